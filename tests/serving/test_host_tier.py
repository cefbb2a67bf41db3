"""Cached prefixes that the device forgets and the host keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.host_tier import HostTier
from tests.serving.driver import Engine, own_tokens

PAGE = 4


class Bytes:
    """What is in every page, by the names of the tokens written there: moves and steps carried out for real."""

    def __init__(self, engine: Engine) -> None:
        self.device: dict[int, tuple[Any, int]] = {}
        self.host: dict[int, tuple[Any, int]] = {}
        scheduler = engine.scheduler
        plan_step = scheduler.plan

        def plan(now_s: float) -> Any:
            made = plan_step(now_s)
            if made is None:
                return None
            for move in made.swap_out:
                for at, to in zip(move.sources.tolist(), move.targets.tolist(), strict=True):
                    self.host[to] = self.device.get(at, (None, 0))  # partly filled pages are swapped too
            for move in made.swap_in:
                for at, to in zip(move.sources.tolist(), move.targets.tolist(), strict=True):
                    self.device[to] = self.host[at]
            for slot, new, context in zip(
                made.slots.tolist(), made.num_new.tolist(), made.context.tolist(), strict=True
            ):
                request = scheduler.seqs.request(slot)
                pages = scheduler.seqs.pages_of(slot).tolist()
                keys = request.keys
                for i in range(context // PAGE):
                    # Every full page before what is computed now holds the very tokens of this request.
                    if i < len(keys):
                        writer, place = self.device[pages[i]]
                        assert writer.keys[place] == keys[i], f"page {i} of {request.id}"
                for i in range(context // PAGE, (context + new) // PAGE):
                    self.device[pages[i]] = (request, i)  # the key of a decoded page comes with its token
            return made

        scheduler.plan = plan  # type: ignore[method-assign]


@given(
    seed=st.integers(0, 2**16),
    host=st.integers(1, 12),
    swap=st.sampled_from([0, 8]),
    pages=st.integers(10, 24),
    asynchronous=st.booleans(),
    order=st.sampled_from(["lru", "lfu"]),
)
@settings(max_examples=60, deadline=None)
def test_what_comes_back_is_what_was_kept(
    seed: int, host: int, swap: int, pages: int, asynchronous: bool, order: str
) -> None:
    rng = np.random.default_rng(seed)
    engine = Engine(
        num_pages=pages,
        page_tokens=PAGE,
        host_cache_pages=host,
        swap_pages=swap,
        async_scheduling=asynchronous,
        kv_eviction=order,
        max_num_batched_tokens=24,
        max_num_seqs=4,
    )
    Bytes(engine)
    prefixes = [own_tokens(f"prefix {i}", 16) for i in range(4)]
    for i in range(16):
        prompt = [
            *prefixes[int(rng.integers(4))][: int(rng.integers(1, 17))],
            *own_tokens(i, int(rng.integers(1, 9))),
        ]
        engine.add(i, prompt, int(rng.integers(1, 8)))
        engine.step()
    engine.run()
    assert engine.idle
    assert engine.scheduler.tier is not None
    engine.scheduler.tier.check()


def test_a_prefix_that_was_pushed_out_is_found_on_the_host() -> None:
    found = {}
    for host in (0, 32):
        engine = Engine(num_pages=10, page_tokens=PAGE, host_cache_pages=host)
        prefix = own_tokens("prefix", 24)
        engine.add("first", prefix, 1)
        engine.run()
        for name in "abcd":
            engine.add(name, 36, 1)
            engine.run()
        again = engine.add("again", [*prefix, 7], 1)
        engine.run()
        found[host] = again.cached_tokens
    assert found == {0: 0, 32: 24}


def test_what_is_on_the_host_already_is_not_copied_again() -> None:
    engine = Engine(num_pages=10, page_tokens=PAGE, host_cache_pages=64)
    tier = engine.scheduler.tier
    assert tier is not None
    prefix = own_tokens("prefix", 24)
    for round_ in range(3):
        engine.add(("again", round_), [*prefix, round_], 1)
        engine.add(("other", round_), own_tokens("other", 36), 1)
        engine.run()
    # Six pages of the prefix and nine of the other prompt, once each.
    assert tier.num_kept <= 6 + 9 + 3
    assert tier.num_loaded > 0


def test_the_least_recently_used_host_page_is_given_up_and_never_a_pinned_one() -> None:
    tier = HostTier(2, 100)
    tier.keep("a", 1)
    tier.keep("b", 2)
    assert tier.find(["a", "b"], 0, 2) == [100, 101]
    hosts = tier.find(["a"], 0, 1)
    tier.pin(hosts, ["a"], 0)
    tier.keep("c", 3)  # in place of b, which was used before a
    assert tier.find(["b"], 0, 1) == []
    assert tier.find(["a"], 0, 1) == hosts
    tier.pin(tier.find(["c"], 0, 1), ["c"], 0)
    tier.keep("d", 4)  # both pinned: lost
    assert tier.find(["d"], 0, 1) == []
    tier.check()
    out, into = tier.take_moves()
    assert len(out) == 1
    assert not into


@pytest.mark.parametrize(
    "fields", [{"host_cache_pages": -1}, {"host_cache_pages": 3, "enable_prefix_caching": False}]
)
def test_errors(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="host_cache_pages"):
        SchedulerConfig(10, **fields)
