"""A saved run folder read back as a record: the inverse of `experiments.results.save_run` with steps.

Token ranges are not saved, so gaps between tokens (ITL) are not there; everything per request and per step is.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from experiments.results import STEPS, load_run
from serving.errors import UsageError
from sim.record import RequestTable, RunRecord, Status, StepTable, Tenant, TokenRanges

_FLOATS = {"start_s", "end_s", "gpu_s", "host_s", "prefill_attention_area"}


def load_record(folder: str | Path) -> RunRecord:
    """The record of a saved run. Raises UsageError naming what is missing or broken."""
    saved = load_run(folder)
    path = saved.folder / STEPS
    if not path.is_file():
        raise UsageError(f"{folder}: no {STEPS}; run again with -o, which saves the steps")
    run, capacity = saved.run, saved.run.get("capacity") or {}
    requests, names = saved.requests(), [str(name) for name in run.get("tenants") or ["default"]]
    try:
        steps = import_module("pyarrow.parquet").read_table(path)
        columns = {f.name: _column(requests, f.name) for f in fields(RequestTable)}
        codes = {status.name.lower(): int(status) for status in Status}
        columns["status"] = np.array([codes[word] for word in columns["status"]], np.int64)
        columns["tenant"] = np.array([names.index(name) for name in columns["tenant"]], np.int64)
        table = StepTable(
            **{
                f.name: _column(steps, f.name).astype(np.float64 if f.name in _FLOATS else np.int64)
                for f in fields(StepTable)
            }
        )
        sizes = {
            name: int(capacity[name])
            for name in ("num_pages", "page_tokens", "num_replicas", "max_num_seqs", "max_num_batched_tokens")
        }
        end_s = float(run["end_s"])
    except (KeyError, ValueError, OSError) as error:
        raise UsageError(f"{folder}: not a run saved by this version ({error})") from None
    ours = {"capacity", "partial", "end_s", "tenants", "warnings"}
    empty = np.empty(0, np.int64)
    return RunRecord(
        requests=RequestTable(**columns),
        steps=table,
        tokens=TokenRanges(np.zeros(len(columns["status"]) + 1, np.int64), empty, empty.copy()),
        tenants=tuple(Tenant(name) for name in names),
        end_s=end_s,
        interrupted=bool(run.get("partial")),
        warnings=tuple(run.get("warnings") or ()),
        meta={key: value for key, value in run.items() if key not in ours},
        **sizes,
    )


def _column(table: Any, name: str) -> Any:
    values = table.column(name).to_numpy(zero_copy_only=False)
    return values if values.dtype == object else np.array(values)
