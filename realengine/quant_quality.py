"""What quantising does to a model's answers: its logits on a text, token by token, against the plain model's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from realengine.batch import Batch
from realengine.runner import StepRunner


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far answers are from the reference's, over all tokens of a text."""

    perplexity: float
    """exp of the mean negative log-likelihood of each next token."""
    logit_error: float
    """Root mean square of the change of the logits, over that of the reference's about their mean; 1.4 is unrelated."""
    kl_nats: float
    """Mean Kullback-Leibler divergence of the next-token distribution from the reference's."""
    same_choice: float
    """Share of tokens after which the likeliest next token is the reference's."""
    num_tokens: int


def bundled_text() -> str:
    """About 650 words written for this project: a story, an explanation, a formula in code, a list, a dialogue."""
    return (resources.files("realengine") / "data" / "quality_text.txt").read_text(encoding="utf-8")


def windows_of(ids: Sequence[int], size: int) -> list[Tensor]:
    """`ids` cut into pieces of `size` tokens, each read by itself; a last one of fewer than two is left out."""
    pieces = (ids[first : first + size] for first in range(0, len(ids), size))
    return [torch.tensor(piece) for piece in pieces if len(piece) > 1]


@torch.inference_mode()
def read_window(step: StepRunner, ids: Tensor) -> Tensor:
    """Logits float32 [T, vocabulary] on the CPU after every token of a window, computed in one step.

    K and V go through the cache's pages, so that a quantised cache shows. The cache holds at least T tokens.
    """
    count, page_tokens, device = len(ids), step.caches[0].k.shape[1], step.device
    pages = torch.arange(1, 1 - (-count // page_tokens), dtype=torch.int32, device=device)
    positions = torch.arange(count, device=device)
    batch = Batch(
        ids=ids.to(device),
        positions=positions,
        slots=page_tokens + positions,
        page_table=pages.unsqueeze(0),
        context_len=torch.tensor([count], dtype=torch.int32, device=device),
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        num_decodes=0,
        max_query=count,
        longest=count,
        sample_rows=None,
        recent=None if step.recent is None else step.recent.whole(count, device),
    )
    return step.model.forward(batch, step.caches).float().cpu()


def divergence(windows: Sequence[Tensor], reference: Sequence[Tensor], found: Sequence[Tensor]) -> Divergence:
    """`found` against `reference`: logits [T, V] of each window."""
    surprise = change = spread = kl = 0.0
    same = told = count = 0
    for ids, ours, theirs in zip(windows, found, reference, strict=True):
        log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
        surprise -= float(log_q[:-1].gather(1, ids[1:, None]).double().sum())
        told += len(ids) - 1
        # The same number added to all logits of a token changes nothing.
        centred = theirs - theirs.mean(dim=1, keepdim=True)
        change += float((ours - ours.mean(dim=1, keepdim=True) - centred).double().square().sum())
        spread += float(centred.double().square().sum())
        kl += float((log_p.exp() * (log_p - log_q)).double().sum())
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        count += len(ids)
    return Divergence(
        math.exp(surprise / told),
        math.sqrt(change / max(spread, 1e-30)),
        max(kl / count, 0.0),
        same / count,
        count,
    )
