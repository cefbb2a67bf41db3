"""Real runs of vLLM kept as CSV: `*_runs.csv` (settings), `*_requests.csv` (times), `*_timeseries.csv` (1 Hz).

Times of a run share the engine's clock. Latencies start when the engine queues a request.
"""

from __future__ import annotations

import json
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
from serving.errors import UsageError, nearest
from sim.deployment import Deployment
from sim.record import Floats

_REQUEST_COLUMNS = ("run", "req", "input_toks", "output_toks", "ttft_ms", "tpot_ms", "e2e_ms")
_RUN_COLUMNS = ("run", "hardware", "model")
_ARRIVALS = ("queued_s", "arrival_obs_s", "arrival_plan_s")
"""When a request reached the engine, best source first."""


def is_folder_of_runs(path: Path) -> bool:
    """Whether `path` is a folder with a requests file and a runs file."""
    return path.is_dir() and any(path.glob("*_requests.csv")) and any(path.glob("*_runs.csv"))


def read_runs(folder: Path, run: str | None, profile: str | None, prefixes: Path | None) -> Case:
    """The run named `run` (a unique part of its name is enough; the only run when None).

    Raises `UsageError` for unreadable files, an unknown or ambiguous name, or settings that cannot be.
    """
    settings, requests_path = _choose(folder, run)
    name = settings["run"]
    rows = [r for r in read_rows(requests_path, _REQUEST_COLUMNS) if r["run"] == name]
    if not rows:
        raise UsageError(f"{requests_path}: no requests of run {name!r}")
    rows.sort(key=lambda r: int(number(r, "req", requests_path)))
    arrival = next((c for c in _ARRIVALS if rows[0].get(c)), None)
    if arrival is None:
        raise UsageError(
            f"{requests_path}: no arrival times; one of the columns {', '.join(_ARRIVALS)} is needed"
        )

    def column(key: str) -> Floats:
        return np.array([number(r, key, requests_path) for r in rows])

    prompts = column("input_toks").astype(int).tolist()
    outputs = column("output_toks").astype(int).tolist()
    version = parse_version(settings.get("engine_version", ""))
    deployment = _deployment(settings, profile, version)
    hash_ids, notes = _prefixes(folder, prefixes, prompts, outputs, deployment)
    workload = plain_workload(
        name, column(arrival), prompts, outputs, hash_ids=hash_ids, block_tokens=deployment.block_size
    )
    time_s, series = _series(folder, name)
    several = np.asarray(outputs) > 1
    blocks = settings.get("num_gpu_blocks", "")
    observed = Observed(
        samples={
            "ttft": column("ttft_ms") / 1e3,
            "tpot": column("tpot_ms")[several] / 1e3,
            "e2el": column("e2e_ms") / 1e3,
        },
        time_s=time_s,
        series=series,
        num_pages=int(float(blocks)) if blocks else None,
    )
    notes = [
        f"requests reach the engine at {arrival}, and latencies start there",
        f"scheduler semantics {deployment.semantics} for engine version {settings.get('engine_version') or '?'}",
        *notes,
    ]
    return Case(name, deployment, workload, observed, True, version, tuple(notes))


def _choose(folder: Path, run: str | None) -> tuple[dict[str, str], Path]:
    """Settings of the chosen run, and the file with its requests."""
    found: dict[str, tuple[dict[str, str], Path]] = {}
    for path in sorted(folder.glob("*_runs.csv")):
        requests = path.with_name(path.name.replace("_runs.csv", "_requests.csv"))
        if requests.is_file():
            found |= {row["run"]: (row, requests) for row in read_rows(path, _RUN_COLUMNS)}
    if not found:
        raise UsageError(f"{folder}: no runs; a folder with X_runs.csv and X_requests.csv is needed")
    if run is None:
        if len(found) > 1:
            raise UsageError(f"{folder} holds {len(found)} runs; choose one with --run: {', '.join(found)}")
        return next(iter(found.values()))
    if run in found:
        return found[run]
    close = [name for name in found if run.lower() in name.lower()]
    if len(close) == 1:
        return found[close[0]]
    why = f"matches {', '.join(close)}" if close else nearest(run, found)
    raise UsageError(f"--run {run!r} is not one run of {folder}; {why}")


def _deployment(settings: dict[str, str], profile: str | None, version: tuple[int, ...]) -> Deployment:
    def given(column: str) -> str | None:
        return settings.get(column) or None

    def whole(column: str) -> int | None:
        text = given(column)
        return None if text is None else int(float(text))

    values: dict[str, Any] = {
        "model": settings["model"],
        "gpu": profile or settings["hardware"].lower().replace(" ", ""),
        "tensor_parallel_size": whole("tp"),
        "data_parallel_size": whole("dp"),
        "dtype": given("dtype"),
        "kv_cache_dtype": given("kv_dtype"),
        "max_num_seqs": whole("max_num_seqs"),
        "max_num_batched_tokens": whole("max_num_batched_tokens"),
        "max_model_len": whole("max_model_len"),
        "block_size": whole("block_size"),
        "gpu_memory_utilization": float(given("gpu_memory_utilization") or 0.9),
        "enable_prefix_caching": not _off(given("prefix_caching")),
        "enforce_eager": _off(given("cuda_graph")),
        "semantics": semantics_of(version),
        "async_scheduling": True,
        "tokenize_us_per_token": 0.0,
        "detokenize_us_per_token": 0.0,
    }
    deployment = Deployment(**{k: v for k, v in values.items() if v is not None})
    return with_engine(deployment, settings.get("engine_version", ""))


def _off(text: str | None) -> bool:
    return text is not None and text.strip().lower() in ("false", "off", "0", "none", "no")


def _series(folder: Path, run: str) -> tuple[Floats, dict[str, Floats]]:
    """The 1 Hz series of a run, where there is one; a KV column of zeros was not recorded."""
    for path in sorted(folder.glob("*_timeseries.csv")):
        rows = [r for r in read_rows(path, ("run", "t", "running", "waiting")) if r["run"] == run]
        if rows:
            time_s = np.array([number(r, "t", path) for r in rows])
            series = {k: np.array([number(r, k, path) for r in rows]) for k in ("running", "waiting")}
            if "kv_cache_pct" in rows[0]:
                kv = np.array([number(r, "kv_cache_pct", path) for r in rows]) / 100
                if kv.any():
                    series["kv"] = kv
            return time_s, series
    return np.empty(0), {}


def _prefixes(
    folder: Path, given: Path | None, prompts: list[int], outputs: list[int], deployment: Deployment
) -> tuple[list[list[int]], list[str]]:
    """Block ids of every prompt, from the file given or from the trace beside the folder whose lengths fit."""
    if not deployment.enable_prefix_caching:
        return [], []
    candidates = (
        [given] if given else sorted((folder.parent / "traces").glob(f"*_block{deployment.block_size}.jsonl"))
    )
    for path in candidates:
        try:
            entries = [
                json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
            ]
            lengths = [(int(e["input_length"]), int(e["output_length"])) for e in entries]
            ids = [list(map(int, e["hash_ids"])) for e in entries]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path}: not a trace with hash_ids ({error})") from None
        if lengths == list(zip(prompts, outputs, strict=True)):
            return ids, [f"prefixes shared as in {path.name}"]
    if given:
        raise UsageError(
            f"{given}: its lengths are not those of the run, request by request; give the run's own trace"
        )
    return [], ["no trace with the run's prefixes was found: the twin shares none (--prefixes names one)"]
