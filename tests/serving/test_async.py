"""Asynchronous scheduling: step n+1 is planned before the tokens of step n are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serving.config import SchedulerConfig
from serving.plan import ONE_EACH, StepOutcome
from serving.request import Request
from serving.scheduler import Scheduler
from tests.serving.driver import Engine, answer_token, own_tokens


def test_a_decode_is_planned_while_its_last_token_is_in_flight() -> None:
    engine = Engine(async_scheduling=True)
    engine.add("a", 5)
    assert engine.plan().sched == {"a": 5}
    assert engine.plan().sched == {"a": 1}
    assert engine.computed("a") == 6
    assert engine.answers["a"] == []


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_no_step_is_planned_beyond_max_tokens(max_tokens: int) -> None:
    # One step for the prompt, which gives the first token, and one for each further token; never one more.
    engine = Engine(async_scheduling=True)
    engine.add("a", 5, max_tokens=max_tokens)
    history = engine.run()
    assert sum(bool(d.sched) for d in history) == max_tokens
    assert engine.tokens_scheduled == 5 + max_tokens - 1


def test_a_stop_token_wastes_one_row() -> None:
    # The step after the stop is planned before anybody knows of it.
    rows = {}
    for asynchronous in (False, True):
        engine = Engine(async_scheduling=asynchronous)
        engine.add("a", 5, max_tokens=50, stop_at=3)
        engine.run()
        assert len(engine.answers["a"]) == 4
        rows[asynchronous] = engine.tokens_scheduled
    assert rows == {False: 5 + 3, True: 5 + 4}


def test_a_stop_token_holds_the_seat_and_the_pages_one_step_longer() -> None:
    admitted_at = {}
    for asynchronous in (False, True):
        engine = Engine(async_scheduling=asynchronous, max_num_seqs=1)
        engine.add("a", 5, max_tokens=50, stop_at=1)
        engine.add("b", 5)
        admitted_at[asynchronous] = next(i for i, d in enumerate(engine.run()) if "b" in d.sched)
    # a ends with its second step. In step 3 (index 2) b follows at once, or a's wasted row is in the way.
    assert admitted_at == {False: 2, True: 3}


def test_max_tokens_is_foreseen_but_the_seat_is_held_until_the_token_is_there() -> None:
    engine = Engine(async_scheduling=True, max_num_seqs=1)
    engine.add("a", 5, max_tokens=2)
    engine.add("b", 5)
    assert engine.step().sched == {"a": 5}
    assert engine.step().sched == {"a": 1}
    # a's last token is in flight: nothing of it is scheduled, but its seat is not free yet either.
    assert engine.step().sched == {}
    assert engine.step().sched == {"b": 5}


def test_every_sampling_row_gets_a_placeholder_and_chunks_get_none() -> None:
    engine = Engine(async_scheduling=True, max_num_batched_tokens=8)
    engine.add("a", 12)
    seqs = engine.scheduler.seqs
    engine.plan()
    assert seqs.target[0] - seqs.known[0] == 0
    engine.plan()
    assert seqs.target[0] - seqs.known[0] == 1


def test_placeholders_count_the_drafts_that_are_in_flight() -> None:
    engine = Engine(async_scheduling=True, num_speculative_tokens=3)
    engine.add("a", 5, max_tokens=50)
    seqs = engine.scheduler.seqs
    engine.plan()
    assert seqs.target[0] - seqs.known[0] == 1
    # The drafts of the next step are not known yet, and are planned for all the same.
    assert engine.plan().sched == {"a": 1 + 3}
    assert seqs.target[0] - seqs.known[0] == 1 + (1 + 3)


def test_a_page_filled_by_a_token_in_flight_is_published_when_the_token_is_known() -> None:
    engine = Engine(async_scheduling=True, page_tokens=4)
    engine.add("a", 7)
    prompt = [*own_tokens("a", 7), answer_token("a", 0), 1]
    engine.plan()
    engine.add("c", prompt, max_tokens=1)
    # a computes token 8, whose value is in flight: its second page is full but has no hash yet.
    assert engine.plan().hits["c"] == 4
    engine = Engine(async_scheduling=True, page_tokens=4)
    engine.add("a", 7)
    engine.plan()
    engine.plan()
    engine.commit()
    engine.add("c", prompt, max_tokens=1)
    # Token 8 is known now, and a, scheduled before c, publishes the page.
    assert engine.plan().hits["c"] == 8


# ---- preemption while a token is in flight ---------------------------------------------------------------------------


def preempted_in_flight(**config: Any) -> Engine:
    """b is preempted (three pages of 4, two prompts of one page) while its first token is in flight."""
    engine = Engine(num_pages=3, page_tokens=4, async_scheduling=True, **config)
    engine.add("a", 4, max_tokens=3)
    engine.add("b", 4, max_tokens=3)
    assert engine.plan().sched == {"a": 4, "b": 4}
    decided = engine.plan()
    assert decided.preempted == ["b"]
    assert decided.sched == {"a": 1}
    return engine


def test_the_token_in_flight_of_a_preempted_request_is_delivered_exactly_once() -> None:
    engine = preempted_in_flight()
    b = engine.requests["b"]
    assert b.num_tokens == 4
    engine.commit()
    assert b.num_tokens == 5
    engine.run()
    assert engine.answers["b"] == [answer_token("b", i) for i in range(3)]
    assert b.output_tokens == 3
    assert engine.idle


def test_a_preempted_request_is_not_resumed_before_its_token_in_flight_arrived() -> None:
    engine = preempted_in_flight()
    engine.scheduler.abort(engine.requests["a"])
    # Everything is free now, but resuming b would sample its first token a second time.
    assert engine.plan().sched == {}
    engine.commit()
    # Token 5 is known; the page of b's prompt survived, so only that token is computed.
    assert engine.plan().sched == {"b": 1}


def test_a_preempted_request_may_end_with_its_token_in_flight() -> None:
    engine = Engine(num_pages=3, page_tokens=4, async_scheduling=True)
    engine.add("a", 4, max_tokens=3)
    b = engine.add("b", 4, max_tokens=9, stop_at=0)
    engine.plan()
    assert engine.plan().preempted == ["b"]
    assert engine.commit() == ["b"]
    assert b.reason == "stop"
    assert list(engine.scheduler.waiting) == []
    engine.run()
    assert engine.idle


def test_aborting_a_request_with_a_token_in_flight_drops_the_token() -> None:
    engine = Engine(async_scheduling=True)
    request = engine.add("a", 5)
    engine.plan()
    engine.scheduler.abort(request)
    assert engine.free == engine.config.num_pages
    assert engine.commit() == []
    assert engine.answers["a"] == []
    assert engine.idle


def test_a_seat_in_flight_is_not_mistaken_for_the_next_request_that_sits_there() -> None:
    engine = Engine(async_scheduling=True, max_num_seqs=1)
    first = engine.add("a", 5)
    engine.plan()
    engine.scheduler.abort(first)
    engine.add("b", 5, max_tokens=4)
    engine.plan()
    engine.commit()  # a's output: nobody's
    assert engine.answers == {"a": [], "b": []}
    engine.run()
    assert len(engine.answers["b"]) == 4


def test_a_seat_is_not_given_away_while_any_step_in_flight_refers_to_it() -> None:
    scheduler = Scheduler(SchedulerConfig(num_pages=10, max_num_seqs=1, async_scheduling=True))
    a, b = Request("a", 5, 50), Request("b", 5, 2)
    scheduler.add(a)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert first is not None
    assert second is not None
    scheduler.abort(a)
    scheduler.commit(first)
    scheduler.add(b)
    third = scheduler.plan(0.0)
    assert third is not None
    # The token of a's second step comes out of the seat that a had, and is nobody's.
    scheduler.commit(second)
    assert scheduler.seqs.known[b.slot] == 5
    scheduler.commit(third)
    assert scheduler.seqs.known[b.slot] == 6


def test_steps_are_committed_in_the_order_of_planning() -> None:
    scheduler = Scheduler(SchedulerConfig(num_pages=10, async_scheduling=True))
    scheduler.add(Request("a", 5, 5))
    scheduler.plan(0.0)
    second = scheduler.plan(0.0)
    assert second is not None
    with pytest.raises(AssertionError, match="order of planning"):
        scheduler.commit(second)


@pytest.mark.parametrize("queue_order", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(10))
def test_answers_are_those_of_synchronous_scheduling(queue_order: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    load = [
        (
            int(rng.integers(1, 30)),
            int(rng.integers(1, 20)),
            int(rng.integers(0, 3)),
            int(rng.integers(0, 30)),
        )
        for _ in range(12)
    ]
    answers = []
    for asynchronous in (False, True):
        engine = Engine(
            num_pages=14,
            page_tokens=4,
            max_num_seqs=4,
            max_num_batched_tokens=12,
            async_scheduling=asynchronous,
            queue_order=queue_order,
        )
        for i, (prompt, max_tokens, priority, stop_at) in enumerate(load):
            engine.add(i, prompt, max_tokens, priority=priority, stop_at=stop_at)
        engine.run()
        assert engine.idle
        answers.append(engine.answers)
    assert answers[0] == answers[1]


def test_counts_without_token_ids_are_enough() -> None:
    # A twin knows how many tokens come out, not which: an outcome of counts, or none at all for one each.
    for outcome in (ONE_EACH, StepOutcome(counts=np.array([1]))):
        scheduler = Scheduler(SchedulerConfig(num_pages=10))
        request = Request("a", 5, 3)
        scheduler.add(request)
        steps = 0
        while scheduler.num_unfinished:
            plan = scheduler.plan(0.0)
            assert plan is not None
            scheduler.commit(plan, outcome)
            steps += 1
        assert (steps, request.output_tokens) == (3, 3)
