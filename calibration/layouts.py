"""Which table of kernel timings a file is, told by its header alone, and its rows as text.

CSV (also named .txt) and Parquet are read, recognised by their first bytes. What the columns mean is the
business of `aiconfigurator`, `vidur`, `lss` and `bench_table`.
"""

from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path
from typing import Any

from serving.errors import UsageError

Rows = list[dict[str, str]]

REQUIRED: dict[str, frozenset[str]] = {
    "gemm": frozenset({"dtype", "m", "n", "k", "latency_us"}),
    "prefill": frozenset({"kv_dtype", "heads", "kv_heads", "head_dim", "batch", "isl", "latency_us"}),
    "decode": frozenset({"kv_dtype", "heads", "kv_heads", "head_dim", "batch", "kv_len", "latency_us"}),
    "comm": frozenset({"impl", "op", "mode", "n_gpus", "bytes", "latency_us"}),
    "lss_attention": frozenset({"prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"}),
    "lss_moe": frozenset({"tokens", "activated_experts", "time_us"}),
    "lss_dense": frozenset({"layer", "tokens", "time_us"}),
    "lss_sequence": frozenset({"layer", "sequences", "time_us"}),
    "lss_layers": frozenset({"layer_name", "input", "kv_cache", "tp_size", "latency(ns)"}),
    "aic_gemm": frozenset({"gemm_dtype", "m", "n", "k", "latency"}),
    "aic_attention": frozenset(
        {
            *("op_name", "attn_dtype", "kv_cache_dtype", "num_heads", "num_key_value_heads", "head_dim"),
            *("batch_size", "isl", "step", "latency"),
        }
    ),
    "aic_comm": frozenset({"op_name", "num_gpus", "message_size", "latency"}),
    "vidur_mlp": frozenset(
        {
            *("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "use_gated_mlp", "num_tokens"),
            *("num_tensor_parallel_workers", "time_stats.mlp_up_proj.median"),
        }
    ),
    "vidur_attention": frozenset(
        {
            *("n_embd", "n_q_head", "n_kv_head", "num_tensor_parallel_workers", "batch_size"),
            *("prefill_chunk_size", "kv_cache_size", "is_prefill", "time_stats.attn_decode.median"),
        }
    ),
    "vidur_all_reduce": frozenset({"time_stats.all_reduce.median", "num_workers", "size", "collective"}),
    "microbench": frozenset({"kind", "dtype", "latency_s"}),
}
"""Columns that a table of each kind cannot do without; the first kind whose columns are all there wins."""

NAMES: dict[str, str] = {
    "gemm": "a table of GEMM timings",
    "prefill": "a table of prefill attention timings",
    "decode": "a table of decode attention timings",
    "comm": "a table of collective timings",
    "lss_attention": "an LLMServingSim attention table",
    "lss_moe": "an LLMServingSim table of experts",
    "lss_dense": "an LLMServingSim table of layers",
    "lss_sequence": "an LLMServingSim table of layers by sequence",
    "lss_layers": "an LLMServingSim table of layers (2025 layout)",
    "aic_gemm": "an AIConfigurator GEMM table",
    "aic_attention": "an AIConfigurator attention table",
    "aic_comm": "an AIConfigurator collectives table",
    "vidur_mlp": "a Vidur mlp table",
    "vidur_attention": "a Vidur attention table",
    "vidur_all_reduce": "a Vidur all_reduce table",
    "microbench": "a table of microbenchmarks",
}

SUFFIXES = (".csv", ".parquet", ".txt")


def recognise(header: frozenset[str], where: str) -> str:
    """The kind of table with this header; `UsageError` names the columns that it lacks, or that it is none."""
    for kind, required in REQUIRED.items():
        if required <= header:
            return kind
    likely = max(REQUIRED, key=lambda kind: len(REQUIRED[kind] & header) / len(REQUIRED[kind]))
    missing = sorted(REQUIRED[likely] - header)
    if len(missing) * 2 <= len(REQUIRED[likely]):
        columns = f"column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise UsageError(f"{where}: it looks like {NAMES[likely]} but has no {columns}")
    shown = sorted(header)[:8]
    more = f" and {len(header) - len(shown)} more" if len(header) > len(shown) else ""
    raise UsageError(f"{where}: line 1: header {shown}{more} is not a known table of kernel timings")


def read_rows(path: Path, data: bytes) -> tuple[frozenset[str], Rows]:
    """Column names and rows of a CSV or Parquet file with the content `data`; empty cells are ''."""
    if data[:4] == b"PAR1":
        return _parquet_rows(path, data)
    try:
        reader = csv.DictReader(data.decode("utf-8-sig").splitlines())
        rows = [{key: value or "" for key, value in row.items() if key} for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read as CSV ({error})") from None
    return frozenset(reader.fieldnames or ()), rows


def _parquet_rows(path: Path, data: bytes) -> tuple[frozenset[str], Rows]:
    pa: Any = import_module("pyarrow")  # slow to import, only needed for Parquet
    pq: Any = import_module("pyarrow.parquet")

    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{path}: cannot be read as Parquet ({reason})") from None
    names = [str(name) for name in table.column_names]
    columns = [["" if v is None else str(v) for v in column.to_pylist()] for column in table.columns]
    return frozenset(names), [dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True)]
