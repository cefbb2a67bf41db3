"""Failures: how often, how long, and what becomes of the requests."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from serving.config import SchedulerConfig
from sim.fleet.record import ReplicaState
from sim.fleet.spec import Failures, Outage
from sim.record import RunRecord, Status
from tests.sim.fleet.worlds import fleet_of, pool, run_fleet
from tests.sim.worlds import LinearPricer, make_workload

EVERY_TENTH = LinearPricer(0.1, 0.0, 0.0)
SYNCHRONOUS = SchedulerConfig(num_pages=400, max_num_seqs=4, max_num_batched_tokens=256)


def outages(*which: tuple[float, int, float | None], **fields: Any) -> Failures:
    schedule = tuple(Outage(time_s=t, replica=r, down_s=d) for t, r, d in which)
    return Failures(schedule=schedule, **fields)


def one(run: RunRecord) -> dict[str, Any]:
    return {name: column[0] for name, column in run.requests.columns().items()}


def test_availability_is_mtbf_over_mtbf_plus_mttr() -> None:
    # 40 replicas over 1,000 mean lives each; a cycle has coefficient of variation of at most 1.
    mtbf_s, mttr_s, replicas, until_s = 3.0, 1.0, 40, 300.0
    workload = make_workload([0.0, until_s], [10, 10], [2, 2])
    run = run_fleet(
        workload,
        pool(replicas=replicas),
        failures=Failures(mtbf_s=mtbf_s, mttr_s=mttr_s, max_retries=1000),
        seed=3,
    )
    seconds = fleet_of(run).seconds(until_s)
    availability = seconds[:, ReplicaState.READY].sum() / (replicas * until_s)
    cycles = replicas * until_s / (mtbf_s + mttr_s)
    # Renewal reward: the deviation of an alternating exponential process, A·(1-A)·sqrt(2/cycles).
    error = 0.75 * 0.25 * sqrt(2 / cycles)
    assert availability == pytest.approx(mtbf_s / (mtbf_s + mttr_s), abs=4 * error)
    assert error < 0.005
    starts = fleet_of(run).event_state == ReplicaState.DOWN
    assert starts.sum() == pytest.approx(cycles, abs=4 * sqrt(cycles))


def test_cold_starts_come_on_top_of_repairs() -> None:
    workload = make_workload([0.0, 20.0], [10, 10], [2, 2])
    run = run_fleet(
        workload, pool(replicas=1, cold_start_s=4.0), failures=outages((5.0, 0, 3.0), max_retries=0)
    )
    fleet = fleet_of(run)
    assert fleet.event_s.tolist() == [0.0, 5.0, 8.0, 12.0]
    assert [ReplicaState(s).name for s in fleet.event_state] == ["READY", "DOWN", "STARTING", "READY"]
    assert fleet.seconds(20.0)[0].tolist() == [0.0, 4.0, 13.0, 0.0, 3.0]


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_request_begins_again_from_scratch_and_its_clock_keeps_running(fast_forward: bool) -> None:
    # 20 tokens, one every 0.1 s: the replica dies at 1.05 s with 10 tokens out, the other one starts over.
    run = run_fleet(
        make_workload([0.0], [16], [20]),
        pool(SYNCHRONOUS, EVERY_TENTH, replicas=2),
        failures=outages((1.05, 0, 5.0)),
        fast_forward=fast_forward,
    )
    row = one(run)
    assert row["replica"] == 1
    assert row["status"] == Status.FINISHED
    assert row["first_token_s"] == pytest.approx(1.05 + 0.1)  # counted from 0, when it was sent
    assert row["last_token_s"] == pytest.approx(1.05 + 2.0)
    assert row["output_tokens"] == 20
    fleet = fleet_of(run)
    assert fleet.retries.tolist() == [1]
    assert fleet.lost_tokens == 10
    # What was computed before is on record: ten steps on replica 0, twenty on replica 1.
    assert np.bincount(run.steps.replica).tolist() == [10, 20]


def test_pauses_double_and_retries_end() -> None:
    # Alone, and down for 0.2 s each time: attempts begin at 0, then 0.5 s after 1.0, then 1.0 s after 2.0, …
    run = run_fleet(
        make_workload([0.0], [16], [200]),
        pool(SYNCHRONOUS, EVERY_TENTH, replicas=1),
        failures=outages((1.0, 0, 0.2), (2.0, 0, 0.2), (4.0, 0, 0.2), max_retries=2, retry_backoff_s=0.5),
    )
    row = one(run)
    assert row["status"] == Status.FAILED
    assert row["reason"] == "replica 0 failed; 2 retries used"
    assert row["engine_done_s"] == 4.0
    starts = run.steps.start_s[np.append(True, np.diff(run.steps.start_s) > 0.15)]
    np.testing.assert_allclose(starts, [0.0, 1.5, 3.0])


def test_a_prefix_cache_dies_with_its_replica() -> None:
    workload = make_workload([0.0, 1.0, 3.0, 4.0], [64] * 4, [2] * 4, segments=[[(48, 1)]] * 4)
    kept = run_fleet(workload, pool(SYNCHRONOUS, replicas=1))
    assert kept.requests.cached_tokens.tolist() == [0, 48, 48, 48]
    lost = run_fleet(workload, pool(SYNCHRONOUS, replicas=1), failures=outages((2.0, 0, 0.5)))
    assert lost.requests.cached_tokens.tolist() == [0, 48, 0, 48]


def test_requests_wait_for_a_replica_that_comes_back_and_fail_when_none_does() -> None:
    workload = make_workload([0.0, 2.0], [16, 16], [5, 5])
    back = run_fleet(workload, pool(replicas=1), failures=outages((1.0, 0, 9.0)))
    assert (back.requests.status == Status.FINISHED).all()
    assert back.requests.scheduled_s[1] == 10.0
    gone = run_fleet(workload, pool(replicas=1), failures=outages((1.0, 0, None)))
    assert gone.requests.status.tolist() == [Status.FINISHED, Status.FAILED]
    assert gone.requests.reason[1] == "no replica is left"


def test_requests_that_only_the_lost_pool_could_serve_fail_at_once() -> None:
    small = replace(SYNCHRONOUS, max_model_len=50)
    workload = make_workload([0.0, 2.0, 2.0], [16, 100, 16], [5, 5, 5])
    run = run_fleet(
        workload,
        pool(SYNCHRONOUS, name="large"),
        pool(small, name="small"),
        failures=outages((1.0, 0, None)),
    )
    assert run.requests.status.tolist() == [Status.FINISHED, Status.FAILED, Status.FINISHED]


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValidationError, match="belong together"):
        Failures(mtbf_s=3)
    with pytest.raises(ValidationError, match="either mtbf_s and mttr_s, or a schedule"):
        Failures()
