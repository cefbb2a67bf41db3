"""The running set as parallel arrays, one row ("slot") per sequence, and its page tables.

A step touches every sequence with a few vector operations and never loops over the batch. The real engine builds its
tensors from the same arrays.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from serving.config import SchedulerConfig
from serving.pages import PagePool, Pages
from serving.plan import Counts, Slots
from serving.request import Request, TokenKeys

NEVER = np.iinfo(np.int64).max


class Sequences:
    """Rows of running sequences.

    `computed` counts tokens whose KV is written or scheduled; `known` counts tokens whose value is known; `target`
    adds tokens in flight (asynchronous scheduling), so that `target - computed` is what a sequence wants next. Without
    asynchronous scheduling `target` *is* `known`.
    """

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self.config = config
        self.pool = pool
        in_flight = config.pipeline_parallel_size if config.pipelined else int(config.async_scheduling)
        num_slots = config.max_num_seqs * (1 + in_flight)
        longest = min(config.max_model_len, config.num_pages * config.page_tokens)
        longest += config.lookahead_tokens + config.num_speculative_tokens + 1
        self.computed: Counts = np.zeros(num_slots, np.int64)
        self.known: Counts = np.zeros(num_slots, np.int64)
        self.target: Counts = np.zeros(num_slots, np.int64) if config.async_scheduling else self.known
        self.finish: Counts = np.full(num_slots, NEVER, np.int64)
        """Known tokens at which the sequence ends with reason "length"."""
        self.capacity: Counts = np.zeros(num_slots, np.int64)
        """Tokens that the sequence's pages hold."""
        self.num_pages: Counts = np.zeros(num_slots, np.int64)
        self.prefill_end: Counts = np.zeros(num_slots, np.int64)
        """Tokens known at admission: up to here the sequence (re)computes a prompt."""
        self.next_key: Counts = np.full(num_slots, NEVER, np.int64)
        """Computed tokens at which the next shared page becomes full."""
        self.prefilling: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.drafts: Counts = np.zeros(num_slots, np.int64)
        self.tables: npt.NDArray[np.int32] = np.zeros(
            (num_slots, -(-longest // config.page_tokens) + 1), np.int32
        )
        self.requests: list[Request | None] = [None] * num_slots
        self.order: list[int] = []
        """Running slots in order of admission."""
        self.num_prefilling = 0
        self.num_keyed = 0
        """Running sequences that still have shared pages to publish."""
        self.ends_in = 0
        """Steps for which nobody can reach `finish`; a lower bound, so that most steps need not look."""
        self._last_decode: tuple[Slots, int, int] | None = None
        self._order_array: Slots | None = None
        self._registered: list[int] = [0] * num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    # ---- membership ----------------------------------------------------------------------------------------

    def order_array(self) -> Slots:
        """`order` as an index array, rebuilt when the running set changed."""
        if self._order_array is None:
            self._order_array = np.array(self.order, np.intp)
        return self._order_array

    def request(self, slot: int) -> Request:
        """The request that runs in `slot`."""
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is empty"
        return request

    def enter(self, request: Request, hit: Sequence[int], finish_at: int) -> int:
        """Give `request` a slot whose table starts with the pages of a prefix `hit`."""
        slot = self._free_slots.pop()
        size = self.config.page_tokens
        self.requests[slot] = request
        request.slot = slot
        self.order.append(slot)
        self._order_array = None
        num_hit = len(hit)
        self.computed[slot] = num_hit * size
        self.known[slot] = self.target[slot] = self.prefill_end[slot] = request.num_tokens
        self.finish[slot] = finish_at
        self.ends_in = min(self.ends_in, finish_at - request.num_tokens)
        self.num_pages[slot] = num_hit
        self.capacity[slot] = num_hit * size
        self.drafts[slot] = 0
        self.prefilling[slot] = True
        self.num_prefilling += 1
        if num_hit:
            self.tables[slot, :num_hit] = hit
        keyed = len(request.keys)
        self._registered[slot] = num_hit
        if self.pool.caching and (keyed > num_hit or isinstance(request.keys, TokenKeys)):
            self.next_key[slot] = (num_hit + 1) * size
            self.num_keyed += 1
        return slot

    def leave(self, slot: int, scheduled: int = 0) -> Request:
        """Take the sequence out of the running set and release its pages; the slot is not reusable yet.

        `scheduled` tokens belong to a step still being planned.
        """
        request = self.request(slot)
        request.num_tokens = int(self.known[slot])
        count = int(self.num_pages[slot])
        identified = min(self.identified_pages(slot, scheduled), count)
        self.pool.release(self.tables[slot, :count], identified, request)
        self.order.remove(slot)
        self._order_array = None
        if self.prefilling[slot]:
            self.prefilling[slot] = False
            self.num_prefilling -= 1
        if self.next_key[slot] != NEVER:
            self.next_key[slot] = NEVER
            self.num_keyed -= 1
        self.finish[slot] = NEVER
        self.requests[slot] = None
        request.slot = -1
        return request

    def reuse(self, slot: int) -> None:
        """Let a later request have `slot`: no step in flight refers to it."""
        self._free_slots.append(slot)

    def end_prefill(self, slot: int) -> None:
        """The sequence's whole prompt is scheduled: from now on it decodes."""
        self.prefilling[slot] = False
        self.num_prefilling -= 1

    def context_totals(self, slots: Slots, context: Counts) -> tuple[int, int]:
        """Sum and maximum of `context`, from those of the step before when the very same set has decoded once more."""
        last = self._last_decode
        if last is not None and last[0] is slots:
            totals = last[1] + len(slots), last[2] + 1
        else:
            totals = int(context.sum()), int(context.max())
        self._last_decode = (slots, *totals) if slots is self._order_array else None
        return totals

    def leap_contexts(self, steps: int) -> None:
        """The whole running set has decoded `steps` times without being planned one by one."""
        if self._last_decode is not None:
            slots, total, longest = self._last_decode
            self._last_decode = (slots, total + steps * len(slots), longest + steps)

    # ---- pages ---------------------------------------------------------------------------------------------

    def pages_of(self, slot: int) -> Pages:
        """Page table of a sequence (a view)."""
        return self.tables[slot, : self.num_pages[slot]]

    def pages_lacking(self, slot: int, num_tokens: int) -> int:
        """Pages missing for the sequence to hold `num_tokens`."""
        lack = num_tokens - int(self.capacity[slot])
        return -(-lack // self.config.page_tokens) if lack > 0 else 0

    def append_pages(self, slot: int, pages: Pages) -> None:
        """Extend one sequence's table."""
        count = int(self.num_pages[slot])
        self.tables[slot, count : count + len(pages)] = pages
        self.num_pages[slot] = count + len(pages)
        self.capacity[slot] += len(pages) * self.config.page_tokens

    def append_page_each(self, slots: Slots, pages: Pages) -> None:
        """Extend each table by one page."""
        counts = self.num_pages[slots]
        self.tables[slots, counts] = pages
        self.num_pages[slots] = counts + 1
        self.capacity[slots] += self.config.page_tokens

    # ---- prefix identity -----------------------------------------------------------------------------------

    def identified_pages(self, slot: int, scheduled: int = 0) -> int:
        """Leading pages that carry an identity: full of tokens that were known when they were scheduled.

        A decode in flight has its page published when its token arrives, a prompt chunk when it is scheduled; hence
        the two terms. `scheduled` tokens belong to a step still being planned.
        """
        if not self.pool.caching:
            return 0
        if isinstance(self.request(slot).keys, TokenKeys):
            return self._registered[slot]
        computed, known = int(self.computed[slot]), int(self.known[slot])
        in_flight = int(self.target[slot]) - known
        tokens = max(min(computed, int(self.prefill_end[slot])), computed - in_flight)
        if scheduled:
            tokens = max(tokens, min(computed + scheduled, known))
        return max(tokens // self.config.page_tokens, self._registered[slot])

    def publish(self, slot: int, num_tokens: int) -> None:
        """Make shared pages findable that are full within the first `num_tokens` tokens."""
        request = self.request(slot)
        keys = request.keys
        size = self.config.page_tokens
        first = self._registered[slot]
        full = min(num_tokens // size, len(keys))
        if full > first:
            register = self.pool.register
            for page, i in zip(self.tables[slot, first:full].tolist(), range(first, full), strict=True):
                register(page, keys[i])
            self._registered[slot] = first = full
        if first >= len(keys) and not isinstance(keys, TokenKeys):
            self.next_key[slot] = NEVER
            self.num_keyed -= 1
        else:
            self.next_key[slot] = (first + 1) * size

    def publish_full(self, slots: Slots, num_tokens: Counts) -> None:
        """`publish` for the rows whose next shared page is now full; `num_tokens` are verified tokens per row."""
        for i in np.flatnonzero(num_tokens >= self.next_key[slots]).tolist():
            self.publish(int(slots[i]), int(num_tokens[i]))

    def find_prefix(self, request: Request, serial: int) -> list[int]:
        """Pages of the longest cached prefix of a request, its last token always left to compute."""
        if not self.pool.caching:
            return []
        limit = (request.num_tokens - 1) // self.config.page_tokens
        keys: Sequence[Hashable] | object = request.keys
        hit = self.pool.find(request.keys, limit)
        private = request.private_pages
        if private is not None and len(hit) < limit and not isinstance(keys, TokenKeys):
            keyed = len(request.keys)
            if len(hit) == keyed:
                hit += self.pool.find_claimed(private[keyed:limit], serial).tolist()
        return hit
