"""How busy GPUs are where replicas differ in how many they have."""

from __future__ import annotations

import pytest

from serving.config import SchedulerConfig
from sim.metrics import summarise
from tests.sim.fleet.worlds import pool, run_fleet
from tests.sim.worlds import LinearPricer, make_workload

ONE_AFTER_THE_OTHER = SchedulerConfig(num_pages=400, max_num_seqs=4, max_num_batched_tokens=256)


def test_a_replica_counts_as_often_as_it_has_gpus() -> None:
    slow = pool(ONE_AFTER_THE_OTHER, LinearPricer(0.1, 0.0, 0.0), name="slow", gpus_per_replica=1)
    fast = pool(ONE_AFTER_THE_OTHER, LinearPricer(0.05, 0.0, 0.0), name="fast", gpus_per_replica=2)
    run = run_fleet(make_workload([0.0, 0.0], [10, 10], [20, 20]), slow, fast)
    assert sorted(run.requests.replica.tolist()) == [0, 1]
    # Both answer one request of 20 tokens: one GPU for all of 2 s, two for the first of them.
    assert summarise(run).gpu_busy_share == pytest.approx((1 * 2.0 + 2 * 1.0) / (3 * 2.0))
