"""`import tokentwin as tt`: the command line's job from Python."""

from __future__ import annotations

import inspect
import json
import pickle
import sys
from pathlib import Path

import pytest

import tokentwin as tt


@pytest.fixture(scope="module")
def run() -> tt.Run:
    return tt.simulate(
        model="llama-3.1-8b",
        gpu="h200",
        dataset_name="random",
        num_prompts=20,
        request_rate=8,
        goodput={"ttft": 500, "tpot": 50},
        slo="p95_ttft:500 p95_tpot:50",
        seed=1,
        max_num_seqs=64,
    )


def test_a_run_has_record_summary_and_verdict(run: tt.Run) -> None:
    assert run.summary.completed == 20
    assert run.num_lost == 0
    assert run.verdict.meets_slos is True
    assert run.summary.slo_attainment == 1.0
    assert run.deployment.max_num_seqs == 64
    assert run.record.meta["seed"] == 1
    assert "20 requests on llama-3.1-8b/h200" in repr(run)


def test_tables_have_a_row_per_request_step_and_metric(run: tt.Run) -> None:
    assert len(run.requests) == 20
    assert len(run.steps) == run.summary.num_steps
    table = run.latencies()
    assert list(table.index) == ["ttft", "tpot", "itl", "e2el"]
    ttft_ms = run.requests["ttft_s"] * 1000
    assert table.loc["ttft", "mean"] == pytest.approx(ttft_ms.mean())
    assert table.loc["ttft", "p95"] == pytest.approx(ttft_ms.quantile(0.95))


def test_the_summary_is_numbers_and_called_a_table_of_them(run: tt.Run) -> None:
    table = run.summary()
    assert table.loc["completed", "value"] == run.summary.completed == 20
    assert table.loc["p95_tpot_ms", "value"] == run.summary.tpot.at(95.0) * 1000
    requests = run.requests
    span_s = requests["last_token_s"].max() - requests["sent_s"].min()
    assert table.loc["request_throughput", "value"] == pytest.approx(20 / span_s)


def test_intervals_have_the_names_of_the_summary() -> None:
    run = tt.simulate(
        model="llama-3.1-8b", dataset_name="random", num_prompts=20, request_rate=8, replications=2
    )
    both = run.summary().join(run.intervals()[["low", "high"]], how="inner")
    assert {"p95_ttft_ms", "mean_tpot_ms", "output_throughput"} <= set(both.index)
    assert (both["low"] <= both["value"]).all()
    assert (both["value"] <= both["high"]).all()


def test_a_run_shows_itself_in_a_notebook_in_the_colours_of_the_page(run: tt.Run) -> None:
    html = run._repr_html_()
    assert html.count("<tr>") == 5
    assert "Meets P95 TTFT" in html
    assert "color:#" not in html.replace(" ", "")
    assert "white" not in html


def test_pictures_are_found_by_completion_and_drawn(run: tt.Run) -> None:
    names = dir(run.plot)
    assert {"ecdf", "timeline", "roofline"} <= set(names)
    assert all(getattr(run.plot, name).__doc__ for name in names)
    drawn = {name: getattr(run.plot, name)() for name in names}
    x, y = drawn["ecdf"].data[0].x, drawn["ecdf"].data[0].y
    assert max(x) == pytest.approx(run.summary.ttft.max_s * 1000)
    assert max(y) == 100
    assert run.plot.ecdf("e2el").data[0].x.max() == pytest.approx(run.summary.e2el.max_s * 1000)
    with pytest.raises(tt.UsageError, match="unknown metric 'tftt'; did you mean 'ttft'"):
        run.plot.ecdf("tftt")
    assert "ecdf" in repr(run.plot)


def test_tables_without_pandas_name_the_extra(run: tt.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for ask in (run.summary, run.latencies, lambda: run.requests):
        with pytest.raises(tt.UsageError, match=r"pip install 'tokentwin\[notebook\]'"):
            ask()
    assert run.summary.completed == 20


def test_a_run_survives_pickling(run: tt.Run) -> None:
    copy = pickle.loads(pickle.dumps(run))
    assert copy.summary == run.summary
    assert copy.summary().equals(run.summary())
    assert copy.deployment == run.deployment
    assert copy.roofline().peak_flops_per_s == run.roofline().peak_flops_per_s


def test_save_and_report(run: tt.Run, tmp_path: Path) -> None:
    paths = run.save(tmp_path / "out", label="api", date="20260101-000000")
    assert [path.name for path in paths][-2:] == ["trace.json.gz", "report.html"]
    assert all(path.stat().st_size for path in paths)
    assert json.loads(paths[0].read_text(encoding="utf-8"))["label"] == "api"
    assert run.report(tmp_path / "alone.html").exists()


def test_the_roofline_stays_under_its_roof(run: tt.Run) -> None:
    """No step computes or reads more than the device could in its time (residuals may exceed it a little)."""
    work, gpu_s = run.roofline(), run.record.steps.gpu_s
    assert (work.flops / gpu_s).max() < 1.1 * work.peak_flops_per_s
    assert (work.bytes / gpu_s).max() < 1.1 * work.peak_bytes_per_s


def test_names_are_those_of_the_flags_aliases_too() -> None:
    run = tt.simulate(model="qwen3-8b", dataset_name="random", num_prompts=3, isl=64, osl=4, tp=2)
    assert run.deployment.tensor_parallel_size == 2
    assert run.record.requests.prompt_tokens.tolist() == [64, 64, 64]
    with pytest.raises(tt.UsageError, match="unknown key 'max_num_sqs'; did you mean 'max_num_seqs'"):
        tt.simulate(model="qwen3-8b", max_num_sqs=4)
    with pytest.raises(tt.UsageError, match="given twice"):
        tt.simulate(model="qwen3-8b", num_prompts=4, request_count=5)


def test_keywords_are_found_by_completion() -> None:
    parameters = inspect.signature(tt.simulate).parameters
    assert {"model", "max_num_seqs", "isl", "tp", "slo", "replications", "workload"} <= set(parameters)
    assert not {"config", "output_dir", "fail_on_slo"} & set(parameters)


def test_values_have_the_types_of_the_flags() -> None:
    with pytest.raises(
        tt.UsageError, match=r"simulate\(\): max_num_seqs: must be a valid integer.*got 'many'"
    ):
        tt.simulate(model="qwen3-8b", max_num_seqs="many")  # type: ignore[arg-type]


def test_a_workload_or_its_spec_or_file_stands_in_for_traffic_flags(tmp_path: Path) -> None:
    spec = tt.spec_from_flags({"dataset_name": "random", "num_prompts": 5})
    deployment = tt.Deployment(model="llama-3.1-8b")
    file = tmp_path / "traffic.yaml"
    file.write_text("tenants: [{dataset: {name: random}, num_prompts: 5}]", encoding="utf-8")
    runs = [
        tt.simulate(spec, deployment=deployment),
        tt.simulate(tt.load_workload(spec, seed=0), deployment=deployment),
        tt.simulate(file, deployment=deployment),
    ]
    assert [run.summary.completed for run in runs] == [5, 5, 5]
    with pytest.raises(tt.UsageError, match="has no effect on a workload that is given"):
        tt.simulate(spec, deployment=deployment, num_prompts=4)


def test_flags_change_a_given_deployment() -> None:
    base = tt.Deployment(model="llama-3.1-8b", max_num_seqs=8, block_size=32)
    run = tt.simulate(deployment=base, dataset_name="random", num_prompts=2, max_num_seqs=4)
    assert (run.deployment.max_num_seqs, run.deployment.block_size) == (4, 32)


def test_errors_are_the_packages() -> None:
    with pytest.raises(tt.InfeasibleError, match="does not fit"):
        tt.simulate(model="llama-3.1-405b", dataset_name="random")
    assert issubclass(tt.InfeasibleError, tt.UsageError)
    assert issubclass(tt.UsageError, tt.TokenTwinError)
