"""The plan that comes of a finished step: rows, prompt chunks, page moves, and what asynchronous scheduling supposes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.plan import Chunk, Counts, Slots, StepPlan
from serving.sequences import Sequences

if TYPE_CHECKING:
    from serving.step import Step


def make_plan(step: Step, slots: Slots, new: Counts, context: Counts) -> StepPlan:
    """Advance the sequences in `slots` [rows] by `new` tokens after `context`, and say all that an executor needs."""
    seqs = step.seqs
    end = context + new
    seqs.computed[slots] = end
    plan = StepPlan(
        index=step.scheduler.num_planned,
        slots=slots,
        num_new=new,
        context=context,
        chunks=[],
        num_decodes=len(slots),
        decode_context_sum=0,
        decode_context_max=0,
        num_tokens=step.num_tokens,
        admitted=step.admitted,
        preempted=step.preempted,
        truncated=step.truncated,
        starved=_starved(seqs, slots, pipelined=step.config.pipelined)
        if len(slots) < len(seqs.order)
        else [],
        num_running=len(seqs.order),
        num_waiting=len(step.scheduler.waiting),
        used_pages=step.scheduler.used_pages,
        num_padding=step.scheduler.policy.padding(step.scheduler),
        copies=step.copies,
    )
    # Nobody executes a step without rows: what it moves goes with the next one.
    if step.config.swap_pages and len(slots):
        plan.swap_out, plan.swap_in = step.scheduler.swap.take_moves()
    if step.scheduler.tier is not None and len(slots):
        out, into = step.scheduler.tier.take_moves()
        plan.swap_out += out
        plan.swap_in += into
    seqs.ends_in -= 1
    if seqs.num_prefilling:
        decodes = _split_chunks(seqs, plan, end)
        if len(decodes):
            plan.decode_context_sum, plan.decode_context_max = int(decodes.sum()), int(decodes.max())
    elif len(slots):
        plan.decode_context_sum, plan.decode_context_max = seqs.context_totals(slots, end)
    if step.drafts:
        drafts = step.drafts
        plan.drafts = np.fromiter((drafts.get(slot, 0) for slot in slots.tolist()), np.int64, len(slots))
    if step.config.num_speculative_tokens:
        plan.num_to_draft = step.scheduler.draft_lengths.after(slots, len(seqs.order))
        if plan.samples is not None:
            plan.num_to_draft[~plan.samples] = 0
    if step.config.async_scheduling:
        sampled = slots if plan.samples is None else slots[plan.samples]
        seqs.target[sampled] += 1
        if plan.drafts is not None:
            seqs.target[slots] += plan.drafts
        if plan.num_to_draft is not None:
            # The drafts of the next step are not known yet; placeholders stand for them.
            made = plan.num_to_draft if plan.samples is None else plan.num_to_draft[plan.samples]
            seqs.drafts[sampled] = made
    return plan


def _starved(seqs: Sequences, slots: Slots, *, pipelined: bool) -> list[int]:
    """Decoding sequences that are not among the scheduled `slots` although they have tokens to come.

    With a pipeline none is: those left out are in another step.
    """
    if pipelined:
        return []
    left_out = seqs.order_array()
    left_out = left_out[~(np.isin(left_out, slots) | seqs.prefilling[left_out])]
    in_flight = seqs.target[left_out] - seqs.known[left_out]
    ends = (in_flight > 0) & (seqs.computed[left_out] + 2 - in_flight >= seqs.finish[left_out])
    return list(left_out[~ends].tolist())


def _split_chunks(seqs: Sequences, plan: StepPlan, end: Counts) -> Counts:
    """Set the plan's prompt chunks and which rows sample; returns the context ends of the decodes."""
    slots = plan.slots
    is_chunk = seqs.prefilling[slots]
    unfinished = False
    for row in np.flatnonzero(is_chunk).tolist():
        slot = int(slots[row])
        last = bool(end[row] >= seqs.target[slot])
        plan.chunks.append(Chunk(seqs.request(slot), int(plan.num_new[row]), int(plan.context[row]), last))
        if last:
            seqs.end_prefill(slot)
        else:
            unfinished = True
    plan.num_decodes = len(slots) - len(plan.chunks)
    if unfinished:
        plan.samples = end >= seqs.target[slots]
    return end[~is_chunk]
