"""The autoscaler against Kubernetes' formula, and where it must settle."""

from __future__ import annotations

from math import ceil, pi, sin

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serving.config import SchedulerConfig
from sim.fleet.record import ReplicaState
from sim.fleet.scaler import Scaler, desired_replicas
from sim.fleet.spec import Autoscaler, ColdStart
from sim.workload.types import Workload
from tests.sim.fleet.worlds import fleet_of, pool, run_fleet
from tests.sim.worlds import LinearPricer, make_workload


@pytest.mark.parametrize(
    ("current", "metric", "target", "desired"),
    [
        # The examples of Kubernetes' documentation: 200m against 100m doubles, 50m halves; a ratio near 1 does nothing.
        (3, 200, 100, 6),
        (4, 50, 100, 2),
        (5, 109, 100, 5),
        (5, 91, 100, 5),
        (5, 111, 100, 6),
        (1, 0, 100, 0),
    ],
)
def test_the_formula(current: int, metric: float, target: float, desired: int) -> None:
    assert desired_replicas(current, metric, target) == desired


@given(
    st.integers(1, 50),
    st.integers(0, 1000),
    st.integers(1, 100),
    st.sampled_from([0.0, 0.1, 0.25]),
)
def test_the_formula_everywhere(current: int, total: int, target: int, tolerance: float) -> None:
    # The metric is a mean over the replicas, so that the number wanted is exactly ceil(total / target).
    found = desired_replicas(current, total / current, target, tolerance)
    if abs(total / current - target) <= tolerance * target:
        assert found == current
    else:
        assert found == -(-total // target)


def test_the_largest_wish_wins_and_the_range_holds() -> None:
    spec = Autoscaler(outstanding=10, waiting=1, min_replicas=2, max_replicas=5)
    scaler = Scaler(spec)
    assert scaler.decide(0.0, 2, {"outstanding": 5, "waiting": 2}) == 4
    assert scaler.decide(15.0, 4, {"outstanding": 50, "waiting": 0}) == 5
    # Down only to the most that was wanted within the cool-down of 300 s.
    assert scaler.decide(30.0, 5, {"outstanding": 1, "waiting": 0}) == 5
    assert scaler.decide(314.9, 5, {"outstanding": 1, "waiting": 0}) == 5
    assert scaler.decide(331.0, 5, {"outstanding": 1, "waiting": 0}) == 2


def test_up_waits_for_its_cool_down_and_steps_are_limited() -> None:
    spec = Autoscaler(outstanding=1, max_replicas=9, scale_up_cooldown_s=30, max_step_up=2, max_step_down=1)
    spec = spec.model_copy(update={"scale_down_cooldown_s": 0.0})
    scaler = Scaler(spec)
    assert scaler.decide(0.0, 1, {"outstanding": 1.0}) == 1
    assert scaler.decide(15.0, 1, {"outstanding": 8.0}) == 1
    assert scaler.decide(31.0, 1, {"outstanding": 8.0}) == 3
    assert scaler.decide(62.0, 3, {"outstanding": 0.0}) == 2


# ---- in a world --------------------------------------------------------------------------------------------

TWENTY_A_SECOND = LinearPricer(0.05, 0.0, 0.0)
"""Steps of 0.05 s whatever they hold: an answer of 20 tokens lasts a second."""
SEATS = SchedulerConfig(num_pages=4000, max_num_seqs=64, max_num_batched_tokens=2048)


def steady(per_s: float, until_s: float) -> Workload:
    count = int(per_s * until_s)
    return make_workload((np.arange(count) / per_s).tolist(), [20] * count, [20] * count)


@pytest.mark.parametrize("cold_start_s", [0.0, 20.0])
def test_a_constant_load_settles_at_load_over_target(cold_start_s: float) -> None:
    # A request lasts a second, so that the load is 20 requests by Little's law.
    target = 6.0
    run = run_fleet(
        steady(20.0, 150.0),
        pool(
            SEATS,
            TWENTY_A_SECOND,
            cold_start_s=cold_start_s,
            autoscaler=Autoscaler(outstanding=target, max_replicas=12, interval_s=5),
        ),
        router="least_outstanding",
    )
    times_s, ready = fleet_of(run).counts(ReplicaState.READY)
    settled = ready[np.searchsorted(times_s, 100.0) - 1 :]
    assert set(settled.tolist()) == {ceil(20 / target)}
    assert np.array_equal(np.unique(run.requests.replica), np.arange(ceil(20 / target)))


def test_a_step_of_load_is_followed_after_scrape_and_cold_start_and_nothing_is_lost() -> None:
    low, high = steady(4.0, 100.0), steady(40.0, 100.0)
    sent = [*low.sent_s, *(100.0 + high.sent_s), *(200.0 + low.sent_s)]
    workload = make_workload(sent, [20] * len(sent), [20] * len(sent))
    scaler = Autoscaler(outstanding=8, max_replicas=10, interval_s=5, scale_down_cooldown_s=20)
    run = run_fleet(workload, pool(SEATS, TWENTY_A_SECOND, cold_start_s=30, autoscaler=scaler))
    assert (run.requests.status == 1).all()
    fleet = fleet_of(run)
    starting = fleet.event_s[fleet.event_state == ReplicaState.STARTING]
    assert 100 < starting.min() <= 105
    times_s, ready = fleet.counts(ReplicaState.READY)

    def at(time_s: float) -> int:
        return int(ready[np.searchsorted(times_s, time_s, side="right") - 1])

    assert at(99) == 1
    assert at(starting.min() + 29.9) == 1
    assert at(starting.min() + 30.0) > 1
    assert at(199) == ceil(40 / 8)
    assert at(290) == 1
    # Down only by draining, and paid for until drained.
    assert (fleet.event_state == ReplicaState.DRAINING).any()
    seconds = fleet.seconds(run.end_s)
    assert fleet.paid_s(run.end_s).sum() == pytest.approx(seconds[:, 1:].sum())
    assert seconds.sum(axis=1) == pytest.approx(np.full(len(seconds), run.end_s))


def test_a_day_costs_less_than_its_peak_all_day() -> None:
    times, at = [], 0.0
    while at < 400:
        at += 1 / (12 - 11 * sin(pi / 2 + 2 * pi * at / 400))
        times.append(at)
    workload = make_workload(times, [20] * len(times), [20] * len(times))
    scaler = Autoscaler(outstanding=4, max_replicas=8, interval_s=5, scale_down_cooldown_s=30)
    run = run_fleet(workload, pool(SEATS, TWENTY_A_SECOND, cold_start_s=5, autoscaler=scaler))
    fleet = fleet_of(run)
    _, ready = fleet.counts(ReplicaState.READY)
    most = int(ready.max())
    assert most >= 5
    # The mean load of 12 requests is worth 3 replicas; following it costs more than that and far less than the peak.
    assert 3 * 400 < fleet.paid_s(run.end_s).sum() < 0.75 * most * 400


@pytest.mark.parametrize("target", [{"waiting": 2.0}, {"kv_cache_usage": 0.4}, {"p95_ttft_ms": 200.0}])
def test_other_targets_scale_an_overload_up_and_an_idle_fleet_down(target: dict[str, float]) -> None:
    few = SchedulerConfig(num_pages=24, max_num_seqs=8, max_num_batched_tokens=2048)
    busy, idle = steady(16.0, 60.0), steady(0.5, 150.0)
    sent = [*busy.sent_s, *(60.0 + idle.sent_s)]
    window = {"window_s": 10.0} if "p95_ttft_ms" in target else {}
    run = run_fleet(
        make_workload(sent, [20] * len(sent), [20] * len(sent)),
        pool(
            few,
            TWENTY_A_SECOND,
            autoscaler=Autoscaler(
                max_replicas=6,
                interval_s=5,
                scale_down_cooldown_s=20,
                **target,  # type: ignore[arg-type]
                **window,  # type: ignore[arg-type]
            ),
        ),
        router="least_outstanding",
    )
    times_s, ready = fleet_of(run).counts(ReplicaState.READY)
    assert ready[: np.searchsorted(times_s, 60)].max() >= 2  # two replicas have 16 seats for a load of 16
    assert ready[-1] == 1
    late = run.requests.first_token_s - run.requests.sent_s
    assert np.percentile(late[(run.requests.sent_s > 45) & (run.requests.sent_s < 60)], 95) < 0.5


def test_cold_start_is_engine_weights_and_graphs() -> None:
    spec = ColdStart(engine_s=10, load_gb_per_s=2, graph_capture_s=0.5)
    assert spec.duration_s(16e9, 51) == 10 + 8 + 25.5
    assert ColdStart(seconds=7).duration_s(16e9, 51) == 7
    # What was measured stands in for the assumption, and what is given for both.
    assert ColdStart(engine_s=10, graph_capture_s=0).duration_s(16e9, 0, 4e9) == 10 + 4
    assert ColdStart(engine_s=10, graph_capture_s=0).duration_s(16e9, 0) == 10 + 8
    assert ColdStart(engine_s=10, load_gb_per_s=1, graph_capture_s=0).duration_s(16e9, 0, 4e9) == 10 + 16


def test_an_autoscaler_needs_a_target_and_a_range() -> None:
    with pytest.raises(ValidationError, match="needs a target"):
        Autoscaler(max_replicas=3)
    with pytest.raises(ValidationError, match="below min_replicas"):
        Autoscaler(outstanding=1, min_replicas=4, max_replicas=3)
    with pytest.raises(ValidationError, match="only with p95_ttft_ms"):
        Autoscaler(outstanding=1, max_replicas=3, window_s=10)
