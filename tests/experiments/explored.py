"""A small sweep that was really run, and what its rows say by definition, for the tests of `tokentwin explore`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from experiments.plan_report import SCHEMA
from experiments.prices import Price
from tokentwin.cli import main

SPEC = """\
base: {model: qwen3-0.6b, dataset_name: random, isl: 400, osl: 40, num_prompts: 80, slo: [p95_ttft:60, p95_tpot:6]}
grid: {request_rate: [40, 120, 360], max_num_seqs: [4, 64], max_num_batched_tokens: [512, 4096], gpu: [l40s, h200]}
"""
PRICES = {"l40s": Price(1.0, "test"), "h200": Price(4.0, "test")}


def make_sweep(folder: Path) -> Path:
    """Run the sweep below a folder and return its own."""
    (folder / "grid.yaml").write_text(SPEC)
    before = os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = "1700000000"
    assert main(["sweep", str(folder / "grid.yaml"), "-o", str(folder / "out"), "--jobs", "1"]) == 0
    os.environ.pop("SOURCE_DATE_EPOCH") if before is None else os.environ.update(SOURCE_DATE_EPOCH=before)
    return folder / "out" / "grid"


def make_plan(folder: Path) -> Path:
    """A plan with a fleet that is surely within its limit of 11 ms, and one whose interval reaches beyond."""
    fleets = [
        {
            "label": gpu, "replicas": 2, "gpus": 2, "deployment": {"gpu": gpu, "model": "m"}, "usd_per_gpu_hour": usd,
            "p95_ttft_ms": ttft_ms, "p95_tpot_ms": 2.0, "p95_ttft_ms_ci95": [0.9 * ttft_ms, 1.2 * ttft_ms],
            "output_throughput": 100.0, "doubtful": ["P95 TTFT"] if 1.2 * ttft_ms > 11 else [],
        }
        for gpu, usd, ttft_ms in (("l40s", 1.0, 10.0), ("h200", 4.0, 6.0))
    ]  # fmt: skip
    plan = {
        "schema": SCHEMA, "fleets": fleets, "load": 5.0, "unit": "requests/s", "pruned": [],
        "promises": {"slos_ms": {"p95_ttft": 11.0, "p95_tpot": 4.0}},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def rows(sweep: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(sweep / "results.parquet").to_pylist()
    return found


def keeps(row: dict[str, Any], ttft_ms: float, tpot_ms: float) -> bool:
    good = row["p95_ttft_ms"] <= ttft_ms and row["p95_tpot_ms"] <= tpot_ms
    return good and not row["failed"] and row["sim_load"] != "saturated"


def undominated(points: dict[int, tuple[float, float]]) -> set[int]:
    """By definition: no other point is at most as large in both and smaller in one."""
    return {
        i
        for i, a in points.items()
        if not any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in points.values())
    }


def usd_per_million(row: dict[str, Any]) -> float:
    return PRICES[row["gpu"]].usd_per_hour * row["num_gpus"] / (row["output_throughput"] * 3600) * 1e6
