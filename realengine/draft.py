"""Speculative decoding in the engine: who drafts, what a step verifies, and how drafts are kept or replaced.

A step computes one known token and d drafts of each decoding sequence in one pass, which gives the target's distribution
at d + 1 positions. Drafts that were certain (n-grams, lookahead, a greedy request) stand exactly where the target's own
draw at that position, made with the random number it would have used without speculation, is the very same token: that
accepts with probability p and leaves the residual, and the text is the one that would have come without drafts. Drafts
drawn from a distribution q stand with probability min(1, p/q), and the first that does not is replaced by a draw from the
residual (`kernels.verification`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serving.plan import StepPlan
from serving.sequences import Sequences
from serving.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from realengine.inputs import StepInputs
    from realengine.kernels import Operators
    from realengine.seats import Draws, Seats

Ints = npt.NDArray[np.int64]
Text = npt.NDArray[np.int32]
Put = Callable[[npt.NDArray[np.generic]], Tensor]


class TextDrafter(Protocol):
    """Drafts from what has been written, on the host. `slot` is the sequence's seat."""

    def take(self, slot: int) -> None:
        """Another sequence sits down in `slot`."""

    def propose(self, slot: int, text: Text, drawn: Ints, num_given: int, most: int) -> Text | Ints:
        """At most `most` tokens to follow `text` [n], prompt included.

        `drawn` is what the target drew at each position of the step, `num_given` of which are now in the text: those
        after them followed a draft that did not stand.
        """


def text_drafter(config: SpeculativeConfig, num_slots: int) -> TextDrafter | None:
    """The drafter of a method that needs no model; None for one that does."""
    if config.method == "ngram":
        from realengine.draft_ngram import NgramDrafter

        return NgramDrafter(*config.lookup_range)
    if config.method == "lookahead":
        from realengine.draft_lookahead import LookaheadDrafter

        return LookaheadDrafter(config.pool_ngram, num_slots)
    return None


@dataclass(slots=True)
class DraftInputs:
    """What a step verifies and drafts: S sequences sample, R = sum of (1 + drafts) rows go through the LM head."""

    num_drafts: Ints
    """Drafts to verify of each sequence [S]."""
    drafts: Ints
    """Their tokens [S, K], of which a sequence uses the first `num_drafts`."""
    owners: Ints
    """Sequence of each row through the LM head [R]."""
    first_row: Ints
    """The first of each sequence's rows [S]."""
    first_position: Ints
    """Position of the first token that each sequence samples [S]."""
    num_to_draft: Ints
    """Tokens to draft for the next step [S]."""
    seats: Ints
    """Scheduler slots of all B sequences of the step, in its order [B]."""
    samples: npt.NDArray[np.intp]
    """Which of them sample [S]."""
    is_chunk: npt.NDArray[np.bool_]
    """Which compute a part of a prompt [B]."""
    context: Ints
    """Tokens computed before the step [B]."""
    end: Ints
    """And after it, drafts included [B]."""
    room: Ints
    """Tokens for which each sequence has KV slots [B]."""
    page_table: npt.NDArray[np.int32]
    """[B, pages], as far as any sequence has pages."""
    text: Text
    """The tokens of every seat, `text[slot, position]`; shared with whoever plans, who waits for this step."""


def draft_inputs(
    plan: StepPlan, order: npt.NDArray[np.intp], samples: npt.NDArray[np.intp], seqs: Sequences, seats: Seats
) -> DraftInputs:
    """Arrays of a plan whose rows are taken in `order`; those at `samples` of that order sample a token."""
    slots = plan.slots[order]
    context = plan.context[order]
    end = context + plan.num_new[order]
    sampling = slots[samples]
    scheduled = plan.drafts[order][samples] if plan.drafts is not None else np.zeros(len(samples), np.int64)
    # Padding that keeps a batch uniform is scheduled like drafts and was never drafted.
    count = np.minimum(scheduled, seats.num_drafts[sampling])
    first_position = end[samples] - scheduled
    most = int(count.max(initial=0))
    at = first_position[:, None] + np.arange(most)
    to_draft = plan.num_to_draft[order][samples] if plan.num_to_draft is not None else np.zeros_like(count)
    rows = 1 + count
    chunk = {c.request for c in plan.chunks}
    capacity = seqs.capacity[slots]
    width = int(capacity.max(initial=0)) // seqs.config.page_tokens
    return DraftInputs(
        num_drafts=count,
        drafts=seats.tokens[sampling[:, None], at].astype(np.int64),
        owners=np.repeat(np.arange(len(samples)), rows),
        first_row=np.cumsum(rows) - rows,
        first_position=first_position,
        num_to_draft=to_draft,
        seats=slots.astype(np.int64),
        samples=samples,
        is_chunk=np.array([seqs.requests[slot] in chunk for slot in slots.tolist()], np.bool_),
        context=context,
        end=end,
        room=np.minimum(capacity, seqs.config.max_model_len),
        page_table=seqs.tables[slots, :width],
        text=seats.tokens,
    )


def sample_rows(inputs: DraftInputs, last_rows: Ints) -> tuple[Ints, Ints]:
    """Rows of the step whose logits are wanted [R], and the positions drawn from them.

    `last_rows` [S] is the last row of each sequence that samples.
    """
    nth = np.arange(len(inputs.owners)) - inputs.first_row[inputs.owners]
    scheduled = inputs.end[inputs.samples] - inputs.first_position
    return (last_rows - scheduled)[inputs.owners] + nth, inputs.first_position[inputs.owners] + nth


def verify(
    logits: Tensor, inputs: StepInputs, draws: Draws, probs: Tensor | None, kernels: Operators, put: Put
) -> tuple[Tensor, Tensor]:
    """What the target says: tokens [S, K + 1] and how many of them hold, int64 [S].

    `logits` [R, V]; `draws` is by row [R]; `probs` [S, K, V] is what the drafts were drawn from, None where they were
    certain. Tokens after those that hold followed a draft that does not stand; they are -1 where `probs` is given.
    """
    check = inputs.draft
    assert check is not None
    drafts = put(check.drafts)
    most = drafts.shape[1]
    num_drafts = put(check.num_drafts)
    steps = torch.arange(most + 1, device=logits.device)
    at = put(check.first_row).unsqueeze(1) + torch.minimum(steps, num_drafts.unsqueeze(1))
    if probs is not None and most and not draws.greedy:
        target = kernels.sampling_probs(
            logits, put(draws.temperature), put(draws.top_k), put(draws.top_p), put(draws.min_p)
        )
        row = put(check.first_row)
        tokens, counts = kernels.verify(
            drafts,
            probs,
            target[at],
            num_drafts.int(),
            put(draws.seed)[row],
            put(check.first_position),
            (put(draws.temperature) <= 0)[row],
        )
        return tokens, counts.long()
    if draws.greedy:
        drawn = logits.argmax(dim=-1)
    else:
        drawn = kernels.sample(
            logits,
            put(draws.temperature),
            put(draws.top_k),
            put(draws.top_p),
            put(draws.min_p),
            put(draws.seed),
            put(inputs.sample_positions),
        )
    tokens = drawn[at]
    agreed = (tokens[:, :most] == drafts) & (steps[:most] < num_drafts.unsqueeze(1))
    return tokens, 1 + agreed.long().cumprod(dim=1).sum(dim=1)
