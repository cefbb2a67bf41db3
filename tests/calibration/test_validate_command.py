"""`tokentwin validate`: exit codes and files, on a run that the twin itself made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calibration.observed import plain_workload
from calibration.validate import validate
from experiments.results import save_run
from sim.deployment import Deployment, build, simulate
from sim.metrics import summarise
from sim.workload import TenantSpec, WorkloadSpec, load_workload
from tokentwin.cli import main

ENGINE = Deployment(model="llama-3.1-8b", gpu="h200", max_num_seqs=8)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    record = simulate(plain_workload("w", [0.0, 0.1, 0.2], [50, 60, 70], [5, 6, 7]), build(ENGINE))
    save_run(record, summarise(record), tmp_path / "run")
    return tmp_path / "run"


def test_within_the_tolerance_it_exits_0_and_writes_both_files(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["validate", "--against", str(saved), "--tolerance", "1", "-o", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["validation.html", "validation.json"]
    assert "within the tolerance" in capsys.readouterr().out


@pytest.mark.parametrize("recorded_pages", [False, True])
def test_a_run_of_its_own_has_the_pages_that_are_predicted(saved: Path, recorded_pages: bool) -> None:
    """Both counts are vLLM's `num_gpu_blocks`, which has the null block that no request may have."""
    found = validate(None, saved, recorded_pages=recorded_pages).pages
    assert found is not None
    usable = build(ENGINE).limits.num_pages
    assert (found.predicted, found.recorded, found.used) == (usable + 1,) * 3


def test_over_the_tolerance_it_exits_1(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--against", str(saved), "--profile", "l40s", "--tolerance", "1"]) == 1
    assert "over the tolerance" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--against is missing"),
        (["--against", "nowhere"], "no run to compare with"),
        (["--against", "nowhere", "--tolerance", "0"], "above 0"),
        (["--against", "nowhere", "--max-num-seqs", "4"], "--max-num-seqs has no effect"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("asked", [{"best_of": 3}, {"beam_width": 2}], ids=str)
def test_searches_and_several_answers_are_replayed_as_such(
    asked: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The twin on its own run: no error; without the workload, whose widths no table says, one line."""
    folder = tmp_path / "run"
    tenant = {"dataset": {"name": "random", "input_len": 60, "output_len": 6}, "num_prompts": 8, **asked}
    spec = WorkloadSpec(tenants=(TenantSpec.model_validate(tenant),))
    record = simulate(load_workload(spec, seed=1), build(ENGINE))
    save_run(record, summarise(record), folder)
    assert main(["validate", "--against", str(folder), "--tolerance", "0.001"]) == 0
    said = capsys.readouterr().out
    assert "ttft p95" in said
    assert "tpot" not in said
    assert "no TPOT to compare" in said
    run = json.loads((folder / "run.json").read_text())
    del run["workload"]
    (folder / "run.json").write_text(json.dumps(run))
    assert main(["validate", "--against", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "cannot be replayed without their workload" in error
    assert error.count("\n") == 1
