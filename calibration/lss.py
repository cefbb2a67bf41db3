"""Layer profiles of one model (LLMServingSim layout) as samples of the same kernels as everything else.

Which model and how many ranks a table is of, its name says (`…lss_<gpu>_<model>_tp<N>_<table>.csv`) or the folders
around it (`<gpu>/<organisation>/<model>/<variant>/tp<N>/<table>.csv` beside a meta.yaml; the layout of 2025 has no
variant). Times are of one layer of one rank, in 16 bit.

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

from calibration.tables import Samples, Table, drop_impossible, drop_spikes, is_problem, number
from costmodel.formats import hardware
from costmodel.layers import elementwise_bytes, embedding_bytes, final_norm_bytes
from costmodel.model import Gemm, ModelShape, load_model
from costmodel.profile import DeviceFacts
from serving.errors import UsageError

_NAME = re.compile(r"lss_(?P<gpu>[a-z0-9]+)_(?P<model>.+)_tp(?P<tp>\d+)_(dense|per_sequence|attention|moe)$")

_VARIANT = re.compile(r"^(bf16|fp16|fp8|fp4|int8|int4|nvfp4|mxfp4|awq|gptq)", re.IGNORECASE)

Point = tuple[tuple[float, ...], tuple[float, ...], float]


def _identify(path: Path) -> tuple[ModelShape, int]:
    match = _NAME.search(path.stem)
    if match is not None:
        return load_model(match["model"]), int(match["tp"])
    folder = re.fullmatch(r"tp(\d+)", path.parent.name)
    if folder is None:
        raise UsageError(
            f"{path}: a layer profile lies in a folder tp<N> or is named …lss_<gpu>_<model>_tp<N>_<table>.csv"
        )
    variant = path.parent.parent
    model = variant.name
    if _VARIANT.match(variant.name):
        if not variant.name.lower().startswith(("bf16", "fp16")):
            raise UsageError(
                f"{path}: variant {variant.name!r} is not read; layer profiles are taken as 16 bit"
            )
        model = _named_in(variant / "meta.yaml") or variant.parent.name
    try:
        return load_model(model), int(folder[1])
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _named_in(meta: Path) -> str | None:
    """The model that a profile's meta.yaml names; None without such a line."""
    try:
        text = meta.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(r"^model: *['\"]?([^'\"\n]+?)['\"]? *$", text, re.MULTILINE)
    return found[1] if found else None


def layer_samples(tables: Sequence[Table], facts: DeviceFacts) -> dict[str, Samples]:
    """Samples by kernel group (gemm, elementwise, sampler, prefill, decode, mixed, moe) of all LSS tables."""
    points: dict[str, list[Point]] = {}
    files: dict[str, list[str]] = {}
    bad: dict[str, int] = {}
    for table in tables:
        if not table.kind.startswith("lss_"):
            continue
        model, tp = _identify(table.path)
        reader = {"lss_attention": _attention, "lss_moe": _moe}.get(table.kind, _layers)
        found = reader(table, model, tp)
        lost = _forget_bad(found)
        for group, some in found.items():
            points.setdefault(group, []).extend(some)
            files.setdefault(group, []).append(table.name)
            bad[group] = bad.get(group, 0) + lost[group]
    samples = {
        group: _samples(group, found, ", ".join(files[group])) for group, found in points.items() if found
    }
    for group, some_samples in samples.items():
        if bad[group]:
            some_samples.dropped["not a positive time"] += bad[group]
    if "gemm" in samples:
        gemm = samples["gemm"]
        n, k = gemm.shape.T
        hw = hardware(facts)
        # Weights that fit L2 are read faster than from HBM when a layer is timed again and again.
        read_s = np.where(n * k * 2.0 > hw.l2_bytes, n * k * 2.0 / hw.hbm_bytes_per_s, 0.0)
        drop_impossible(gemm, np.maximum(2.0 * gemm.grid[:, 0] * n * k / hw.peak_flops, read_s))
        drop_spikes(gemm)
    return {group: found for group, found in samples.items() if len(found)}


def _forget_bad(found: dict[str, list[Point]]) -> dict[str, int]:
    """Take points out whose time or size is no number, or whose time is not positive; how many, by group."""
    lost = {}
    for group, points in found.items():
        good = [p for p in points if p[2] > 0 and is_problem(group, *p[:2])]
        lost[group] = len(points) - len(good)
        points[:] = good
    return lost


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
    products |= _split_products(model, tp)
    widths |= {
        "input_layernorm": widths["layernorm"],
        "post_layernorm": widths["layernorm"],
        "rope": widths["rotary_emb"],
    }
    found: dict[str, list[Point]] = {}
    for row in table.rows:
        layer, tokens, seconds = _layer_row(row)
        if layer in products:
            product = products[layer]
            found.setdefault("gemm", []).append(((float(product.n), float(product.k)), (tokens,), seconds))
        elif layer in widths:
            found.setdefault("elementwise", []).append(((widths[layer],), (tokens,), seconds))
        elif layer == "sampler":
            found.setdefault("sampler", []).append(((float(model.vocab_size),), (tokens,), seconds))
    return found


def _layer_row(row: dict[str, str]) -> tuple[str, float, float]:
    """(layer, tokens or sequences, seconds), of any of the layouts."""
    if "layer_name" in row:
        return row["layer_name"], number(row["input"]), number(row["latency(ns)"]) * 1e-9
    return row["layer"], number(row.get("tokens") or row.get("sequences")), number(row["time_us"]) * 1e-6


def _split_products(model: ModelShape, tp: int) -> dict[str, Gemm]:
    """The projections of the 2025 layout, which times q, k, v, gate and up one by one."""
    q = model.heads_per_rank(tp) * model.head_dim
    kv = model.kv_heads_per_rank(tp) * model.head_dim
    width, hidden = model.intermediate_size // tp, model.hidden_size
    sizes = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": width, "up_proj": width}
    return {name: Gemm(name, n, hidden) for name, n in sizes.items()}


def _moe(table: Table, model: ModelShape, tp: int) -> dict[str, list[Point]]:
    shape = (float(model.hidden_size), model.intermediate_size / tp)
    return {
        "moe": [
            (
                shape,
                (number(r["tokens"]) * model.experts_per_token, number(r["activated_experts"])),
                number(r["time_us"]) * 1e-6,
            )
            for r in table.rows
        ]
    }


def _attention(table: Table, model: ModelShape, tp: int) -> dict[str, list[Point]]:
    shape = (float(model.heads_per_rank(tp)), float(model.kv_heads_per_rank(tp)))
    times: dict[tuple[float, float, float, float], float] = {}
    for row in table.rows:
        chunk, before, batch, context = (
            number(row[c]) for c in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        )
        times[chunk, before, batch, context] = number(row["time_us"]) * 1e-6
    found: dict[str, list[Point]] = {"prefill": [], "decode": [], "mixed": []}
    for (chunk, before, batch, context), seconds in times.items():
        if batch == 0:
            found["prefill"].append((shape, (1.0, chunk, before), seconds))
        elif chunk == 0:
            found["decode"].append((shape, (batch, context), seconds))
        else:
            found["mixed"].append((shape, (chunk, before, batch, context), seconds))
    return found
