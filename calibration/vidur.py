"""Vidur's profiling tables (github.com/microsoft/vidur, `data/profiling/{compute,network}/…`): mlp.csv,
attention.csv, all_reduce.csv.

`time_stats.<operation>.median` is in milliseconds of kernel time, to the microsecond, in 16 bit. Columns give
the whole model; operations run on one of `num_tensor_parallel_workers`. `kv_cache_size` tokens of each
sequence are cached before the operation; `size` of a collective is in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from calibration.tables import Table, number

Row = dict[str, str]
_TRUE = ("true", "1", "1.0")

NCCL_MODE = "NCCL kernels (Vidur)"


def converted(table: Table) -> list[Table]:
    """`table` (of kind vidur_mlp, vidur_attention or vidur_all_reduce) in our own layout."""
    if table.kind == "vidur_all_reduce":
        return [table.holding("comm", [_all_reduce(row) for row in table.rows])]
    if table.kind == "vidur_attention":
        prefill, decode = table.holding("prefill", []), table.holding("decode", [])
        for row in table.rows:
            is_prefill = row["is_prefill"].strip().lower() in _TRUE
            (prefill if is_prefill else decode).rows.append(_attention(row, is_prefill))
        return [found for found in (prefill, decode) if found.rows]
    gemm, elementwise = table.holding("gemm", []), table.holding("elementwise", [])
    for row in table.rows:
        gemm.rows.extend(_products(row))
        elementwise.rows.extend(_elementwise(row))
    return [gemm, elementwise]


def _microseconds(row: Row, operation: str) -> str:
    return repr(number(row.get(f"time_stats.{operation}.median")) * 1e3)


def _sizes(row: Row) -> tuple[float, float, float, float, float]:
    """(hidden size, query width, key width, MLP width on one rank, ranks)."""
    hidden, heads, kv_heads = (number(row[c]) for c in ("n_embd", "n_head", "n_kv_head"))
    tp = number(row["num_tensor_parallel_workers"])
    head_dim = hidden / heads if heads else float("nan")
    ranks = tp if tp else float("nan")
    kv_width = max(kv_heads / ranks, 1.0) * head_dim
    return hidden, heads * head_dim / ranks, kv_width, number(row["n_expanded_embd"]) / ranks, ranks


def _products(row: Row) -> Iterator[Row]:
    """The linear layers of one rank as (m, k) x (k, n)."""
    hidden, query, key, width, _ = _sizes(row)
    gated = row["use_gated_mlp"].strip().lower() in _TRUE
    for operation, n, k in (
        ("attn_pre_proj", query + 2 * key, hidden),
        ("attn_post_proj", hidden, query),
        ("mlp_up_proj", width * (2.0 if gated else 1.0), hidden),
        ("mlp_down_proj", hidden, width),
    ):
        yield {
            "dtype": "bfloat16",
            "m": row["num_tokens"],
            "n": repr(n),
            "k": repr(k),
            "latency_us": _microseconds(row, operation),
        }


def _elementwise(row: Row) -> Iterator[Row]:
    """Operations of so many bytes a token, read and written in 16 bit; those that the table has."""
    hidden, query, key, width, _ = _sizes(row)
    gated = row["use_gated_mlp"].strip().lower() in _TRUE
    for operation, values in (
        ("emb", 2.0 * hidden),
        ("input_layernorm", 2.0 * hidden),
        ("post_attention_layernorm", 2.0 * hidden),
        ("add", 3.0 * hidden),
        ("attn_rope", 2.0 * (query + key)),
        ("mlp_act", width * (3.0 if gated else 2.0)),
    ):
        if f"time_stats.{operation}.median" in row:
            yield {
                "bytes_per_token": repr(2.0 * values),
                "tokens": row["num_tokens"],
                "latency_us": _microseconds(row, operation),
            }


def _attention(row: Row, is_prefill: bool) -> Row:
    tp, heads = number(row["num_tensor_parallel_workers"]), number(row["n_q_head"])
    ranks = tp if tp else float("nan")
    cached = number(row["kv_cache_size"])
    return {
        "kv_dtype": "bfloat16",
        "heads": repr(heads / ranks),
        "kv_heads": repr(max(number(row["n_kv_head"]) / ranks, 1.0)),
        "head_dim": repr(number(row["n_embd"]) / heads if heads else float("nan")),
        "batch": row["batch_size"],
        "isl": row["prefill_chunk_size"],
        "context": repr(cached),
        "kv_len": repr(cached + 1.0),
        "latency_us": _microseconds(row, "attn_prefill" if is_prefill else "attn_decode"),
    }


def _all_reduce(row: Row) -> Row:
    return {
        "impl": "nccl",
        "version": "",
        "op": row["collective"],
        "mode": NCCL_MODE,
        "dtype": "half",
        "n_gpus": row["num_workers"],
        "bytes": row["size"],
        "latency_us": _microseconds(row, "all_reduce"),
    }
