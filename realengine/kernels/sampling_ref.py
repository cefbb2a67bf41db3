"""The next token: temperature, then min-p and top-k, then top-p, then one draw.

Every filter keeps the tokens whose logit reaches a threshold, so tokens with equal logits stand or fall together and
the result depends on no sorting order:

* top-k: the k-th largest logit;
* min-p: the logit whose probability is `min_p` times the largest;
* top-p: the largest logit t such that the tokens at or above t have at least `top_p` of what the two others left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from realengine.kernels.philox_ref import TARGET, uniform


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    stream: int = TARGET,
) -> Tensor:
    """One token (int64) per row of `logits [B, V]`; temperature 0 takes the first of the largest logits.

    Off is top_k 0, top_p 1, min_p 0. The draw of a row depends on its own logits, seed and position alone.
    """
    greedy = temperature <= 0
    best = logits.argmax(dim=-1)
    if bool(greedy.all()):
        return best
    weights = _weights(logits.float(), temperature, top_k, top_p, min_p)
    return torch.where(greedy, best, draw(weights, uniform(seeds, positions, stream)))


def sampling_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The distribution (float32) that `sample` draws from; speculative verification needs it in full."""
    weights = _weights(logits.float(), temperature, top_k, top_p, min_p)
    probs = (weights / weights.sum(dim=-1, keepdim=True)).float()
    one_hot = torch.zeros_like(probs).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where((temperature <= 0).unsqueeze(1), one_hot, probs)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """The first index at which the running sum of a row exceeds `u` times its total."""
    running = weights.double().cumsum(dim=-1)
    chosen = torch.searchsorted(running, (u * running[:, -1]).unsqueeze(1), right=True).squeeze(1)
    # Only rounding can run past the end; the last index with weight is then meant.
    last = weights.shape[1] - 1 - (weights > 0).int().flip(1).argmax(dim=-1)
    return torch.minimum(chosen, last)


def _weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """exp((logit - max) / temperature), in float64, of the tokens that pass the filters; 0 for the others."""
    vocabulary = logits.shape[1]
    warmth = torch.where(temperature > 0, temperature, torch.ones_like(temperature)).unsqueeze(1).double()
    top = logits.amax(dim=-1, keepdim=True)
    weights = torch.exp((logits.double() - top) / warmth)
    threshold = torch.full_like(top, -torch.inf)
    limited = (top_k > 0) & (top_k < vocabulary)
    if bool(limited.any()):
        most = int(top_k[limited].max())
        kth = logits.topk(most, dim=-1).values.gather(1, (top_k.long().clamp(1, most) - 1).unsqueeze(1))
        threshold = torch.where(limited.unsqueeze(1), kth, threshold)
    if bool((min_p > 0).any()):
        floor = top + temperature.unsqueeze(1) * torch.log(min_p).unsqueeze(1)
        threshold = torch.maximum(threshold, torch.where(min_p.unsqueeze(1) > 0, floor, threshold))
    nucleus = top_p < 1
    if bool(nucleus.any()):
        kept = torch.where(logits >= threshold, weights, 0.0)
        order = logits.argsort(dim=-1, descending=True)
        running = kept.gather(1, order).cumsum(dim=-1)
        wanted = top_p.double().unsqueeze(1) * running[:, -1:]
        enough = order.gather(1, (running < wanted).sum(dim=-1, keepdim=True).clamp(max=vocabulary - 1))
        smallest = logits.gather(1, enough)
        threshold = torch.maximum(threshold, torch.where(nucleus.unsqueeze(1), smallest, threshold))
    return torch.where(logits >= threshold, weights, 0.0)
