"""Points of InferenceX (InferenceMAX) as a CSV: means of TTFT and TPOT per (lengths, concurrency, devices).

Its recipe is built in: a closed loop of `conc` clients and 10 x conc requests that all start at once, lengths
uniform integers in [0.8 x, x], answers of the full length; a server without prefix caching, FP8 weights and KV
for precision fp8, max_num_seqs = conc, 8192 batched tokens, max_model_len = isl + osl + 20 (1k/1k) or + 200,
0.9 of memory, asynchronous scheduling.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from calibration.observed import (
    Case,
    Observed,
    number,
    plain_workload,
    read_rows,
    semantics_of,
    with_engine,
)
from costmodel.engine_version import parse_version
from serving.errors import UsageError
from sim.deployment import Deployment

HEADER = ("model", "system", "precision", "isl", "osl", "conc", "tp_size", "ttft_mean_ms", "tpot_mean_ms")
DEFAULT_VERSION = "0.10.2"
"""The engine of the published points of October 2025, whose version column is empty."""


def is_inferencex(path: Path) -> bool:
    """Whether the first line of a CSV file names the columns of InferenceX points."""
    if not path.is_file() or path.suffix.lower() != ".csv":
        return False
    try:
        with path.open(encoding="utf-8-sig") as file:
            header = file.readline().strip().split(",")
    except (OSError, UnicodeDecodeError):
        return False
    return set(HEADER) <= set(header)


def read_points(path: Path, run: str | None, profile: str | None, seed: int) -> list[Case]:
    """Every point of the file whose label contains `run` (all when None). Raises `UsageError` when none does."""
    cases = [_case(row, path, profile, seed) for row in read_rows(path, HEADER)]
    kept = [c for c in cases if run is None or run.lower() in c.name.lower()]
    if not kept:
        some = cases[0].name if cases else "nothing"
        raise UsageError(f"--run {run!r} is in no label of {path}; labels read like {some!r}")
    return kept


def _case(row: dict[str, str], path: Path, profile: str | None, seed: int) -> Case:
    isl, osl, conc, tp = (int(number(row, c, path)) for c in ("isl", "osl", "conc", "tp_size"))
    fp8 = row["precision"].lower() == "fp8"
    engine = row.get("backend_version") or DEFAULT_VERSION
    version = parse_version(engine)
    values: dict[str, Any] = {
        "model": row["model"],
        "gpu": profile or row["system"],
        "tensor_parallel_size": tp,
        "quantization": "fp8" if fp8 else None,
        "kv_cache_dtype": "fp8" if fp8 else "auto",
        "max_num_seqs": conc,
        "max_num_batched_tokens": 8192,
        "max_model_len": isl + osl + (20 if isl == osl == 1024 else 200),
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": False,
        "semantics": semantics_of(version),
        "async_scheduling": True,
    }
    rng = np.random.default_rng([seed, isl, osl, conc])
    count = 10 * conc
    prompts = rng.integers(math.ceil(0.8 * isl), isl, size=count, endpoint=True)
    outputs = rng.integers(math.ceil(0.8 * osl), osl, size=count, endpoint=True)
    label = f"{isl}/{osl} tp{tp} conc{conc}"
    workload = plain_workload(
        label, np.zeros(count), prompts.tolist(), outputs.tolist(), max_concurrency=conc
    )
    observed = Observed(
        means_ms={"ttft": number(row, "ttft_mean_ms", path), "tpot": number(row, "tpot_mean_ms", path)}
    )
    return Case(label, with_engine(Deployment(**values), engine), workload, observed, False, version)
