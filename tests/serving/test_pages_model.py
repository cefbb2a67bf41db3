"""The page pool against a naive model: one plain list for the free queue, one dictionary for everything else."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving.pages import PagePool


class NaivePool:
    """What a page pool does, in the most obvious way."""

    def __init__(self, num_pages: int, caching: bool, prepend_unhashed: bool) -> None:
        self.caching, self.prepend_unhashed = caching, prepend_unhashed
        self.free = list(range(1, num_pages + 1))
        self.refs = dict.fromkeys(self.free, 0)
        self.keys: list[tuple[Hashable, int]] = []  # in order of registration
        self.claims: dict[int, int] = {}

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for page in taken:
            self.refs[page] = 1
            self.keys = [(key, held) for key, held in self.keys if held != page]
            self.claims.pop(page, None)
        return taken

    def release(self, pages: list[int], num_identified: int) -> None:
        for place in reversed(range(len(pages))):
            page = pages[place]
            self.refs[page] -= 1
            if self.refs[page]:
                continue
            identified = self.caching and place < num_identified
            if identified or not self.prepend_unhashed:
                self.free.append(page)
        # Those without identity go to the front as a block, the last page of the sequence foremost.
        if self.prepend_unhashed:
            front = [
                pages[place]
                for place in reversed(range(len(pages)))
                if not self.refs[pages[place]] and not (self.caching and place < num_identified)
            ]
            self.free = front + self.free

    def share(self, pages: list[int]) -> None:
        for page in pages:
            if not self.refs[page]:
                self.free.remove(page)
            self.refs[page] += 1

    def find(self, keys: list[Hashable], limit: int) -> list[int]:
        hit = []
        for key in keys[:limit]:
            pages = [page for held, page in self.keys if held == key]
            if not pages:
                break
            hit.append(pages[0])
        return hit


class Holder:
    """A sequence: its table and how many of its first pages have an identity."""

    def __init__(self, pages: list[int], identified: int) -> None:
        self.pages, self.identified = pages, identified


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 24), caching=st.booleans(), prepend=st.booleans())
    def start(self, num_pages: int, caching: bool, prepend: bool) -> None:
        self.pool = PagePool(num_pages, caching=caching, prepend_unhashed=prepend)
        self.naive = NaivePool(num_pages, caching, prepend)
        self.caching = caching
        self.holders: list[Holder] = []
        self.left: list[tuple[list[int], int]] = []
        self.num_owners = 0

    def pick(self, data: st.DataObject) -> Holder:
        return self.holders[data.draw(st.integers(0, len(self.holders) - 1), label="holder")]

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, min(self.pool.num_free, 6)), label="count")
        pages = self.pool.take(count).tolist()
        assert pages == self.naive.take(count)
        self.holders.append(Holder(pages, 0))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        holder = self.pick(data)
        count = data.draw(st.integers(0, min(self.pool.num_free, 3)), label="count")
        pages = self.pool.take(count).tolist()
        assert pages == self.naive.take(count)
        holder.pages += pages

    @precondition(lambda self: self.holders and self.caching)
    @rule(data=st.data(), key=st.integers(0, 5))
    def register_next_page(self, data: st.DataObject, key: int) -> None:
        holder = self.pick(data)
        if holder.identified < len(holder.pages):
            page = holder.pages[holder.identified]
            holder.identified += 1
            if all(held != page for _, held in self.naive.keys):
                name = (holder.identified - 1, key)
                self.pool.register(page, name)
                self.naive.keys.append((name, page))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = self.pick(data)
        self.holders.remove(holder)
        table = np.array(holder.pages, np.int32)
        self.pool.release(table, holder.identified)
        table[:] = 0  # the table's memory belongs to the next sequence
        self.naive.release(holder.pages, holder.identified)

    @precondition(lambda self: self.holders and self.caching)
    @rule(data=st.data())
    def preempt_with_private_pages(self, data: st.DataObject) -> None:
        # Claimed pages are not registered: their owner alone may find them again.
        holder = self.pick(data)
        self.holders.remove(holder)
        keyed = {page for _, page in self.naive.keys}
        private = [p for p in holder.pages if p not in keyed and self.naive.refs[p] == 1]
        owner, self.num_owners = self.num_owners, self.num_owners + 1
        self.pool.claim(np.array(private, np.int32), owner)
        self.naive.claims.update(dict.fromkeys(private, owner))
        self.pool.release(np.array(holder.pages, np.int32), len(holder.pages))
        self.naive.release(holder.pages, len(holder.pages))
        self.left.append((private, owner))

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        pages, owner = self.left.pop(data.draw(st.integers(0, len(self.left) - 1), label="who"))
        hit = self.pool.find_claimed(np.array(pages, np.int32), owner).tolist()
        expected = []
        for page in pages:
            if self.naive.claims.get(page) != owner:
                break
            expected.append(page)
        assert hit == expected
        self.share(hit)

    @rule(keys=st.lists(st.integers(0, 5), max_size=5), limit=st.integers(0, 5))
    def hit(self, keys: list[int], limit: int) -> None:
        names: list[Hashable] = list(enumerate(keys))
        hit = self.pool.find(names, limit)
        assert hit == self.naive.find(names, limit)
        self.share(hit)

    def share(self, pages: list[int]) -> None:
        assert self.pool.num_evictable(pages) == sum(not self.naive.refs[page] for page in pages)
        if pages:
            self.pool.share(pages)
            self.naive.share(pages)
            self.holders.append(Holder(list(pages), len(pages)))

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.free_order() == self.naive.free
        assert self.pool.num_free == len(self.naive.free)
        assert self.pool.refs[1:].tolist() == list(self.naive.refs.values())
        for key in {key for key, _ in self.naive.keys}:
            assert self.pool.find([key], 1) == self.naive.find([key], 1)
        for place in range(6):
            for key in range(6):
                if not any(held == (place, key) for held, _ in self.naive.keys):
                    assert self.pool.find([(place, key)], 1) == []


TestPagePool = PoolMachine.TestCase
TestPagePool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_taking_more_than_is_free_is_a_fault_of_the_caller() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="3 pages asked of 2 free"):
        pool.take(3)


def test_taking_no_page_changes_nothing() -> None:
    pool = PagePool(3)
    pool.release(pool.take(2), 0)
    before = pool.free_order()
    assert len(pool.take(0)) == 0
    assert pool.free_order() == before


def test_a_page_released_as_unidentified_though_registered_stays_hittable_until_taken() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    pool.register(int(pages[0]), "k")
    pool.release(pages, 1)
    assert pool.find(["k"], 1) == [1]
    pool.take(2)  # page 2, which is unhashed and comes first, then page 3
    assert pool.find(["k"], 1) == [1]
    pool.take(1)
    assert pool.find(["k"], 1) == []
