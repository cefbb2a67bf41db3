"""Layer profiles of one model (LLMServingSim layout) as samples of the same kernels as everything else.

A layer's time at a number of tokens is a GEMM of known (n, k); norms, rotary embedding and activation become
bytes per token. Attention rows mix prefill chunks and decodes: pure rows fit the two kernels, mixed rows tell
what decodes cost inside a kernel that also prefills.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from calibration.tables import Samples, Table, drop_impossible, drop_spikes
from costmodel.formats import hardware
from costmodel.kernels import Hardware
from costmodel.layers import elementwise_bytes, embedding_bytes, final_norm_bytes
from costmodel.model import ModelShape, load_model
from costmodel.predict import Kernel
from costmodel.profile import DeviceFacts, KernelFit
from serving.errors import UsageError

_NAME = re.compile(r"lss_(?P<gpu>[a-z0-9]+)_(?P<model>.+)_tp(?P<tp>\d+)_(dense|per_sequence|attention|moe)$")

Point = tuple[tuple[float, ...], tuple[float, ...], float]


def _identify(path: Path) -> tuple[ModelShape, int]:
    match = _NAME.search(path.stem)
    if match is None:
        raise UsageError(f"{path}: a layer profile is named …lss_<gpu>_<model>_tp<N>_<table>.csv")
    return load_model(match["model"]), int(match["tp"])


def layer_samples(tables: Sequence[Table], facts: DeviceFacts) -> dict[str, Samples]:
    """Samples by kernel group (gemm, elementwise, sampler, prefill, decode, decode_mixed, moe) of all LSS
    tables."""
    points: dict[str, list[Point]] = {}
    files: dict[str, list[str]] = {}
    for table in tables:
        if not table.kind.startswith("lss_"):
            continue
        model, tp = _identify(table.path)
        reader = {"lss_attention": _attention, "lss_moe": _moe}.get(table.kind, _layers)
        for group, found in reader(table, model, tp).items():
            points.setdefault(group, []).extend(found)
            files.setdefault(group, []).append(table.path.name)
    samples = {group: _samples(group, found, ", ".join(files[group])) for group, found in points.items()}
    if "gemm" in samples:
        gemm = samples["gemm"]
        n, k = gemm.shape.T
        hw = hardware(facts)
        # Weights that fit L2 are read faster than from HBM when a layer is timed again and again.
        read_s = np.where(n * k * 2.0 > hw.l2_bytes, n * k * 2.0 / hw.hbm_bytes_per_s, 0.0)
        drop_impossible(gemm, np.maximum(2.0 * gemm.grid[:, 0] * n * k / hw.peak_flops, read_s))
        drop_spikes(gemm)
    return {group: found for group, found in samples.items() if len(found)}


def _samples(group: str, points: Sequence[Point], source: str) -> Samples:
    seen: dict[tuple[tuple[float, ...], tuple[float, ...]], list[float]] = {}
    for shape, grid, seconds in points:
        seen.setdefault((shape, grid), []).append(seconds)
    dropped: Counter[str] = Counter()
    extra = len(points) - len(seen)
    if extra:
        dropped["same shape measured twice (mean taken)"] = extra
    return Samples(
        group,
        np.array([s for s, _ in seen]),
        np.array([g for _, g in seen]),
        np.array([float(np.mean(v)) for v in seen.values()]),
        dropped,
        source,
    )


def _layers(table: Table, model: ModelShape, tp: int) -> dict[str, list[Point]]:
    qkv, o = model.attention_gemms(tp)
    gate_up, down = model.mlp_gemms(tp)
    products = {
        "qkv_proj": qkv,
        "o_proj": o,
        "gate_up_proj": gate_up,
        "down_proj": down,
        "lm_head": model.lm_head_gemm(tp),
    }
    widths = elementwise_bytes(model, tp)
    widths |= {"embedding": embedding_bytes(model), "final_layernorm": final_norm_bytes(model)}
    found: dict[str, list[Point]] = {}
    for row in table.rows:
        layer, seconds = row["layer"], float(row["time_us"]) * 1e-6
        tokens = float(row["tokens"] if "tokens" in row else row["sequences"])
        if layer in products:
            product = products[layer]
            found.setdefault("gemm", []).append(((float(product.n), float(product.k)), (tokens,), seconds))
        elif layer in widths:
            found.setdefault("elementwise", []).append(((widths[layer],), (tokens,), seconds))
        elif layer == "sampler":
            found.setdefault("sampler", []).append(((float(model.vocab_size),), (tokens,), seconds))
    return found


def _moe(table: Table, model: ModelShape, tp: int) -> dict[str, list[Point]]:
    shape = (float(model.hidden_size), model.intermediate_size / tp)
    return {
        "moe": [
            (
                shape,
                (float(r["tokens"]) * model.experts_per_token, float(r["activated_experts"])),
                float(r["time_us"]) * 1e-6,
            )
            for r in table.rows
        ]
    }


def _attention(table: Table, model: ModelShape, tp: int) -> dict[str, list[Point]]:
    shape = (float(model.heads_per_rank(tp)), float(model.kv_heads_per_rank(tp)))
    times: dict[tuple[int, int, int, int], float] = {}
    for row in table.rows:
        key = (int(row["prefill_chunk"]), int(row["kv_prefill"]), int(row["n_decode"]), int(row["kv_decode"]))
        times[key] = float(row["time_us"]) * 1e-6
    found: dict[str, list[Point]] = {"prefill": [], "decode": [], "mixed": []}
    for (chunk, before, batch, context), seconds in times.items():
        if batch == 0:
            found["prefill"].append((shape, (1.0, float(chunk), float(before)), seconds))
        elif chunk == 0:
            found["decode"].append((shape, (float(batch), float(context)), seconds))
        else:
            point = (float(chunk), float(before), float(batch), float(context))
            found["mixed"].append((shape, point, seconds))
    return found


def decode_share(mixed: Samples, prefill: KernelFit, hw: Hardware) -> Samples:
    """What decodes add to the work of a kernel that also prefills: shape (heads, kv_heads), grid (batch, context).

    A mixed kernel takes as long as its longest prefill chunk alone or, if that is more, as all its work: the
    chunk's share of a busy device plus the decodes. Rows whose chunk alone would take most of the time say
    nothing about the decodes and are left out; the median over chunks is taken.
    """
    kernel = Kernel("prefill", prefill, hw)
    crowd = 64.0
    added: dict[tuple[float, ...], list[float]] = {}
    shapes, which = np.unique(mixed.shape, axis=0, return_inverse=True)
    for s, shape in enumerate(shapes):
        rows = which.ravel() == s
        chunk, before, batch, context = mixed.grid[rows].T
        alone = kernel.seconds(shape.tolist(), 1.0, chunk, before)
        share = (kernel.seconds(shape.tolist(), crowd, chunk, before) - kernel.launch_s) / crowd
        left = mixed.seconds[rows] - np.minimum(kernel.launch_s + share, alone)
        telling = mixed.seconds[rows] > 1.25 * alone
        for b, c, value in zip(batch[telling], context[telling], left[telling], strict=True):
            added.setdefault((*shape.tolist(), b, c), []).append(float(value))
    kept = {key: float(np.median(values)) for key, values in added.items() if len(values) >= 3}
    keys = np.array(list(kept)).reshape(len(kept), 4)
    dropped = Counter(mixed.dropped)
    dropped["decodes hidden behind the prefill"] += len(mixed) - sum(len(v) for v in added.values())
    seconds = np.maximum(np.array(list(kept.values())), 1e-7)
    return Samples("decode_mixed", keys[:, :2], keys[:, 2:], seconds, dropped, mixed.source)
