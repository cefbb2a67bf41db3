"""The formulas: seconds of one kernel from its shape, the device's facts and a handful of positive
coefficients.

Each is `launch floor + smooth maximum of compute and memory`, with what makes real kernels differ from a
roofline: tile and wave quantisation and split-K for GEMMs, causal tiles and the longest thread block for
prefill attention, split-KV and occupancy for decode attention, latency plus bandwidth for collectives. All
are vectorised: axes are arrays that broadcast. Fitting (in `calibration/`) and pricing call the same
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Coefficients = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a formula needs of the device and the number formats."""

    num_sms: int
    peak_flops: float
    hbm_bytes_per_s: float
    l2_bytes: float
    link_bytes_per_s: float
    weight_bytes: float = 2.0
    activation_bytes: float = 2.0
    kv_bytes: float = 2.0
    head_dim: int = 128


def smooth_max(a: Floats, b: Floats, power: float) -> Floats:
    """(a^p + b^p)^(1/p), computed without overflow; p = 1 is a sum, large p a maximum."""
    high = np.maximum(np.maximum(a, b), 1e-30)
    return np.asarray(high * (1.0 + (np.minimum(a, b) / high) ** power) ** (1.0 / power))


def in_cache(c: Coefficients, hw: Hardware, num_bytes: Floats) -> Floats:
    """How many times faster than HBM `num_bytes` come where the L2 cache holds them all: 1 + `l2_gain`, or 1."""
    return np.asarray(
        1.0 + c["l2_gain"] / (1.0 + (num_bytes / (hw.l2_bytes * c["l2_share"])) ** c["l2_power"])
    )


# -- GEMM ----------------------------------------------------------------------------------------------------

_TILES = ((16, 64), (32, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 128))
_SPLITS = (1, 2, 4, 8, 16)

GEMM_DEFAULTS: dict[str, float] = {
    "launch_s": 2.4e-6,
    "eff_rows": 0.003,
    "eff_16x64": 0.20,
    "eff_32x64": 0.35,
    "eff_64x64": 0.60,
    "eff_64x128": 0.80,
    "eff_128x128": 0.70,
    "eff_128x256": 0.75,
    "eff_256x128": 0.75,
    "prologue_s": 4e-7,
    "split_s": 2.5e-6,
    "hbm_efficiency": 0.82,
    "occupancy_half": 0.05,
    "smoothing": 2.0,
    "throttle": 0.03,
    "softness": 0.5,
    "l2_gain": 1.0,
    "l2_share": 0.9,
    "l2_power": 6.0,
    "l2_copies": 6.0,
    "l2_io": 1.0,
    "quant_s": 2e-6,
    "quant_row_s": 1e-9,
    "quant_efficiency": 0.5,
}


def gemm_s(c: Coefficients, hw: Hardware, n: Floats, k: Floats, m: Floats) -> Floats:
    """(m, k) x (k, n): the best of seven tiles and five split-K factors, in waves of thread blocks; or row by row,
    as libraries do for a few tokens in 16 bit, at `eff_rows` of the peak.

    `softness` is how far a partial last wave costs its share instead of a whole one; `throttle` lengthens large
    products by its value per e-fold of work (clocks fall under sustained power). A benchmark that takes turns with
    `l2_copies` sets of weights finds them in the L2 cache (`in_cache`) while they and what a product reads and writes
    fit. 8-bit activations are quantised first by a kernel of their own, which takes `quant_row_s` a row on top of
    its bytes.
    """
    weights = n * k * hw.weight_bytes
    quantised = hw.activation_bytes < 2.0
    read, written = m * k * hw.activation_bytes, m * n * 2.0
    moved = weights + read + written
    kept = (read * (3.0 if quantised else 1.0) + written) * c["l2_io"]
    faster = in_cache(c, hw, weights * c["l2_copies"] + kept)
    bandwidth = hw.hbm_bytes_per_s * c["hbm_efficiency"] * faster
    rate_per_sm = hw.peak_flops / hw.num_sms
    half, power = c["occupancy_half"], 1.0 + c["smoothing"]
    best: Floats | None = None
    if c["eff_rows"] and not quantised:
        best = smooth_max(2.0 * m * n * k / (hw.peak_flops * c["eff_rows"]), moved / bandwidth, power)
    for tile_m, tile_n in _TILES:
        efficiency = c[f"eff_{tile_m}x{tile_n}"]
        if not efficiency:
            continue
        blocks = np.ceil(m / tile_m) * np.ceil(n / tile_n)
        rate = rate_per_sm * efficiency
        for split in _SPLITS:
            depth = np.maximum(k / split, 64.0)
            occupancy = blocks * np.minimum(split, np.ceil(k / 64.0)) / hw.num_sms
            waves = np.ceil(occupancy) * (1.0 - c["softness"]) + np.maximum(occupancy, 1.0) * c["softness"]
            compute = waves * (2.0 * tile_m * tile_n * depth / rate + c["prologue_s"])
            if split > 1:
                compute = compute + c["split_s"]
            share = np.minimum(occupancy / (occupancy + half) * (1.0 + half), 1.0)
            t = smooth_max(compute, moved / (bandwidth * share), power)
            best = t if best is None else np.minimum(best, t)
    assert best is not None
    work = 2.0 * m * n * k / (hw.peak_flops * 1e-4)
    seconds = c["launch_s"] + best * (1.0 + c["throttle"] * np.log1p(work))
    if quantised:
        per_s = hw.hbm_bytes_per_s * c["quant_efficiency"] * (faster if c["l2_io"] else 1.0)
        seconds = seconds + c["quant_s"] + c["quant_row_s"] * m + 3.0 * m * k / per_s
    return np.asarray(seconds)


# -- attention -----------------------------------------------------------------------------------------------

PREFILL_DEFAULTS: dict[str, float] = {
    "launch_s": 8e-6,
    "efficiency": 0.65,
    "lone_block": 1.0,
    "prologue_s": 5e-7,
    "hbm_efficiency": 0.7,
    "smoothing": 3.0,
    "per_seq_s": 1e-8,
    "l2_gain": 0.3,
    "l2_share": 0.8,
    "l2_power": 6.0,
    "context_splits": 1.0,
    "pack_gqa": 0.0,
    "query_tile": 128.0,
}
_KEY_TILE = 128


def prefill_s(
    c: Coefficients,
    hw: Hardware,
    heads: Floats,
    kv_heads: Floats,
    batch: Floats,
    tokens: Floats,
    context: Floats,
) -> Floats:
    """Causal attention of `batch` chunks of `tokens` queries each over `context` earlier tokens plus themselves.

    Work is counted in tiles of `query_tile` rows by 128 keys; rows are tokens of one head, or of all heads of a
    KV head (`pack_gqa` 1). The kernel ends no sooner than its longest thread block, which walks the whole context
    unless the kernel splits it (`context_splits` > 1: FlashAttention 3). Queries, keys and values that the kernel
    before has just written may still be in the L2 cache (`in_cache`).
    """
    packed = 1.0 + c["pack_gqa"] * (heads / kv_heads - 1.0)
    q_tiles = np.ceil(tokens * packed / c["query_tile"])
    keys = np.ceil(tokens / _KEY_TILE)
    seen = context / _KEY_TILE
    rate_per_sm = hw.peak_flops / hw.num_sms * c["efficiency"]
    tile_time = 4.0 * hw.head_dim * c["query_tile"] * _KEY_TILE / rate_per_sm
    blocks = batch * heads / packed * q_tiles
    total = blocks * ((seen + (keys + 1.0) / 2.0) * tile_time + c["prologue_s"])
    splits = np.clip(hw.num_sms / blocks, 1.0, max(1.0, c["context_splits"]))
    longest = (keys + seen / splits) * tile_time * c["lone_block"] + c["prologue_s"]
    power = 1.0 + c["smoothing"]
    compute = smooth_max(total / hw.num_sms, longest, power)
    moved = batch * hw.head_dim * (tokens * heads * 4.0 + (tokens + context) * kv_heads * 2.0 * hw.kv_bytes)
    memory = moved / (hw.hbm_bytes_per_s * c["hbm_efficiency"] * in_cache(c, hw, moved))
    return np.asarray(c["launch_s"] + smooth_max(compute, memory, power) + batch * c["per_seq_s"])


DECODE_DEFAULTS: dict[str, float] = {
    "launch_s": 9e-6,
    "hbm_efficiency": 0.85,
    "occupancy_half": 0.25,
    "token_s": 1.5e-8,
    "mha_token_s": 1.5e-8,
    "row_cost": 0.01,
    "split_s": 2.2e-6,
    "reduce_efficiency": 5.0,
    "mha_splits": 128.0,
    "smoothing": 4.0,
    "per_seq_s": 3e-8,
}
_KV_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)


def decode_s(
    c: Coefficients, hw: Hardware, heads: Floats, kv_heads: Floats, batch: Floats, context: Floats
) -> Floats:
    """One query token of each of `batch` sequences of equal `context`, the current token included.

    One thread block per sequence, KV head and split; the number of splits is the best for the shape. Some
    kernels do not split when every query head has its own KV head (`mha_splits` 1: FlashAttention 2).
    """
    best: Floats | None = None
    rows = np.ceil(heads / kv_heads / 16.0)
    token_s = np.where(heads == kv_heads, c["mha_token_s"], c["token_s"] * (1.0 + c["row_cost"] * rows))
    moved = batch * kv_heads * context * (2.0 * hw.head_dim * hw.kv_bytes)
    power = 1.0 + c["smoothing"]
    for split in _KV_SPLITS:
        occupancy = batch * kv_heads * np.minimum(split, np.ceil(context / 128.0)) / hw.num_sms
        share = np.minimum(occupancy / (occupancy + c["occupancy_half"]) * (1.0 + c["occupancy_half"]), 1.0)
        memory = moved / (hw.hbm_bytes_per_s * c["hbm_efficiency"] * share)
        walk = np.ceil(occupancy) * np.ceil(context / split / 64.0) * 64.0 * token_s
        t = smooth_max(memory, walk, power)
        if split > 1:
            partial = split * batch * heads * hw.head_dim * 8.0
            t = t + c["split_s"] + partial / (hw.hbm_bytes_per_s * c["reduce_efficiency"])
            t = np.where((heads == kv_heads) & (split > c["mha_splits"]), np.inf, t)
        best = t if best is None else np.minimum(best, t)
    assert best is not None
    return np.asarray(c["launch_s"] + best + batch * c["per_seq_s"])


MIXED_DEFAULTS: dict[str, float] = {
    "launch_s": 2e-6,
    "hbm_efficiency": 0.5,
    "token_s": 3e-8,
    "occupancy_half": 0.25,
    "smoothing": 4.0,
    "per_seq_s": 3e-7,
    "empty_block_s": 0.0,
}
MIXED_QUERY_TILE = 64
"""Query rows of a thread block of FlashAttention 2's kernel for paged caches."""


def empty_tile_s(c: Coefficients, hw: Hardware, heads: float) -> float:
    """What one query tile without work costs a kernel that prefills several sequences, or prefills and decodes.

    The grid has as many query tiles for every sequence as the longest chunk needs; a sequence with fewer (a decode
    has one) leaves blocks that start, find nothing to do and exit: `empty_block_s` each of a multiprocessor.
    """
    return heads * c["empty_block_s"] / hw.num_sms


def tail_s(longer_s: Floats, own_s: Floats, work_s: Floats) -> Floats:
    """What a kernel that prefills and decodes waits for its longest thread block after all other work is done.

    Multiprocessors take blocks in order, heads outermost, so a sequence's last head starts when `work_s` is nearly
    over; its block walks the whole context alone: `longer_s` more than the blocks of an average sequence. The part
    `own_s` of the work is such long blocks themselves, whose end is in `work_s` already.
    """
    return np.asarray(longer_s * np.maximum(1.0 - own_s / work_s, 0.0))


def without_tail(seconds: Floats, longer_s: Floats, own_s: Floats) -> Floats:
    """The `work_s` that together with its `tail_s` takes `seconds`."""
    half = (seconds - longer_s) / 2.0
    return np.asarray(np.minimum(half + np.sqrt(half**2 + longer_s * own_s), seconds))


def decode_mixed_s(
    c: Coefficients, hw: Hardware, heads: Floats, kv_heads: Floats, batch: Floats, context: Floats
) -> Floats:
    """What `batch` decode rows add to a kernel that also prefills: no KV split, one block per query head.

    Their empty blocks (`empty_tile_s`) depend on the prefill and come on top.
    """
    occupancy = batch * heads / hw.num_sms
    share = np.minimum(occupancy / (occupancy + c["occupancy_half"]) * (1.0 + c["occupancy_half"]), 1.0)
    moved = batch * kv_heads * context * (2.0 * hw.head_dim * hw.kv_bytes)
    memory = moved / (hw.hbm_bytes_per_s * c["hbm_efficiency"] * share)
    walk = np.maximum(occupancy, 1.0) * np.ceil(context / 64.0) * 64.0 * c["token_s"]
    return np.asarray(c["launch_s"] + smooth_max(memory, walk, 1.0 + c["smoothing"]) + batch * c["per_seq_s"])


# -- the rest of a layer -------------------------------------------------------------------------------------

ALL_REDUCE_DEFAULTS: dict[str, float] = {
    "latency_s": 4.5e-6,
    "per_hop_s": 3e-7,
    "two_shot_s": 4e-6,
    "bandwidth": 0.75,
    "one_shot_bandwidth": 0.6,
    "ring_s": 1.5e-5,
    "ring_bandwidth": 0.75,
    "smoothing": 2.0,
}

_CUSTOM_ALL_REDUCE_BYTES = 8 * 2**20
"""From this size on vLLM leaves its own all-reduce to NCCL (`CustomAllreduce.max_size`)."""


def all_reduce_s(c: Coefficients, hw: Hardware, num_gpus: Floats, num_bytes: Floats) -> Floats:
    """Sum of `num_bytes` over `num_gpus`.

    Small messages: every GPU reads all others (one shot), or scatters and gathers (two shots), the faster of
    the two. Large ones: NCCL.
    """
    peers = num_gpus - 1.0
    twice = 2.0 * num_bytes * peers / num_gpus / hw.link_bytes_per_s
    one = num_bytes * peers / (hw.link_bytes_per_s * c["one_shot_bandwidth"])
    two = c["two_shot_s"] + twice / c["bandwidth"]
    base = c["latency_s"] + c["per_hop_s"] * peers
    custom = base + 1.0 / smooth_max(1.0 / one, 1.0 / two, 1.0 + c["smoothing"])
    ring = base + c["ring_s"] + twice / c["ring_bandwidth"]
    return np.asarray(np.where(num_bytes < _CUSTOM_ALL_REDUCE_BYTES, custom, ring))


MOE_DEFAULTS: dict[str, float] = {
    "launch_s": 2.5e-5,
    "efficiency": 0.45,
    "hbm_efficiency": 0.85,
    "smoothing": 2.0,
    "row_s": 2e-9,
}


def moe_s(
    c: Coefficients, hw: Hardware, hidden: Floats, width: Floats, rows: Floats, experts: Floats
) -> Floats:
    """Routed experts: `rows` (tokens x experts each) spread over `experts` distinct experts of `width`."""
    weights = experts * 3.0 * hidden * width
    tiles = experts * np.ceil(rows / experts / 16.0) * 16.0
    memory = (weights * hw.weight_bytes + rows * (hidden * 2.0 + width * 3.0) * 2.0) / (
        hw.hbm_bytes_per_s * c["hbm_efficiency"]
    )
    compute = 6.0 * tiles * hidden * width / (hw.peak_flops * c["efficiency"])
    return np.asarray(c["launch_s"] + smooth_max(memory, compute, 1.0 + c["smoothing"]) + rows * c["row_s"])


ELEMENTWISE_DEFAULTS: dict[str, float] = {
    "launch_s": 2.2e-6,
    "hbm_efficiency": 0.8,
    "l2_gain": 2.0,
    "l2_share": 0.5,
}


def elementwise_s(c: Coefficients, hw: Hardware, bytes_per_token: Floats, tokens: Floats) -> Floats:
    """Norms, rotary embedding, activation: bytes over bandwidth, faster while they fit the L2 cache."""
    moved = bytes_per_token * tokens
    fit = 1.0 / (1.0 + (moved / (hw.l2_bytes * c["l2_share"])) ** 2)
    return np.asarray(
        c["launch_s"] + moved / (hw.hbm_bytes_per_s * c["hbm_efficiency"] * (1.0 + c["l2_gain"] * fit))
    )


SAMPLER_DEFAULTS: dict[str, float] = {
    "launch_s": 2.5e-5,
    "hbm_efficiency": 0.55,
    "l2_gain": 4.0,
    "l2_share": 0.5,
}


def sampler_s(c: Coefficients, hw: Hardware, vocab: Floats, rows: Floats) -> Floats:
    """Greedy or random choice among `vocab` logits (float32) for `rows` sequences."""
    return elementwise_s(c, hw, vocab * 4.0, rows)


Formula = Callable[..., Floats]

FORMULAS: dict[str, tuple[Formula, dict[str, float], tuple[str, ...], tuple[str, ...]]] = {
    "gemm": (gemm_s, GEMM_DEFAULTS, ("n", "k"), ("m",)),
    "prefill": (prefill_s, PREFILL_DEFAULTS, ("heads", "kv_heads"), ("batch", "tokens", "context")),
    "decode": (decode_s, DECODE_DEFAULTS, ("heads", "kv_heads"), ("batch", "context")),
    "decode_mixed": (decode_mixed_s, MIXED_DEFAULTS, ("heads", "kv_heads"), ("batch", "context")),
    "all_reduce": (all_reduce_s, ALL_REDUCE_DEFAULTS, ("num_gpus",), ("bytes",)),
    "moe": (moe_s, MOE_DEFAULTS, ("hidden", "width"), ("rows", "experts")),
    "elementwise": (elementwise_s, ELEMENTWISE_DEFAULTS, ("bytes_per_token",), ("tokens",)),
    "sampler": (sampler_s, SAMPLER_DEFAULTS, ("vocab",), ("rows",)),
}
"""Per kind: formula, coefficients of an unfitted device, shape axes, grid axes. The default efficiencies
are the rounded middle of the shipped fits."""

EARLIER: dict[str, dict[str, float]] = {
    "gemm": {
        "eff_rows": 0.0,
        "eff_16x64": 0.0,
        "eff_32x64": 0.0,
        "l2_power": 2.0,
        "l2_copies": 1.0,
        "l2_io": 0.0,
        "quant_row_s": 0.0,
    },
    "prefill": {"l2_gain": 0.0},
}
"""Per kind: coefficients that a fit may lack because it was made before them, at values that leave its formula as it
was."""
