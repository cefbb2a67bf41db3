"""Step jitter and stalls in a run: exact under fast-forward, of the size asked for, each switched off by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serving.errors import UsageError
from sim.deployment import Deployment, build, simulate
from sim.jitter import step_noise
from sim.metrics import summarise
from sim.noise import StepNoise
from sim.record import RunRecord
from sim.replications import deployment_spread
from tests.sim.worlds import make_workload

LOAD = make_workload([0.05 * i for i in range(40)], [200] * 40, [300] * 40)


def run(fast_forward: bool = True, seed: int = 0, **options: Any) -> RunRecord:
    return simulate(
        LOAD, Deployment(model="llama-3.1-8b", gpu="h100", **options), fast_forward=fast_forward, seed=seed
    )


def test_fast_forward_changes_nothing_under_jitter_and_stalls() -> None:
    options = {"step_jitter": 0.05, "stall_rate": 0.01, "stall_ms": 30.0}
    leapt, stepped = run(**options), run(fast_forward=False, **options)
    np.testing.assert_array_equal(leapt.steps.end_s, stepped.steps.end_s)
    np.testing.assert_array_equal(leapt.steps.gpu_s, stepped.steps.gpu_s)


def test_stalls_are_as_many_and_as_long_as_asked_for() -> None:
    stream = StepNoise(0.0, 3, stall_rate=0.02, stall_s=0.05).stream(0)
    stalls = stream.stall_run(0, 200_000)
    share = (stalls > 0).mean()
    assert abs(share - 0.02) < 4 * np.sqrt(0.02 * 0.98 / 200_000)
    assert stalls[stalls > 0].mean() == pytest.approx(0.05, rel=4 / np.sqrt((stalls > 0).sum()))
    assert (stream.run(0, 1000) == 1.0).all()


def test_switching_stalls_off_leaves_the_jitter() -> None:
    with_stalls = StepNoise(0.05, 3, stall_rate=0.02, stall_s=0.05).stream(1)
    without = StepNoise(0.05, 3).stream(1)
    np.testing.assert_array_equal(with_stalls.run(0, 10_000), without.run(0, 10_000))


def test_rare_stalls_move_the_tail_and_not_the_median() -> None:
    plain, stalled = summarise(run()), summarise(run(stall_rate=0.02, stall_ms=100.0))
    assert stalled.itl.at(99) > 3 * plain.itl.at(99)
    assert stalled.itl.median_s == pytest.approx(plain.itl.median_s, rel=0.02)


def test_the_profiles_own_jitter() -> None:
    jittered, plain = run(step_jitter="profile"), run()
    assert (jittered.steps.gpu_s[:100] != plain.steps.gpu_s[:100]).any()
    again, other = run(step_jitter="profile"), run(step_jitter="profile", seed=1)
    np.testing.assert_array_equal(again.steps.end_s, jittered.steps.end_s)
    assert other.steps.end_s[-1] != jittered.steps.end_s[-1]


def test_steps_with_drafts_stall_too() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "acceptance": 0.5}
    plain, stalled = (
        run(speculative_config=drafts, **more) for more in ({}, {"stall_rate": 0.05, "stall_ms": 40.0})
    )
    late_s = stalled.steps.gpu_s.sum() - plain.steps.gpu_s.sum()
    assert late_s > 0.5 * 0.05 * 0.040 * len(stalled.steps)


def test_replications_have_the_spread_that_was_asked_for() -> None:
    built = build(Deployment(model="llama-3.1-8b", gpu="h100", step_jitter=0.3))
    noise = step_noise(built, StepNoise(0.02, 5), 0)
    assert noise == StepNoise(0.3, 5)


def test_the_profiles_own_jitter_is_that_of_the_pools() -> None:
    pools = [{"quantization": "fp8", "tensor_parallel_size": 2}, {"gpu": "l40s", "weight": 1.0}]
    pools[0]["weight"] = 1.0
    built = build(Deployment(model="llama-3.1-8b", gpu="h100", step_jitter="profile", pools=pools))
    noise = step_noise(built, None, 0)
    assert noise is not None
    assert noise.log_std == deployment_spread(built).step_log_std


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stall_rate": 0.1}, "go together"),
        ({"stall_ms": 10.0}, "go together"),
        ({"step_jitter": 2.0}, "0 to 1"),
    ],
)
def test_errors(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(**options)
