"""Noise belongs to the number of a step: the same however the run is computed, and of mean 1."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from sim.noise import StepNoise
from sim.workload.types import Workload
from sim.world import run_world
from tests.sim.test_fast_forward import POLICIES, assert_same, configs, workloads
from tests.sim.worlds import LinearPricer, make_workload


@settings(max_examples=150, deadline=None)
@given(
    workloads(),
    configs(),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([0.0, 0.004, 0.05]),
    st.integers(1, 2),
    st.sampled_from([0.0, 0.9]),
)
def test_fast_forward_changes_nothing_under_noise(
    workload: Workload,
    config: SchedulerConfig,
    policy: str,
    host_s: float,
    num_replicas: int,
    correlation: float,
) -> None:
    runs = [
        run_world(
            workload,
            config,
            LinearPricer(host_s=host_s),
            make_policy=POLICIES[policy],
            num_replicas=num_replicas,
            fast_forward=fast_forward,
            noise=StepNoise(0.3, 7, correlation),
        )
        for fast_forward in (True, False)
    ]
    assert_same(*runs)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_step_gets_the_factor_of_its_number(asynchronous: bool) -> None:
    workload = make_workload([0.0, 0.5, 0.9], [40, 300, 20], [200, 90, 150])
    config = SchedulerConfig(num_pages=1000, async_scheduling=asynchronous)
    noise = StepNoise(0.2, 3)
    clean, noisy = (run_world(workload, config, LinearPricer(), noise=n) for n in (None, noise))
    steps = min(len(clean.steps), len(noisy.steps), 20)  # later on arrivals meet other steps
    factors = noise.stream(0).run(0, steps)
    np.testing.assert_allclose(noisy.steps.gpu_s[:steps], clean.steps.gpu_s[:steps] * factors, rtol=1e-12)


def test_factors_do_not_depend_on_the_order_of_asking_and_differ_between_replicas_and_seeds() -> None:
    noise = StepNoise(0.1, 1, 0.5)
    forward, backward = noise.stream(0), noise.stream(0)
    assert [forward.at(k) for k in (0, 1, 5000)] == [backward.at(k) for k in (5000, 1, 0)][::-1]
    assert forward.run(4090, 20).tolist() == [backward.at(4090 + i) for i in range(20)]
    others = (noise.stream(1), StepNoise(0.1, 2, 0.5).stream(0))
    assert all(other.at(0) != forward.at(0) for other in others)


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_factors_have_mean_one_the_asked_spread_and_correlation(correlation: float) -> None:
    log = np.log(StepNoise(0.2, 5, correlation).stream(0).run(0, 200_000))
    # 200,000 draws, or 22,000 independent ones at correlation 0.8: standard errors under 0.0014 and 0.005.
    assert np.exp(log).mean() == pytest.approx(1.0, abs=0.006)
    assert log.std() == pytest.approx(0.2, abs=0.003)
    assert np.corrcoef(log[1:], log[:-1])[0, 1] == pytest.approx(correlation, abs=0.01)
