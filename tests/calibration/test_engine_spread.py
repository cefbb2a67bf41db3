"""How wide the factor on all device time is, and where the number comes from."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from calibration.engine_spread import left_out, levels, main, pooled, retimed, spread
from costmodel.uncertainty import ENGINE_LOG_STD

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def test_levels_are_the_tables_offsets_from_their_mean() -> None:
    rng = np.random.default_rng(0)
    base = {(n, 4096, m): float(rng.uniform(1, 100)) for n in (1024, 2048, 8192) for m in range(1, 40)}
    slower = {p: t * 1.1 for p, t in base.items()} | {(7, 7, 7): 1.0}
    one_odd = {p: t * (5.0 if p == (1024, 4096, 3) else 0.9) for p, t in base.items()}
    mean = (0.0 + math.log(1.1) + math.log(0.9)) / 3
    wanted = [-mean, math.log(1.1) - mean, math.log(0.9) - mean]
    assert levels([base, slower, one_odd]) == pytest.approx(wanted, abs=1e-12)


def test_a_pooled_spread_is_that_of_groups_drawn_alike() -> None:
    rng = np.random.default_rng(1)
    groups = [rng.normal(shift, 0.04, 3).tolist() for shift in np.linspace(-1, 1, 4000)]
    assert pooled(groups) == pytest.approx(0.04, rel=0.03)
    assert spread([0.01, 0.03]) == pytest.approx(0.02 / math.sqrt(2))


def test_a_run_is_judged_by_the_others_alone() -> None:
    found = {run: (width, held) for run, _, width, held in left_out({"a": 0.03, "b": -0.04, "c": 0.2})}
    assert found["c"] == (pytest.approx(math.sqrt((0.03**2 + 0.04**2) / 2)), False)
    assert found["a"] == (pytest.approx(math.sqrt((0.04**2 + 0.2**2) / 2)), True)


def test_missing_tables_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.shared
@pytest.mark.skipif(
    not (DATA / "kernels").is_dir(), reason="the kernel tables (../shared/data/kernels) are absent"
)
def test_the_spread_in_use_is_that_of_tables_which_saw_no_engine() -> None:
    assert (
        pytest.approx(pooled([found for *_, found in retimed(DATA / "kernels")]), abs=5e-4) == ENGINE_LOG_STD
    )
