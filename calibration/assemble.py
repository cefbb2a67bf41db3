"""From a set of timing tables to a device profile: which rows fit which kernel, cleaned how.

`fit_profile` is what `tokentwin calibrate fit` runs. `python -m calibration.ship` makes the shipped profiles
with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from calibration import bench_table, lss, vidur
from calibration.fit import DEFAULT_OPTIONS, Options, fit_kernel, grid_groups, shape_groups
from calibration.mixed import decode_share, fit_empty_block
from calibration.sources import read_sources
from calibration.tables import (
    Samples,
    Table,
    drop_host_floor,
    drop_impossible,
    drop_spikes,
    number,
    samples_from,
    thin,
)
from costmodel.datasheet import HOST, device_facts
from costmodel.engine_version import parse_version
from costmodel.formats import GEMM_FORMATS, KV_FORMATS, hardware
from costmodel.kernels import FORMULAS
from costmodel.profile import (
    SCHEMA,
    DeviceFacts,
    DeviceProfile,
    HostTerms,
    KernelFit,
    KernelKind,
    Provenance,
)
from serving.errors import UsageError

VLLM_ALL_REDUCE = "vLLM_custom_graph"
NCCL_ALL_REDUCE = "nccl-tests"
ALL_REDUCE_PREFERENCE = (
    bench_table.MODE,
    VLLM_ALL_REDUCE,
    "SGLang_CustomAllReduce_graph",
    "TRTLLM",
    NCCL_ALL_REDUCE,
    vidur.NCCL_MODE,
)
"""Implementations of an all-reduce, the one an engine would use first. `*_eager` rows time the host as
well."""


STAND_INS = {"fp8_block": "fp8"}
"""Whose timings stand in for products that a format's table shows only as long as the host took to launch them.

Both multiply 8-bit values and quantise what they are given. On H100, H200 and L40S the two take the same time, to 5 %,
wherever reading the weights takes longer than the launch.
"""


def gemm_samples(tables: Sequence[Table], dtype: str, facts: DeviceFacts) -> Samples:
    """Cleaned GEMM timings of one number format: shape (n, k), grid (m,)."""
    samples = _gemm_rows(tables, dtype)
    if len(samples):
        stand_in = _gemm_rows(tables, STAND_INS[dtype]) if dtype in STAND_INS else None
        clean_gemm(samples, dtype, facts, stand_in)
    return samples


def _gemm_rows(tables: Sequence[Table], dtype: str) -> Samples:
    rows = [r for t in tables for r in t.rows if r["dtype"] == dtype]
    names = ", ".join(t.name for t in tables if any(r["dtype"] == dtype for r in t.rows))
    samples = samples_from(
        "gemm", rows, lambda r: (float(r["n"]), float(r["k"])), lambda r: (float(r["m"]),), source=names
    )
    if len(samples):
        thin(samples)
    return samples


def clean_gemm(samples: Samples, dtype: str, facts: DeviceFacts, stand_in: Samples | None = None) -> None:
    """Drop impossible, host-bound and disturbed rows. Small weights may sit in L2 and beat the HBM bound."""
    hw = hardware(facts, GEMM_FORMATS[dtype])
    n, k = samples.shape.T
    weights = n * k * hw.weight_bytes
    read_s = np.where(weights > hw.l2_bytes, weights / hw.hbm_bytes_per_s, 0.0)
    drop_impossible(samples, np.maximum(2.0 * samples.grid[:, 0] * n * k / hw.peak_flops, read_s))
    drop_host_floor(samples, stand_in=stand_in if stand_in is not None and len(stand_in) else None)
    drop_spikes(samples)


def prefill_samples(tables: Sequence[Table], kv_dtype: str, facts: DeviceFacts) -> Samples:
    """Cleaned prefill attention timings: shape (heads, kv_heads), grid (batch, tokens, context before them)."""
    samples = _attention_samples(
        "prefill",
        tables,
        kv_dtype,
        lambda r: (float(r["batch"]), float(r["isl"]), float(r.get("context") or 0.0)),
    )
    if len(samples):
        hw = hardware(facts, head_dim=samples.head_dim)
        batch, tokens, context = samples.grid.T
        flops = 2.0 * batch * samples.shape[:, 0] * hw.head_dim * tokens * (2.0 * context + tokens + 1.0)
        drop_impossible(samples, flops / hw.peak_flops)
        samples.grid = samples.grid[:, [0, 2, 1]]
        drop_spikes(samples)
        samples.grid = samples.grid[:, [0, 2, 1]]
    return samples


def decode_samples(tables: Sequence[Table], kv_dtype: str, facts: DeviceFacts) -> Samples:
    """Cleaned decode attention timings: shape (heads, kv_heads), grid (batch, context)."""
    samples = _attention_samples(
        "decode", tables, kv_dtype, lambda r: (float(r["batch"]), float(r["kv_len"]))
    )
    if len(samples):
        clean_decode(samples, facts, KV_FORMATS[kv_dtype].element_bytes(samples.head_dim))
    return samples


def _attention_samples(
    kind: str, tables: Sequence[Table], kv_dtype: str, grid: Callable[[Mapping[str, str]], tuple[float, ...]]
) -> Samples:
    """Timings of one cache format and one head size: 128 where it was measured, else the most frequent."""
    rows = [r for t in tables for r in t.rows if r["kv_dtype"] == kv_dtype]
    sizes = Counter(number(r["head_dim"]) for r in rows)
    chosen = 128.0 if 128.0 in sizes or not sizes else sizes.most_common(1)[0][0]
    samples = samples_from(
        kind,
        [r for r in rows if number(r["head_dim"]) == chosen],
        lambda r: (float(r["heads"]), float(r["kv_heads"])),
        grid,
        source=", ".join(t.name for t in tables),
    )
    if others := len(rows) - sizes[chosen]:
        samples.dropped[f"head size other than {chosen:g}"] += others
    samples.head_dim = int(chosen) if chosen == chosen else 128
    thin(samples)
    return samples


def plain_samples(kind: KernelKind, tables: Sequence[Table]) -> Samples:
    """Timings whose columns are the axes of their formula (elementwise, sampler, moe, decode_mixed)."""
    _, _, shape_axes, grid_axes = FORMULAS[kind]
    rename = {"context": "kv_len"} if kind == "decode_mixed" else {}
    samples = samples_from(
        kind,
        [r for t in tables for r in t.rows],
        lambda r: tuple(float(r[axis]) for axis in shape_axes),
        lambda r: tuple(float(r[rename.get(axis, axis)]) for axis in grid_axes),
        source=", ".join(t.name for t in tables),
    )
    if len(samples):
        thin(samples)
        drop_spikes(samples)
    return samples


def clean_decode(samples: Samples, facts: DeviceFacts, kv_bytes: float) -> None:
    """Drop rows faster than HBM: a KV cache within L2 is read faster than any real one, with weights
    between."""
    hw = hardware(facts, kv_bytes=kv_bytes, head_dim=samples.head_dim)
    read = samples.grid[:, 0] * samples.grid[:, 1] * samples.shape[:, 1] * 2.0 * hw.head_dim * kv_bytes
    drop_impossible(samples, read / hw.hbm_bytes_per_s, slack=1.0)
    drop_spikes(samples)


def all_reduce_samples(tables: Sequence[Table]) -> dict[str, Samples]:
    """All-reduce timings of the preferred implementation: shape (num_gpus,), grid (bytes,).

    By version, the newest first. Earlier ones are vLLM's, measured about as finely (`_as_finely`).
    """
    rows = [
        r for t in tables for r in t.rows if r["op"] == "all_reduce" and r["dtype"] in ("bfloat16", "half")
    ]
    mode = next((m for m in ALL_REDUCE_PREFERENCE if any(r["mode"] == m for r in rows)), "")
    of_version: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        if row["mode"] == mode:
            of_version.setdefault(row["version"], []).append(row)
    order = sorted(of_version, key=lambda v: (parse_version(v), v), reverse=True)
    names = ", ".join(t.name for t in tables)
    found: dict[str, Samples] = {}
    for version in order if mode == VLLM_ALL_REDUCE else order[:1]:
        samples = samples_from(
            "all_reduce",
            of_version[version],
            lambda r: (float(r["n_gpus"]),),
            lambda r: (float(r["bytes"]),),
            source=f"{names}: {mode} {version}",
        )
        if len(samples):
            thin(samples)
            drop_spikes(samples)
        if version != order[0]:
            samples.keep(
                _as_finely(samples, found[order[0]]), "fewer than half of the newest version's sizes"
            )
        found[version] = samples
    return found


def nccl_samples(tables: Sequence[Table]) -> Samples:
    """NCCL's all-reduce, the newest version's: shape (num_gpus,), grid (bytes,)."""
    rows = [
        r
        for t in tables
        for r in t.rows
        if r["op"] == "all_reduce" and r["mode"] == NCCL_ALL_REDUCE and r["dtype"] in ("bfloat16", "half")
    ]
    newest = max((r["version"] for r in rows), key=parse_version, default="")
    return _by_nccl([r for r in rows if r["version"] == newest], tables, newest)


def _by_nccl(rows: Sequence[dict[str, str]], tables: Sequence[Table], what: str) -> Samples:
    """Cleaned timings of one collective of NCCL's: shape (num_gpus,), grid (bytes,)."""
    samples = samples_from(
        "all_reduce",
        rows,
        lambda r: (float(r["n_gpus"]),),
        lambda r: (float(r["bytes"]),),
        source=f"{', '.join(t.name for t in tables)}: NCCL {what}",
    )
    if len(samples):
        thin(samples)
        drop_spikes(samples)
    return samples


def exchange_samples(tables: Sequence[Table]) -> Samples:
    """NCCL's all-gather and reduce-scatter of the same bytes, added up: shape (num_gpus,), grid (bytes,).

    Bytes are those of the whole, gathered or before it is scattered. Of several versions the newest.
    """
    of_op: dict[str, dict[tuple[str, str, str], dict[str, str]]] = {"all_gather": {}, "reduce_scatter": {}}
    for row in (r for t in tables for r in t.rows if r["op"] in of_op and r["dtype"] in ("bfloat16", "half")):
        of_op[row["op"]][row["version"], row["n_gpus"], row["bytes"]] = row
    back = of_op["reduce_scatter"]
    both = [(key, row) for key, row in of_op["all_gather"].items() if key in back]
    newest = max((key[0] for key, _ in both), key=parse_version, default="")
    rows = [
        row | {"latency_us": repr(float(row["latency_us"]) + float(back[key]["latency_us"]))}
        for key, row in both
        if key[0] == newest
    ]
    return _by_nccl(rows, tables, f"all_gather + reduce_scatter {newest}")


def _as_finely(samples: Samples, newest: Samples) -> npt.NDArray[np.bool_]:
    """Which timings are over a number of GPUs at which there are at least half as many sizes as `newest` has at any."""
    _, most = np.unique(newest.shape, return_counts=True)
    _, here, count = np.unique(samples.shape, return_inverse=True, return_counts=True)
    return np.asarray(2 * count[here.ravel()] >= most.max(initial=0))


def fit_profile(
    tables: Sequence[Path],
    device: str | DeviceFacts,
    *,
    options: Options = DEFAULT_OPTIONS,
    host: HostTerms = HOST,
    provenance: Provenance | None = None,
    formats: Mapping[str, Sequence[str]] | None = None,
    context_splits: float = 1.0,
    engine: str = "vllm",
    progress: Callable[[str], None] = lambda line: None,
) -> DeviceProfile:
    """A profile of `device` (a shipped name or own facts) fitted to `tables`: files of any layout that
    `calibration.sources` knows, or folders of them.

    `formats`: GEMM number formats to read, by file name (all of a file when it is not named).
    `context_splits`: over how many thread blocks the prefill kernel may spread one query tile's earlier
    context (1: FlashAttention 2; 32: FlashAttention 3), which tables without earlier context cannot tell.
    `engine`: whose tables to take of an AIConfigurator tree.
    Raises `UsageError` for unreadable tables and for tables that hold nothing usable.
    """
    facts = device_facts(device) if isinstance(device, str) else device
    found = read_sources(tables, facts.name, engine)
    for line in (*found.passed_over, *found.notes()):
        progress(line)
    samples = all_samples([_limited(table, formats or {}) for table in found.tables], facts)
    fits: dict[str, dict[str, KernelFit]] = {}
    singles: dict[str, KernelFit] = {}
    for (group, name), some in samples.items():
        fixed = {"context_splits": context_splits} if group == "prefill" else {}
        if not len(some):
            progress(f"{facts.name} {group} {name}: nothing left of its rows ({_reasons(some)})")
            continue
        if group == "mixed":
            if "bfloat16" not in fits.get("prefill", {}):
                progress(f"{facts.name} mixed: no prompts by themselves to tell its decodes from")
                continue
            alone, hw = fits["prefill"]["bfloat16"], hardware(facts)
            fixed["empty_block_s"] = fit_empty_block(some, alone, hw)
            some = decode_share(some, alone, hw, fixed["empty_block_s"])
            group = "decode_mixed"
        fit = _fit(group, name, some, facts, options, fixed)
        progress(f"{facts.name} {group} {name}: {fit.errors} ({fit.num_points:,} points; {_reasons(some)})")
        if name:
            fits.setdefault(group, {})[name] = fit
        else:
            singles[group] = fit
    reduces = fits.pop("all_reduce", {})
    newest, *earlier = reduces or [""]
    if reduces:
        singles["all_reduce"] = reduces[newest]
    if not singles and not fits:
        raise UsageError(f"no usable kernel timings for {facts.name} in {len(found.files)} tables")
    stamp = provenance or Provenance(measured="kernel timings given by the user")
    return DeviceProfile(
        schema=SCHEMA,
        facts=facts,
        **fits,
        **singles,
        all_reduce_version=newest if earlier else "",
        other_all_reduces={version: reduces[version] for version in earlier},
        host=host,
        provenance=stamp.model_copy(
            update={
                "tables": [f"{t.name} {t.digest}" for t in found.files],
                "notes": [*stamp.notes, *found.notes()],
            }
        ),
    )


def all_samples(tables: Sequence[Table], facts: DeviceFacts) -> dict[tuple[str, str], Samples]:
    """Cleaned timings by (kernel, number format), the format being '' where there is only one; of all-reduces by version.

    Layer profiles stand in for what no table of single kernels gives. Kernels without any row are left out;
    one with rows and without a sample lost them all to cleaning.
    """
    of_kind: dict[str, list[Table]] = {}
    for table in tables:
        of_kind.setdefault(table.kind, []).append(table)
    found: dict[tuple[str, str], Samples] = {}
    for dtype in sorted({r["dtype"] for t in of_kind.get("gemm", []) for r in t.rows} & set(GEMM_FORMATS)):
        found["gemm", dtype] = gemm_samples(of_kind["gemm"], dtype, facts)
    for kv_dtype in KV_FORMATS:
        found["prefill", kv_dtype] = prefill_samples(of_kind.get("prefill", []), kv_dtype, facts)
        found["decode", kv_dtype] = decode_samples(of_kind.get("decode", []), kv_dtype, facts)
    for version, samples in all_reduce_samples(of_kind.get("comm", [])).items():
        found["all_reduce", version] = samples
    found["nccl_all_reduce", ""] = nccl_samples(of_kind.get("comm", []))
    found["expert_exchange", ""] = exchange_samples(of_kind.get("comm", []))
    names: tuple[tuple[KernelKind, str], ...] = (
        ("moe", "bfloat16"),
        ("decode_mixed", "bfloat16"),
        ("elementwise", ""),
        ("sampler", ""),
    )
    for kind, name in names:
        found[kind, name] = plain_samples(kind, of_kind.get(kind, []))
    found = {key: samples for key, samples in found.items() if len(samples) or samples.dropped}
    for group, samples in lss.layer_samples(tables, facts).items():
        name = "" if group in ("elementwise", "sampler") else "bfloat16"
        found.setdefault((group, name), samples)
    # Decodes beside prompts are told from prefill's fit.
    return dict(sorted(found.items(), key=lambda item: item[0][0] == "mixed"))


_COLLECTIVES = ("all_reduce", "nccl_all_reduce", "expert_exchange")


def _fit(
    group: str,
    name: str,
    samples: Samples,
    facts: DeviceFacts,
    options: Options,
    fixed: dict[str, float],
) -> KernelFit:
    hw = hardware(
        facts,
        GEMM_FORMATS[name if group == "gemm" else "bfloat16"],
        kv_bytes=KV_FORMATS[name].element_bytes(samples.head_dim) if name in KV_FORMATS else 2.0,
        head_dim=samples.head_dim,
    )
    fit = fit_kernel(
        cast(KernelKind, "all_reduce" if group in _COLLECTIVES else group),
        samples,
        hw,
        options=options,
        groups=grid_groups if group in (*_COLLECTIVES, "sampler") else shape_groups,
        fixed=fixed,
    )
    if samples.noise is not None:
        fit = fit.model_copy(update={"noise_log_std": round(samples.noise, 4)})
    if samples.head_dim != 128:
        size = float(samples.head_dim)
        fit = fit.model_copy(update={"hull": {**fit.hull, "head_dim": (size, size)}})
    return fit


def _reasons(samples: Samples) -> str:
    return "; ".join(f"{count:,} {reason}" for reason, count in samples.dropped.items()) or "nothing dropped"


def _limited(table: Table, formats: Mapping[str, Sequence[str]]) -> Table:
    wanted = formats.get(table.path.name)
    if wanted is None:
        return table
    return table.holding(table.kind, [r for r in table.rows if r.get("dtype") in wanted])
