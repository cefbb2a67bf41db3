"""Which cached page is forgotten first when pages run short: other orders than least recently used.

Every order keeps a chain of pages usable: a page never goes before the pages after it in the sequence that released it
last, because a prefix is only found from its beginning. Pages without identity always go first.

`lfu`      least frequently found, with ageing (LFU-DA: Arlitt et al., 2000): a page's worth is how often it was found,
           plus the worth of the last page evicted, so that what was popular once does not stay for ever.
`cost`     greedy dual size frequency (Cherkasova, 1998): as above, times what it costs to compute the page again.
           Pages are of equal size, and attention makes a page dearer the deeper it lies in its sequence.
`session`  pages of a conversation stay `session_keep_s` after its last answer, less from turn to turn, as if they had
           been used then; apart from that, least recently used.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from serving.config import SchedulerConfig
from serving.pages import PagePool, Pages
from serving.request import Request


def make_pool(config: SchedulerConfig) -> PagePool:
    """The pool of `config`, which forgets pages in its `kv_eviction` order."""
    if config.kv_eviction == "lru":
        return PagePool(
            config.num_pages, caching=config.enable_prefix_caching, prepend_unhashed=config.prepend_unhashed
        )
    return ValuedPool(config)


class ValuedPool(PagePool):
    """A page pool that forgets the page of least worth.

    An entry of the heap counts only while `_entry[page]` is still its number; a page that is used again leaves a dead
    entry behind.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config.num_pages, caching=config.enable_prefix_caching)
        self.config = config
        self._found: npt.NDArray[np.int64] = np.zeros(config.num_pages + 1, np.int64)
        self._heap: list[tuple[float, int, int]] = []
        self._entry: npt.NDArray[np.int64] = np.zeros(config.num_pages + 1, np.int64)
        self._entries = 0
        self._evicted_worth = 0.0
        self._kept_until_s: npt.NDArray[np.float64] = np.zeros(config.num_pages + 1)

    def take(self, count: int) -> Pages:
        pages = super().take(count)
        self._found[pages] = 0
        self._kept_until_s[pages] = 0.0
        return pages

    def _take_back(self, count: int) -> Pages:
        """Pages never used before, then those of least worth."""
        fresh = self._head[self._head_at : self._head_at + count]
        self._head_at += len(fresh)
        if len(fresh) == count:
            return fresh
        worst: list[int] = []
        while len(fresh) + len(worst) < count:
            worth, entry, page = heapq.heappop(self._heap)
            if self._entry[page] == entry:
                self._entry[page] = 0
                self._evicted_worth = max(self._evicted_worth, worth)
                worst.append(page)
        return np.concatenate((fresh, np.array(worst, np.int32)))

    def release(self, pages: Pages, num_identified: int, owner: Request | None = None) -> None:
        if not self.caching:
            num_identified = 0
        refs = self.refs[pages] - 1
        self.refs[pages] = refs
        free = refs == 0
        rest = pages[num_identified:][free[num_identified:]]
        self._front.extend(rest.tolist())
        held = pages[:num_identified]
        # A page is worth at least as much as what follows it.
        worth = np.maximum.accumulate(self._worth(held, owner)[::-1])[::-1]
        kept = np.flatnonzero(free[:num_identified])
        self.num_free += len(rest) + len(kept)
        for i in kept[::-1].tolist():
            self._push(int(held[i]), float(worth[i]))

    def _push(self, page: int, worth: float) -> None:
        self._entries += 1
        self._entry[page] = self._entries
        heapq.heappush(self._heap, (worth, self._entries, page))
        if len(self._heap) > 4 * self.num_pages:
            self._heap = [entry for entry in self._heap if self._entry[entry[2]] == entry[1]]
            heapq.heapify(self._heap)

    def _worth(self, pages: Pages, owner: Request | None) -> npt.NDArray[np.float64]:
        config = self.config
        if config.kv_eviction == "session":
            keep_s = 0.0
            if owner is not None and owner.session is not None:
                keep_s = config.session_keep_s * config.session_decay**owner.turn
            # What one conversation is promised, no other request that shares the page takes back.
            until_s: npt.NDArray[np.float64] = np.maximum(self.now_s + keep_s, self._kept_until_s[pages])
            self._kept_until_s[pages] = until_s
            return until_s
        found: npt.NDArray[np.float64] = self._found[pages].astype(np.float64) + 1.0
        if config.kv_eviction == "cost" and config.attention_tokens:
            found *= 1.0 + np.arange(len(pages)) * (config.page_tokens / config.attention_tokens)
        found += self._evicted_worth
        return found

    def share(self, pages: Sequence[int] | Pages) -> None:
        hit = np.asarray(pages, np.int32)
        self.num_free -= int(np.count_nonzero(self.refs[hit] == 0))
        self.refs[hit] += 1
        self._found[hit] += 1
        self._entry[hit] = 0

    def free_order(self) -> list[int]:
        live = sorted(entry for entry in self._heap if self._entry[entry[2]] == entry[1])
        return [
            *reversed(self._front),
            *self._head[self._head_at :].tolist(),
            *(page for _, _, page in live),
        ]
