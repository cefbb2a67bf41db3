"""Paged decode attention, split along KV ("flash decoding"), with a second kernel that joins the parts.

What limits it is reading K and V once: 2 · context · kv_heads · head_dim numbers per sequence. For that

* a program reads one KV head for its whole group of query heads (the group, padded to 16, is the row tile of a
  tensor-core product), so nothing is read twice;
* tokens of a tile are gathered by page table, but a head of a token is contiguous: 16-byte asynchronous copies, two
  tiles ahead of the one in use. On an H200 three programs fit a multiprocessor, with up to 64 KB each in flight where
  about 30 KB per multiprocessor (4.8 TB/s × 0.8 µs / 132) cover the latency of memory;
* every sequence is cut into the same number of parts, chosen on the host from the batch, the KV heads and the number of
  multiprocessors, and a part's length is computed on the device from `context_len`: lengths are never read back, the
  grid is an upper bound, and parts beyond the end return at once. One graph of a padded batch serves every length.

With recent tokens kept as they were (`recent_ref`) a sequence's tiles are those of its pages and then those of its ring:
both are divided among its parts, and joined, as one.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from realengine.kernels import recent as recents
from realengine.kernels.launch import (
    TRITON_TYPES,
    Device,
    Launch,
    Tile,
    ceil_div,
    device_of,
    jit,
    jit_for_any,
    power_of_2,
)
from realengine.kernels.recent import attend_recent, num_blocks
from realengine.kernels.recent_ref import Recent
from realengine.kernels.tune import tile_for

ROWS = 16
"""The row tile of a tensor-core product; the heads of a group fill it as far as they go."""
LEAST_TOKENS = 128
"""A part shorter than this costs more to join than it saves."""
MOST_SPLITS = 64
PROGRAMS_PER_MULTIPROCESSOR = 8
"""About three are resident at a time; several waves even out sequences of different lengths."""

TILES = {
    0: [Tile(16, 32, 4, 1)],
    80: [Tile(16, 64, 4, 3), Tile(16, 32, 4, 3), Tile(16, 64, 4, 5), Tile(16, 128, 4, 3)],
    90: [
        Tile(16, 64, 4, 5),
        Tile(16, 128, 4, 3),
        Tile(16, 64, 4, 3),
        Tile(16, 64, 8, 5),
        Tile(16, 128, 8, 5),
    ],
}
"""Per architecture, the default first; columns are tokens. A tile's address is loaded too (the page table), so that 3
stages are one KV tile ahead, and 5 are two."""
INT4_TILES = {**TILES, 90: [Tile(16, 128, 4, 5), *TILES[90]]}
"""int4 tiles have a quarter of the bytes: twice as many tokens keep enough of them in flight."""

FLOAT32_TILE = Tile(16, 32, 4, 3)
"""float32 is for comparing results: its products are three of tf32 (about float32's accuracy), and want small tiles."""


@jit
def load_tile(  # type: ignore[no-untyped-def]
    cache, slots, scales, head, inside, cells, slot_row, KVH: tl.constexpr, WIDTH: tl.constexpr,
    PAD: tl.constexpr, FULL: tl.constexpr, BITS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Heads of the tokens at `slots` as (low, high, scale) in the type of computation; tiles are [tokens, PAD].

    int4 unpacks into two halves; otherwise `low` is the whole head and `high` the same again. FULL: every token of the
    tile exists, so nothing needs a mask.
    """
    NOTHING: tl.constexpr = 0.0 if BITS == 16 else 0  # fp8 takes no whole number
    at = cache + slots.to(tl.int64)[:, None] * slot_row + head * WIDTH + cells[None, :]
    if FULL and WIDTH == PAD:
        raw = tl.load(at)
    elif FULL:
        raw = tl.load(at, mask=cells[None, :] < WIDTH, other=NOTHING)
    else:
        raw = tl.load(at, mask=inside[:, None] & (cells[None, :] < WIDTH), other=NOTHING)
    scale = 1.0
    if BITS != 16:
        if FULL:
            scale = tl.load(scales + slots.to(tl.int64) * KVH + head)
        else:
            scale = tl.load(scales + slots.to(tl.int64) * KVH + head, mask=inside, other=0.0)
    if BITS == 4:
        # By way of int8 and float32: every number is exact in the type of computation.
        low = ((raw & 15).to(tl.int8) - 8).to(COMPUTE)
        high = ((raw >> 4).to(tl.int8) - 8).to(COMPUTE)
        return low, high, scale
    whole = raw.to(COMPUTE)
    return whole, whole, scale


@jit_for_any("table_row")
def decode_attention_kernel(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, k_scale, v_scale, page_table, context_len, recent_k, recent_v, seats, started, out,
    parts, sizes, q_row, out_row, table_row, slot_row, scale,
    GROUP: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
    PAGE: tl.constexpr, BITS: tl.constexpr, COMPUTE: tl.constexpr, SPLITS: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    RECENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One part of one sequence for one KV head. `scale` includes log2(e): exponentials are powers of two."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    context = tl.load(context_len + seq)
    edge, pages, blocks = num_blocks(context, started + seq if WINDOW else None, BLOCK, WINDOW, RECENT)
    per_split = tl.maximum(tl.cdiv(blocks, SPLITS), LEAST_BLOCKS)
    first = split * per_split
    last = tl.minimum(first + per_split, blocks)
    if SPLITS > 1 and first >= blocks:
        return

    row = tl.arange(0, ROWS)
    cells = tl.arange(0, PAD)
    head = kv_head * GROUP + row
    real = (row < GROUP)[:, None] & (cells < WIDTH)[None, :]
    q_at = q + seq * q_row + head[:, None] * D + cells[None, :]
    q_low = tl.load(q_at, mask=real, other=0.0).to(COMPUTE)
    acc_low = tl.zeros((ROWS, PAD), tl.float32)
    q_high = q_low
    acc_high = 0.0
    if BITS == 4:
        q_high = tl.load(q_at + WIDTH, mask=real, other=0.0).to(COMPUTE)
        acc_high = tl.zeros((ROWS, PAD), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    table = page_table + seq * table_row

    if WINDOW:
        ring = tl.load(seats + seq) * WINDOW
        acc_low, acc_high, top, total = attend_recent(
            acc_low, acc_high, top, total, q_low, q_high, tl.maximum(first - pages, 0), last - pages, edge,
            context, None, None, recent_k + kv_head * D, recent_v + kv_head * D, ring, KVH * D, KVH * D, scale,
            WINDOW, D, WIDTH, PAD, BITS, COMPUTE, RECENT, STAGES, False,
        )  # fmt: skip
    for block in range(first, tl.minimum(last, pages) if WINDOW else last):
        token = block * BLOCK + tl.arange(0, BLOCK)
        inside = token < edge
        page = tl.load(table + token // PAGE, mask=inside, other=0)
        slots = page * PAGE + token % PAGE
        k_low, k_high, k_step = load_tile(
            k_cache, slots, k_scale, kv_head, inside, cells, slot_row, KVH, WIDTH, PAD, False, BITS, COMPUTE
        )  # fmt: skip
        scores = tl.dot(q_low, tl.trans(k_low), input_precision="tf32x3")
        if BITS == 4:
            scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="tf32x3")
        if BITS != 16:
            scores *= k_step[None, :]
        scores = tl.where(inside[None, :], scores * scale, float("-inf"))
        # A block has at least one token, so the maximum is finite from the first one on.
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        v_low, v_high, v_step = load_tile(
            v_cache, slots, v_scale, kv_head, inside, cells, slot_row, KVH, WIDTH, PAD, False, BITS, COMPUTE
        )  # fmt: skip
        if BITS != 16:
            weights *= v_step[None, :]
        weights = weights.to(COMPUTE)
        acc_low = tl.dot(weights, v_low, acc_low * shrink[:, None], input_precision="tf32x3")
        if BITS == 4:
            acc_high = tl.dot(weights, v_high, acc_high * shrink[:, None], input_precision="tf32x3")
        top = new_top

    share = 1.0 / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLITS == 1:
        to = out + seq * out_row + head[:, None] * D + cells[None, :]
    else:
        part = (seq * (KVH * GROUP) + head) * SPLITS + split
        to = parts + part[:, None] * D + cells[None, :]
        tl.store(sizes + part, top + tl.log2(total), mask=row < GROUP)
    tl.store(to, (acc_low * share).to(to.dtype.element_ty), mask=real)
    if BITS == 4:
        tl.store(to + WIDTH, (acc_high * share).to(to.dtype.element_ty), mask=real)


@jit
def join_parts_kernel(  # type: ignore[no-untyped-def]
    parts, sizes, context_len, started, out, out_row, H: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr,
    SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, LEAST_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """The parts of one head, weighted by their softmax sums 2^size."""
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    context = tl.load(context_len + seq)
    _, _, blocks = num_blocks(context, started + seq if WINDOW else None, BLOCK, WINDOW, RECENT)
    per_split = tl.maximum(tl.cdiv(blocks, SPLITS), LEAST_BLOCKS)
    used = tl.cdiv(blocks, per_split)
    split = tl.arange(0, SPLITS_PAD)
    cells = tl.arange(0, PAD)
    part = (seq * H + head) * SPLITS + split
    size = tl.load(sizes + part, mask=split < used, other=float("-inf"))
    top = tl.maximum(tl.max(size, 0), -1e30)  # finite even if there is no part
    weight = tl.where(split < used, tl.exp2(size - top), 0.0)
    total = tl.sum(weight, 0)
    real = (split < used)[:, None] & (cells < D)[None, :]
    values = tl.load(parts + part[:, None] * D + cells[None, :], mask=real, other=0.0)
    result = tl.sum(values * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + seq * out_row + head * D + cells, result.to(out.dtype.element_ty), mask=cells < D)


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    scale: float,
    out: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    recent: Recent | None = None,
) -> Tensor:
    """See `decode_attention_ref`. The width of `page_table` bounds the context, and so the number of parts."""
    launches, out = decode_launches(
        q, k_cache, v_cache, page_table, context_len, scale, out, k_scale, v_scale, recent=recent
    )
    for launch in launches:
        launch.run()
    return out


def decode_launches(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    scale: float,
    out: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tile: Tile | None = None,
    recent: Recent | None = None,
) -> tuple[list[Launch], Tensor]:
    """The one or two launches, and the output."""
    batch, heads, dim = q.shape
    page, kv_heads, width = k_cache.shape[1:]
    assert all(x.is_contiguous() for x in (k_cache, v_cache))
    assert q.stride()[1:] == (dim, 1), "the heads of a token lie behind one another"
    bits = 16 if k_scale is None else 8 if width == dim else 4
    device = device_of(q)
    if tile is None and q.dtype == torch.float32 and device.arch:
        tile = FLOAT32_TILE
    tiles = INT4_TILES if bits == 4 else TILES
    tile = tile or tile_for("decode_attention", f"d{dim}b{bits}" + "r" * bool(recent), tiles, device)
    longest = page_table.shape[1] * page
    splits = num_splits(device, batch, kv_heads, longest)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    parts = sizes = None
    if splits > 1:
        parts = torch.empty((batch, heads, splits, dim), dtype=torch.float32, device=q.device)
        sizes = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    shared = {
        "D": dim,
        "SPLITS": splits,
        "LEAST_BLOCKS": ceil_div(LEAST_TOKENS, tile.columns),
        "BLOCK": tile.columns,
    }
    window = recents.constants(recent, device, tile)
    rings = (None,) * 4 if recent is None else (recent.k, recent.v, recent.seats, recent.first)
    attend = Launch(
        decode_attention_kernel,
        (kv_heads, splits, batch),
        (
            *(q, k_cache, v_cache, k_scale, v_scale, page_table, context_len, *rings, out, parts, sizes),
            *(q.stride(0), out.stride(0), page_table.stride(0), kv_heads * width, scale * math.log2(math.e)),
        ),
        {
            **shared,
            "GROUP": heads // kv_heads,
            "KVH": kv_heads,
            "WIDTH": width,
            "PAD": max(power_of_2(width), 16),
            "PAGE": page,
            "BITS": bits,
            "COMPUTE": TRITON_TYPES[q.dtype],
            "ROWS": ROWS,
            **window,
        },
        tile.warps,
        tile.stages,
    )
    if splits == 1:
        return [attend], out
    shared |= {"WINDOW": window["WINDOW"], "RECENT": window["RECENT"]}
    constants = {**shared, "H": heads, "PAD": power_of_2(dim), "SPLITS_PAD": power_of_2(splits)}
    join = Launch(
        join_parts_kernel,
        (heads, batch),
        (parts, sizes, context_len, rings[3], out, out.stride(0)),
        constants,
        warps=max(1, min(power_of_2(splits) * power_of_2(dim) // 256, 4)),
    )
    return [attend, join], out


def num_splits(device: Device, batch: int, kv_heads: int, longest: int) -> int:
    """Parts per sequence, so that all multiprocessors work whatever the batch; 1 if that is so without any.

    A power of two: the number is compiled in, and seven kernels serve the graphs of all batch sizes.
    """
    wanted = ceil_div(device.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR, max(batch * kv_heads, 1))
    return power_of_2(min(wanted, ceil_div(longest, LEAST_TOKENS), MOST_SPLITS))
