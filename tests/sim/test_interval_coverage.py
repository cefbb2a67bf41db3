"""Do 95 % intervals hold what they promise? Truths are drawn from the uncertainty model and simulated.

16 predictions (each with its own nominal workload and replications) meet 14 truths each: 224 truths. At a true coverage
of 95 % the share covered has a standard error of 1.5 to 2.5 points (truths share predictions), so 90 to 99 % is what a
right method gives.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest

from costmodel.uncertainty import Spread
from sim.deployment import Built, Deployment, build
from sim.intervals import Draw, measure
from sim.latency import latencies
from sim.replications import deployment_spread, simulate_draw
from sim.workload import TenantSpec, WorkloadSpec, load_workload

PREDICTIONS, TRUTHS = 16, 14
LIMIT_S = 0.010


@lru_cache
def deployment() -> tuple[Built, Spread]:
    built = build(Deployment(model="qwen3-0.6b", gpu="h200", max_num_batched_tokens=512, max_num_seqs=16))
    return built, deployment_spread(built)


@lru_cache
def traffic(rate: float, count: int) -> WorkloadSpec:
    tenant = {
        "dataset": {"name": "random", "input_len": 256, "output_len": 12, "range_ratio": 0.5},
        "arrivals": {"request_rate": rate},
        "num_prompts": count,
    }
    return WorkloadSpec(tenants=(TenantSpec.model_validate(tenant),))


def latencies_at(draw: Draw, rate: float, count: int, seed: int) -> tuple[float, float]:
    """Mean TPOT and P95 TTFT, in seconds."""
    spec = traffic(rate, count)
    record = simulate_draw(draw, *deployment(), spec, load_workload(spec, seed=seed))
    values = latencies(record)
    return float(values.tpot_s.mean()), float(np.percentile(values.ttft_s, 95))


def sustainable_rate(draw: Draw, seed: int) -> float:
    """The largest rate that keeps P95 TTFT within its limit, by bisection of its logarithm."""
    low, high = math.log(150.0), math.log(2400.0)
    for _ in range(6):
        middle = (low + high) / 2
        if latencies_at(draw, round(math.exp(middle), 3), 30, seed)[1] <= LIMIT_S:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def figures(draw: Draw, seed: int) -> dict[str, float]:
    tpot_s, ttft_s = latencies_at(draw, 300.0, 40, seed)
    return {"mean_tpot": tpot_s, "p95_ttft": ttft_s, "max_qps": sustainable_rate(draw, seed)}


@pytest.mark.slow
def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    spread = deployment()[1]
    covered: dict[str, list[bool]] = {"mean_tpot": [], "p95_ttft": [], "max_qps": []}
    for prediction in range(PREDICTIONS):
        predicted = measure(
            lambda draw, seed=prediction: figures(draw, seed),  # type: ignore[misc]
            spread,
            seed=prediction,
            replications=8,
        )
        for i in range(TRUTHS):
            state = 4_000_000 + prediction * TRUTHS + i
            truth = figures(Draw(spread.draw(state, 0), noise_seed=state, sample_seed=state), state)
            for name, hits in covered.items():
                interval = predicted.interval(name)
                assert interval is not None
                hits.append(interval.low <= truth[name] <= interval.high)
    shares = {name: float(np.mean(hits)) for name, hits in covered.items()}
    print({name: f"{share:.1%} of {PREDICTIONS * TRUTHS}" for name, share in shares.items()})
    assert all(0.90 <= share <= 0.99 for share in shares.values()), shares
