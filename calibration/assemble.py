"""From a set of timing tables to a device profile: which rows fit which kernel, cleaned how.

`fit_profile` is what `tokentwin calibrate fit` runs. `python -m calibration.ship` makes the shipped profiles
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from calibration import lss
from calibration.fit import DEFAULT_OPTIONS, Options, fit_kernel, grid_groups
from calibration.tables import (
    Samples,
    Table,
    drop_host_floor,
    drop_impossible,
    drop_spikes,
    read_table,
    samples_from,
)
from costmodel.datasheet import HOST, device_facts
from costmodel.formats import GEMM_FORMATS, hardware
from costmodel.profile import SCHEMA, DeviceFacts, DeviceProfile, HostTerms, KernelFit, Provenance
from serving.errors import UsageError

ALL_REDUCE_PREFERENCE = ("vLLM_custom_graph", "SGLang_CustomAllReduce_graph", "TRTLLM", "nccl-tests")
"""Implementations of an all-reduce, the one an engine would use first. `*_eager` rows time the host as
well."""

KV_BYTES = {"bfloat16": 2.0, "fp8": 1.0}


def gemm_samples(tables: Sequence[Table], dtype: str, facts: DeviceFacts) -> Samples:
    """Cleaned GEMM timings of one number format: shape (n, k), grid (m,)."""
    rows = [r for t in tables for r in t.rows if r["dtype"] == dtype]
    names = ", ".join(t.path.name for t in tables if any(r["dtype"] == dtype for r in t.rows))
    samples = samples_from(
        "gemm", rows, lambda r: (float(r["n"]), float(r["k"])), lambda r: (float(r["m"]),), source=names
    )
    if len(samples):
        clean_gemm(samples, dtype, facts)
    return samples


def clean_gemm(samples: Samples, dtype: str, facts: DeviceFacts) -> None:
    """Drop impossible, host-bound and disturbed rows. Small weights may sit in L2 and beat the HBM bound."""
    hw = hardware(facts, GEMM_FORMATS[dtype])
    n, k = samples.shape.T
    weights = n * k * hw.weight_bytes
    read_s = np.where(weights > hw.l2_bytes, weights / hw.hbm_bytes_per_s, 0.0)
    drop_impossible(samples, np.maximum(2.0 * samples.grid[:, 0] * n * k / hw.peak_flops, read_s))
    drop_host_floor(samples)
    drop_spikes(samples)


def prefill_samples(tables: Sequence[Table], kv_dtype: str, facts: DeviceFacts) -> Samples:
    """Cleaned prefill attention timings: shape (heads, kv_heads), grid (batch, tokens, context 0)."""
    rows = [r for t in tables for r in t.rows if r["kv_dtype"] == kv_dtype and r["head_dim"] == "128"]
    samples = samples_from(
        "prefill",
        rows,
        lambda r: (float(r["heads"]), float(r["kv_heads"])),
        lambda r: (float(r["batch"]), float(r["isl"]), 0.0),
        source=", ".join(t.path.name for t in tables),
    )
    if len(samples):
        hw = hardware(facts)
        batch, tokens, _ = samples.grid.T
        flops = 2.0 * batch * samples.shape[:, 0] * hw.head_dim * tokens * (tokens + 1.0)
        drop_impossible(samples, flops / hw.peak_flops)
        clean_last = Samples(
            "prefill", samples.shape, samples.grid[:, [0, 2, 1]], samples.seconds, samples.dropped
        )
        drop_spikes(clean_last)
        samples.shape, samples.seconds = clean_last.shape, clean_last.seconds
        samples.grid = clean_last.grid[:, [0, 2, 1]]
    return samples


def decode_samples(tables: Sequence[Table], kv_dtype: str, facts: DeviceFacts) -> Samples:
    """Cleaned decode attention timings: shape (heads, kv_heads), grid (batch, context)."""
    rows = [r for t in tables for r in t.rows if r["kv_dtype"] == kv_dtype and r["head_dim"] == "128"]
    samples = samples_from(
        "decode",
        rows,
        lambda r: (float(r["heads"]), float(r["kv_heads"])),
        lambda r: (float(r["batch"]), float(r["kv_len"])),
        source=", ".join(t.path.name for t in tables),
    )
    if len(samples):
        clean_decode(samples, facts, KV_BYTES[kv_dtype])
    return samples


def clean_decode(samples: Samples, facts: DeviceFacts, kv_bytes: float) -> None:
    """Drop rows faster than HBM: a KV cache within L2 is read faster than any real one, with weights
    between."""
    hw = hardware(facts, kv_bytes=kv_bytes)
    read = samples.grid[:, 0] * samples.grid[:, 1] * samples.shape[:, 1] * 2.0 * hw.head_dim * kv_bytes
    drop_impossible(samples, read / hw.hbm_bytes_per_s, slack=1.0)
    drop_spikes(samples)


def all_reduce_samples(tables: Sequence[Table], facts: DeviceFacts) -> Samples:
    """All-reduce timings of the preferred implementation: shape (num_gpus,), grid (bytes,)."""
    rows = [
        r for t in tables for r in t.rows if r["op"] == "all_reduce" and r["dtype"] in ("bfloat16", "half")
    ]
    chosen: list[dict[str, str]] = []
    mode = ""
    for preferred in ALL_REDUCE_PREFERENCE:
        found = [r for r in rows if r["mode"] == preferred]
        if found:
            newest = max(
                {r["version"] for r in found}, key=lambda v: [int(p) for p in v.split(".") if p.isdigit()]
            )
            chosen, mode = [r for r in found if r["version"] == newest], f"{preferred} {newest}"
            break
    samples = samples_from(
        "all_reduce",
        chosen,
        lambda r: (float(r["n_gpus"]),),
        lambda r: (float(r["bytes"]),),
        source=f"{', '.join(t.path.name for t in tables)}: {mode}",
    )
    if len(samples):
        drop_spikes(samples)
    return samples


def fit_profile(
    tables: Sequence[Path],
    device: str | DeviceFacts,
    *,
    options: Options = DEFAULT_OPTIONS,
    host: HostTerms = HOST,
    provenance: Provenance | None = None,
    formats: Mapping[str, Sequence[str]] | None = None,
    context_splits: float = 1.0,
    progress: Callable[[str], None] = lambda line: None,
) -> DeviceProfile:
    """A profile of `device` (a shipped name or own facts) fitted to `tables` (CSV files; kinds found by
    header).

    `formats`: GEMM number formats to read, by file name (all of a file when it is not named).
    `context_splits`: over how many thread blocks the prefill kernel may spread one query tile's earlier
    context (1: FlashAttention 2; 32: FlashAttention 3), which tables without earlier context cannot tell.
    Raises `UsageError` for unreadable tables and for tables that hold nothing usable.
    """
    facts = device_facts(device) if isinstance(device, str) else device
    read = [_limited(read_table(Path(path)), formats or {}) for path in tables]
    by_kind: dict[str, list[Table]] = {}
    for table in read:
        by_kind.setdefault(table.kind, []).append(table)
    gemm: dict[str, Samples] = {}
    for dtype in sorted({r["dtype"] for t in by_kind.get("gemm", []) for r in t.rows} & set(GEMM_FORMATS)):
        gemm[dtype] = gemm_samples(by_kind["gemm"], dtype, facts)
    prefill: dict[str, Samples] = {}
    decode: dict[str, Samples] = {}
    for kv_dtype in KV_BYTES:
        prefill[kv_dtype] = prefill_samples(by_kind.get("prefill", []), kv_dtype, facts)
        decode[kv_dtype] = decode_samples(by_kind.get("decode", []), kv_dtype, facts)
    layers = lss.layer_samples(read, facts)
    fits: dict[str, dict[str, KernelFit]] = {
        k: {} for k in ("gemm", "prefill", "decode", "decode_mixed", "moe")
    }

    def fit(group: str, name: str, samples: Samples, kv_bytes: float = 2.0) -> None:
        if not len(samples):
            return
        hw = hardware(facts, GEMM_FORMATS[name if group == "gemm" else "bfloat16"], kv_bytes=kv_bytes)
        fixed = {"context_splits": context_splits} if group == "prefill" else None
        fits[group][name] = fit_kernel(group, samples, hw, options=options, fixed=fixed)  # type: ignore[arg-type]
        progress(f"{facts.name} {group}/{name}: {fits[group][name].errors}")

    for dtype, samples in gemm.items():
        fit("gemm", dtype, samples)
    for kv_dtype, kv_bytes in KV_BYTES.items():
        fit("prefill", kv_dtype, prefill[kv_dtype], kv_bytes)
        fit("decode", kv_dtype, decode[kv_dtype], kv_bytes)
    for group in ("gemm", "prefill", "decode", "moe"):
        if group in layers and "bfloat16" not in fits[group]:
            fit(group, "bfloat16", layers[group])
    if "mixed" in layers:
        share = lss.decode_share(layers["mixed"], fits["prefill"]["bfloat16"], hardware(facts))
        fit("decode_mixed", "bfloat16", share)
    singles: dict[str, KernelFit] = {}
    comm = all_reduce_samples(by_kind.get("comm", []), facts)
    if len(comm):
        singles["all_reduce"] = fit_kernel(
            "all_reduce", comm, hardware(facts), options=options, groups=grid_groups
        )
        progress(f"{facts.name} all_reduce: {singles['all_reduce'].errors}")
    if "elementwise" in layers:
        singles["elementwise"] = fit_kernel(
            "elementwise", layers["elementwise"], hardware(facts), options=options
        )
    if "sampler" in layers:
        singles["sampler"] = fit_kernel(
            "sampler", layers["sampler"], hardware(facts), options=options, groups=grid_groups
        )
    if not singles and not any(fits.values()):
        raise UsageError(f"no usable kernel timings for {facts.name} in {len(read)} tables")
    stamp = provenance or Provenance(measured="kernel timings given by the user")
    return DeviceProfile(
        schema=SCHEMA,
        facts=facts,
        **fits,
        **singles,
        host=host,
        provenance=stamp.model_copy(update={"tables": [f"{t.path.name} {t.digest}" for t in read]}),
    )


def _limited(table: Table, formats: Mapping[str, Sequence[str]]) -> Table:
    wanted = formats.get(table.path.name)
    if wanted is None:
        return table
    return Table(table.path, table.kind, [r for r in table.rows if r.get("dtype") in wanted], table.digest)
