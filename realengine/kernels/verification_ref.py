"""Speculative verification: drafts are kept or replaced so that the output is distributed as the target's own.

Leviathan, Kalman, Matias: "Fast inference from transformers via speculative decoding", 2023; Chen et al.: "Accelerating
large language model decoding with speculative sampling", 2023. Draft x, drawn from q, is accepted with probability
min(1, p(x) / q(x)); the first rejected one is replaced by a draw from (p − q)⁺; after K accepted ones the target's next
distribution gives one token more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from realengine.kernels.philox_ref import ACCEPT, TARGET, uniform
from realengine.kernels.sampling_ref import draw


def verify(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    num_drafts: Tensor,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens [B, K+1] (int64, -1 after the last) and how many there are (int32): the accepted drafts and one more.

    draft_tokens [B, K], of which a row uses the first `num_drafts`; target_probs [B, K+1, V] with temperature and
    filters applied (`sampling_probs`); draft_probs [B, K, V], or None where a draft was certain (n-gram: q = 1).
    `positions` is the position of a row's first draft: the token drawn there without speculation would use the same
    random number. Rows in `greedy` accept what equals the target's largest probability and need no one-hot rows.
    """
    batch, most = draft_tokens.shape
    drafts = draft_tokens.long()
    steps = torch.arange(most, device=drafts.device)
    p = target_probs[:, :most].gather(2, drafts.unsqueeze(2)).squeeze(2).double()
    q = torch.ones_like(p)
    if draft_probs is not None:
        q = draft_probs.gather(2, drafts.unsqueeze(2)).squeeze(2).double()
    u = uniform(seeds.unsqueeze(1), positions.unsqueeze(1) + steps, ACCEPT)
    # p/q >= u without the division; p > 0 because u may be exactly 0.
    accepted = (q > 0) & (p > 0) & (p >= u * q)
    if greedy is not None:
        best = target_probs.argmax(dim=-1)
        accepted = torch.where(greedy.unsqueeze(1), drafts == best[:, :most], accepted)
    accepted &= steps < num_drafts.unsqueeze(1)
    kept = accepted.int().cumprod(dim=1).sum(dim=1)

    rows = torch.arange(batch, device=drafts.device)
    weights = target_probs[rows, kept].double()
    if most:
        at = kept.clamp(max=most - 1)
        if draft_probs is None:
            proposed = torch.zeros_like(weights).scatter_(1, drafts[rows, at].unsqueeze(1), torch.inf)
        else:
            proposed = draft_probs[rows, at].double()
        residual = (weights - proposed).clamp(min=0)
        # All of the residual can vanish by rounding where p and q agree; the target is then as good.
        rejected = (kept < num_drafts) & (residual.sum(dim=1) > 0)
        weights = torch.where(rejected.unsqueeze(1), residual, weights)
    last = draw(weights, uniform(seeds, positions + kept, TARGET))
    if greedy is not None:
        last = torch.where(greedy, best[rows, kept], last)
    tokens = torch.nn.functional.pad(drafts, (0, 1))
    tokens[rows, kept] = last
    after = torch.arange(most + 1, device=drafts.device) > kept.unsqueeze(1)
    return tokens.masked_fill(after, -1), (kept + 1).int()
