"""AIConfigurator's measured tables (github.com/ai-dynamo/aiconfigurator, `systems/data/<gpu>/…/*_perf.*`).

Latencies are milliseconds under CUDA-graph replay. A message size counts elements, not bytes. `step` is the
number of cached tokens: of a decode row it and `isl` (1) make up the context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from calibration.tables import Table, number
from costmodel.formats import GEMM_FORMATS

Row = dict[str, str]

SIXTEEN_BIT = {"bfloat16": "bfloat16", "float16": "bfloat16", "half": "bfloat16"}
_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float": 4, "int8": 1, "fp8": 1}

TABLES = (
    "gemm_perf",
    "context_attention_perf",
    "generation_attention_perf",
    "custom_allreduce_perf",
    "nccl_perf",
)
"""Stems of the files that are read; the others time modules that the cost model does not have."""


def converted(table: Table) -> list[Table]:
    """`table` (of kind aic_gemm, aic_attention or aic_comm) in our own layout."""
    if table.kind == "aic_gemm":
        return [_gemm(table)]
    if table.kind == "aic_comm":
        return [_comm(table)]
    return _attention(table)


def _microseconds(row: Row) -> str:
    return repr(number(row["latency"]) * 1e3)


def _gemm(table: Table) -> Table:
    rows: list[Row] = []
    found = table.holding("gemm", rows)
    for row in table.rows:
        dtype = SIXTEEN_BIT.get(row["gemm_dtype"], row["gemm_dtype"])
        if dtype not in GEMM_FORMATS:
            found.dropped[f"number format {dtype or '(none)'}"] += 1
            continue
        rows.append({**{axis: row[axis] for axis in "mnk"}, "dtype": dtype, "latency_us": _microseconds(row)})
        rows[-1]["kernel"] = row.get("kernel_source", "")
    _one_kernel(rows, found.dropped, lambda r: (r["dtype"], r["m"], r["n"], r["k"]), lambda r: r["dtype"])
    return found


def _attention(table: Table) -> list[Table]:
    prefill, decode = table.holding("prefill", []), table.holding("decode", [])
    for row in table.rows:
        found = decode if row["op_name"].startswith("generation") else prefill
        kv_dtype = SIXTEEN_BIT.get(row["kv_cache_dtype"], row["kv_cache_dtype"])
        if row["attn_dtype"] not in SIXTEEN_BIT:
            found.dropped[f"attention arithmetic in {row['attn_dtype'] or '(none)'}"] += 1
        elif number(row.get("window_size") or "0") > 0:
            found.dropped["sliding window"] += 1
        elif number(row.get("beam_width") or "1") > 1:
            found.dropped["beam search"] += 1
        else:
            heads = row["num_heads"]
            kv_heads = row["num_key_value_heads"]
            cached = number(row["step"] or "0")
            found.rows.append(
                {
                    "kv_dtype": kv_dtype,
                    "heads": heads,
                    "kv_heads": heads if kv_heads == "0" else kv_heads,
                    "head_dim": row["head_dim"],
                    "batch": row["batch_size"],
                    "isl": row["isl"],
                    "context": repr(cached),
                    "kv_len": repr(cached + number(row["isl"])),
                    "latency_us": _microseconds(row),
                    "kernel": row.get("kernel_source", ""),
                }
            )
    for found in (prefill, decode):
        _one_kernel(found.rows, found.dropped, _attention_problem, lambda r: r["kv_dtype"])
    return [found for found in (prefill, decode) if found.rows or found.dropped]


def _attention_problem(row: Row) -> tuple[str, ...]:
    axes = ("kv_dtype", "heads", "kv_heads", "head_dim", "batch", "isl", "kv_len")
    return tuple(row[axis] for axis in axes)


def _comm(table: Table) -> Table:
    rows = []
    for row in table.rows:
        nccl = "nccl_dtype" in row
        dtype = row.get("nccl_dtype") or row.get("allreduce_dtype") or "half"
        rows.append(
            {
                "impl": "nccl" if nccl else row.get("framework", "").lower(),
                "version": row.get("version", ""),
                "op": row["op_name"],
                "mode": "nccl-tests" if nccl else row.get("kernel_source", ""),
                "dtype": dtype,
                "n_gpus": row["num_gpus"],
                "bytes": repr(number(row["message_size"]) * _ELEMENT_BYTES.get(dtype, 2)),
                "latency_us": _microseconds(row),
            }
        )
    return table.holding("comm", rows)


def _one_kernel(
    rows: list[Row],
    dropped: Counter[str],
    problem: Callable[[Row], tuple[str, ...]],
    family: Callable[[Row], str],
) -> None:
    """Where several kernels were timed on one problem, keep the one that was timed most often in its family."""
    often = Counter((family(row), row["kernel"]) for row in rows)
    best: dict[tuple[str, ...], str] = {}
    for row in rows:
        key = problem(row)
        if key not in best or often[family(row), row["kernel"]] > often[family(row), best[key]]:
            best[key] = row["kernel"]
    kept = [row for row in rows if best[problem(row)] == row["kernel"]]
    if len(kept) < len(rows):
        dropped["another kernel was timed on the same problem"] += len(rows) - len(kept)
        rows[:] = kept
