"""Fleets of every kind: no request is lost, and fast-forward changes nothing, whatever happens to replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from sim.admission import Admission, Shedding, TokenBucket
from sim.fleet.plan import PoolPlan
from sim.fleet.spec import Autoscaler, Failures, KvTransfer, Outage
from sim.record import RunRecord, Status
from sim.router import router_names
from sim.workload.types import Workload
from tests.sim.fleet.worlds import fleet_of, pool, run_fleet
from tests.sim.test_fast_forward import assert_same, configs, workloads

TIMES = st.sampled_from([0.0, 0.02, 0.11, 0.35, 1.0, 2.5])


@st.composite
def failures(draw: st.DrawFn) -> Failures | None:
    how = draw(st.sampled_from(["none", "schedule", "drawn"]))
    if how == "none":
        return None
    common: dict[str, Any] = {
        "max_retries": draw(st.integers(0, 3)),
        "retry_backoff_s": draw(st.sampled_from([0.0, 0.05])),
    }
    if how == "drawn":
        return Failures(mtbf_s=draw(st.sampled_from([0.3, 2.0])), mttr_s=0.1, **common)
    outages = draw(
        st.lists(
            st.builds(
                Outage,
                time_s=TIMES,
                replica=st.integers(0, 2),
                down_s=st.sampled_from([0.05, 0.5, None]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    return Failures(schedule=tuple(outages), **common)


@st.composite
def autoscalers(draw: st.DrawFn) -> Autoscaler | None:
    if draw(st.booleans()):
        return None
    target = draw(
        st.sampled_from(
            [{"outstanding": 2.0}, {"waiting": 1.0}, {"kv_cache_usage": 0.3}, {"p95_ttft_ms": 50.0}]
        )
    )
    return Autoscaler(
        min_replicas=1,
        max_replicas=4,
        interval_s=draw(st.sampled_from([0.05, 0.2])),
        scale_down_cooldown_s=draw(st.sampled_from([0.0, 0.3])),
        **target,  # type: ignore[arg-type]
    )


def one_pool(config: SchedulerConfig, scaler: Autoscaler | None, cold_start_s: float) -> tuple[PoolPlan, ...]:
    return (pool(config, replicas=2, autoscaler=scaler, cold_start_s=cold_start_s),)


def two_pools(
    config: SchedulerConfig, scaler: Autoscaler | None, cold_start_s: float
) -> tuple[PoolPlan, ...]:
    small = replace(config, num_pages=max(8, config.num_pages // 2), max_model_len=60)
    return (
        pool(config, replicas=1, autoscaler=scaler, cold_start_s=cold_start_s, name="large", weight=2.0),
        pool(small, replicas=2, cold_start_s=cold_start_s, name="small"),
    )


def apart(config: SchedulerConfig, scaler: Autoscaler | None, cold_start_s: float) -> tuple[PoolPlan, ...]:
    return (
        pool(config, replicas=2, role="prefill", cold_start_s=cold_start_s, kv_bytes_per_token=1e6, name="p"),
        pool(config, replicas=1, role="decode", cold_start_s=cold_start_s, name="d"),
    )


def run_both_ways(workload: Workload, *pools: PoolPlan, **plan: Any) -> RunRecord:
    fast, slow = (run_fleet(workload, *pools, fast_forward=on, **plan) for on in (True, False))
    assert_same(fast, slow)
    for name in ("event_s", "event_replica", "event_state", "retries", "prefill_replica", "kv_transfer_s"):
        np.testing.assert_array_equal(getattr(fast.fleet, name), getattr(slow.fleet, name), err_msg=name)
    assert fleet_of(fast).lost_tokens == fleet_of(slow).lost_tokens
    return fast


@st.composite
def fleets(draw: st.DrawFn) -> tuple[tuple[PoolPlan, ...], dict[str, Any]]:
    """Pools of any shape, and what routes, scales and breaks them."""
    shape = draw(st.sampled_from([one_pool, two_pools, apart]))
    pools = shape(draw(configs()), draw(autoscalers()), draw(st.sampled_from([0.0, 0.07, 0.4])))
    plan = {
        "router": draw(st.sampled_from(sorted(router_names()))),
        "failures": draw(failures()),
        "seed": draw(st.integers(0, 3)),
        "kv_transfer": KvTransfer(bandwidth_gb_per_s=1.0),
    }
    return pools, plan


def check_ended(record: RunRecord, workload: Workload, broken: Failures | None) -> None:
    """Every request has an end, and none fails where nothing does."""
    assert len(record.requests) == len(workload)
    assert not (record.requests.status == Status.UNFINISHED).any()
    if broken is None:
        assert not (record.requests.status == Status.FAILED).any()
        assert not fleet_of(record).retries.any()


@settings(max_examples=120, deadline=None)
@given(workloads(), fleets())
def test_no_request_is_lost_and_fast_forward_changes_nothing(
    workload: Workload, fleet: tuple[tuple[PoolPlan, ...], dict[str, Any]]
) -> None:
    pools, plan = fleet
    check_ended(run_both_ways(workload, *pools, **plan), workload, plan["failures"])


@settings(max_examples=60, deadline=None)
@given(
    workloads(),
    configs(),
    st.sampled_from(
        [
            Admission(token_bucket=TokenBucket(rate=2.0, burst=2)),
            Admission(token_bucket=TokenBucket(rate=100.0, burst=150, by="tokens")),
            Admission(max_waiting=2),
            Admission(deadline_ms=60, deadline_window_s=0.5),
            Admission(shed=Shedding(ttft_ms=40, window_s=0.1)),
        ]
    ),
)
def test_the_door_refuses_the_same_with_and_without_fast_forward(
    workload: Workload, config: SchedulerConfig, admission: Admission
) -> None:
    record = run_both_ways(workload, pool(config, replicas=2), admission=admission)
    assert not (record.requests.status == Status.UNFINISHED).any()


@pytest.mark.parametrize("router", router_names())
def test_a_fleet_without_events_is_the_plain_run(router: str) -> None:
    from sim.world import run_world
    from tests.sim.fleet.worlds import ENGINE
    from tests.sim.worlds import LinearPricer, make_workload

    rng = np.random.default_rng(0)
    workload = make_workload(
        np.cumsum(rng.exponential(0.05, 80)).tolist(),
        rng.integers(20, 200, 80).tolist(),
        rng.integers(1, 60, 80).tolist(),
        segments=[[(20, int(g))] for g in rng.integers(1, 6, 80)],
    )
    plain = run_world(workload, ENGINE, LinearPricer(), num_replicas=3, router=router)
    assert_same(plain, run_fleet(workload, pool(replicas=3), router=router))
