"""Intervals from known worlds: exact where the answer is a formula, paired where configurations share their luck."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from costmodel.uncertainty import GroupSpread, Spread
from serving.errors import UsageError
from sim.deployment import Deployment, build
from sim.intervals import Draw, compare, measure, plan_draws, t975
from sim.metrics import summarise
from sim.replications import figures, is_drawn, replicate, run_draws
from sim.workload import TenantSpec, WorkloadSpec, load_workload
from tests.sim.worlds import make_workload

SPREAD = Spread((GroupSpread("decode", "a", 0.1, ""), GroupSpread("host", "b", 0.05, "")), 0.02)


def spec(rate: float = 20.0, count: int = 40, **dataset: object) -> WorkloadSpec:
    tenant = {
        "dataset": {"name": "random", "input_len": 64, "output_len": 16, "range_ratio": 0.5, **dataset},
        "arrivals": {"request_rate": rate},
        "num_prompts": count,
    }
    return WorkloadSpec(tenants=(TenantSpec.model_validate(tenant),))


SMALL = Deployment(model="qwen3-0.6b", gpu="h200", max_num_batched_tokens=512, max_num_seqs=16)


def test_students_t_is_students_t() -> None:
    for freedom in (1, 2, 5, 30, 31, 60, 500):
        assert t975(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-3)


def test_a_power_law_of_the_factors_has_the_analytic_interval() -> None:
    """y = 3·a²·b with log a ~ 0.1 z, log b ~ 0.05 z: log y has standard deviation sqrt(0.2² + 0.05²) exactly."""
    got = measure(
        lambda draw: {"y": 3 * math.exp(0.2 * draw.normals.get("a", 0) + 0.05 * draw.normals.get("b", 0))},
        SPREAD,
        seed=1,
        replications=8,
    ).interval("y")
    assert got is not None
    half = 1.959964 * math.hypot(0.2, 0.05)
    assert (got.value, got.low, got.high) == pytest.approx((3, 3 * math.exp(-half), 3 * math.exp(half)))
    assert (got.calibration, got.noise, got.sampling) == pytest.approx((1, 0, 0))


def test_noise_and_sampling_are_told_apart() -> None:
    """Independent normal parts: variance 4 from requests and 1 from noise, over many replications."""

    def evaluate(draw: Draw) -> dict[str, float]:
        noise = 0.0 if draw.noise_seed is None else np.random.default_rng(draw.noise_seed).normal()
        sample = 0.0 if draw.sample_seed is None else 2 * np.random.default_rng(draw.sample_seed).normal()
        return {"y": -50 + noise + sample}

    replicated = measure(evaluate, SPREAD, seed=5, replications=400)
    got = replicated.interval("y")
    assert got is not None
    assert got.high - got.low == pytest.approx(2 * 1.966 * math.sqrt(5), rel=0.1)
    assert got.calibration == 0
    assert got.dominant == "sampling"
    kept = measure(evaluate, SPREAD, seed=5, replications=400, resample=False).interval("y")
    assert kept is not None
    assert kept.high - kept.low == pytest.approx(2 * 1.966, rel=0.1)


def test_an_interval_holds_its_value_and_shares_stay_shares() -> None:
    def evaluate(draw: Draw) -> dict[str, float]:
        if draw.noise_seed is None:
            return {"good": 0.99, "gone": math.nan}
        return {"good": 0.99 - 0.04 * np.random.default_rng(draw.noise_seed).random(), "gone": 1.0}

    replicated = measure(evaluate, SPREAD, seed=0, replications=6, shares=("good",))
    got = replicated.interval("good")
    assert got is not None
    assert 0 <= got.low <= got.value <= got.high <= 1
    assert replicated.interval("gone") is None
    assert replicated.names() == ("good",)


def test_one_replication_is_the_nominal_run_without_intervals() -> None:
    once = replicate(spec(), SMALL, seed=3, replications=1)
    assert once.names() == ()
    built = build(SMALL)
    from sim.deployment import simulate

    assert once.nominal == figures(summarise(simulate(load_workload(spec(), seed=3), built)))
    with pytest.raises(UsageError, match="--replications"):
        replicate(spec(), SMALL, replications=0)


def test_the_result_depends_on_the_seed_alone() -> None:
    one, two = (replicate(spec(), SMALL, seed=3, replications=3, jobs=jobs) for jobs in (1, 2))
    assert one == two
    assert one != replicate(spec(), SMALL, seed=4, replications=3)


def test_workers_return_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.replications._WORTH_FORKING_S", 0.0)
    draws = [Draw(noise_seed=i) for i in range(20)]
    told: list[int] = []
    out = run_draws(
        lambda draw: {"y": float(draw.noise_seed or 0)},
        draws,
        jobs=2,
        progress=lambda done, _: told.append(done),
    )
    assert [figures_of["y"] for figures_of in out] == list(range(20))
    assert told == list(range(1, 21))


def test_a_trace_keeps_its_requests_and_a_generated_workload_is_drawn_anew() -> None:
    assert is_drawn(spec())
    given = make_workload([0.0, 0.1], [10, 10], [5, 5])
    assert not is_drawn(given)
    plan = plan_draws(SPREAD, seed=0, replications=4, resample=False)
    assert all(draw.sample_seed is None for draw in plan)
    assert replicate(given, SMALL, replications=3).interval("mean_ttft") is not None


def test_the_same_deployment_twice_makes_no_difference() -> None:
    a, b = (replicate(spec(), SMALL, seed=1, replications=4) for _ in range(2))
    for name, difference in compare(a, b).items():
        assert (difference.low, difference.value, difference.high) == pytest.approx((0, 0, 0), abs=1e-12), (
            name
        )
        assert difference.words == "no difference"


def test_pairing_sees_what_separate_intervals_cannot() -> None:
    """More tokens a step cut TTFT a little; calibration errors common to both would hide it."""
    a, b = (
        replicate(spec(400.0), SMALL.model_copy(update={"max_num_seqs": seqs}), seed=1, replications=6)
        for seqs in (16, 2)
    )
    difference = compare(a, b)["mean_e2el"]
    assert difference.differs
    assert difference.words == "higher"
    first, second = a.interval("mean_tpot"), b.interval("mean_tpot")
    assert first is not None
    assert second is not None
    paired = compare(a, b)["mean_tpot"]
    assert paired.high - paired.low < math.hypot(first.high - first.low, second.high - second.low)
