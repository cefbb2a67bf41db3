"""The scheduler: add, plan, commit, abort. It decides what runs next; it never runs anything and reads no clock.

What a step contains is a batch policy's choice (`serving.policies`); this class keeps the state that every policy works
on and the rules that none may break: a request is never lost, pages are counted, lengths end where they must.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from serving.config import SchedulerConfig
from serving.drafting import DraftLengths
from serving.eviction import make_pool
from serving.host_tier import HostTier
from serving.plan import ONE_EACH, Slots, StepOutcome, StepPlan
from serving.queues import Fair, Queue
from serving.request import Request, State, TokenKeys
from serving.sequences import NEVER, Sequences
from serving.step import Step
from serving.swap import SwapSpace

if TYPE_CHECKING:
    from serving.policies import BatchPolicy


class Scheduler:
    """One engine's scheduler.

    `plan(now_s)` allocates pages and chooses victims; `commit` takes the step's outcome. With asynchronous scheduling
    one more plan may be made before the first is committed, with a pipeline as many plans as it has stages, and they are
    committed in order. `queue` replaces the order named in `config`.
    """

    def __init__(
        self, config: SchedulerConfig, policy: BatchPolicy | None = None, queue: Queue | None = None
    ) -> None:
        from serving.policies import Chunked

        self.config = config
        self.policy: BatchPolicy = policy if policy is not None else Chunked()
        self.pool = make_pool(config)
        self.seqs = Sequences(config, self.pool)
        self.draft_lengths = DraftLengths(config, len(self.seqs.requests))
        self.swap = SwapSpace(config.swap_pages)
        self.tier = HostTier(config.host_cache_pages, config.swap_pages) if config.host_cache_pages else None
        self.pool.tier = self.tier
        self.waiting: Queue = queue if queue is not None else self.policy.make_queue(config.queue_order)
        self.fair: Fair | None = self.waiting if isinstance(self.waiting, Fair) else None
        self.watermark_pages = int(config.watermark * (config.num_pages + 1))
        self.num_planned = 0
        self._blocked_at = -1
        self.wake_s = math.inf
        """When to plan again although nothing happens: set by a policy that waits for a batch to fill."""
        self.in_flight: list[StepPlan] = []
        self.prefix_queries_tokens = 0
        self.prefix_hit_tokens = 0
        self._stale: dict[int, Request] = {}
        self._serials: dict[Request, int] = {}
        self._next_serial = 0
        self._cooling: list[tuple[int, int]] = []
        # A sequence may never want more pages than exist: it ends with reason "length" when the last page is full.
        # Drafts that may be rejected need room as well, except past max_model_len, where nothing is drafted.
        room = config.num_pages * config.page_tokens
        if room < config.max_model_len:
            room += 1 - config.num_speculative_tokens - config.lookahead_tokens
        self.longest = min(config.max_model_len, room)

    # ---- requests in and out -------------------------------------------------------------------------------

    def refusal(self, request: Request) -> str:
        """Why `request` can never run here; empty when it can."""
        config = self.config
        if request.prompt_tokens < 1:
            return f"prompt of {request.prompt_tokens} tokens; at least 1 is needed"
        if request.max_tokens < 1:
            return f"max_tokens is {request.max_tokens}; at least 1 is needed"
        if request.prompt_tokens >= config.max_model_len:
            return f"prompt of {request.prompt_tokens} tokens leaves no room in max_model_len {config.max_model_len}"
        if request.prompt_tokens + 1 > self.longest:
            return (
                f"prompt of {request.prompt_tokens} tokens needs more than the whole KV cache "
                f"({config.num_pages} pages of {config.page_tokens} tokens)"
            )
        return self.policy.refuses(request, config) or ""

    def add(self, request: Request) -> bool:
        """Queue a request. False when it can never run: `request.state` is REJECTED and `request.reason` says why."""
        if reason := self.refusal(request):
            request.state, request.reason = State.REJECTED, reason
            return False
        self._serials[request] = self._next_serial
        self._next_serial += 1
        if not self.waiting or self.config.queue_order != "fcfs":
            self.head_blocked = False
        self.waiting.add(request)
        return True

    def abort(self, request: Request) -> None:
        """End a request wherever it is; its pages are free at once. Does nothing to one that is already done."""
        if request.done:
            return
        if request.slot >= 0:
            self._retire(request.slot)
        else:
            self.waiting.remove(request)
            self.head_blocked = False
        self._end(request, "abort")

    @property
    def head_blocked(self) -> bool:
        """The head of the queue was refused for want of pages, and since then none was freed and none published."""
        return self._blocked_at == self.pool.num_registered

    @head_blocked.setter
    def head_blocked(self, blocked: bool) -> None:
        # Under fair sharing another request may be the head after the very next step.
        self._blocked_at = self.pool.num_registered if blocked and self.fair is None else -1

    @property
    def num_running(self) -> int:
        """Sequences that hold a seat."""
        return len(self.seqs.order)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self.waiting)

    @property
    def num_unfinished(self) -> int:
        """Requests that are running or waiting."""
        return len(self._serials)

    @property
    def used_pages(self) -> int:
        """Pages that running sequences hold."""
        return self.config.num_pages - self.pool.num_free

    def running(self) -> Iterator[Request]:
        """Running requests in order of admission."""
        return (self.seqs.request(slot) for slot in self.seqs.order)

    def unfinished(self) -> Iterator[Request]:
        """Running and waiting requests in order of arrival."""
        return iter(self._serials)

    def in_flight_request(self, slot: int) -> Request | None:
        """Whose tokens the oldest step in flight computes in `slot`, preempted meanwhile or not; None after an abort."""
        stale = self._stale.get(slot)
        return stale if stale is not None else self.seqs.requests[slot]

    def finish_at(self, request: Request) -> int:
        """Known tokens at which a request ends with reason "length"."""
        return min(request.prompt_tokens + request.max_tokens, self.longest)

    def serial(self, request: Request) -> int:
        """Number of a live request in order of arrival."""
        return self._serials[request]

    # ---- one step ------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None when nothing can be scheduled now."""
        self.wake_s = math.inf
        self.pool.now_s = now_s
        step = Step(self, now_s)
        self.policy.schedule(step)
        plan = step.finish()
        if plan is None:
            return None
        self.num_planned += 1
        if (self.config.async_scheduling or self.config.pipelined) and len(plan):
            self.in_flight.append(plan)
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome = ONE_EACH) -> list[Request]:
        """Append the step's tokens; returns the requests that finished, in row order."""
        if self.config.async_scheduling or self.config.pipelined:
            assert self.in_flight[0] is plan, "steps are committed in the order of planning"
            del self.in_flight[0]
        if outcome.counts is None and outcome.tokens is None and outcome.stopped is None and not self._stale:
            finished = self._commit_one_each(plan)
        else:
            finished = self._commit_rows(plan, outcome)
        if self._cooling:
            self._cool()
        return finished

    def _commit_one_each(self, plan: StepPlan) -> list[Request]:
        seqs = self.seqs
        slots = plan.slots if plan.samples is None else plan.slots[plan.samples]
        known = seqs.known[slots] + 1
        seqs.known[slots] = known
        if self.fair is not None:
            self.charge_outputs(slots)
        if seqs.num_keyed and self.config.async_scheduling:
            # A page filled by a token in flight is published when the token arrives.
            seqs.publish_full(slots, seqs.computed[slots] - (seqs.target[slots] - known))
        if seqs.ends_in > 0 and not self.config.num_speculative_tokens and not self.config.pipelined:
            return []
        done = known >= seqs.finish[slots]
        finished = [self._finish(slot, "length") for slot in slots[done].tolist()] if done.any() else []
        order = seqs.order_array()
        seqs.ends_in = int((seqs.finish[order] - seqs.target[order]).min()) if len(order) else NEVER
        return finished

    def _commit_rows(self, plan: StepPlan, outcome: StepOutcome) -> list[Request]:
        seqs = self.seqs
        finished: list[Request] = []
        sampled = [True] * len(plan.slots) if plan.samples is None else plan.samples.tolist()
        measured = self.draft_lengths if self.draft_lengths.measures else None
        padded = {a.request for a in plan.admitted} if measured is not None else ()
        for row, slot in enumerate(plan.slots.tolist()):
            stale = self._stale.get(slot)
            if stale is not None:
                stale.stale_tokens -= int(plan.num_new[row])
                if not stale.stale_tokens:
                    del self._stale[slot]
            request = stale if stale is not None else seqs.requests[slot]
            if request is None or request.done:
                continue
            tokens = outcome.tokens[row] if outcome.tokens is not None else None
            if tokens is not None:
                count = len(tokens)
            elif outcome.counts is not None:
                count = int(outcome.counts[row])
            else:
                count = int(sampled[row])
            if stale is not None:
                if self._append_stale(request, count, tokens, _stopped(outcome, row)):
                    finished.append(request)
                continue
            if not count:
                continue
            drafts = int(plan.drafts[row]) if plan.drafts is not None else 0
            if drafts:
                rejected = drafts - (count - 1)
                seqs.computed[slot] -= rejected
                if self.config.async_scheduling:
                    seqs.target[slot] -= rejected
                if measured is not None and request not in padded:
                    measured.verified(slot, drafts, count - 1)
            room = int(seqs.finish[slot] - seqs.known[slot])
            kept = min(count, room)
            if kept < count:
                seqs.computed[slot] -= count - kept
                if self.config.async_scheduling:
                    seqs.target[slot] -= count - kept
            seqs.known[slot] += kept
            if self.fair is not None:
                self.fair.charge(request.tenant, 0, kept)
            if tokens is not None and isinstance(request.keys, TokenKeys):
                request.keys.extend(tokens[:kept])
            if seqs.next_key[slot] <= seqs.computed[slot] and (
                self.config.async_scheduling or self.config.num_speculative_tokens
            ):
                seqs.publish(slot, int(seqs.computed[slot] - max(0, seqs.target[slot] - seqs.known[slot])))
            # A stop condition met by the very token that reaches the limit comes first, as in vLLM.
            reason = _stopped(outcome, row) if kept == count else None
            if reason is not None or kept >= room:
                finished.append(self._finish(slot, reason or "length"))
            elif outcome.drafts is not None and not seqs.prefilling[slot]:
                seqs.drafts[slot] = outcome.drafts[row]
        return finished

    def _append_stale(self, request: Request, count: int, tokens: object, stopped: str | None) -> bool:
        """Deliver the in-flight output of a request that was preempted meanwhile. True when that ends it."""
        room = self.finish_at(request) - request.num_tokens
        kept = min(count, room)
        request.num_tokens += kept
        if self.fair is not None:
            self.fair.charge(request.tenant, 0, kept)
        if isinstance(tokens, (list, tuple)) and isinstance(request.keys, TokenKeys):
            request.keys.extend(tokens[:kept])
        if kept >= room or (stopped is not None and count):
            self.waiting.remove(request)
            self._end(request, stopped if kept == count and stopped is not None else "length")
            return True
        return False

    def charge_outputs(self, slots: Slots, steps: int = 1) -> None:
        """Put `steps` tokens for each of these sequences on their tenants' accounts."""
        assert self.fair is not None
        requests = (self.seqs.requests[slot] for slot in slots.tolist())
        counts = Counter(request.tenant for request in requests if request is not None)
        for tenant, count in counts.items():
            self.fair.charge(tenant, 0, steps * count)

    # ---- leaving the running set ---------------------------------------------------------------------------

    def propose(self, request: Request, drafts: int) -> None:
        """Set how many draft tokens the next step may verify for a request that is decoding."""
        if request.slot >= 0 and not self.seqs.prefilling[request.slot]:
            self.seqs.drafts[request.slot] = drafts

    def preempt(self, slot: int, scheduled: int = 0) -> Request:
        """Send a running sequence back to the queue: pages freed, its tokens swapped out if the host has room.

        Otherwise they are computed again, less what is still cached then.
        """
        seqs = self.seqs
        request = seqs.request(slot)
        # Of drafts in flight nobody knows yet which stand; the last known token is certain.
        computed = min(int(seqs.computed[slot]), int(seqs.known[slot]))
        if self.config.swap_pages and self._worth_swapping(computed):
            self.swap.move_out(
                request, seqs.tables[slot, : -(-computed // self.config.page_tokens)], computed
            )
        identified = seqs.identified_pages(slot, scheduled)
        if scheduled and identified:
            # Identified for their place in the queue, as in vLLM; but the step that would have filled them is undone.
            filled = min(identified, int(seqs.computed[slot]) // self.config.page_tokens)
            seqs.pool.unregister(seqs.tables[slot, filled:identified])
            identified = filled
        keyed = len(request.keys)
        if seqs.pool.caching and identified > keyed and not isinstance(request.keys, TokenKeys):
            request.private_pages = seqs.tables[slot, :identified].copy()
            seqs.pool.claim(request.private_pages[keyed:], self._serials[request])
        else:
            request.private_pages = None
        in_flight = sum(
            int(plan.num_new[plan.slots == slot].sum())
            for plan in self.in_flight
            if (plan.slots == slot).any()
        )
        self._retire(slot, scheduled)
        if in_flight:
            request.stale_tokens = in_flight
            self._stale[slot] = request
        request.state = State.PREEMPTED
        request.preemptions += 1
        self.waiting.put_back(request)
        return request

    def _worth_swapping(self, num_tokens: int) -> bool:
        costs = self.config.swap_costs
        return costs is None or costs[0] * num_tokens < (costs[1] + costs[2] * num_tokens) * num_tokens

    def truncate(self, slot: int) -> Request:
        """End a sequence that no page pool could extend."""
        return self._finish(slot, "length")

    def _finish(self, slot: int, reason: str) -> Request:
        request = self._retire(slot)
        self._end(request, reason)
        return request

    def _end(self, request: Request, reason: str) -> None:
        request.state, request.reason = State.FINISHED, reason
        request.private_pages = request.sibling = None
        self.swap.drop(request)
        if self.fair is not None:
            self.fair.ended(request)
        del self._serials[request]

    def _retire(self, slot: int, scheduled: int = 0) -> Request:
        request = self.seqs.leave(slot, scheduled)
        self.head_blocked = False
        if self.in_flight:
            self._cooling.append((self.num_planned, slot))
        else:
            self.seqs.reuse(slot)
        return request

    def _cool(self) -> None:
        """Slots become reusable once the last step planned before they were vacated is committed."""
        keep = []
        for planned, slot in self._cooling:
            if not self.in_flight or self.in_flight[0].index >= planned:
                self.seqs.reuse(slot)
            else:
                keep.append((planned, slot))
        self._cooling = keep

    # ---- self-check ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Invariants of pages and sequences; raises AssertionError when one is broken."""
        self.pool.check()
        if self.tier is not None:
            self.tier.check()
        refs = np.zeros_like(self.pool.refs)
        for slot in self.seqs.order:
            pages = self.seqs.pages_of(slot)
            assert len(np.unique(pages)) == len(pages), "a page is twice in one table"
            refs[pages] += 1
            assert self.seqs.capacity[slot] >= self.seqs.computed[slot], "tokens without a page"
        assert (refs == self.pool.refs).all(), "reference counts differ from the page tables"


def _stopped(outcome: StepOutcome, row: int) -> str | None:
    if outcome.stopped is None or not outcome.stopped[row]:
        return None
    return outcome.reasons[row] if outcome.reasons is not None else "stop"
