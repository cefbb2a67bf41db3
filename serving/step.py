"""A step under construction: the verbs a batch policy may use, and the plan that comes of them.

`continue_running` and `admit_waiting` are vLLM V1's two loops. The first has a vector form for when every running
sequence gets what it asks for or what the budget leaves, and falls back to the sequence-by-sequence form where a choice
must be made: pages run out, or drafts are verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.plan import Admission, Counts, Slots, StepPlan
from serving.request import Request, State
from serving.start import find_start
from serving.step_plan import make_plan

if TYPE_CHECKING:
    from serving.scheduler import Scheduler

_ONES: Counts = np.ones(4096, np.int64)


class Step:
    """What a policy sees and may do while it plans one step at `now_s`.

    `token_budget` is what is left of max_num_batched_tokens. `extend`, `admit` and `preempt` change it and the plan.
    """

    def __init__(self, scheduler: Scheduler, now_s: float) -> None:
        self.scheduler = scheduler
        self.now_s = now_s
        self.config = scheduler.config
        self.seqs = scheduler.seqs
        self.token_budget = self.config.max_num_batched_tokens
        self.prefill_budget: int | None = None
        """Prompt tokens that this step may still compute; None: as many as the token budget allows."""
        self.preempted: list[Request] = []
        self.truncated: list[Request] = []
        # Rows planned by the vector form, then rows planned one by one.
        self._slots: Slots | None = None
        self._new: Counts | None = None
        self._context: Counts | None = None
        self._rows: dict[int, int] = {}
        self.drafts: dict[int, int] = {}
        """Draft tokens to verify by slot."""
        self.admitted: list[Admission] = []
        self.copies: list[tuple[int, int]] = []
        """(source, target) pages of forks."""
        self._num_tokens = 0
        self._input_budget = self.config.max_num_batched_tokens
        self._draft_slots = self.config.draft_slots
        self._prefill_in_batch = False

    # ---- for policies --------------------------------------------------------------------------------------

    def set_budget(self, num_tokens: int) -> None:
        """Replace the token budget of this step, for policies that do not keep to max_num_batched_tokens."""
        self.token_budget = num_tokens
        self._input_budget = num_tokens + self._draft_slots * self.config.max_num_seqs

    @property
    def num_tokens(self) -> int:
        """Tokens scheduled so far in this step."""
        return self._num_tokens

    @property
    def running(self) -> list[Request]:
        """Running requests in order of admission."""
        return list(self.scheduler.running())

    @property
    def num_running(self) -> int:
        """Sequences that hold a seat."""
        return len(self.seqs.order)

    @property
    def num_decoding(self) -> int:
        """Running sequences whose prompt is computed."""
        return len(self.seqs.order) - self.seqs.num_prefilling

    @property
    def seats(self) -> int:
        """How many more sequences may run."""
        return self.config.max_num_seqs - len(self.seqs.order)

    def wanted(self, request: Request) -> int:
        """Tokens a running request has yet to compute: the rest of its prompt, or 1 when it decodes (0: done)."""
        slot = request.slot
        if self.seqs.target[slot] >= self.seqs.finish[slot]:
            return 0
        return int(self.seqs.target[slot] + self.seqs.drafts[slot] - self.seqs.computed[slot])

    def scheduled(self, request: Request) -> bool:
        """The request is already part of this step."""
        return request.slot >= 0 and (
            request.slot in self._rows
            or (self._slots is not None and bool((self._slots == request.slot).any()))
        )

    def extend(self, request: Request, num_tokens: int | None = None) -> bool:
        """Schedule a running request for `num_tokens` (all it wants by default). False when budget or pages lack."""
        if self.scheduled(request):
            return False
        wanted = self.wanted(request)
        count = min(wanted if num_tokens is None else min(num_tokens, wanted), self.token_budget)
        if count < 1:
            return False
        return self._extend(request.slot, count)

    def admit(self, request: Request, num_tokens: int | None = None, *, reserve_tokens: int = 0) -> bool:
        """Admit a waiting request and schedule its first chunk (as much as the budget allows by default).

        `reserve_tokens` pages are allocated at once for contiguous policies. False when seats, budget or pages lack.
        """
        if request.slot >= 0 or self.seats < 1 or self.token_budget < 1:
            return False
        if not self._admit(request, num_tokens, reserve_tokens):
            return False
        waiting = self.scheduler.waiting
        if request is waiting.peek():
            waiting.pop()
            self.scheduler.head_blocked = False
        else:
            waiting.remove(request)
        self._charge_prompt()
        return True

    def preempt(self, request: Request) -> None:
        """Send a running request back to the queue and undo what this step had scheduled for it."""
        slot = request.slot
        self._split_vector_rows()
        scheduled = self._rows.pop(slot, 0)
        self.drafts.pop(slot, None)
        if scheduled:
            self._num_tokens -= scheduled
            self.token_budget += scheduled
            self._input_budget += scheduled + self._draft_slots
            if self.prefill_budget is not None and self.seqs.prefilling[slot]:
                self.prefill_budget += scheduled
        self.preempted.append(self.scheduler.preempt(slot, scheduled))

    # ---- the running set, as vLLM V1 schedules it ----------------------------------------------------------

    def continue_running(self) -> None:
        """Give each running sequence what it wants, in order of admission, until the token budget is used up."""
        together = not self.config.num_speculative_tokens and (
            self.prefill_budget is None or not self.seqs.num_prefilling
        )
        if self.seqs.order and not (together and self._continue_together()):
            self._continue_one_by_one()

    def _continue_together(self) -> bool:
        seqs, config = self.seqs, self.config
        slots = seqs.order_array()
        computed = seqs.computed[slots]
        if config.async_scheduling and seqs.ends_in <= 0:
            live = seqs.target[slots] < seqs.finish[slots]
            if not live.all():
                # The last token of the others is in flight: another step would be wasted.
                slots, computed = slots[live], computed[live]
        if config.pipelined:
            # The next token of the others is on its way through the stages.
            wants = seqs.target[slots] > computed
            if not wants.all():
                slots, computed = slots[wants], computed[wants]
        rows = len(slots)
        if not rows:
            return True
        if not seqs.num_prefilling and rows <= self.token_budget:
            new = _ONES[:rows] if rows <= len(_ONES) else np.ones(rows, np.int64)
            total = rows
            lacking = computed == seqs.capacity[slots]
            num_lacking = int(np.count_nonzero(lacking))
            if num_lacking > seqs.pool.num_free:
                return False
            if num_lacking:
                seqs.append_page_each(slots[lacking], seqs.pool.take(num_lacking))
        else:
            wanted = seqs.target[slots] - computed
            if threshold := self._long_prefill_threshold():
                np.minimum(wanted, threshold, out=wanted)
            new = wanted
            total = int(wanted.sum())
            if total > self.token_budget:
                before = np.cumsum(wanted) - wanted
                new = np.clip(self.token_budget - before, 0, wanted)
                total = self.token_budget
            pages = -((seqs.capacity[slots] - computed - new) // config.page_tokens)
            np.maximum(pages, 0, out=pages)
            num_lacking = int(pages.sum())
            if num_lacking > seqs.pool.num_free:
                return False
            if not new.all():
                keep = new > 0
                slots, computed, new, pages = slots[keep], computed[keep], new[keep], pages[keep]
            if num_lacking:
                taken, at = seqs.pool.take(num_lacking), 0
                for row in np.flatnonzero(pages).tolist():
                    count = int(pages[row])
                    seqs.append_pages(int(slots[row]), taken[at : at + count])
                    at += count
        if seqs.num_keyed:
            seqs.publish_full(slots, np.minimum(computed + new, seqs.known[slots]))
        self._slots, self._new, self._context = slots, new, computed
        self._num_tokens += total
        self.token_budget -= total
        self._input_budget -= total
        return True

    def _continue_one_by_one(self) -> None:
        seqs, config = self.seqs, self.config
        order = seqs.order
        threshold = self._long_prefill_threshold()
        # A victim is taken from anywhere in `order`, so the position is found again after each preemption.
        position = 0
        while position < len(order) and self.token_budget > 0 and self._input_budget > self._draft_slots:
            slot = order[position]
            in_flight = int(seqs.target[slot] - seqs.known[slot])
            computed = int(seqs.computed[slot])
            if in_flight > 0 and computed + 2 - in_flight >= seqs.finish[slot]:
                position += 1
                continue
            wanted = int(seqs.target[slot] + seqs.drafts[slot]) - computed
            if 0 < threshold < wanted:
                wanted = threshold
            count = min(wanted, self.token_budget, self._input_budget - self._draft_slots)
            count = min(count, config.max_model_len - computed - 1)
            if self.prefill_budget is not None and seqs.prefilling[slot]:
                count = min(count, self.prefill_budget)
            if count <= 0:
                position += 1
                continue
            position, fits = self._extend_or_preempt(position, count)
            if fits:
                position += 1
            elif config.queue_order == "fcfs":
                break
            # Otherwise it was its own victim and `position` is already the next, which comes first and may still fit.

    def _extend_or_preempt(self, position: int, count: int) -> tuple[int, bool]:
        """Extend the sequence at `position`, preempting others (at last itself) until its pages fit.

        Returns where it, or what follows it, stands now, and whether it was extended.
        """
        seqs, scheduler = self.seqs, self.scheduler
        slot = seqs.order[position]
        while not self._extend(slot, count):
            index = scheduler.waiting.victim(list(scheduler.running()))
            victim = seqs.order[index]
            if len(seqs.order) == 1 and self._can_never_fit(slot, count):
                self.truncated.append(scheduler.truncate(slot))
                return position, False
            self.preempt(seqs.request(victim))
            if victim == slot:
                return position, False
            position -= index < position
        return position, True

    def _can_never_fit(self, slot: int, count: int) -> bool:
        tokens = int(self.seqs.computed[slot]) + count + self.config.lookahead_tokens
        return -(-tokens // self.config.page_tokens) > self.config.num_pages

    def _extend(self, slot: int, count: int) -> bool:
        seqs, config = self.seqs, self.config
        computed = int(seqs.computed[slot])
        end = min(computed + count + config.lookahead_tokens, config.max_model_len)
        lacking = seqs.pages_lacking(slot, end)
        if lacking > seqs.pool.num_free:
            return False
        if lacking:
            seqs.append_pages(slot, seqs.pool.take(lacking))
        verified = min(computed + count, int(seqs.known[slot]))
        if seqs.next_key[slot] <= verified:
            seqs.publish(slot, verified)
        self._rows[slot] = count
        self._num_tokens += count
        self.token_budget -= count
        self._input_budget -= count + self._draft_slots
        if seqs.prefilling[slot]:
            self._prefill_in_batch = True
            if self.prefill_budget is not None:
                self.prefill_budget -= count
        drafts = count + computed - int(seqs.target[slot])
        if seqs.drafts[slot]:
            if drafts > 0:
                self.drafts[slot] = drafts
            seqs.drafts[slot] = 0
        return True

    # ---- the queue, as vLLM V1 admits from it --------------------------------------------------------------

    def admit_waiting(self) -> None:
        """Admit from the head of the queue while seats, budget and pages last; the first refusal ends it."""
        scheduler = self.scheduler
        waiting = scheduler.waiting
        while (
            waiting
            and self.token_budget > 0
            and self._input_budget > self._draft_slots
            and len(self.seqs.order) < self.config.max_num_seqs
        ):
            if not self._admit(waiting.peek(), None, 0):
                break
            waiting.pop()
            self._charge_prompt()

    def _admit(self, request: Request, num_tokens: int | None, reserve_tokens: int) -> bool:
        scheduler, seqs, config = self.scheduler, self.seqs, self.config
        size, pool = config.page_tokens, seqs.pool
        is_head = request is scheduler.waiting.peek()
        if scheduler.head_blocked and num_tokens is None and is_head:
            return False
        if request.stale_tokens:
            return False
        start = find_start(scheduler, request, may_wait=not reserve_tokens)
        if start is None:
            return False
        hit, cached = start.shared, start.num_tokens
        evictable = pool.num_evictable(hit)
        watermark = scheduler.watermark_pages if seqs.order else 0
        room = pool.num_free - evictable - watermark
        if config.reserve_full_isl and -(-request.num_tokens // size) - len(hit) > room:
            scheduler.head_blocked |= is_head
            return False
        budget = min(self.token_budget, self._input_budget - self._draft_slots)
        if self.prefill_budget is not None:
            budget = min(budget, self.prefill_budget)
            if budget < 1:
                return False
        count = request.num_tokens - cached
        padded = False
        if (
            config.num_speculative_tokens
            and count == 1
            and not self._prefill_in_batch
            and (len(self._rows) > len(self.admitted) or self._slots is not None or cached)
            and cached + 2 + config.num_speculative_tokens <= config.max_model_len
        ):
            # Keeps the batch uniform for the decode graph: placeholder drafts that are never accepted.
            if 1 + config.num_speculative_tokens > budget:
                return False
            count, padded = 1 + config.num_speculative_tokens, True
        if 0 < (threshold := self._long_prefill_threshold()) < count:
            count = threshold
        if not config.enable_chunked_prefill and count > budget:
            return False
        count = min(count, budget if num_tokens is None else min(num_tokens, budget))
        end = min(max(cached + count + config.lookahead_tokens, reserve_tokens), config.max_model_len)
        lacking = max(-(-end // size) - len(hit), 0)
        if lacking > room:
            scheduler.head_blocked |= is_head
            return False
        if hit:
            pool.share(hit)
        resumed = request.state is State.PREEMPTED
        slot = seqs.enter(request, hit, scheduler.finish_at(request))
        if scheduler.draft_lengths.measures:
            scheduler.draft_lengths.enter(slot)
        if start.host and scheduler.tier is not None:
            scheduler.tier.pin(start.host, request.keys, len(hit))
        if lacking:
            seqs.append_pages(slot, pool.take(lacking))
        if start.host and scheduler.tier is not None:
            scheduler.tier.load(start.host, seqs.tables[slot, len(hit) : len(hit) + len(start.host)])
        seqs.computed[slot] = cached
        if start.copied_page:
            self.copies.append((start.copied_page, int(seqs.tables[slot, len(hit)])))
        if start.swapped:
            scheduler.swap.move_in(request, seqs.pages_of(slot))
        request.sibling = None
        request.external_tokens = 0
        verified = min(cached + count, request.num_tokens)
        if seqs.next_key[slot] <= verified:
            seqs.publish(slot, verified)
        request.state = State.RUNNING
        if request.cached_tokens < 0:
            request.cached_tokens = cached
        if not start.swapped:
            scheduler.prefix_queries_tokens += request.num_tokens
            scheduler.prefix_hit_tokens += cached
        self.admitted.append(Admission(request, cached, resumed))
        self._rows[slot] = count
        if padded:
            self.drafts[slot] = config.num_speculative_tokens
        self._num_tokens += count
        self.token_budget -= count
        self._input_budget -= count + self._draft_slots
        if self.prefill_budget is not None:
            self.prefill_budget -= count
        return True

    def _charge_prompt(self) -> None:
        """Under fair sharing, put the prompt just admitted on its tenant's account, once it has left the queue."""
        if (fair := self.scheduler.fair) is not None and not (last := self.admitted[-1]).resumed:
            fair.charge(last.request.tenant, last.request.prompt_tokens - last.cached_tokens, 0)

    def _long_prefill_threshold(self) -> int:
        """vLLM's cap on one request's chunk; it protects others, so it does not bind a lone request."""
        threshold = self.config.long_prefill_token_threshold
        if threshold and self.scheduler.num_running + self.scheduler.num_waiting > 1:
            return threshold
        return 0

    # ---- the plan ------------------------------------------------------------------------------------------

    def _split_vector_rows(self) -> None:
        """Turn rows planned together into rows planned one by one, so that one can be taken out."""
        if self._slots is not None:
            assert self._new is not None
            planned = dict(zip(self._slots.tolist(), self._new.tolist(), strict=True))
            self._rows = {**planned, **self._rows}
            self._slots = self._new = self._context = None

    def finish(self) -> StepPlan | None:
        """Advance the scheduled sequences and return the plan; None when the step is empty."""
        seqs = self.seqs
        slots, new, context = self._slots, self._new, self._context
        if self._rows:
            row_slots = np.fromiter(self._rows, np.intp, len(self._rows))
            row_new = np.fromiter(self._rows.values(), np.int64, len(self._rows))
            row_context = seqs.computed[row_slots]
            if slots is None or new is None or context is None:
                slots, new, context = row_slots, row_new, row_context
            else:
                slots = np.concatenate((slots, row_slots))
                new = np.concatenate((new, row_new))
                context = np.concatenate((context, row_context))
        if slots is None or new is None or context is None:
            if not (self.preempted or self.truncated):
                return None
            slots, new, context = np.empty(0, np.intp), np.empty(0, np.int64), np.empty(0, np.int64)
        return make_plan(self, slots, new, context)
