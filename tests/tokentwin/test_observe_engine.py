"""What watches a run of the engine: the same spans, alerts, minutes and metrics as of a simulation."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from experiments.saved import load_record
from experiments.utilisation import engine_work
from realengine import nvml
from realengine.export import write_folder
from tests.realengine.engines import TINY, running, tiny_model, tiny_source
from tests.tokentwin.shell import Command
from tokentwin.job import make_spec
from tokentwin.live import of_engine
from tokentwin.replay import replay, warm_up
from tokentwin.server.run_meters import RunMeters

SMALL = ("--num-gpu-blocks-override", "65", "--max-num-seqs", "8", "--max-num-batched-tokens", "128")
TRAFFIC = (
    "--dataset-name",
    "random",
    "--num-prompts",
    "8",
    "--isl",
    "20",
    "--osl",
    "5",
    "--request-rate",
    "50",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_folder(tiny_source(), folder, torch.float32)
    return folder


def test_a_run_leaves_spans_minutes_alerts_and_achieved_rates(
    tokentwin: Command, model: Path, tmp_path: Path
) -> None:
    flags = (
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--alert",
        "ttft:max:1s > 1ms",
        "--otlp-file",
        tmp_path / "t.jsonl",
    )
    answer = tokentwin("run", "--model", model, *SMALL, *TRAFFIC, *flags, "-o", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert "fired at 1s" in " ".join(answer.out.split())
    assert "Achieved GFLOP/s, while busy:" in answer.out
    assert "MFU" not in answer.out
    document = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0])["resourceSpans"][0]
    clock = {a["key"]: a["value"] for a in document["resource"]["attributes"]}["tokentwin.clock"]
    assert clock == {"stringValue": "real"}
    spans = document["scopeSpans"][0]["spans"]
    assert [span["name"] for span in spans].count("decode") == 8
    record = load_record(tmp_path / "run")
    work = engine_work(record)
    assert work is not None
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    s = record.steps
    assert result["sim_flops_per_s"] == pytest.approx(work.flops.sum() / (s.end_s - s.start_s).sum())
    minutes = pq.read_table(tmp_path / "run" / "minutes.parquet")
    assert minutes.column("completed").to_pylist() == [8]
    assert "mfu" not in minutes.column_names
    assert "power_w" not in minutes.column_names
    assert "Work per second" in (tmp_path / "run" / "report.html").read_text()


def test_what_the_driver_says_is_kept_where_there_is_a_device(
    tokentwin: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def watching(device: Any, now_s: Any, **_: Any) -> Any:
        samples: dict[str, list[float]] = {name: [] for name in nvml.COLUMNS}
        yield samples
        for at_s, power_w in ((now_s() / 2, 300.0), (now_s(), 500.0)):
            for name in samples:
                samples[name].append({"time_s": at_s, "power_w": power_w}.get(name, float("nan")))

    monkeypatch.setattr(nvml, "watching", watching)
    arguments = (*SMALL, *TRAFFIC, "--device", "cpu", "--dtype", "float32", "-o", tmp_path)
    assert tokentwin("run", "--model", model, *arguments).code == 0
    table = pq.read_table(tmp_path / "minutes.parquet")
    assert table.column("power_w").to_pylist() == [400.0]
    assert "gpu_utilization" not in table.column_names


def test_metrics_of_the_engine_leave_the_warm_up_out() -> None:
    from sim.workload import load_workload

    traffic = {
        "dataset_name": "random",
        "num_prompts": 6,
        "input_len": 20,
        "output_len": 5,
        "request_rate": 100.0,
    }
    workload = load_workload(make_spec(traffic), seed=0)
    with running(tiny_model()) as engine:
        warm_up(engine, workload, TINY.vocab_size, 2)
        meters = RunMeters(of_engine(engine), "tiny")
        record = replay(engine, workload, vocab_size=TINY.vocab_size)
    values = {
        sample.name: sample.value
        for family in meters.collect()
        for sample in family.samples
        if len(sample.labels) <= 3
    }
    assert values["vllm:request_success_total"] == 6
    assert values["vllm:prompt_tokens_total"] == 6 * 20
    assert values["vllm:generation_tokens_total"] == 6 * 5
    assert values["vllm:iteration_tokens_total_count"] == len(record.steps)
    ttft = record.requests.prefill_done_s - record.requests.queued_s
    assert values["vllm:time_to_first_token_seconds_sum"] == pytest.approx(float(np.sum(ttft)), rel=1e-6)
