"""Our own table of microbenchmarks: one row a measurement, plain columns, seconds; CSV or Parquet.

`kind` says which kernel, and with it which columns hold its problem (`AXES`). The others stay empty.
docs/calibration.md describes every column.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from calibration.tables import Table, number
from costmodel.formats import GEMM_FORMATS, KV_FORMATS
from costmodel.kernels import FORMULAS
from serving.errors import UsageError, nearest

Row = dict[str, str]

AXES: dict[str, tuple[str, ...]] = {kind: (*shape, *grid) for kind, (_, _, shape, grid) in FORMULAS.items()}
"""Columns that a kernel's rows must fill: those of its formula, such as n, k, m for a GEMM."""

COLUMNS: tuple[str, ...] = (
    "kind",
    "dtype",
    *dict.fromkeys(axis for axes in AXES.values() for axis in axes),
    "head_dim",
    "latency_s",
    "repeats",
    "noise",
)
"""Every column, in the order in which `write` puts them."""

MODE = "microbenchmark"
_TOKENWISE = ("moe", "elementwise", "sampler")
_KV_DTYPES = {"": "bfloat16", "bfloat16": "bfloat16", "float16": "bfloat16", "half": "bfloat16"} | {
    name: name for name in KV_FORMATS
}


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write measurements; the suffix of `path` says whether as Parquet or CSV.

    `UsageError` for an unknown kind, a column that does not exist or one that a kind needs and lacks.
    """
    found = list(rows)
    for number_, row in enumerate(found, 1):
        if unknown := sorted(set(row) - set(COLUMNS)):
            raise UsageError(f"{path}: row {number_}: {unknown[0]!r} is no column of a microbenchmark table")
        _check(str(row.get("kind")), {name for name, value in row.items() if value is not None}, str(path))
    if path.suffix == ".parquet":
        pa: Any = import_module("pyarrow")  # slow to import, only needed for Parquet
        pq: Any = import_module("pyarrow.parquet")

        text = {"kind": pa.string(), "dtype": pa.string(), "repeats": pa.int64()}
        schema = pa.schema([(name, text.get(name, pa.float64())) for name in COLUMNS])
        pq.write_table(pa.Table.from_pylist([dict(row) for row in found], schema=schema), path)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


def _check(kind: str, columns: set[str], where: str) -> None:
    if kind not in AXES:
        raise UsageError(f"{where}: kind {kind!r} is not a kernel; {nearest(kind, AXES)}")
    if missing := [axis for axis in AXES[kind] if axis not in columns]:
        raise UsageError(
            f"{where}: rows of kind {kind} need the columns {', '.join(AXES[kind])}; no {missing[0]}"
        )


def converted(table: Table) -> list[Table]:
    """`table` (of kind microbench) as one table per kernel; `UsageError` for an unknown kind or missing columns."""
    columns = set(table.rows[0]) if table.rows else set()
    found: dict[str, Table] = {}
    for row in table.rows:
        kind = row["kind"].strip()
        if kind not in found:
            _check(kind, columns, str(table.path))
            found[kind] = table.holding("comm" if kind == "all_reduce" else kind, [])
        if (repeats := row.get("repeats", "")) and not number(repeats) >= 1:
            found[kind].dropped["no repeats"] += 1
            continue
        found[kind].rows.append(_row(kind, row, str(table.path)))
    return list(found.values())


def _row(kind: str, row: Row, where: str) -> Row:
    common = {"latency_us": repr(number(row["latency_s"]) * 1e6), "noise": row.get("noise", "")}
    dtype = row["dtype"].strip()
    if kind == "gemm":
        name = {"float16": "bfloat16", "half": "bfloat16"}.get(dtype, dtype)
        if name not in GEMM_FORMATS:
            raise UsageError(
                f"{where}: dtype {dtype!r} of a gemm is not modelled; {nearest(dtype, GEMM_FORMATS)}"
            )
        return {**common, "dtype": name, **{axis: row[axis] for axis in AXES[kind]}}
    if kind == "all_reduce":
        fixed = {"impl": MODE, "version": "", "op": kind, "mode": MODE, "dtype": "bfloat16"}
        return {**common, **fixed, "n_gpus": row["num_gpus"], "bytes": row["bytes"]}
    if kind in _TOKENWISE:
        return {**common, **{axis: row[axis] for axis in AXES[kind]}}
    if dtype not in _KV_DTYPES:
        raise UsageError(
            f"{where}: dtype {dtype!r} of a KV cache is not modelled; {nearest(dtype, _KV_DTYPES)}"
        )
    return {
        **common,
        "kv_dtype": _KV_DTYPES[dtype],
        "heads": row["heads"],
        "kv_heads": row["kv_heads"],
        "head_dim": row.get("head_dim") or "128",
        "batch": row["batch"],
        "isl": row.get("tokens", ""),
        "context": row["context"],
        "kv_len": row["context"],
    }
