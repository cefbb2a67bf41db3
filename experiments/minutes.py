"""A run minute by minute: what a dashboard would have shown, one row per minute since the first request."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from experiments.alert_series import endings, gauge, held, sampled, samples
from experiments.observed import span_s
from experiments.results import writable
from experiments.utilisation import Work, rates_by_window
from sim.record import Floats, RunRecord

FILE = "minutes.parquet"
MINUTE_S = 60.0
DEVICE = "device_samples"
"""Key in `RunRecord.meta` of what the device's driver said: lists of equal length, `time_s` among them."""


def minute_columns(
    record: RunRecord, work: Work | None = None, *, window_s: float = MINUTE_S
) -> dict[str, Floats]:
    """Columns by name, shape (minutes,); NaN where a minute saw nothing. `work` adds FLOP/s, bytes/s, MFU and MBU.

    `start_s` is since the first request. Latencies are of what happened within the minute: a TTFT counts where its
    first token came, TPOT and E2EL where the answer ended.
    """
    from_s, to_s = span_s(record)
    count = max(1, int(np.ceil((to_s - from_s) / window_s - 1e-9)))
    edges_s: Floats = from_s + window_s * np.arange(count + 1, dtype=np.float64)
    ends_s = edges_s[1:]
    ended_s, failed = endings(record)
    out: dict[str, Floats] = {
        "start_s": edges_s[:-1] - from_s,
        "arrived": _counts(record.requests.sent_s, edges_s),
        "completed": _counts(ended_s[failed == 0], edges_s),
        "failed": _counts(ended_s[failed == 1], edges_s),
        "error_rate": sampled(ended_s, failed, "mean", ends_s, window_s),
    }
    for metric in ("ttft", "tpot", "e2el", "queue"):
        seen_s, values = samples(record, metric)
        for statistic in ("p50", "p95", "p99"):
            out[f"{statistic}_{metric}_s"] = sampled(seen_s, values, statistic, ends_s, window_s)
    for name in ("kv_usage", "running", "waiting"):
        function = gauge(record, name)
        for statistic in ("mean", "max"):
            out[f"{name}_{statistic}"] = held(function, statistic, ends_s, window_s)
    if work is not None and len(record.steps) and record.fleet is None:
        out["flops_per_s"], out["bytes_per_s"] = rates_by_window(record, work, edges_s)
        out["mfu"] = out["flops_per_s"] / work.peak_flops_per_s
        out["mbu"] = out["bytes_per_s"] / work.peak_bytes_per_s
    return out | device_columns(record, ends_s, window_s)


def device_columns(record: RunRecord, ends_s: Floats, window_s: float) -> dict[str, Floats]:
    """Means of what the driver said (`power_w`, `gpu_utilization`, …) in each window; nothing where it was not asked."""
    known: Mapping[str, Any] = record.meta.get(DEVICE) or {}
    if not known.get("time_s"):
        return {}
    at_s = np.asarray(known["time_s"], np.float64)
    out = {}
    for name, values in known.items():
        column = np.asarray(values, np.float64)
        told = ~np.isnan(column)
        if name != "time_s" and told.any():
            out[name] = sampled(at_s[told], column[told], "mean", ends_s, window_s)
    return out


def write_minutes(record: RunRecord, work: Work | None, folder: Path) -> Path:
    """Write `minutes.parquet` and return its path. Raises UsageError when it cannot be written."""
    columns = {
        name: values.astype(np.int64) if name in ("arrived", "completed", "failed") else values
        for name, values in minute_columns(record, work).items()
        if not (name in ("mfu", "mbu") and np.isnan(values).all())
    }
    pa: Any = import_module("pyarrow")
    pq: Any = import_module("pyarrow.parquet")
    path = folder / FILE
    with writable(folder):
        table = pa.table({name: pa.array(values, from_pandas=True) for name, values in columns.items()})
        pq.write_table(table, path, compression="zstd")
    return path


def _counts(times_s: Floats, edges_s: Floats) -> Floats:
    """Events in (edge, next edge]; one at the very beginning belongs to the first window."""
    known = np.sort(times_s[~np.isnan(times_s)])
    upto = np.searchsorted(known, edges_s, side="right")
    upto[0] = 0
    return np.diff(upto).astype(np.float64)
