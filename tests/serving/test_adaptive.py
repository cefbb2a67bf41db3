"""Caps by size class and by estimated tokens, and the share of a step that prompts may take."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import UsageError
from serving.policies import Adaptive, load_policy
from serving.policies.adaptive import estimated_tokens, parse_size_classes
from serving.request import Request
from sim.deployment import Deployment
from sim.deployment_limits import policy_options
from tests.serving.driver import Engine


def test_short_requests_pass_a_full_class_of_long_ones() -> None:
    engine = Engine(Adaptive(((32, 8), (math.inf, 2))), max_num_seqs=8)
    for i in range(5):
        engine.add(f"summary {i}", 100, 50)
    engine.add("completion", 10, 5)
    decided = engine.step()
    assert set(decided.sched) == {"summary 0", "summary 1", "completion"}
    engine.run()
    assert engine.idle


def test_of_each_class_at_most_so_many_run() -> None:
    engine = Engine(Adaptive(((40, 3), (math.inf, 1))), max_num_seqs=8, max_num_batched_tokens=64)
    for i in range(20):
        engine.add(i, 100 if i % 2 else 20, 10)
    while engine.scheduler.num_unfinished:
        engine.step()
        sizes = [estimated_tokens(request) for request in engine.scheduler.running()]
        assert sum(size <= 40 for size in sizes) <= 3
        assert sum(size > 40 for size in sizes) <= 1
    assert engine.idle


def test_estimated_tokens_bound_what_runs_and_a_lone_giant_still_runs() -> None:
    engine = Engine(Adaptive(max_running_tokens=100), max_num_seqs=8)
    for i in range(4):
        engine.add(i, 30, 10)
    engine.add("giant", 300, 10)
    seen = 0
    while engine.scheduler.num_unfinished:
        engine.step()
        running = list(engine.scheduler.running())
        held = sum(map(estimated_tokens, running))
        assert held <= 100 or len(running) == 1
        seen = max(seen, held)
    assert engine.idle
    assert seen == 310


def test_the_prediction_counts_where_there_is_one() -> None:
    assert estimated_tokens(Request(0, 30, 100)) == 130
    assert estimated_tokens(Request(0, 30, 100, predicted_tokens=20)) == 50
    assert estimated_tokens(Request(0, 30, 100, predicted_tokens=200)) == 130


def test_prompts_take_their_share_while_others_decode() -> None:
    """A quarter of 64 tokens: a prompt beside a decode is computed 16 tokens a step; alone it gets all it wants."""
    engine = Engine(Adaptive(prefill_share=0.25), max_num_batched_tokens=64)
    engine.add("first", 64, 20)
    assert engine.step().sched == {"first": 64}
    engine.add("second", 100, 4)
    assert engine.step().sched == {"first": 1, "second": 16}
    assert engine.step().sched == {"first": 1, "second": 16}
    engine.run()
    assert engine.idle


def test_with_every_cap_open_it_is_chunked() -> None:
    histories = []
    for policy in (load_policy("adaptive"), load_policy("chunked")):
        engine = Engine(policy, num_pages=12, max_num_batched_tokens=32)
        for i in range(8):
            engine.add(i, 20 + 7 * i, 9)
            engine.step()
        histories.append([decided.sched for decided in engine.run()])
    assert histories[0] == histories[1]


@given(
    requests=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 20)), min_size=1, max_size=12),
    bounds=st.lists(st.integers(1, 100), min_size=0, max_size=3, unique=True).map(sorted),
    seats=st.integers(1, 3),
    tokens=st.none() | st.integers(1, 200),
    share=st.sampled_from([1.0, 0.5, 0.1]),
    pages=st.integers(8, 30),
)
@settings(max_examples=60, deadline=None)
def test_nobody_starves(
    requests: list[tuple[int, int]],
    bounds: list[int],
    seats: int,
    tokens: int | None,
    share: float,
    pages: int,
) -> None:
    policy = Adaptive([(float(bound), seats) for bound in bounds], tokens, share)
    engine = Engine(policy, num_pages=pages, page_tokens=8, max_num_batched_tokens=24, max_num_seqs=4)
    for i, (prompt, output) in enumerate(requests):
        engine.add(i, prompt, output)
        engine.step()
    engine.run()
    assert engine.idle


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size_classes": [(64, 2), (32, 2)]}, "growing bounds"),
        ({"size_classes": [(64, 0)]}, "at least 1 sequence"),
        ({"max_running_tokens": 0}, "max_running_tokens"),
        ({"prefill_share": 0.0}, "prefill_share"),
        ({"prefill_share": 1.5}, "prefill_share"),
    ],
)
def test_errors(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_policy("adaptive", **options)


def test_a_share_needs_prompts_that_can_be_cut() -> None:
    uncut = Deployment(
        model="llama-3.1-8b", policy="adaptive", prefill_share=0.5, enable_chunked_prefill=False
    )
    with pytest.raises(UsageError, match="would wait until nobody decodes"):
        policy_options(uncut)
    assert policy_options(uncut.model_copy(update={"prefill_share": 1.0})) == {"prefill_share": 1.0}


def test_size_classes_as_text() -> None:
    assert parse_size_classes("256:64,inf:8") == ((256.0, 64), (math.inf, 8))
    for text in ("256", "256:many", ":3", "nan:3", "256:64,"):
        with pytest.raises(UsageError, match="256:64,inf:8"):
            parse_size_classes(text)
