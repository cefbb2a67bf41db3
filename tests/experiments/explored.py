"""A small sweep that was really run, and what its rows say by definition, for the tests of `tokentwin explore`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

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
