"""The files of a run: what other tools read from them, and that the same run gives the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from experiments.results import load_run, result_json, save_run
from serving.errors import UsageError
from sim.metrics import summarise
from sim.record import RunRecord, Tenant
from sim.slo import Goodput, parse_slo
from sim.verdict import verdict
from tests.sim.toy_runs import toy_run

HEAD = [
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput"),
]
DETAILS = [
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors")
]
PEAKS = ["max_output_tokens_per_s", "max_concurrent_requests"]
STATISTICS = ("mean", "median", "std", "p50", "p90", "p95", "p99")
STATS = [f"{s}_{m}_ms" for m in ("ttft", "tpot", "itl", "e2el") for s in STATISTICS]

META: dict[str, Any] = {
    "model_id": "toy",
    "seed": 7,
    "argv": ["simulate", "--seed", "7"],
    "config": {"max_num_seqs": 8},
    "version": "0.1.0",
    "git_commit": "abc",
    "profile_hash": "def",
    "tensor_parallel_size": 2,
    "request_rate": 10.0,
}


@pytest.fixture
def run() -> RunRecord:
    """Forty requests, ten a second; the last is rejected."""
    return toy_run(
        np.arange(40) * 0.1, [10] * 40, [5] * 40, rejected=(39,), tenants=(Tenant("chat"),), meta=META
    )


def result(run: RunRecord, **options: Any) -> dict[str, Any]:
    return result_json(run, summarise(run, goodput=Goodput(ttft_s=0.5)), date="20260101-000000", **options)


def test_keys_are_vllms_in_vllms_order(run: RunRecord) -> None:
    keys = list(result(run))
    assert keys[: len(HEAD + PEAKS + STATS)] == HEAD + PEAKS + STATS
    detailed = list(result(run, detailed=True))
    assert detailed[: len(HEAD + DETAILS + PEAKS + STATS)] == HEAD + DETAILS + PEAKS + STATS
    ours = set(keys) - set(HEAD + PEAKS + STATS)
    parallel = {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
    slo = {"slo_attainment", "slo_attainment_by_metric", "goodput_slos_ms", "partial"}
    assert {k for k in ours if not k.startswith("sim_")} == parallel | slo


def test_details_are_seconds_per_sent_request(run: RunRecord) -> None:
    out = result(run, detailed=True)
    assert {len(out[key]) for key in DETAILS} == {40}
    assert out["ttfts"][0] == pytest.approx(0.032)  # 10 + 1 + 10 + 1 + 10 ms
    assert out["itls"][0] == pytest.approx([0.010] * 4)
    assert out["ttfts"][0] + sum(out["itls"][0]) == pytest.approx(out["latencies"][0])
    assert out["errors"] == [""] * 39 + ["prompt is longer than max_model_len"]
    assert (out["output_lens"][39], out["ttfts"][39], out["itls"][39]) == (0, 0.0, [])


def test_what_the_pareto_plot_reads(run: RunRecord) -> None:
    # Users are max_concurrency or, when null, max_concurrent_requests; GPUs are the product of the sizes.
    out = result(run)
    assert out["max_concurrency"] is None
    assert out["max_concurrent_requests"] > 0
    assert out["output_throughput"] > 0
    assert (out["tensor_parallel_size"], out["pipeline_parallel_size"], out["data_parallel_size"]) == (
        2,
        1,
        1,
    )


def test_rates_are_numbers_or_inf(run: RunRecord) -> None:
    assert result(run)["request_rate"] == 10.0
    assert result(replace(run, meta={}))["request_rate"] == pytest.approx(10.0)  # offered: 39 gaps in 3.9 s
    assert result(toy_run([0.0, 0.0], [1, 1], [2, 2]))["request_rate"] == "inf"
    assert result(replace(run, meta=META | {"request_rate": float("inf")}))["request_rate"] == "inf"


def test_json_is_strict_even_when_nothing_ran(tmp_path: Path) -> None:
    empty = toy_run([0.0], [10], [2], rejected=(0,))
    save_run(empty, s := summarise(empty, slos=parse_slo(["chat"])), tmp_path, verdict=verdict(empty, s))

    def refuse(token: str) -> None:
        raise AssertionError(token)

    out = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert (out["completed"], out["failed"], out["mean_ttft_ms"]) == (0, 1, None)
    assert out["sim_slos"]["p95_ttft"] == {"limit_ms": 1000.0, "value_ms": None, "met": False}


def test_the_same_run_gives_the_same_bytes(
    run: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for name in ("a", "b"):
        save_run(run, summarise(run), tmp_path / name, detailed=True, steps=True)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == ["requests.parquet", "result.json", "run.json", "steps.parquet", "tokens.parquet"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert load_run(tmp_path / "a").result["date"] == "20231114-221320"


def test_requests_are_rows_that_duckdb_reads(run: RunRecord, tmp_path: Path) -> None:
    save_run(run, s := summarise(run), tmp_path)
    query = f"""select status, tenant, count(*), avg(ttft_s), any_value(reason)
        from '{tmp_path}/requests.parquet' group by all order by status"""
    finished, rejected = duckdb.sql(query).fetchall()
    assert finished[:3] == ("finished", "chat", 39)
    assert finished[3] == pytest.approx(s.ttft.mean_s)
    assert rejected == ("rejected", "chat", 1, None, "prompt is longer than max_model_len")
    stages = "select avg(e2el_s - network_s - tokenize_s - queue_s - prefill_s - decode_s - stream_s)"
    (rest,) = duckdb.sql(f"{stages} from '{tmp_path}/requests.parquet'").fetchall()
    assert rest[0] == pytest.approx(0, abs=1e-12)


def test_what_was_run_is_kept_and_read_back(run: RunRecord, tmp_path: Path) -> None:
    save_run(replace(run, interrupted=True), summarise(run), tmp_path)
    saved = load_run(tmp_path)
    assert {k: saved.run[k] for k in META} == META
    assert saved.run["partial"] is True
    assert saved.result["partial"] is True
    assert saved.requests().num_rows == 40


def test_results_are_appended_a_line_each(run: RunRecord, tmp_path: Path) -> None:
    for label in ("first", "second"):
        save_run(run, summarise(run), tmp_path, append=True, label=label, filename="all.json")
    lines = (tmp_path / "all.json").read_text().splitlines()
    assert [json.loads(line)["label"] for line in lines] == ["first", "second"]
    assert load_run(tmp_path, "all.json").result["label"] == "second"


def test_metadata_sits_after_num_prompts(run: RunRecord) -> None:
    keys = list(result(run, metadata=["gpu=h200", "note=a=b"]))
    assert keys[keys.index("num_prompts") + 1 :][:2] == ["gpu", "note"]
    with pytest.raises(UsageError, match="KEY=VALUE"):
        result(run, metadata=["gpu"])
    with pytest.raises(UsageError, match="'duration'"):
        result(run, metadata=["duration=3"])


def test_an_unwritable_folder_is_one_line(run: RunRecord, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write to .*file/out") as error:
        save_run(run, summarise(run), tmp_path / "file" / "out")
    assert "\n" not in str(error.value)


def test_a_missing_or_broken_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*result\.json"):
        load_run(tmp_path)
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(UsageError, match="cannot read"):
        load_run(tmp_path)


@pytest.mark.skipif("TOKENTWIN_VLLM_RS" not in os.environ, reason="TOKENTWIN_VLLM_RS names no vllm-rs binary")
@pytest.mark.parametrize("detailed", [False, True])
def test_vllm_compares_our_results(run: RunRecord, tmp_path: Path, detailed: bool) -> None:
    empty = toy_run([0.0], [10], [2], rejected=(0,))
    for name, record in (
        ("a", run),
        ("b", toy_run(np.arange(40) * 0.1, [90] * 40, [9] * 40)),
        ("empty", empty),
    ):
        save_run(record, summarise(record), tmp_path, filename=f"{name}.json", detailed=detailed)
    for other in ("b", "empty"):
        command = [os.environ["TOKENTWIN_VLLM_RS"], "bench", "serve", "--compare"]
        pair = [str(tmp_path / "a.json"), str(tmp_path / f"{other}.json")]
        out = subprocess.run([*command, *pair], capture_output=True, text=True, timeout=60)
        assert out.returncode == 0, out.stderr
        if other == "b":
            for row in ("Completed requests", "Mean TTFT", "Mean TPOT", "Mean ITL", "Output throughput"):
                assert row in out.stdout, out.stdout


def test_facts_are_found_under_the_workload_and_the_deployment(run: RunRecord) -> None:
    nested = {
        "deployment": {"model": "llama", "tensor_parallel_size": 4, "data_parallel_size": 2},
        "workload": {"seed": 3, "request_rate": None, "burstiness": 0.5, "max_concurrency": 16},
    }
    out = result(replace(run, meta=nested))
    assert (out["model_id"], out["tokenizer_id"], out["sim_seed"]) == ("llama", "llama", 3)
    assert (out["tensor_parallel_size"], out["data_parallel_size"]) == (4, 2)
    assert (out["burstiness"], out["max_concurrency"]) == (0.5, 16)
    assert out["request_rate"] == "inf"  # a closed loop has no rate of its own
