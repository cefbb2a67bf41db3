"""Runs of the twin with one known disease each, saved as run folders, and the same requests in foreign formats."""

from __future__ import annotations

import csv
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from experiments.results import result_json, save_run
from sim.latency import latencies
from tokentwin.api import simulate
from tokentwin.run import Run

SERVED = {"model": "llama-3.1-8b", "gpu": "h200", "dataset_name": "random"}
RUNS: dict[str, dict[str, Any]] = {
    # 16 seats: a request holds one for about half a second, so that 32/s is the most, and 60/s arrive.
    "queue": {"isl": 1024, "osl": 64, "request_rate": 60, "num_prompts": 90, "max_num_seqs": 16,
              "slo": ["p95_ttft:500", "p95_tpot:50"]},
    # 900 pages of 16 tokens hold 14,400 tokens: about 12 sequences of 1,000 + 200.
    "pages": {"isl": 1000, "osl": 200, "random_range_ratio": "0.5", "request_rate": 20, "num_prompts": 80,
              "num_gpu_blocks_override": 900, "slo": ["p95_ttft:500"]},
    # Whole prompts of 6,000 tokens, about 300 ms each, while the others wait for their next token.
    "stalls": {"isl": 6000, "osl": 60, "request_rate": 4, "num_prompts": 50, "policy": "continuous",
               "max_model_len": 10000, "slo": ["p99_itl:50"]},
    # Hundreds decode at once: each step reads all their KV beside the weights.
    "bandwidth": {"isl": 500, "osl": 200, "random_range_ratio": "0.5", "request_rate": 50, "num_prompts": 200,
                  "slo": ["p95_tpot:9"]},
    # 140 GB of weights over two devices of 4.8 TB/s take 15 ms a token however few decode.
    "floor": {"model": "llama-3.1-70b", "tensor_parallel_size": 2, "isl": 200, "osl": 40, "request_rate": 1,
              "num_prompts": 30, "slo": ["p95_tpot:10"]},
    "prefix": {"dataset_name": "prefix_repetition", "prefix_repetition_prefix_len": 4000,
               "prefix_repetition_suffix_len": 96, "prefix_repetition_output_len": 32, "request_rate": 6,
               "num_prompts": 50, "enable_prefix_caching": False, "slo": ["p95_ttft:100"]},
    "healthy": {"isl": 500, "osl": 60, "request_rate": 4, "num_prompts": 150,
                "slo": ["p95_ttft:500", "p95_tpot:50"]},
    "network": {"isl": 200, "osl": 20, "request_rate": 4, "num_prompts": 100, "rtt_ms": 300,
                "slo": ["p95_ttft:200"]},
}  # fmt: skip


@functools.cache
def sick_run(name: str) -> Run:
    """One of `RUNS`."""
    return simulate(**{**SERVED, **RUNS[name]})


@functools.cache
def folder(name: str) -> Path:
    """Its run folder."""
    path = Path(tempfile.mkdtemp()) / name
    run = sick_run(name)
    save_run(run.record, run.summary, path, verdict=run.verdict, steps=True)
    return path


def bench_json(name: str, path: Path, *, server: bool = True) -> Path:
    """The run as `vllm bench serve --save-detailed` saves it, with or without what the server says of each request."""
    run = sick_run(name)
    result = result_json(run.record, run.summary, detailed=True)
    if server:
        r, lat = run.record.requests, latencies(run.record)
        result["server_queue_times"] = lat.queue_s.tolist()
        result["server_ttfts"] = (r.prefill_done_s - r.queued_s).tolist()
    path.write_text(json.dumps(result), encoding="utf-8")
    return path


def columns(name: str) -> dict[str, list[float]]:
    """Columns of the finished requests, in the names of the CSV format."""
    r, lat = sick_run(name).record.requests, latencies(sick_run(name).record)
    done = np.isfinite(lat.e2el_s)
    found = {
        "sent_s": r.sent_s,
        "prompt_tokens": r.prompt_tokens,
        "output_tokens": r.output_tokens,
        "ttft_s": lat.ttft_s,
        "e2el_s": lat.e2el_s,
        "queue_s": lat.queue_s,
        "prefill_s": lat.prefill_s,
        "preemptions": r.preemptions,
    }
    return {key: values[done].tolist() for key, values in found.items()}


def write_csv(path: Path, table: dict[str, list[Any]]) -> Path:
    """A CSV of these columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    return path


def spans(table: dict[str, list[Any]]) -> dict[str, Any]:
    """OTLP JSON with the attributes that vLLM's API server gives its span of a request."""
    names = {
        "prompt_tokens": "gen_ai.usage.prompt_tokens",
        "output_tokens": "gen_ai.usage.completion_tokens",
        "ttft_s": "gen_ai.latency.time_to_first_token",
        "e2el_s": "gen_ai.latency.e2e",
        "queue_s": "gen_ai.latency.time_in_queue",
        "prefill_s": "gen_ai.latency.time_in_model_prefill",
    }
    found = []
    for i, sent_s in enumerate(table["sent_s"]):
        attributes: list[dict[str, Any]] = [
            {"key": key, "value": {"doubleValue": table[name][i]}}
            for name, key in names.items()
            if name.endswith("_s")
        ]
        attributes += [
            {"key": key, "value": {"intValue": str(table[name][i])}}
            for name, key in names.items()
            if "tokens" in name
        ]
        attributes.append({"key": "gen_ai.request.id", "value": {"stringValue": f"cmpl-{i}"}})
        start_ns = 1_700_000_000_000_000_000 + round(sent_s * 1e9)
        found.append({"name": "llm_request", "startTimeUnixNano": str(start_ns), "attributes": attributes})
    other = {"name": "http", "startTimeUnixNano": "1700000000000000000", "attributes": []}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [other, *found]}]}]}
