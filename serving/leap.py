"""Exact fast-forward: how many steps ahead are all alike, and the state after them.

While every running sequence decodes and nobody can be admitted, finishes or runs out of pages, consecutive steps have the
same members. `steady_steps` counts them; `leap` applies any number of them at once and leaves the very state, page ids
included, that planning and committing them one by one would have left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.plan import StepPlan
from serving.sequences import NEVER

if TYPE_CHECKING:
    from serving.scheduler import Scheduler


def steady_steps(scheduler: Scheduler, current: StepPlan | None = None) -> int:
    """Steps that can be leapt over from here; 0 when the next step may differ.

    `current` is the step in flight under asynchronous scheduling; it must already be a decode of everybody.
    """
    seqs, config = scheduler.seqs, scheduler.config
    rows = len(seqs.order)
    if (
        not rows
        or seqs.num_prefilling
        or config.num_speculative_tokens
        or not scheduler.policy.steady
        or rows > config.max_num_batched_tokens
        or scheduler.policy.may_admit(scheduler)
        or (seqs.num_keyed and len(scheduler.waiting))
    ):
        return 0
    if config.async_scheduling and (
        current is None
        or len(current.slots) != rows
        or current.chunks
        or len(scheduler.in_flight) != 1
        or scheduler._stale
    ):
        return 0
    slots = seqs.order_array()
    steps = int((seqs.finish[slots] - seqs.target[slots]).min())
    if not config.async_scheduling:
        steps -= 1  # the step that finishes somebody is planned by itself
    if steps < 1:
        return 0
    free = scheduler.pool.num_free
    slack = seqs.capacity[slots] - seqs.computed[slots]
    size = config.page_tokens

    def pages(count: int) -> int:
        lacking = count - slack
        return int(((lacking[lacking > 0] + size - 1) // size).sum())

    if scheduler.tier is not None:
        steps = min(steps, int(slack.min()))  # a page taken may move another to the host, which takes time
        if steps < 1:
            return 0
    if pages(steps) > free:
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            if pages(middle) > free:
                high = middle
            else:
                low = middle
        steps = low
    return steps


def leap(scheduler: Scheduler, steps: int, current: StepPlan | None = None, charged: int = 0) -> None:
    """Plan and commit `steps` decode steps of the whole running set at once; `steps` comes from `steady_steps`.

    Under asynchronous scheduling `current` becomes the last of them, in flight. Under fair sharing `charged` of the
    steps are on the tenants' accounts already.
    """
    seqs = scheduler.seqs
    size = scheduler.config.page_tokens
    slots = seqs.order_array()
    computed = seqs.computed[slots]
    lacking = -((seqs.capacity[slots] - computed - steps) // size)
    rows = np.flatnonzero(lacking > 0)
    if len(rows):
        # A page is taken at the step whose token no longer fits: order by step, then by row, as one by one would.
        counts = lacking[rows]
        row_of = np.repeat(rows, counts)
        nth = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        at_step = (seqs.capacity[slots] - computed)[row_of] + nth * size
        order = np.lexsort((row_of, at_step))
        taken = scheduler.pool.take(len(order))
        owners = slots[row_of[order]]
        seqs.tables[owners, seqs.num_pages[owners] + nth[order]] = taken
        seqs.num_pages[slots[rows]] += counts
        seqs.capacity[slots[rows]] += counts * size
    seqs.computed[slots] = computed + steps
    seqs.known[slots] += steps
    if scheduler.fair is not None:
        scheduler.charge_outputs(slots, steps - charged)
    if seqs.target is not seqs.known:
        seqs.target[slots] += steps
    if seqs.num_keyed:
        _publish(scheduler, steps)
    scheduler.num_planned += steps
    seqs.ends_in -= steps
    seqs.leap_contexts(steps)
    if current is not None:
        current.index += steps
        current.context = current.context + steps
        current.decode_context_sum += steps * len(slots)
        current.decode_context_max += steps
        current.used_pages = scheduler.used_pages
        current.preempted, current.admitted, current.starved = [], [], []


def _publish(scheduler: Scheduler, steps: int) -> None:
    """Publish shared pages that became full, in the order in which single steps would have."""
    seqs = scheduler.seqs
    slots = seqs.order_array()
    verified = seqs.computed[slots] - (seqs.target[slots] - seqs.known[slots])
    if seqs.target is seqs.known:
        verified = seqs.computed[slots]
    start = verified - steps
    full: list[tuple[int, int, int]] = []
    for row in np.flatnonzero(seqs.next_key[slots] <= verified).tolist():
        tokens = int(seqs.next_key[slots[row]])
        while tokens <= verified[row] and tokens != NEVER:
            full.append((tokens - int(start[row]), row, tokens))
            tokens += scheduler.config.page_tokens
    for _, row, tokens in sorted(full):
        if seqs.next_key[slots[row]] <= tokens:
            seqs.publish(int(slots[row]), tokens)
