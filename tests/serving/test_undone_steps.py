"""A sequence preempted by the very step that had scheduled it: what that step would have computed cannot be found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.driver import Engine


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("host_cache_pages", [0, 8])
def test_pages_of_an_undone_chunk_are_not_cached(private: bool, host_cache_pages: int) -> None:
    fields: dict[str, Any] = {"keys": ()} if private else {}
    engine = Engine(
        num_pages=7,
        page_tokens=4,
        max_num_batched_tokens=10,
        long_prefill_token_threshold=6,
        queue_order="priority",
        host_cache_pages=host_cache_pages,
    )
    engine.add("low", 22, 2, priority=1, **fields)
    engine.step()  # alone: 10 tokens
    engine.add("high", 4, 3, priority=0, **fields)
    engine.step()  # 6 more of low, which are 16 in 4 pages, and all of high in 1
    # The last 6 of low take the 2 pages that are left; then high needs one for its fifth token and low has to go.
    decided = engine.step()
    assert decided.preempted == ["low"]
    assert decided.sched == {"high": 1}
    resumed = next(d for d in engine.run() if d.resumed)
    assert resumed.hits == {"low": 16}
    assert resumed.sched["low"] == 6
