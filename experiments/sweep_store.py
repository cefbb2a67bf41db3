"""Where a sweep's results are: one Parquet file per finished run as they come, and the tree of `vllm bench sweep`.

Every file appears whole (written beside, then renamed), and a run's Parquet file appears last: it is the mark that the
run is done. All Parquet files of a sweep have one schema, so that `SELECT … FROM 'points/*.parquet'` just works.

    <out>/<experiment>/sweep.json                      what was asked for
                       points/000007.parquet           one row: parameters and figures, or the error
                       SERVE--k=v-BENCH--k=v/run=0.json, summary.json, run=1.failure.json
                       summary.csv, results.parquet    all of them, when the sweep is over
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.results import METRICS, writable
from experiments.sweep_spec import NAME, Params, canonical, label
from serving.errors import UsageError
from sim.replications import RATES, SHARES

SWEEP, POINTS, RESULTS, SUMMARY, SUMMARY_CSV = (
    "sweep.json",
    "points",
    "results.parquet",
    "summary.json",
    "summary.csv",
)
_LONGEST_NAME = 180

OF_THE_INPUT = ("UsageError", "InfeasibleError")
FIXED = dict.fromkeys(("index", "run"), "int") | dict.fromkeys(
    ("name", "status", "error", "error_type"), "str"
)
STATISTICS = ("mean", "median", "std", "p50", "p90", "p95", "p99")
COLUMNS: dict[str, str] = {
    **dict.fromkeys(
        ("num_prompts", "completed", "failed", "total_input_tokens", "total_output_tokens"), "int"
    ),
    "duration": "float",
    **dict.fromkeys(("request_throughput", "request_goodput", "output_throughput"), "float"),
    **dict.fromkeys(("total_token_throughput", "slo_attainment", "max_output_tokens_per_s"), "float"),
    "max_concurrent_requests": "int",
    **{f"{statistic}_{metric}_ms": "float" for metric in METRICS for statistic in STATISTICS},
    **dict.fromkeys(("sim_offered_rate", "sim_prefix_hit_rate", "sim_gpu_busy_share"), "float"),
    **dict.fromkeys(("sim_batch_occupancy_mean", "sim_kv_occupancy_mean", "sim_kv_occupancy_max"), "float"),
    **dict.fromkeys(("sim_preemptions", "sim_num_steps"), "int"),
    "sim_load": "str",
    "sim_bound": "str",
    "sim_meets_slos": "bool",
    "num_gpus": "int",
    "output_throughput_per_gpu": "float",
}
"""Figures of a run in its Parquet row, by name in the result JSON (but the last two), and their types."""
ENDS: dict[str, tuple[str, str]] = {
    f"{name}{unit}": (f"{name}_ci95_low{unit}", f"{name}_ci95_high{unit}")
    for name, unit in (
        *((f"{statistic}_{m}", "_ms") for m in METRICS for statistic in STATISTICS if statistic != "std"),
        *((name, "") for name in (*RATES, *SHARES)),
    )
}
"""Columns with the ends of the 95 % interval of a figure, where a sweep makes replications."""
INTERVALS = {end: "float" for both in ENDS.values() for end in both}


@dataclass(frozen=True, slots=True)
class Task:
    """One run of one point."""

    index: int
    run: int
    params: Params
    folder: str
    """Name of the point's folder in the tree."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task: the result JSON, or the error."""

    result: dict[str, Any] | None
    error: str = ""
    error_type: str = ""


def folder_name(params: Params, serving: Iterable[str]) -> str:
    """`SERVE--k=v-BENCH--k=v`, as vLLM names it; cut and completed by a hash where a file system would not take it."""
    known = set(serving)
    named = str(params.get(NAME, ""))
    if named:
        name = named if named.startswith(("SERVE--", "BENCH--")) else f"BENCH--{named}"
    else:
        serve = {key: value for key, value in params.items() if key in known}
        bench = {key: value for key, value in params.items() if key not in known}
        parts = [f"SERVE--{label(serve)}"] if serve else []
        parts += [f"BENCH--{label(bench)}"] if bench else []
        name = "-".join(parts) or "BENCH--base"
    safe = name.replace("/", "_").replace("\\", "_").replace("..", "__").replace("\0", "_")
    if len(safe.encode()) > _LONGEST_NAME:
        digest = hashlib.sha256(canonical(params).encode()).hexdigest()[:10]
        safe = safe.encode()[:_LONGEST_NAME].decode(errors="ignore") + "-" + digest
    return safe


class Store:
    """The folder of one sweep."""

    def __init__(
        self, root: Path, kinds: Mapping[str, str], serving: Iterable[str], *, intervals: bool = False
    ) -> None:
        self.root = root
        self.figures = COLUMNS | INTERVALS if intervals else COLUMNS
        self.kinds = dict(kinds)
        """Type of each parameter that varies: int, float, bool or str."""
        self.serving = tuple(serving)

    def open(self, asked: dict[str, Any], *, resume: bool) -> dict[str, Any]:
        """Make the folder, or continue in it. Returns what sweep.json says, `asked` on the first time.

        Raises UsageError when results are there and `resume` is not set, or were asked for with something else.
        """
        path = self.root / SWEEP
        with writable(self.root):
            if path.exists():
                if not resume:
                    raise UsageError(
                        f"{self.root} holds a sweep already; continue it with --resume, or choose another "
                        "--experiment-name"
                    )
                (self.root / POINTS).mkdir(exist_ok=True)
                return self._continue(asked, path)
            (self.root / POINTS).mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(asked, indent=1, default=str) + "\n")
        return asked

    def _continue(self, asked: dict[str, Any], path: Path) -> dict[str, Any]:
        try:
            before: Any = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(
                f"--resume: cannot read {path}: {error}; choose another --experiment-name"
            ) from None
        if not isinstance(before, dict):
            raise UsageError(f"--resume: {path} is not a JSON object; choose another --experiment-name")
        for key in ("base", "points", "search", "num_runs"):
            if canonical(before.get(key)) != canonical(asked.get(key)):
                raise UsageError(
                    f"--resume: {path} was made with another {key}; use another --experiment-name for a changed sweep"
                )
        for left in (*self.root.glob("*.part-*"), *self.root.glob("*/*.part-*")):
            left.unlink()
        return before

    def done(self) -> dict[int, dict[str, Any]]:
        """Rows of the runs that are done, by index; without failures that are not of the input: they are tried again."""
        pq: Any = import_module("pyarrow.parquet")
        rows = {}
        for path in sorted((self.root / POINTS).glob("[0-9]*.parquet")):
            row = pq.read_table(path).to_pylist()[0]
            if row["error_type"] in (None, *OF_THE_INPUT):
                rows[int(row["index"])] = row
        return rows

    def write(self, task: Task, outcome: Outcome) -> dict[str, Any]:
        """Keep what became of a task, and return its row."""
        with writable(self.root):
            folder = self.root / task.folder
            folder.mkdir(exist_ok=True)
            overrides = {key: value for key, value in task.params.items() if key != NAME}
            if outcome.result is None:
                failure = {
                    "run_number": task.run,
                    "error_type": outcome.error_type,
                    "error": outcome.error,
                    "serve_overrides": {k: v for k, v in overrides.items() if k in self.serving},
                    "bench_overrides": {k: v for k, v in overrides.items() if k not in self.serving},
                }
                write_whole(folder / f"run={task.run}.failure.json", json.dumps(failure, indent=2) + "\n")
            else:
                result = {**outcome.result, "run_number": task.run, **overrides}
                write_whole(folder / f"run={task.run}.json", json.dumps(result, indent=4))
                self._summarise(folder)
            row = self.row(task, outcome)
            self._parquet([row], self.root / POINTS / f"{task.index:06d}.parquet")
        return row

    def row(self, task: Task, outcome: Outcome) -> dict[str, Any]:
        """The Parquet row of a task."""
        result = dict(outcome.result or {})
        if result:
            fleet = result.get("sim_fleet") or {}
            one = (
                result["tensor_parallel_size"]
                * result["pipeline_parallel_size"]
                * result["data_parallel_size"]
            )
            result["num_gpus"] = fleet.get("num_gpus", one)
            result["output_throughput_per_gpu"] = result["output_throughput"] / result["num_gpus"]
        return {
            "index": task.index,
            "run": task.run,
            "name": task.params.get(NAME),
            "status": "done" if outcome.result is not None else "failed",
            "error": outcome.error or None,
            "error_type": outcome.error_type or None,
            **{self.column(key): _typed(task.params.get(key), kind) for key, kind in self.kinds.items()},
            **{name: _typed(result.get(name), kind) for name, kind in self.figures.items()},
        }

    def column(self, key: str) -> str:
        """A parameter's column: its name, or with a prefix where a figure has that name."""
        return f"param_{key}" if key in COLUMNS or key in FIXED else key

    def finish(self, folders: Iterable[str]) -> None:
        """Write all rows into one file, and all results into vLLM's summary.csv, in the order of `folders`."""
        rows = [row for _, row in sorted(self.done().items())]
        with writable(self.root):
            if rows:
                self._parquet(rows, self.root / RESULTS)
            results = []
            for path in (self.root / folder / SUMMARY for folder in folders):
                if path.exists():  # no run of a point may have ended well
                    results += json.loads(path.read_text(encoding="utf-8"))
            if results:
                write_whole(self.root / SUMMARY_CSV, _csv(results))

    def _summarise(self, folder: Path) -> None:
        runs = sorted(folder.glob("run=*[0-9].json"), key=lambda path: int(path.stem.partition("=")[2]))
        results = [json.loads(path.read_text(encoding="utf-8")) for path in runs]
        write_whole(folder / SUMMARY, json.dumps(results, indent=4))

    def _parquet(self, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
        pa: Any = import_module("pyarrow")
        pq: Any = import_module("pyarrow.parquet")
        types = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "str": pa.string()}
        kinds = {**FIXED, **{self.column(k): kind for k, kind in self.kinds.items()}, **self.figures}
        schema = pa.schema([(name, types[kind]) for name, kind in kinds.items()])
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema), sink, compression="zstd")
        write_whole(path, sink.getvalue())


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there whole or not at all, even when the process is killed."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(path)


def _typed(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind == "str":
        return value if isinstance(value, str) else canonical(value)
    return {"int": int, "float": float, "bool": bool}[kind](value)


def _csv(results: Sequence[Mapping[str, Any]]) -> str:
    """As pandas writes a frame of these records: an index, and the keys in order of first mention."""
    keys = list(dict.fromkeys(key for result in results for key in result))
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["", *keys])
    for index, result in enumerate(results):
        table.writerow([index, *("" if result.get(key) is None else result[key] for key in keys)])
    return out.getvalue()
