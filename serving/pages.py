"""The page pool: free pages in eviction order, reference counts, and which pages hold which prefix.

The order is vLLM's, page for page: allocation takes the head of the free queue and forgets what the page held; a
released sequence returns its pages tail first, those without identity to the front (reused first), the others to the
back (least recently used go first); a hit takes its page out of the middle.

The queue is a stack of unidentified pages (front) before a deque of numpy segments (back), one segment per release.
An entry of a segment counts only while `_stamp[page]` is still the segment's number, so that taking a page out of the
middle is one store. A release or an allocation is a few vector operations however many pages it moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from serving.request import PageKeys, Request

if TYPE_CHECKING:
    from serving.host_tier import HostTier

Pages = npt.NDArray[np.int32]

_GONE = 0
"""Stamp of a page taken out of the middle of the queue; segments count from 1."""


class PagePool:
    """`num_pages` usable pages with ids 1 to num_pages; id 0 is never handed out (kernels write padding there)."""

    def __init__(self, num_pages: int, *, caching: bool = True, prepend_unhashed: bool = True) -> None:
        self.num_pages = num_pages
        self.caching = caching
        self._prepend_unhashed = prepend_unhashed
        self.num_free = num_pages
        self.refs: npt.NDArray[np.int32] = np.zeros(num_pages + 1, np.int32)
        self._front: list[int] = []
        self._head: Pages = np.arange(1, num_pages + 1, dtype=np.int32)
        self._head_at = 0
        self._head_stamp = 1
        self._back: deque[tuple[int, Pages]] = deque()
        self._stamp: npt.NDArray[np.int64] = np.ones(num_pages + 1, np.int64)
        self._last_stamp = 1
        # Shared identity: key -> page, or -> {page: None} in order of registration when several hold it.
        self._index: dict[Hashable, int | dict[int, None]] = {}
        self._key_of: list[Hashable | None] = [None] * (num_pages + 1)
        self._has_key: npt.NDArray[np.bool_] = np.zeros(num_pages + 1, np.bool_)
        self.num_registered = 0
        """How often a page got a key; while it stands still, no prefix can have become longer."""
        self.num_evicted = 0
        """How many pages with a key were handed out again and thereby forgotten."""
        self.now_s = 0.0
        """Time of the step that is being planned, for pools that ask."""
        self.tier: HostTier | None = None
        """Is told of every page with a key that is about to be forgotten."""
        # Private identity: which preempted sequence may find the page again.
        self._claim: npt.NDArray[np.int64] = np.full(num_pages + 1, -1, np.int64)
        self._num_claims = 0

    # ---- allocation and release ----------------------------------------------------------------------------

    def take(self, count: int) -> Pages:
        """The next `count` pages in eviction order, each with one reference; what they held is forgotten.

        The caller has checked `num_free`; taking more than that is a fault of ours, not of the user.
        """
        assert count <= self.num_free, f"{count} pages asked of {self.num_free} free"
        self.num_free -= count
        front = self._front
        if front and count:
            from_front = front[: -count - 1 : -1]
            del front[-len(from_front) :]
            missing = count - len(from_front)
            pages = np.array(from_front, np.int32)
            if missing:
                pages = np.concatenate((pages, self._take_back(missing)))
        else:
            pages = self._take_back(count)
        self.refs[pages] = 1
        if self._index:
            keyed = pages[self._has_key[pages]]
            if len(keyed):
                self.num_evicted += len(keyed)
                self._forget(keyed)
        if self._num_claims:
            self._claim[pages] = -1
        return pages

    def _take_back(self, count: int) -> Pages:
        at = self._head_at
        end = at + count
        if end <= len(self._head):
            self._head_at = end
            return self._head[at:end]
        parts = [self._head[at:]]
        missing = end - len(self._head)
        while True:
            stamp, segment = self._back.popleft()
            segment = segment[self._stamp[segment] == stamp]
            if len(segment) >= missing:
                break
            parts.append(segment)
            missing -= len(segment)
        parts.append(segment[:missing])
        self._head, self._head_at, self._head_stamp = segment, missing, stamp
        return np.concatenate(parts)

    def release(self, pages: Pages, num_identified: int, owner: Request | None = None) -> None:
        """Drop one reference of each page of a sequence, in table order; the first `num_identified` have an identity.

        Pages that nobody else holds join the free queue, tail first. `owner` is whose pages they were.
        """
        if not self.caching:
            num_identified = 0
        refs = self.refs[pages] - 1
        self.refs[pages] = refs
        identified, rest = pages[:num_identified][::-1], pages[num_identified:][::-1]
        if refs.any():
            free = refs == 0
            identified, rest = identified[free[:num_identified][::-1]], rest[free[num_identified:][::-1]]
        self.num_free += len(identified) + len(rest)
        if len(rest):
            if self._prepend_unhashed:
                self._front.extend(rest[::-1].tolist())
            else:
                # One queue for both kinds, tail first: unidentified pages are simply the sequence's last.
                identified = np.concatenate((rest, identified))
        if len(identified):
            identified = identified.copy()  # `pages` is a view of a table that the next sequence overwrites
            self._last_stamp += 1
            self._stamp[identified] = self._last_stamp
            self._back.append((self._last_stamp, identified))

    def share(self, pages: Sequence[int] | Pages) -> None:
        """Add one reference to each page (a prefix hit or a fork); free ones leave the middle of the queue."""
        hit = np.asarray(pages, np.int32)
        refs = self.refs[hit]
        freed = hit[refs == 0]
        self.refs[hit] = refs + 1
        if len(freed):
            self.num_free -= len(freed)
            if (self._stamp[freed] == self._head_stamp).any():
                self._stamp[freed] = _GONE
                rest = self._head[self._head_at :]
                self._head, self._head_at = rest[self._stamp[rest] == self._head_stamp], 0
            else:
                self._stamp[freed] = _GONE

    def num_evictable(self, pages: Sequence[int] | Pages) -> int:
        """How many of these pages sit in the free queue, so that a hit on them lowers `num_free`."""
        return int(np.count_nonzero(self.refs[np.asarray(pages, np.int32)] == 0)) if len(pages) else 0

    # ---- prefix identity -----------------------------------------------------------------------------------

    def register(self, page: int, key: Hashable) -> None:
        """Let later requests find `page` by `key`. Several pages may carry one key; the first found is used."""
        self.num_registered += 1
        held = self._index.get(key)
        if held is None:
            self._index[key] = page
        elif isinstance(held, dict):
            held[page] = None
        else:
            self._index[key] = {held: None, page: None}
        self._key_of[page] = key
        self._has_key[page] = True

    def find(self, keys: PageKeys | Sequence[Hashable], limit: int) -> list[int]:
        """Pages of the longest cached prefix, at most `limit` of them."""
        get = self._index.get
        hit: list[int] = []
        for i in range(min(limit, len(keys))):
            page = get(keys[i])
            if page is None:
                break
            hit.append(page if isinstance(page, int) else next(iter(page)))
        if len(hit) > 1 and len(set(hit)) < len(hit):
            # Two keys of one chain are equal: a broken hash. A page is never twice in one table.
            hit = hit[: next(i for i, page in enumerate(hit) if page in hit[:i])]
        return hit

    def unregister(self, pages: Pages) -> None:
        """Nobody may find these pages any more: what their keys name was not computed."""
        self._forget(pages[self._has_key[pages]], keep=False)

    def _forget(self, pages: Pages, *, keep: bool = True) -> None:
        index, key_of = self._index, self._key_of
        self._has_key[pages] = False
        for page in pages.tolist():
            key = key_of[page]
            if keep and self.tier is not None and key is not None:
                self.tier.keep(key, page)
            key_of[page] = None
            held = index[key]
            if isinstance(held, dict):
                del held[page]
                if len(held) == 1:
                    index[key] = next(iter(held))
            else:
                del index[key]

    def claim(self, pages: Pages, owner: int) -> None:
        """Mark private pages of a preempted sequence so that `find_claimed` knows which survived."""
        self._claim[pages] = owner
        self._num_claims += 1

    def find_claimed(self, pages: Pages, owner: int) -> Pages:
        """The leading run of `pages` that `owner` claimed and nobody was given since."""
        lost = self._claim[pages] != owner
        return pages[: int(lost.argmax())] if lost.any() else pages

    # ---- self-checks ---------------------------------------------------------------------------------------

    def free_order(self) -> list[int]:
        """Every free page in the order in which `take` would hand it out."""
        order: list[int] = [*reversed(self._front), *self._head[self._head_at :].tolist()]
        for stamp, segment in self._back:
            order += segment[self._stamp[segment] == stamp].tolist()
        return order

    def check(self) -> None:
        """Invariants: a page is free exactly when it has no reference, and is queued exactly once."""
        order = self.free_order()
        assert len(order) == len(set(order)) == self.num_free, "a page is queued twice or lost"
        assert set(order) == set((np.flatnonzero(self.refs[1:] == 0) + 1).tolist()), (
            "free page with references"
        )
        assert not self.refs[0], "page 0 was handed out"
