"""From a step's plan to the arrays of its batch, in vector operations over the scheduler's own arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from realengine.draft import DraftInputs, draft_inputs, sample_rows
from realengine.seats import Seats
from serving.plan import Slots, StepPlan
from serving.sequences import Sequences
from serving.swap import Move

if TYPE_CHECKING:
    from realengine.quant_recent import RecentRows

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Moves:
    """Whole pages to copy before a step computes, kind by kind in this order."""

    swap_out: list[Move] = field(default_factory=list)
    """Device to host."""
    swap_in: list[Move] = field(default_factory=list)
    """Host to device."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) on the device."""

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copies)


@dataclass(slots=True)
class StepInputs:
    """A step as plain arrays: what goes to the device, and to the other ranks. Decodes first, then longer chunks.

    It copies what it takes from the scheduler, which may move on before the step runs.
    """

    index: int
    ids: Ints
    """Token ids [T]; where `in_flight`, the token is the one that the step before samples."""
    in_flight: npt.NDArray[np.bool_] | None
    """[T]: ids that the host does not know yet (asynchronous scheduling); None when it knows all."""
    token_seats: Ints
    """Scheduler slot of each token's sequence [T]."""
    positions: Ints
    kv_slots: Ints
    """Where each token's K and V go: page * page_tokens + offset [T]."""
    page_table: npt.NDArray[np.int32]
    context_len: npt.NDArray[np.int32]
    query_start: npt.NDArray[np.int32]
    num_decodes: int
    max_query: int
    longest: int
    sample_rows: Ints
    """Row of T from which each sampling sequence takes its logits."""
    sample_seats: Ints
    """Scheduler slots of those sequences."""
    sample_positions: Ints
    """Positions of the tokens to be sampled."""
    plan_rows: Ints
    """Their rows in the plan."""
    moves: Moves
    turns: Ints | None = None
    """How often somebody has sat down in each token's seat [T]: a change means another sequence."""
    draft: DraftInputs | None = None
    """What to verify and to draft; `sample_rows` and `sample_positions` are then [R], one for each token verified."""
    recent: RecentRows | None = None
    """Where rings of recent tokens are read and written; set by the runner that has them."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


def step_inputs(plan: StepPlan, seqs: Sequences, known: Seats, page_tokens: int) -> StepInputs:
    """Arrays of `plan`. `known.tokens[slot, position]` are the ids that the host knows, drafts included."""
    # Decodes first: one kernel takes them all, another the longer chunks.
    order = np.argsort(plan.num_new > 1, kind="stable")
    seats: Slots = plan.slots[order]
    new, context = plan.num_new[order], plan.context[order]
    end = context + new
    num_decodes = int(np.count_nonzero(new == 1))
    starts = np.cumsum(new) - new
    row = np.repeat(np.arange(len(seats)), new)
    total = len(row)
    positions = np.arange(total) + (context - starts)[row]
    longest = int(end.max())
    table = seqs.tables[seats, : -(-longest // page_tokens)]
    kv_slots = table[row, positions // page_tokens].astype(np.int64) * page_tokens + positions % page_tokens
    token_seats = seats[row]
    in_flight = None
    if seqs.target is not seqs.known:
        in_flight = positions >= seqs.known[token_seats]
        if not in_flight.any():
            in_flight = None
    samples = np.arange(len(seats)) if plan.samples is None else np.flatnonzero(plan.samples[order])
    last_rows, sampled_at = (starts + new - 1)[samples], end[samples]
    draft = None
    if plan.num_to_draft is not None:
        draft = draft_inputs(plan, order, samples, seqs, known)
        last_rows, sampled_at = sample_rows(draft, last_rows)
    return StepInputs(
        index=plan.index,
        ids=known.tokens[token_seats, positions].astype(np.int64),
        in_flight=in_flight,
        token_seats=token_seats.astype(np.int64),
        positions=positions,
        kv_slots=kv_slots,
        page_table=table,
        context_len=end.astype(np.int32),
        query_start=(np.append(starts, total)[num_decodes:] - num_decodes).astype(np.int32),
        num_decodes=num_decodes,
        max_query=int(new.max()),
        longest=longest,
        sample_rows=last_rows,
        sample_seats=seats[samples].astype(np.int64),
        sample_positions=sampled_at,
        plan_rows=order[samples],
        moves=Moves(plan.swap_out, plan.swap_in, plan.copies),
        turns=known.turns[token_seats],
        draft=draft,
    )
