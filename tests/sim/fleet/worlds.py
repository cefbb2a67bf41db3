"""Fleets of small engines for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from costmodel.prices import Prices
from serving.config import SchedulerConfig
from sim.fleet.plan import FleetPlan, PoolPlan
from sim.fleet.record import FleetRecord
from sim.record import RunRecord, Status
from sim.workload.types import Workload
from sim.world import run_world
from tests.sim.worlds import LinearPricer

ENGINE = SchedulerConfig(num_pages=400, max_num_seqs=4, max_num_batched_tokens=256, async_scheduling=True)


def run_fleet(
    workload: Workload,
    *pools: PoolPlan,
    fast_forward: bool = True,
    until_s: float = np.inf,
    watch: Callable[[Any], None] | None = None,
    **plan: Any,
) -> RunRecord:
    """A run of pools behind a router; one pool of two small engines by default."""
    pools = pools or (pool(replicas=2),)
    record = run_world(
        workload,
        pools[0].config,
        pools[0].pricer,
        fast_forward=fast_forward,
        until_s=until_s,
        fleet=FleetPlan(pools, **plan),
        watch=watch,
    )
    check_conservation(record, workload)
    return record


def pool(config: SchedulerConfig = ENGINE, pricer: Prices | None = None, **fields: Any) -> PoolPlan:
    """A pool of small engines."""
    return PoolPlan(config, pricer if pricer is not None else LinearPricer(), **fields)


def fleet_of(record: RunRecord) -> FleetRecord:
    """What the fleet left."""
    assert record.fleet is not None
    return record.fleet


def check_conservation(record: RunRecord, workload: Workload) -> None:
    """Every request that was sent ended in one way, and a finished one has every token exactly once."""
    r, whole = record.requests, workload.come_whole()
    counts = np.bincount(r.status, minlength=len(Status))
    assert counts.sum() == len(r) <= len(workload)
    for row in range(len(r)):
        times = record.token_times_s(row)
        assert len(times) == r.output_tokens[row]
        gaps = np.diff(times)
        assert (gaps == 0 if whole[r.request_id[row]] else gaps > 0).all()
        if r.status[row] == Status.FINISHED:
            assert times[-1] == r.last_token_s[row]
            assert times[0] == r.first_token_s[row]
        if r.status[row] in (Status.FAILED, Status.REJECTED):
            assert not len(times)
            assert r.reason[row]
