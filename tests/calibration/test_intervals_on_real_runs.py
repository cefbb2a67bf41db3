"""Two real runs against the twin's intervals. Figures of one run move together, so two runs cannot tell 95 % from 80."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from calibration.compare import figures_of
from calibration.runs_vllm import read_runs
from calibration.validate import memory_of, replay, twin_samples
from costmodel.uncertainty import PerturbedPricer
from sim.deployment import simulate
from sim.intervals import Draw, measure
from sim.noise import StepNoise
from sim.replications import deployment_spread

YARDSTICK = Path(__file__).resolve().parents[3] / "shared" / "data" / "yardstick"
RUNS = ("rtx4090", "rtxpro6000")


def covered(run: str) -> dict[str, bool]:
    """Whether each of the run's 15 figures lies in the twin's interval; its requests are given, prices are not."""
    case = read_runs(YARDSTICK, run, None, None)
    _, built = replay(case, memory_of(case).num_blocks)
    spread = deployment_spread(built)

    def samples(draw: Draw) -> Mapping[str, float]:
        record = simulate(
            case.workload,
            built,
            pricer=PerturbedPricer(built.pricer, spread.factors(draw.normals)),
            noise=None if draw.noise_seed is None else StepNoise(spread.step_log_std, draw.noise_seed),
        )
        twin = twin_samples(record, at_engine=case.at_engine)
        pairs = {metric: (real, twin[metric]) for metric, real in case.observed.samples.items()}
        figures = figures_of(pairs)
        real.update({f"{f.statistic} {f.metric}": f.real_ms for f in figures})
        return {f"{f.statistic} {f.metric}": f.twin_ms for f in figures}

    real: dict[str, float] = {}
    predicted = measure(samples, spread, seed=0, replications=6, resample=False)
    found = {}
    for name, value in real.items():
        interval = predicted.interval(name)
        assert interval is not None
        found[name] = interval.low <= value <= interval.high
    return found


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.skipif(not YARDSTICK.is_dir(), reason="the measured runs (../shared/data/yardstick) are absent")
def test_most_figures_of_real_runs_lie_within_the_twins_intervals() -> None:
    inside = {run: covered(run) for run in RUNS}
    print({run: f"{sum(found.values())} of {len(found)}" for run, found in inside.items()})
    outside = [(run, name) for run, found in inside.items() for name, ok in found.items() if not ok]
    assert sum(len(found) for found in inside.values()) == 30
    assert len(outside) <= 6, outside
