"""Eviction orders against a naive model, and what each is for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.eviction import ValuedPool
from serving.request import Request
from tests.serving.driver import Engine, own_tokens

PAGE = 4


def pool_of(num_pages: int, order: str, **options: Any) -> ValuedPool:
    return ValuedPool(SchedulerConfig(num_pages, PAGE, kv_eviction=order, **options))


class ValuedMachine(RuleBasedStateMachine):
    """Pages, references and what is queued, beside plain dictionaries; the worth of a page by the definition."""

    @initialize(num_pages=st.integers(1, 16), order=st.sampled_from(["lfu", "cost", "session"]))
    def start(self, num_pages: int, order: str) -> None:
        self.order = order
        self.pool = pool_of(num_pages, order, attention_tokens=8.0, session_keep_s=10.0, session_decay=0.5)
        self.holders: list[tuple[list[int], int]] = []
        self.found: dict[int, int] = {}
        # What one conversation is promised, no other request takes back.
        self.promised_s: dict[int, float] = {}
        self.cached: dict[int, tuple[float, int]] = {}
        self.blank = list(range(1, num_pages + 1))
        self.evicted, self.count, self.now_s = 0.0, 0, 0.0

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        count = min(count, self.pool.num_free)
        pages = self.pool.take(count).tolist()
        for page in pages:
            if page in self.blank:
                self.blank.remove(page)
            else:
                assert not self.blank, "a cached page went while a blank one was free"
                worth = self.cached.pop(page)
                assert worth == min([worth, *self.cached.values()]), "not the page of least worth"
                self.evicted = max(self.evicted, worth[0])
            self.found[page] = 0
            self.promised_s[page] = 0.0
        self.holders.append((pages, 0))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), seconds=st.floats(0, 5), turn=st.integers(-1, 3))
    def release(self, data: st.DataObject, seconds: float, turn: int) -> None:
        pages, least = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        identified = data.draw(st.integers(least, len(pages)))
        self.now_s += seconds
        self.pool.now_s = self.now_s
        owner = Request(0, 1, 1, session=None if turn < 0 else "s", turn=max(turn, 0))
        self.pool.release(np.array(pages, np.int32), identified, owner)
        worth = []
        for place, page in enumerate(pages[:identified]):
            if self.order == "session":
                until_s = self.now_s + (10.0 * 0.5**turn if turn >= 0 else 0.0)
                self.promised_s[page] = max(self.promised_s[page], until_s)
                worth.append(self.promised_s[page])
            else:
                cost = 1.0 + place * PAGE / 8.0 if self.order == "cost" else 1.0
                worth.append(self.evicted + (1.0 + self.found[page]) * cost)
        for place in reversed(range(len(pages))):
            page = pages[place]
            if any(page in held for held, _ in self.holders):
                continue
            if place < identified:
                self.count += 1
                self.cached[page] = (max(worth[place:]), self.count)
            else:
                self.blank.append(page)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.cached)), min_size=1, max_size=4, unique=True))
        self.pool.share(pages)
        for page in pages:
            self.found[page] += 1
            del self.cached[page]
        self.holders.append((pages, len(pages)))

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.num_free == len(self.blank) + len(self.cached)


TestValuedPool = ValuedMachine.TestCase
TestValuedPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def finish(engine: Engine, *requests: tuple[str, list[int], dict[str, Any]]) -> None:
    """One request after the other, each on its own."""
    for name, prompt, fields in requests:
        engine.add(name, prompt, 1, **fields)
        engine.run()


def hits(engine: Engine, name: str, prompt: list[int]) -> int:
    request = engine.add(name, prompt, 1)
    engine.run()
    return request.cached_tokens


POPULAR = list(range(1, 17))
"""Four pages that many ask for."""


def scan(name: str) -> list[int]:
    """Four pages that nobody asks for again."""
    return [1000 + ord(name[0]) * 100 + i for i in range(16)]


@pytest.mark.parametrize(("order", "kept"), [("lru", 0), ("lfu", 12), ("cost", 12)])
def test_a_scan_does_not_push_out_what_is_popular(order: str, kept: int) -> None:
    """A page found often outlives pages that were used later, but once; LRU forgets it."""
    engine = Engine(num_pages=12, page_tokens=PAGE, kv_eviction=order)
    finish(engine, *((f"p{i}", [*POPULAR, 7], {}) for i in range(3)))
    finish(engine, *((name, scan(name), {}) for name in "abc"))
    assert hits(engine, "again", POPULAR) == kept


def test_a_request_without_a_session_does_not_shorten_what_a_conversation_keeps() -> None:
    engine = Engine(num_pages=16, page_tokens=4, kv_eviction="session", session_keep_s=1000.0)
    system, first = own_tokens("system", 16), own_tokens("first turn", 8)
    engine.add("turn", [*system, *first], 1, session=1, turn=0)
    engine.run()
    engine.add("once", [*system, *own_tokens("once", 3)], 1)
    engine.run()
    for name in "abcd":
        engine.add(name, 36, 1)
        engine.run()
    again = engine.add("next turn", [*system, *first, 7, 8, 9], 1, session=1, turn=1)
    engine.run()
    assert again.cached_tokens == 24


def test_what_was_popular_ages() -> None:
    """LFU with ageing lets go of a favourite of the past: plain LFU would keep it for ever."""
    engine = Engine(num_pages=12, page_tokens=PAGE, kv_eviction="lfu")
    finish(engine, *((f"p{i}", [*POPULAR, 7], {}) for i in range(3)))
    finish(engine, *((chr(97 + i), scan(chr(97 + i)), {}) for i in range(20)))
    assert hits(engine, "again", POPULAR) == 0


def test_cost_keeps_the_deep_prefix() -> None:
    """Of two prefixes used once each, the long one is dearer to compute again and stays, although it is older."""
    long, short = list(range(1, 25)), list(range(101, 109))
    kept = {}
    for order in ("lfu", "cost"):
        engine = Engine(num_pages=10, page_tokens=PAGE, kv_eviction=order, attention_tokens=8.0)
        finish(engine, ("long", long, {}), ("short", short, {}), ("new", scan("n"), {}))
        kept[order] = hits(engine, "again", long)
    assert kept["cost"] > kept["lfu"]


def test_a_live_conversation_stays_for_its_next_turn() -> None:
    """The driver's clock counts steps: within `session_keep_s` of them other prompts do not push a conversation out."""
    kept = {}
    for order in ("lru", "session"):
        engine = Engine(num_pages=12, page_tokens=PAGE, kv_eviction=order, session_keep_s=100.0)
        finish(engine, ("turn", POPULAR, {"session": "s"}), *((name, scan(name), {}) for name in "abc"))
        kept[order] = hits(engine, "next", POPULAR)
    assert kept == {"lru": 0, "session": 12}


def test_a_conversation_that_has_ended_is_let_go() -> None:
    engine = Engine(num_pages=12, page_tokens=PAGE, kv_eviction="session", session_keep_s=3.0)
    finish(engine, ("turn", POPULAR, {"session": "s"}), *((name, scan(name), {}) for name in "abcdef"))
    assert hits(engine, "next", POPULAR) == 0


@given(order=st.sampled_from(["lru", "lfu", "cost", "session"]), seed=st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_answers_and_pages_whatever_the_order(order: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    engine = Engine(num_pages=14, page_tokens=PAGE, kv_eviction=order, attention_tokens=16.0)
    prefixes = [[int(t) for t in rng.integers(0, 50, 12)] for _ in range(3)]
    for i in range(12):
        prompt = [*prefixes[int(rng.integers(3))], *map(int, rng.integers(0, 50, rng.integers(1, 8)))]
        engine.add(i, prompt, int(rng.integers(1, 9)), session=int(rng.integers(3)), turn=i)
        engine.step()
    engine.run()
    assert engine.idle


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_eviction": "mru"}, "lru, lfu, cost, session"),
        ({"kv_eviction": "lfu", "enable_prefix_caching": False}, "no effect"),
        ({"kv_eviction": "session", "session_decay": 0.0}, "session_decay"),
        ({"kv_eviction": "session", "session_keep_s": -1.0}, "session_keep_s"),
    ],
)
def test_errors(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SchedulerConfig(10, **fields)
