"""Runs of which no answer streams: no TPOT and no ITL anywhere, and one line that says why; mixed runs keep both."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from experiments.compare_saved import compare_saved
from experiments.console import print_run
from experiments.diagnose import diagnose
from experiments.diagnose_report import diagnosis_lines
from experiments.diagnose_run import read_measured
from experiments.report import report_html
from experiments.report_several import several_html
from experiments.results import result_json
from experiments.saved import Opened, open_run
from serving.errors import UsageError
from sim.metrics import NOT_STREAMED, summarise
from sim.samples import thin_percentiles
from sim.slo import parse_slo
from sim.verdict import verdict
from tokentwin import simulate
from tokentwin.run import Run

MIXED = """
tenants:
  - {name: whole, dataset: {name: random, input_len: 64, output_len: 9}, arrivals: {request_rate: 50}, num_prompts: 12,
     best_of: 2}
  - {name: chat, dataset: {name: random, input_len: 64, output_len: 9}, arrivals: {request_rate: 50}, num_prompts: 12}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All best-of, half of them, and answers of a single token."""
    path = tmp_path_factory.mktemp("whole") / "mixed.yaml"
    path.write_text(MIXED)
    where = {"model": "qwen3-0.6b", "gpu": "h200", "replications": 2}
    traffic = {"dataset_name": "random", "isl": 64, "num_prompts": 20, "request_rate": 50.0}
    return {
        "whole": simulate(**where, **traffic, osl=9, best_of=2),
        "one token": simulate(**where, **traffic, osl=1),
        "mixed": simulate(path, **where),
    }


@pytest.fixture(scope="module")
def opened(runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Opened]:
    base = tmp_path_factory.mktemp("saved")
    for name, run in runs.items():
        run.save(base / name)
    return {name: open_run(base / name) for name in runs}


def terminal(run: Run) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80)
    print_run(run.record, run.summary, run.verdict, console=console, certainty=run.certainty)
    return out.getvalue()


def page(run: Run) -> str:
    text = report_html(run.record, run.summary, run.verdict, certainty=run.certainty)
    return text.split("<main>")[1]


@pytest.mark.parametrize("name", ["whole", "one token"])
@pytest.mark.parametrize("shown", [terminal, page, Run._repr_html_])
def test_nothing_is_shown_of_what_there_is_none_and_one_line_says_why(
    runs: dict[str, Run], name: str, shown: Callable[[Run], str]
) -> None:
    text = shown(runs[name])
    assert text.count(NOT_STREAMED) == 1
    assert not re.findall(r"(?:P\d+|Mean|Median|>)\s*(?:TPOT|ITL)", text)
    assert "Time per output token" not in text
    assert "TTFT" in text
    assert "E2EL" in text


@pytest.mark.parametrize("shown", [terminal, page, Run._repr_html_])
def test_a_run_that_streams_in_part_keeps_its_tpot(runs: dict[str, Run], shown: Callable[[Run], str]) -> None:
    text = shown(runs["mixed"])
    assert NOT_STREAMED not in text
    assert "TPOT" in text
    assert "ITL" in text


def test_pictures_and_thin_percentiles_leave_it_out_too(runs: dict[str, Run]) -> None:
    whole, mixed = runs["whole"], runs["mixed"]
    assert [axis.title.text for axis in whole.plot.p95().select_yaxes()] == ["P95 TTFT (ms)"]
    assert len(list(mixed.plot.p95().select_yaxes())) == 2
    with pytest.raises(UsageError, match="every answer came whole"):
        whole.plot.ecdf("tpot")
    assert {thin.name for thin in thin_percentiles(whole.summary)} >= {"p99_ttft", "p99_e2el"}
    assert not [thin for thin in thin_percentiles(whole.summary) if thin.name.endswith("tpot")]


def test_saved_runs_are_compared_without_it(opened: dict[str, Opened]) -> None:
    folder = opened["whole"].folder
    (variant,) = compare_saved({"a": folder, "b": folder}).variants
    assert [note for note in variant.notes if "come whole" in note]
    names = {change.metric.name for change in variant.changes}
    assert {"p95_ttft", "p95_e2el"} <= names
    assert not [name for name in names if name.endswith(("_tpot", "_itl"))]
    (streamed,) = compare_saved({"a": opened["mixed"].folder, "b": opened["mixed"].folder}).variants
    assert "p95_tpot" in {change.metric.name for change in streamed.changes}


def test_beside_a_run_that_streams_there_is_a_dash(opened: dict[str, Opened], tmp_path: Path) -> None:
    both = several_html([opened["whole"], opened["mixed"]], tmp_path)
    row = re.search(r'<th scope="row">P95 TPOT \(ms\)</th>(.*?)</tr>', both)
    assert row is not None
    tpot_ms = opened["mixed"].summary.tpot.at(95.0) * 1000
    assert row.group(1) == f"<td>–</td><td>{tpot_ms:,.4g}</td>"
    assert both.count(f"whole: {NOT_STREAMED}") == both.count(NOT_STREAMED) == 1
    neither = several_html([opened["whole"], opened["one token"]], tmp_path)
    assert neither.count(NOT_STREAMED) == 2
    assert "TPOT (ms)" not in neither
    assert "ITL (ms)" not in neither


@pytest.mark.parametrize("name", ["whole", "one token", "mixed"])
def test_a_limit_on_what_there_is_none_of_is_judged_nowhere(opened: dict[str, Opened], name: str) -> None:
    """Neither in the JSON nor by diagnose; a limit beside it is."""
    folder, slos = opened[name].folder, ["p95_tpot:1e6", "p95_ttft:1e6"]
    run = open_run(folder)
    found = verdict(run.record, summarise(run.record, slos=parse_slo(slos)))
    result = result_json(run.record, run.summary, verdict=found)
    here = name == "mixed"
    assert (result["mean_tpot_ms"] is not None) == here
    assert result["sim_slos"]["p95_tpot"]["met"] is (True if here else None)
    assert (result["sim_slos"]["p95_tpot"]["value_ms"] is not None) == here
    assert result["sim_slos"]["p95_ttft"]["met"] is True
    assert result["sim_meets_slos"] is (True if here else None)
    diagnosed = diagnose(read_measured(folder), parse_slo(slos))
    assert {j.slo.name: j.met for j in diagnosed.judged} == {
        "p95_ttft": True,
        "p95_tpot": True if here else None,
    }
    words = " ".join(" ".join(diagnosis_lines(diagnosed)).split())
    assert ("Cannot judge P95 TPOT" in words) != here
    assert ("every promise that can be judged is kept" in words) != here
    only = diagnose(read_measured(folder), parse_slo(slos[:1]))
    assert only.healthy == here
    assert only.why_nothing == ("" if here else "no promise can be judged")
    assert not [f for f in only.findings if f.rule == "tail" and f.fired]
