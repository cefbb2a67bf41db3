"""Engine and twin side by side: the same requests, figures with intervals, and a report of all of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from calibration.device_calibrate import Bench, Plan, prepare  # noqa: E402
from calibration.live import Live, LiveFigure, LiveReport, validate_live  # noqa: E402
from calibration.live_engine import CpuTimeEngine, IdleRunner, arrivals_of  # noqa: E402
from calibration.microbench_run import Store  # noqa: E402
from experiments.live_report import TARGETS, live_json, live_lines, save_live  # noqa: E402
from realengine.build import EngineOptions  # noqa: E402
from serving.config import SchedulerConfig  # noqa: E402
from serving.errors import UsageError  # noqa: E402
from sim.workload import WorkloadSpec, load_workload  # noqa: E402
from sim.workload.flags import spec_from_flags  # noqa: E402
from tests.calibration.test_microbench import SOURCE  # noqa: E402
from tokentwin.cli import main  # noqa: E402

PLAN = Plan(
    EngineOptions("small", dtype="bfloat16", device="cpu"),
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=64,
)


def spec(rate: float, **more: Any) -> WorkloadSpec:
    flags = {
        "dataset_name": "random",
        "random_input_len": 12,
        "random_output_len": 6,
        "random_range_ratio": "0.5",
        "random_prefix_len": 16,
        "num_prompts": 8,
        "request_rate": rate,
    }
    return spec_from_flags(flags | more)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return prepare(PLAN, SOURCE)


@pytest.fixture(scope="module")
def report(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> LiveReport:
    live = Live(bench, Store(bench.header()), tmp_path_factory.mktemp("live"))
    return validate_live(live, spec, (0.4, 0.8), repeats=1, replications=4)


def test_every_load_has_every_figure_with_an_interval(report: LiveReport) -> None:
    assert [point.load for point in report.points] == [0.4, 0.8]
    for point in report.points:
        assert len(point.figures) == 16
        assert all(f.real_ms > 0 and f.twin_ms > 0 for f in point.figures)
        assert all(f.low_ms <= f.twin_ms <= f.high_ms for f in point.figures)


def test_the_twin_is_in_the_neighbourhood(report: LiveReport) -> None:
    """No claim on accuracy: a loaded machine only promises the order of magnitude."""
    for point in report.points:
        tpot = next(f for f in point.figures if (f.metric, f.statistic) == ("tpot", "median"))
        assert 0.2 < tpot.twin_ms / tpot.real_ms < 5


def test_every_real_step_is_priced(report: LiveReport) -> None:
    for point in report.points:
        assert len(point.steps.real_s) == len(point.steps.twin_s) == len(point.steps.kind) > 0
        assert set(point.steps.kind) <= {"decode", "prefill", "mixed"}


def test_shared_prefixes_are_found_by_the_engine(report: LiveReport) -> None:
    assert all(point.cached_share > 0.2 for point in report.points)


def test_the_parts_of_an_error_add_up_to_it(report: LiveReport) -> None:
    for point in report.points:
        for split in point.splits:
            total = sum(split.parts.values()) + split.unexplained
            assert total == pytest.approx(split.difference, abs=1e-9)
            assert split.parts["workload"] == 0.0
            assert split.parts["schedule"] == 0.0


def test_the_report_is_lines_json_and_one_page(report: LiveReport, tmp_path: Path) -> None:
    lines = live_lines(report)
    assert any("wander" in line for line in lines)
    assert sum("median absolute error" in line for line in lines) == len(TARGETS)
    saved = [path.name for path in save_live(report, tmp_path)]
    assert saved == ["live.json", "live.html"]
    content = json.loads((tmp_path / "live.json").read_text())
    assert content["schema"] == "tokentwin-live/1"
    assert len(content["loads"]) == 2
    page = (tmp_path / "live.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "http://" not in page.split("<script>")[0]


def test_figures_without_intervals_are_not_counted_as_covered(report: LiveReport) -> None:
    bare = replace(
        report,
        points=tuple(
            replace(p, figures=tuple(replace(f, low_ms=math.nan, high_ms=math.nan) for f in p.figures))
            for p in report.points
        ),
    )
    assert math.isnan(bare.coverage())
    assert live_json(bare)["coverage"] is None


def test_an_interval_covers_its_ends() -> None:
    figure = LiveFigure("tpot", "mean", 10.0, 11.0, 10.0, 12.0)
    assert figure.covered
    assert figure.error == pytest.approx(0.1)
    assert not replace(figure, real_ms=9.9).covered


def test_equal_prefixes_become_equal_tokens_and_nothing_else_does() -> None:
    workload = load_workload(spec(math.inf), seed=0)
    arrivals = arrivals_of(workload, 1000)
    prefixes = {tuple(a.prompt[:16]) for a in arrivals}
    assert len(prefixes) == 1
    assert len({tuple(a.prompt) for a in arrivals}) == len(arrivals)
    assert [len(a.prompt) for a in arrivals] == workload.prompt_tokens.tolist()


def test_idle_time_is_leapt_over_and_requests_arrive_when_they_were_sent() -> None:
    """An hour between two requests passes at once; each is sent at its own time to the clock's resolution."""
    limits = SchedulerConfig(8, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
    engine = CpuTimeEngine(limits, IdleRunner(), vocab_size=1000)
    workload = load_workload(spec(1.0, num_prompts=2), seed=0)
    arrivals = [replace(a, sent_s=3600.0 * i) for i, a in enumerate(arrivals_of(workload, 1000))]
    engine.serve(arrivals)
    columns = engine.recorder.request_columns()
    assert columns["sent_s"].tolist() == [0.0, 3600.0]
    assert (columns["queued_s"] >= columns["sent_s"]).all()
    assert columns["queued_s"][1] - 3600.0 < 1.0
    assert columns["output_tokens"].tolist() == workload.output_tokens.tolist()
    assert (np.diff(engine.recorder.step_columns()["end_s"]) >= 0).all()


def test_a_wall_clock_run_serves_everything(bench: Bench, tmp_path: Path) -> None:
    live = Live(bench, Store(bench.header()), tmp_path, clock="wall")
    record, _ = live.serve(load_workload(spec(200.0), seed=0))
    assert (record.requests.status == 1).all()
    assert (record.requests.first_token_s >= record.requests.sent_s).all()


def test_loads_that_cannot_be_are_refused(bench: Bench, tmp_path: Path) -> None:
    live = Live(bench, Store(bench.header()), tmp_path)
    with pytest.raises(UsageError, match="--sweep-load"):
        validate_live(live, spec, (0.0,))
    with pytest.raises(UsageError, match="--no-interleave"):
        validate_live(live, spec, (0.5,), interleave=False)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["validate", "--live"], "--model"),
        (["validate", "--live", "--model", "x", "--sweep-load", "half"], "--sweep-load"),
        (["validate", "--live", "--model", "x", "--against", "y"], "--against"),
        (["validate", "--live", "--model", "x", "--gpu", "h200"], "--gpu"),
        (["validate", "--sweep-load", "0.5", "--against", "y"], "--live"),
        (["calibrate", "--model", "x", "-o", "x.yaml"], "--output"),
        (["calibrate", "--model", "x", "-o", "x.json", "--budget", "soon"], "--budget"),
        (["calibrate", "from-metrics", "x.txt", "--profile", "h200", "-o", "y.json"], "x.txt"),
        (["calibrate", "from-metrics", "x.txt", "-o", "y.json"], "--profile"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_flag(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert word in error
    assert error.count("\n") == 1


def test_the_tables_of_the_page_are_made_of_what_was_saved(report: LiveReport, tmp_path: Path) -> None:
    from experiments.live_doc import BEGIN, END
    from experiments.live_doc import main as live_doc

    save_live(report, tmp_path / "small")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert live_doc([str(tmp_path / "small"), "--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert text.count("| small | 0.") == 2
    assert "old" not in text
    assert live_doc([str(tmp_path / "nothing")]) == 2
