"""Requests that repeat others are answered without an engine once the first has been."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from serving.config import SchedulerConfig
from serving.errors import UsageError
from sim.deployment import Deployment, simulate
from sim.latency import latencies
from sim.metrics import summarise
from sim.record import Status, Tenant
from sim.streaming import reading
from sim.world import run_world
from tests.sim.worlds import LinearPricer, make_workload

SAME = [(40, 7)]
"""A prompt of 40 tokens, all of stream 7."""


def test_what_is_the_same_request() -> None:
    workload = make_workload(
        [0.0] * 7,
        [40, 40, 40, 41, 40, 40, 40],
        [5, 5, 6, 5, 5, 5, 5],
        segments=[SAME, SAME, SAME, SAME, [], [(40, 8)], [(100, 7)]],
    )
    # Another length, a token more than what is shared, no identity, another stream; the last goes on beyond its prompt.
    assert workload.repeats().tolist() == [0, 0, 2, 3, 4, 5, 0]


def test_a_repeat_is_answered_at_once_and_only_after_the_first_has_been() -> None:
    workload = make_workload([0.0, 0.001, 5.0, 6.0], [40] * 4, [5] * 4, segments=[SAME] * 4)
    workload = replace(workload, tenants=(Tenant(rtt_s=0.1),))
    record = run_world(workload, SchedulerConfig(100), LinearPricer(), response_cache=True)
    r, lat = record.requests, latencies(record)
    assert r.replica.tolist() == [0, 0, -1, -1]
    assert (r.status == Status.FINISHED).all()
    np.testing.assert_allclose(lat.e2el_s[2:], 0.1)
    np.testing.assert_allclose(lat.ttft_s[2:], 0.1)
    assert r.output_tokens.tolist() == [5] * 4
    assert summarise(record).answered_before == 2
    assert record.steps.num_prefill_tokens.sum() <= 2 * 40


def test_without_it_nothing_is_answered_before() -> None:
    workload = make_workload([0.0, 5.0], [40] * 2, [5] * 2, segments=[SAME] * 2)
    record = run_world(workload, SchedulerConfig(100), LinearPricer())
    assert record.requests.replica.tolist() == [0, 0]
    assert summarise(record).answered_before == 0


def test_a_repeat_of_one_that_was_refused_is_kept_for_the_next() -> None:
    # The first is refused while the other runs and waits; the second of its kind is answered, and the third from that.
    workload = make_workload(
        [0.0, 0.1, 0.2, 30.0, 60.0], [40] * 5, [500, 500, 5, 5, 5], segments=[[], [], SAME, SAME, SAME]
    )
    deployment = Deployment(
        model="llama-3.1-8b",
        gpu="h100",
        max_num_seqs=1,
        admission={"max_waiting": 1},
        response_cache="memory",
    )
    r = simulate(workload, deployment).requests
    assert r.status[2:].tolist() == [Status.REJECTED, Status.FINISHED, Status.FINISHED]
    assert r.replica[2:].tolist() == [-1, 0, -1]


def test_all_tokens_of_a_cached_answer_come_at_once() -> None:
    workload = make_workload([0.0, 5.0], [40] * 2, [5] * 2, segments=[SAME] * 2)
    record = run_world(workload, SchedulerConfig(100), LinearPricer(), response_cache=True)
    np.testing.assert_array_equal(record.token_times_s(1), np.full(5, record.requests.last_token_s[1]))
    assert len(record.event_times_s(1)) == 1
    seen = reading(record)
    assert seen.longest_pause_s[1] == 0.0
    assert seen.first_word_s[1] == pytest.approx(0.0)


def test_conversations_go_on_after_a_cached_answer() -> None:
    workload = make_workload(
        [0.0, 5.0, 0.0],
        [40, 40, 60],
        [5, 5, 5],
        segments=[SAME, SAME, []],
        after=[-1, -1, 1],
        think_s=[0, 0, 1.0],
    )
    record = run_world(workload, SchedulerConfig(100), LinearPricer(), response_cache=True)
    assert record.requests.sent_s.tolist() == [0.0, 5.0, 6.0]
    assert (record.requests.status == Status.FINISHED).all()


def test_a_deployment_with_a_cache() -> None:
    workload = make_workload([0.0, 5.0], [40] * 2, [5] * 2, segments=[SAME] * 2)
    base = Deployment(model="llama-3.1-8b", gpu="h100")
    record = simulate(workload, base.model_copy(update={"response_cache": "memory"}))
    assert summarise(record).answered_before == 1
    with pytest.raises(UsageError, match="memory, or redis"):
        simulate(workload, base.model_copy(update={"response_cache": "yes"}))
