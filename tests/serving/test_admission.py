"""The second loop of a step: who is admitted from the queue, and what refuses the head."""

from __future__ import annotations

import pytest

from tests.serving.driver import Engine, own_tokens


def test_waiting_requests_are_admitted_in_order_of_arrival() -> None:
    engine = Engine()
    for name in "cab":
        engine.add(name, 3)
    decided = engine.step()
    assert list(decided.sched) == ["c", "a", "b"]
    assert decided.running == ["c", "a", "b"]


def test_no_more_than_max_num_seqs_run() -> None:
    engine = Engine(max_num_seqs=2)
    for name in "abc":
        engine.add(name, 3, max_tokens=2)
    assert engine.step().running == ["a", "b"]
    engine.step()  # a and b end
    assert engine.step().running == ["c"]


def test_admission_stops_when_the_budget_is_used_up() -> None:
    engine = Engine(max_num_batched_tokens=10)
    engine.add("a", 10)
    engine.add("b", 1)
    assert engine.step().waiting == ["b"]


def test_a_prompt_longer_than_the_budget_is_admitted_in_chunks() -> None:
    engine = Engine(max_num_batched_tokens=10)
    engine.add("a", 25)
    assert [engine.step().sched["a"] for _ in range(4)] == [10, 10, 5, 1]


def test_without_chunked_prefill_a_prompt_beyond_the_rest_of_the_budget_stops_admission() -> None:
    engine = Engine(max_num_batched_tokens=10, enable_chunked_prefill=False)
    engine.add("a", 6, max_tokens=3)
    engine.add("b", 5, max_tokens=3)
    engine.add("c", 1)
    # 4 tokens of budget are left: b is not cut, and c, which would fit, is behind it.
    decided = engine.step()
    assert decided.sched == {"a": 6}
    assert decided.waiting == ["b", "c"]
    # a decodes (1); b and c take 5 and 1 of the remaining 9.
    assert engine.step().sched == {"a": 1, "b": 5, "c": 1}


def test_only_the_head_of_the_queue_is_tried() -> None:
    engine = Engine(num_pages=4, page_tokens=4)
    engine.add("a", 8)
    engine.add("big", 12)
    engine.add("small", 1)
    # Two pages are free; big needs three, so small, which needs one, is not looked at.
    decided = engine.step()
    assert decided.sched == {"a": 8}
    assert decided.waiting == ["big", "small"]


def test_the_whole_prompt_must_fit_although_only_its_first_chunk_is_computed() -> None:
    # a's first chunk takes a page; three are free. b's chunk of 4 tokens would need one, its prompt of 16 needs four.
    config = {
        "num_pages": 4,
        "page_tokens": 4,
        "max_num_batched_tokens": 8,
        "long_prefill_token_threshold": 4,
    }
    engine = Engine(**config)
    engine.add("a", 5)
    engine.add("b", 16)
    engine.step()
    assert engine.scheduler.num_running == 1

    engine = Engine(**config, reserve_full_isl=False)
    engine.add("a", 5)
    engine.add("b", 16)
    assert engine.step().sched == {"a": 4, "b": 4}


def test_the_full_prompt_gate_covers_the_tokens_a_resumed_request_has_generated() -> None:
    engine = Engine(num_pages=5, page_tokens=4, enable_prefix_caching=False)
    engine.add("a", 11, max_tokens=9)
    engine.add("b", 7, max_tokens=9)
    engine.step()  # 3 + 2 pages, each with room for one token
    engine.step()
    decided = engine.step()
    # Both are full: a preempts b, which has produced two tokens (9 known: three pages).
    assert decided.preempted == ["b"]
    assert decided.free == 1
    history = engine.run()
    # a ends with 11 + 9 = 20 tokens after holding five pages, so b is resumed only then, with everything it knew.
    resumed = [d for d in history if d.resumed]
    assert [d.sched for d in resumed] == [{"b": 9}]
    assert engine.idle


def test_pages_found_in_the_prefix_cache_lower_what_the_gate_asks_for() -> None:
    # Six pages: a holds 4 of its own; b has the same 3 full pages and one more: 4 - 3 = 1 must be free.
    prompt = own_tokens("shared", 12)
    engine = Engine(num_pages=6, page_tokens=4)
    engine.add("a", [*prompt, 1])
    engine.step()
    engine.add("b", [*prompt, 2])
    decided = engine.step()
    assert decided.hits == {"b": 12}
    assert decided.free == 6 - 4 - 1


def test_evictable_hits_are_not_counted_as_free_pages_too() -> None:
    # a leaves two hashed pages behind. b hits both, and needs two more: the pool of four has exactly two others.
    prompt = own_tokens("shared", 8)
    engine = Engine(num_pages=4, page_tokens=4)
    engine.add("a", [*prompt, 1], max_tokens=1)
    engine.step()
    assert engine.free == 4
    engine.add("b", [*prompt, *range(8)], max_tokens=1)
    assert engine.step().hits == {"b": 8}

    # With one page held by somebody else only one other is left, so b may not be admitted.
    engine = Engine(num_pages=4, page_tokens=4)
    engine.add("a", [*prompt, 1], max_tokens=1)
    engine.step()
    engine.add("x", 1)
    engine.step()
    engine.add("b", [*prompt, *range(8)], max_tokens=1)
    assert engine.step().waiting == ["b"]


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, True), (0.2, True), (0.25, True), (0.3, False)])
def test_the_watermark_keeps_pages_free_while_something_runs(watermark: float, admitted: bool) -> None:
    # vLLM counts the null block: 11 pages + 1 = 12 blocks; 0.2 of them are 2, 0.25 are 3, 0.3 are 3 (rounded down).
    # a holds 4 pages (13 to 16 tokens), b wants 4: three pages stay free, which meets a watermark of at most three.
    engine = Engine(num_pages=11, page_tokens=4, watermark=watermark if admitted else 0.34)
    engine.add("a", 13)
    engine.step()
    engine.add("b", 16)
    assert ("b" in engine.step().sched) == admitted


def test_the_watermark_does_not_bind_when_nothing_runs() -> None:
    engine = Engine(num_pages=10, page_tokens=4, watermark=0.9)
    engine.add("a", 36)
    assert engine.step().sched == {"a": 36}


def test_a_blocked_head_is_tried_again_when_pages_come_free() -> None:
    engine = Engine(num_pages=4, page_tokens=4)
    engine.add("a", 8, max_tokens=2)
    engine.add("big", 12)
    assert engine.step().waiting == ["big"]
    assert engine.step().finished == ["a"]
    assert engine.step().sched == {"big": 12}


def test_a_blocked_head_that_is_aborted_no_longer_blocks_those_behind_it() -> None:
    engine = Engine(num_pages=4, page_tokens=4)
    engine.add("a", 4)
    big = engine.add("big", 16)
    engine.add("small", 1)
    assert engine.step().waiting == ["big", "small"]
    engine.scheduler.abort(big)
    assert "small" in engine.step().sched


def test_a_blocked_head_is_tried_again_when_a_running_request_publishes_pages_that_it_shares() -> None:
    prompt = own_tokens("shared", 8)
    engine = Engine(num_pages=7, page_tokens=4, long_prefill_token_threshold=2)
    engine.add("a", prompt)
    engine.add("b", [*prompt, *own_tokens("b", 20)], max_tokens=1)
    # Chunks of 2: a's first takes a page that is not full, so nothing is published; b needs 7 pages of 6.
    first = engine.step()
    assert first.sched == {"a": 2}
    assert first.free == 6
    # The second chunk fills and publishes that page without taking another: b needs 7 - 1 = 6 of 6.
    second = engine.step()
    assert second.hits == {"b": 4}


def test_priority_order_admits_the_most_urgent_first() -> None:
    engine = Engine(queue_order="priority", max_num_seqs=2)
    engine.add("later", 1, priority=5)
    engine.add("soon", 1, priority=-1)
    engine.add("first", 1, priority=-1, arrival_s=-3.0)
    assert list(engine.step().sched) == ["first", "soon"]


def test_shortest_job_first_uses_the_predicted_length_and_max_tokens_where_there_is_none() -> None:
    engine = Engine(queue_order="sjf")
    engine.add("unknown", 1, max_tokens=50)
    engine.add("long", 1, max_tokens=10, predicted_tokens=100)
    engine.add("short", 1, max_tokens=500, predicted_tokens=3)
    assert list(engine.step().sched) == ["short", "unknown", "long"]


def test_earliest_deadline_first() -> None:
    engine = Engine(queue_order="edf")
    engine.add("whenever", 1)
    engine.add("late", 1, deadline_s=9.0)
    engine.add("soon", 1, deadline_s=2.0)
    assert list(engine.step().sched) == ["soon", "late", "whenever"]


def test_equal_keys_are_served_in_order_of_arrival_then_of_id() -> None:
    engine = Engine(queue_order="priority")
    for name in (11, 2, 5):
        engine.add(name, 1, arrival_s=0.0)
    # Numbers compare as numbers, not as text.
    assert list(engine.step().sched) == [2, 5, 11]
