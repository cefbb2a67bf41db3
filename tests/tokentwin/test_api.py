"""`import tokentwin as tt`: the command line's job from Python."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pyarrow as pa
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
    table = run.summary_table()
    assert len(table) == 4
    if isinstance(table, pa.Table):
        row = table.to_pylist()[0]
        assert row["metric"] == "ttft"
        assert row["mean"] == run.summary.ttft.mean_s * 1000


def test_a_run_shows_itself_in_a_notebook(run: tt.Run) -> None:
    html = run._repr_html_()
    assert html.count("<tr>") == 5
    assert "Meets P95 TTFT" in html


def test_a_run_survives_pickling(run: tt.Run) -> None:
    copy = pickle.loads(pickle.dumps(run))
    assert copy.summary == run.summary
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
