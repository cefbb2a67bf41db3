"""Where vLLM hangs or livelocks and this scheduler must not: requests that can never fit, pools that are too small."""

from __future__ import annotations

import pytest

from serving.policies import BatchPolicy, Chunked, Continuous, Static
from serving.request import State
from tests.serving.driver import Engine


def test_a_prompt_larger_than_the_whole_pool_is_rejected_when_added_and_those_behind_it_run() -> None:
    engine = Engine(num_pages=4, page_tokens=4)
    giant = engine.add("giant", 17)
    engine.add("small", 3, max_tokens=2)
    assert giant.state is State.REJECTED
    assert "17 tokens needs more than the whole KV cache (4 pages of 4 tokens)" in giant.reason
    assert engine.step().sched == {"small": 3}
    engine.run()
    assert engine.idle


def test_a_prompt_of_exactly_the_pool_gives_the_one_token_that_needs_no_page() -> None:
    # 16 tokens fit; the token sampled from them is never computed, so it needs no KV.
    engine = Engine(num_pages=4, page_tokens=4)
    request = engine.add("a", 16, max_tokens=10)
    assert engine.step().finished == ["a"]
    assert (request.output_tokens, request.reason) == (1, "length")


def test_a_lone_request_that_outgrows_the_pool_ends_with_length() -> None:
    engine = Engine(num_pages=4, page_tokens=4)
    request = engine.add("a", 10, max_tokens=100)
    history = engine.run()
    # The pool holds 16 tokens; the 17th is sampled and not computed: 17 - 10 = 7 come out, one a step.
    assert (request.output_tokens, request.reason) == (7, "length")
    assert len(history) == 7
    assert not any(d.preempted for d in history)
    assert engine.idle


def test_requests_that_each_outgrow_the_pool_all_end() -> None:
    engine = Engine(num_pages=4, page_tokens=4)
    requests = [engine.add(i, 4, max_tokens=100) for i in range(5)]
    engine.run()
    assert [(r.output_tokens, r.reason) for r in requests] == [(13, "length")] * 5


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("draft_has_kv", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_speculating_request_that_outgrows_the_pool_ends_too(
    k: int, draft_has_kv: bool, asynchronous: bool
) -> None:
    engine = Engine(
        num_pages=5,
        page_tokens=4,
        num_speculative_tokens=k,
        draft_has_kv=draft_has_kv,
        async_scheduling=asynchronous,
    )
    engine.propose = k
    request = engine.add("a", 3, max_tokens=100)
    engine.run(limit=60)
    assert request.reason == "length"
    # At most the pool and one token. Room is kept for k drafts and a drafter's look-ahead slots, and where a step is
    # in flight for all that it may yet accept.
    lookahead = k if draft_has_kv else 0
    fewest = 20 - 2 * k - lookahead if asynchronous and k else 20 + 1 - k - lookahead
    assert fewest <= request.num_tokens <= 20 + 1
    assert engine.idle


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "why"),
    [
        (0, 5, "prompt of 0 tokens; at least 1 is needed"),
        (5, 0, "max_tokens is 0; at least 1 is needed"),
        (50, 5, "prompt of 50 tokens leaves no room in max_model_len 50"),
    ],
)
def test_what_cannot_be_served_is_rejected_with_a_reason(prompt: int, max_tokens: int, why: str) -> None:
    engine = Engine(max_model_len=50)
    request = engine.add("a", prompt, max_tokens)
    assert request.state is State.REJECTED
    assert request.done
    assert why in request.reason
    assert engine.plan().sched == {}
    assert engine.scheduler.num_unfinished == 0


def test_an_answer_ends_at_max_model_len() -> None:
    engine = Engine(max_model_len=50)
    request = engine.add("a", 49, max_tokens=10)
    engine.run()
    assert (request.output_tokens, request.reason) == (1, "length")
    request = engine.add("b", 30, max_tokens=100)
    engine.run()
    assert (request.output_tokens, request.reason) == (20, "length")


def test_static_batching_rejects_what_it_could_never_reserve() -> None:
    engine = Engine(Static(max_wait_s=0), num_pages=4, page_tokens=4)
    request = engine.add("a", 10, max_tokens=7)
    assert request.state is State.REJECTED
    assert "static batching reserves 5 pages for it; the KV cache has 4" in request.reason


def test_without_chunked_prefill_what_no_step_can_hold_is_rejected() -> None:
    # A prompt of 7 and 4 answer tokens: 10 may have to be computed at once after a preemption, and 10 is the budget.
    engine = Engine(enable_chunked_prefill=False, max_num_batched_tokens=10)
    assert engine.add("a", 7, max_tokens=4).state is State.WAITING
    request = engine.add("b", 7, max_tokens=5)
    assert request.state is State.REJECTED
    assert "max_num_batched_tokens is 10" in request.reason
    engine.run()
    assert engine.idle


@pytest.mark.parametrize("policy", [Chunked(), Continuous(), Static(max_wait_s=0)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_pool_of_exactly_one_largest_request_serves_them_one_after_the_other(
    policy: BatchPolicy, asynchronous: bool
) -> None:
    engine = Engine(policy, num_pages=4, page_tokens=4, async_scheduling=asynchronous)
    requests = [engine.add(i, 10, max_tokens=6) for i in range(4)]
    engine.run(limit=200)
    assert [r.output_tokens for r in requests] == [6] * 4
    assert engine.idle


@pytest.mark.parametrize("reserve_full_isl", [True, False])
@pytest.mark.parametrize("queue_order", ["fcfs", "priority"])
def test_requests_of_just_over_half_the_pool_do_not_livelock(
    reserve_full_isl: bool, queue_order: str
) -> None:
    # Two prompts of 6 pages in a pool of 11: with the first chunk as the only gate both start and fight for the rest.
    engine = Engine(
        num_pages=11,
        page_tokens=4,
        max_num_batched_tokens=8,
        reserve_full_isl=reserve_full_isl,
        queue_order=queue_order,
        enable_prefix_caching=False,
    )
    requests = [engine.add(i, 22, max_tokens=3) for i in range(4)]
    engine.run(limit=300)
    assert [r.output_tokens for r in requests] == [3] * 4
    # The oldest always goes on, so each request is thrown back at most once for each one before it.
    assert all(r.preemptions <= i for i, r in enumerate(requests))
    needed = sum(22 + 2 for _ in requests)
    assert engine.tokens_scheduled <= 3 * needed
    assert engine.idle


def test_a_conversation_that_grows_turn_by_turn_does_not_livelock() -> None:
    # Each turn repeats all before it and needs a little more of the pool; two of them alternate.
    engine = Engine(num_pages=12, page_tokens=4, max_num_batched_tokens=16)
    histories = {"x": list(range(8)), "y": list(range(1000, 1008))}
    for turn in range(4):
        for who, tokens in histories.items():
            engine.add((who, turn), tokens, max_tokens=6)
        engine.run(limit=200)
        for who, tokens in histories.items():
            answer = engine.answers[who, turn]
            assert len(answer) == 6
            tokens += answer + [hash((who, turn)) % 1000 for _ in range(2)]
    assert engine.idle
