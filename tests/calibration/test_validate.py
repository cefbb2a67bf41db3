"""Validation as a specification: a run that the twin itself made is matched exactly, and every source is read."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from calibration.compare import Comparison, Figure, at_times, statistics_ms
from calibration.observed import Case, Observed, graphs_in_budget, plain_workload, semantics_of
from calibration.validate import memory_of, twin_samples, validate
from costmodel.engine_version import parse_version
from experiments.results import save_run
from experiments.validation_report import save_validation, validation_html, validation_lines
from serving.errors import UsageError
from sim.deployment import Deployment, build, simulate
from sim.metrics import summarise
from sim.record import RunRecord
from tests.sim.worlds import make_workload

SETTINGS = {
    "run": "toy_run",
    "hardware": "RTX4090",
    "engine_version": "0.19.0",
    "model": "meta-llama/Llama-3.1-8B",
    "dtype": "bfloat16",
    "kv_dtype": "auto",
    "tp": "1",
    "dp": "1",
    "max_num_seqs": "16",
    "max_num_batched_tokens": "512",
    "max_model_len": "2048",
    "block_size": "16",
    "num_gpu_blocks": "200",
    "gpu_memory_utilization": "0.9",
    "prefix_caching": "True",
    "cuda_graph": "default(on)",
}
ENGINE = Deployment(
    model="llama-3.1-8b",
    gpu="rtx4090",
    max_num_seqs=16,
    max_num_batched_tokens=512,
    max_model_len=2048,
    gpu_memory_utilization=0.9,
    num_gpu_blocks_override=200,
    async_scheduling=True,
    tokenize_us_per_token=0.0,
    detokenize_us_per_token=0.0,
)


def toy_record() -> RunRecord:
    """Twenty requests that share no prefix, on few pages, so that some are preempted."""
    rng = np.random.default_rng(1)
    sent = np.cumsum(rng.exponential(0.05, 20))
    prompts, outputs = rng.integers(20, 700, 20), rng.integers(2, 200, 20)
    return simulate(plain_workload("toy", sent, prompts.tolist(), outputs.tolist()), build(ENGINE))


def write_runs(folder: Path, record: RunRecord, **settings: str) -> Path:
    """The record as a real run in CSV files."""
    r, twin = record.requests, twin_samples(record, at_engine=True)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "x_runs.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, list(SETTINGS))
        rows.writeheader()
        rows.writerow(SETTINGS | settings)
    with (folder / "x_requests.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["run", "req", "queued_s", "input_toks", "output_toks", "ttft_ms", "tpot_ms", "e2e_ms"])
        columns = zip(
            r.queued_s, r.prompt_tokens, r.output_tokens, *(twin[m] * 1e3 for m in twin), strict=True
        )
        out.writerows(["toy_run", i, *values] for i, values in enumerate(columns))
    times = np.arange(0.0, 2.0, 0.1)
    s = record.steps
    running = at_times(times, s.start_s, s.end_s, s.num_running.astype(float))
    waiting = at_times(times, s.start_s, s.end_s, s.num_waiting.astype(float))
    with (folder / "x_timeseries.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["run", "t", "running", "waiting", "kv_cache_pct"])
        out.writerows(["toy_run", *values, 0.0] for values in zip(times, running, waiting, strict=True))
    return folder


def test_a_run_of_the_twin_itself_is_matched_exactly(tmp_path: Path) -> None:
    found = validate(None, write_runs(tmp_path / "a", toy_record()), recorded_pages=True)
    assert len(found.figures) == 15
    assert found.mean_error() == pytest.approx(0, abs=1e-9)
    assert [s.name for s in found.series] == ["running", "waiting"]  # KV of zeros was not recorded
    assert all(s.rms == 0 for s in found.series)
    assert found.pages is not None
    assert (found.pages.recorded, found.pages.used) == (200, 200)


def test_the_engine_settings_come_from_the_runs_file(tmp_path: Path) -> None:
    found = validate(None, write_runs(tmp_path / "a", toy_record(), max_num_seqs="4", prefix_caching="off"))
    deployment = found.settings["deployment"]
    assert deployment["max_num_seqs"] == 4
    assert deployment["enable_prefix_caching"] is False
    assert deployment["gpu"] == "rtx4090"
    assert found.mean_error() > 0.01


def test_a_part_of_a_name_chooses_a_run_and_a_wrong_one_names_the_nearest(tmp_path: Path) -> None:
    folder = write_runs(tmp_path / "a", toy_record())
    assert validate(None, folder, run="TOY").title == "toy_run"
    with pytest.raises(UsageError, match="toy_run"):
        validate(None, folder, run="tow_run")


def test_prefixes_of_another_workload_are_an_error(tmp_path: Path) -> None:
    folder = write_runs(tmp_path / "a", toy_record())
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_length": 5, "output_length": 5, "hash_ids": [1]}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="lengths are not those of the run"):
        validate(None, folder, prefixes=trace)


@pytest.mark.parametrize(("column", "value"), [("ttft_ms", "fast"), ("queued_s", "nan")])
def test_a_value_that_is_no_number_is_named(tmp_path: Path, column: str, value: str) -> None:
    folder = write_runs(tmp_path / "a", toy_record())
    path = folder / "x_requests.csv"
    rows = list(csv.DictReader(path.open()))
    rows[3][column] = value
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, list(rows[0]))
        out.writeheader()
        out.writerows(rows)
    with pytest.raises(UsageError, match=f"{column}.*{value}"):
        validate(None, folder)


def test_something_else_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run to compare with"):
        validate(None, tmp_path)


def test_a_run_folder_of_ours_is_replayed(tmp_path: Path) -> None:
    record = toy_record()
    save_run(record, summarise(record), tmp_path / "ours")
    found = validate(None, tmp_path / "ours")
    assert found.mean_error() == pytest.approx(0, abs=1e-9)


def test_a_detailed_bench_result_needs_to_be_told_how_it_was_served(tmp_path: Path) -> None:
    record = toy_record()
    save_run(record, summarise(record), tmp_path / "ours", detailed=True)
    path = tmp_path / "ours" / "result.json"
    with pytest.raises(UsageError, match="--model"):
        validate(None, path)
    found = validate(None, path, deployment=ENGINE)
    assert found.mean_error() == pytest.approx(0, abs=1e-6)


def test_a_bench_result_without_details_says_how_to_make_them(tmp_path: Path) -> None:
    path = tmp_path / "plain.json"
    path.write_text(json.dumps({"completed": 3}), encoding="utf-8")
    with pytest.raises(UsageError, match="--save-detailed"):
        validate(None, path, deployment=ENGINE)


def test_inferencex_points_follow_the_built_in_recipe(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text(
        "model,system,precision,isl,osl,conc,tp_size,ttft_mean_ms,tpot_mean_ms,backend_version\n"
        "meta-llama/Llama-3.1-8B,h200_sxm,fp8,1024,1024,4.0,1,50,5,\n"
        "meta-llama/Llama-3.1-8B,h200_sxm,fp8,8192,1024,4,2,100,5,\n",
        encoding="utf-8",
    )
    found = validate(None, path)
    assert [f.label for f in found.figures] == ["1024/1024 tp1 conc4"] * 2 + ["8192/1024 tp2 conc4"] * 2
    deployment = found.settings["deployment"]
    assert deployment["max_num_seqs"] == 4
    assert deployment["max_model_len"] == 1024 + 1024 + 20
    assert deployment["kv_cache_dtype"] == deployment["quantization"] == "fp8"
    assert deployment["enable_prefix_caching"] is False
    assert deployment["semantics"] == "vllm-2025"
    assert [f.label for f in validate(None, path, run="tp2").figures] == ["8192/1024 tp2 conc4"] * 2
    with pytest.raises(UsageError, match="no label"):
        validate(None, path, run="tp16")


def test_pages_of_replicas_that_share_experts_are_those_of_the_deployment() -> None:
    deployment = Deployment(
        model="qwen3-30b-a3b",
        gpu="h200",
        data_parallel_size=2,
        enable_expert_parallel=True,
        max_model_len=4096,
    )
    case = Case("moe", deployment, make_workload([0.0], [10], [2]), Observed(), at_engine=True)
    assert memory_of(case).num_blocks == build(deployment).memory.num_blocks


def test_engine_versions_decide_semantics_and_the_graph_budget() -> None:
    assert parse_version("v0.19.0rc1") == (0, 19, 0)
    assert parse_version("") == ()
    assert [semantics_of(v) for v in ((0, 10, 2), (0, 19, 0), ())] == ["vllm-2025", "vllm-0.33", "vllm-0.33"]
    assert [graphs_in_budget(v) for v in ((0, 19, 0), (0, 21), ())] == [False, True, True]


def test_figures_are_numpy_percentiles_in_milliseconds() -> None:
    """Of 0, 1, …, 100 s the percentiles are the numbers themselves."""
    found = statistics_ms(np.arange(101.0))
    assert found == {"mean": 50_000, "median": 50_000, "p90": 90_000, "p95": 95_000, "p99": 99_000}


def test_a_step_column_holds_between_its_start_and_end() -> None:
    start, end = np.array([0.0, 1.0, 5.0]), np.array([1.0, 2.0, 6.0])
    found = at_times(np.array([0.5, 1.0, 3.0, 5.5, 9.0]), start, end, [1.0, 2.0, 3.0])
    assert found.tolist() == [1.0, 2.0, 0.0, 3.0, 0.0]


def two_figures() -> Comparison:
    figures = (
        Figure("ttft", "mean", 100.0, 110.0),
        Figure("tpot", "mean", 10.0, 9.8),
        Figure("tpot", "mean", 10.0, 30.0, "full", "kv-saturated"),
    )
    return Comparison("a <b>", {}, figures)


def test_excluded_figures_are_shown_and_do_not_count() -> None:
    found = two_figures()
    assert found.mean_error() == pytest.approx(0.06)  # (10 % + 2 %) / 2
    assert found.bias() == pytest.approx(0.04)
    assert found.worst().error == pytest.approx(0.1)
    assert (found.within(0.061), found.within(0.059)) == (True, False)
    lines = validation_lines(found, 0.05)
    assert any("kv-saturated" in line for line in lines)
    assert lines[-1].startswith("over the tolerance")
    assert max(map(len, lines)) <= 100


def test_the_page_and_the_json_hold_the_same_errors(tmp_path: Path) -> None:
    found = validate(None, write_runs(tmp_path / "a", toy_record()))
    result, page = save_validation(found, tmp_path / "out")
    saved = json.loads(result.read_text())
    assert saved["mean_absolute_error"] == pytest.approx(found.mean_error())
    assert len(saved["figures"]) == 15
    text = page.read_text(encoding="utf-8")
    assert f"{found.figures[0].error:+.2%}" in text
    assert text.count('class="plotly-graph-div"') == 5  # three ECDFs and two series
    assert "a &lt;b&gt;" in validation_html(two_figures())
