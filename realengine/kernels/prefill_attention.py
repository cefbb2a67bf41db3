"""Causal attention of chunks over a paged cache, in one launch for sequences of any lengths.

What limits it is arithmetic: 4 · queries · context · head_dim operations per head. For that

* the rows of a program are query tokens × the heads of one group, so a KV tile in shared memory serves all of them;
* rows fill tiles of 64 or 128, which on Hopper are warpgroup products (wgmma) with K and V read from shared memory;
* tiles that every row sees are run without any mask, and only the last ones, which cross the diagonal, with it;
* programs that see most come first, so that the tail of a launch is short;
* K and V arrive by 16-byte asynchronous copies, `stages` tiles ahead.

The grid is an upper bound (tokens / tile + sequences): a program finds its sequence by binary search in `query_start`,
and returns if it is beyond the end. Nothing is read back to the host.

With recent tokens kept as they were (`recent_ref`) a program reads old tokens from pages, the ring's from before the
chunk from there, and the chunk's own from K and V themselves, since the ring may be shorter than the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from realengine.kernels import recent as recents
from realengine.kernels.decode_attention import load_tile
from realengine.kernels.launch import (
    TRITON_TYPES,
    Device,
    Launch,
    Tile,
    device_of,
    jit,
    jit_for_any,
    power_of_2,
)
from realengine.kernels.recent import attend_recent
from realengine.kernels.recent_ref import Recent
from realengine.kernels.tune import candidates, tile_for

TILES = {
    0: [Tile(32, 32, 4, 1)],
    80: [Tile(128, 32, 8, 3), Tile(64, 64, 8, 3), Tile(64, 32, 4, 3)],
    90: [Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 4, 3)],
}
"""Per architecture, the default first; rows are tokens × group, columns are tokens of the context."""
QUANTISED_TILES = {**TILES, 80: [Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 3)]}
"""Unpacking takes registers, which mma needs for the accumulator and wgmma, with 8 warps, has left."""

FLOAT32_TILE = Tile(32, 32, 4, 2)
"""See `decode_attention.FLOAT32_TILE`."""


@jit
def attend_tiles(  # type: ignore[no-untyped-def]
    acc_low, acc_high, top, total, q_low, q_high, first, last, last_seen, context, k_cache, v_cache, k_scale,
    v_scale, table, kv_head, slot_row, scale,
    KVH: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Online softmax over the KV tiles `first` to `last`. FULL: every row sees all of every tile."""
    cells = tl.arange(0, PAD)
    for block in range(first, last):
        token = block * BLOCK + tl.arange(0, BLOCK)
        inside = token < context
        if FULL:
            page = tl.load(table + token // PAGE)
        else:
            page = tl.load(table + token // PAGE, mask=inside, other=0)
        slots = page * PAGE + token % PAGE
        k_low, k_high, k_step = load_tile(
            k_cache, slots, k_scale, kv_head, inside, cells, slot_row, KVH, WIDTH, PAD, FULL, BITS, COMPUTE
        )  # fmt: skip
        scores = tl.dot(q_low, tl.trans(k_low), input_precision="tf32x3")
        if BITS == 4:
            scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="tf32x3")
        if BITS != 16:
            scores *= k_step[None, :]
        scores *= scale
        if not FULL:
            scores = tl.where(token[None, :] <= last_seen[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        v_low, v_high, v_step = load_tile(
            v_cache, slots, v_scale, kv_head, inside, cells, slot_row, KVH, WIDTH, PAD, FULL, BITS, COMPUTE
        )  # fmt: skip
        if BITS != 16:
            weights *= v_step[None, :]
        weights = weights.to(COMPUTE)
        acc_low = tl.dot(weights, v_low, acc_low * shrink[:, None], input_precision="tf32x3")
        if BITS == 4:
            acc_high = tl.dot(weights, v_high, acc_high * shrink[:, None], input_precision="tf32x3")
        top = new_top
    return acc_low, acc_high, top, total


@jit_for_any("page_table", "context_len", "seats", "started", "table_row", "num_seqs")
def prefill_attention_kernel(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, k_scale, v_scale, page_table, query_start, context_len, recent_k, recent_v, seats,
    started, k_new, v_new, out, q_row, out_row, table_row, slot_row, k_row, v_row, num_seqs, scale,
    GROUP: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
    PAGE: tl.constexpr, BITS: tl.constexpr, COMPUTE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, RECENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS // GROUP query tokens of one sequence for one KV head. `scale` includes log2(e)."""
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    # Sequence i owns the tiles from query_start[i] // TOKENS + i on: find the last one that starts at or before ours.
    low = tile * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        starts = tl.load(query_start + middle) // TOKENS + middle
        low = tl.where(starts <= tile, middle, low)
        high = tl.where(starts <= tile, high, middle)
    start = tl.load(query_start + low)
    queries = tl.load(query_start + low + 1) - start
    first_query = (tile - start // TOKENS - low) * TOKENS
    if first_query >= queries:
        return
    seq = low.to(tl.int64)
    context = tl.load(context_len + seq)

    row = tl.arange(0, ROWS)
    query = tl.minimum(first_query + row // GROUP, queries - 1)
    real = (row // GROUP < TOKENS) & (first_query + row // GROUP < queries)
    last_seen = context - queries + query
    head = kv_head * GROUP + row % GROUP
    cells = tl.arange(0, PAD)
    token = (start + query).to(tl.int64)
    used = real[:, None] & (cells < WIDTH)[None, :]
    q_at = q + token[:, None] * q_row + head[:, None] * D + cells[None, :]
    q_low = tl.load(q_at, mask=used, other=0.0).to(COMPUTE)
    acc_low = tl.zeros((ROWS, PAD), tl.float32)
    q_high = q_low
    acc_high = 0.0
    if BITS == 4:
        q_high = tl.load(q_at + WIDTH, mask=used, other=0.0).to(COMPUTE)
        acc_high = tl.zeros((ROWS, PAD), tl.float32)
    # A tile may have nothing that a row sees: with recent tokens the maximum must be finite before that.
    top = tl.full((ROWS,), -1e30 if WINDOW else float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)

    begin = context - queries
    seen_by_all = begin + first_query + 1
    seen_by_some = begin + tl.minimum(first_query + TOKENS, queries)
    edge = last_seen
    last_in_pages = last_seen
    if WINDOW:
        end = seen_by_some
        fresh = tl.load(started + seq).to(tl.int32)
        edge = tl.maximum(last_seen - WINDOW + 1, fresh)
        last_in_pages = edge - 1
        seen_by_all = tl.maximum(seen_by_all - WINDOW, fresh)
        seen_by_some = tl.maximum(seen_by_some - WINDOW, fresh)
        context = seen_by_some
    full = seen_by_all // BLOCK
    table = page_table + seq * table_row
    acc_low, acc_high, top, total = attend_tiles(
        acc_low, acc_high, top, total, q_low, q_high, 0, full, last_seen, context, k_cache, v_cache, k_scale,
        v_scale, table, kv_head, slot_row, scale, KVH, WIDTH, PAD, PAGE, BITS, COMPUTE, BLOCK, True
    )  # fmt: skip
    acc_low, acc_high, top, total = attend_tiles(
        acc_low, acc_high, top, total, q_low, q_high, full, tl.cdiv(seen_by_some, BLOCK), last_in_pages,
        context, k_cache, v_cache, k_scale, v_scale, table, kv_head, slot_row, scale, KVH, WIDTH, PAD, PAGE,
        BITS, COMPUTE, BLOCK, False
    )  # fmt: skip
    if WINDOW:
        ring = tl.load(seats + seq) * WINDOW
        at = kv_head * D
        acc_low, acc_high, top, total = attend_recent(
            acc_low, acc_high, top, total, q_low, q_high, 0, tl.cdiv(begin - seen_by_all, RECENT), seen_by_all,
            begin, edge, last_seen, recent_k + at, recent_v + at, ring, KVH * D, KVH * D, scale,
            WINDOW, D, WIDTH, PAD, BITS, COMPUTE, RECENT, STAGES, True
        )  # fmt: skip
        first = tl.maximum(seen_by_all, begin)
        acc_low, acc_high, top, total = attend_recent(
            acc_low, acc_high, top, total, q_low, q_high, 0, tl.cdiv(end - first, RECENT), first,
            end, edge, last_seen, k_new + at, v_new + at, start - begin, k_row, v_row, scale,
            0, D, WIDTH, PAD, BITS, COMPUTE, RECENT, STAGES, True
        )  # fmt: skip
    share = 1.0 / total[:, None]
    to = out + token[:, None] * out_row + head[:, None] * D + cells[None, :]
    tl.store(to, (acc_low * share).to(out.dtype.element_ty), mask=used)
    if BITS == 4:
        tl.store(to + WIDTH, (acc_high * share).to(out.dtype.element_ty), mask=used)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    scale: float,
    max_query: int,
    out: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    recent: Recent | None = None,
    new: Sequence[Tensor] | None = None,
) -> Tensor:
    """See `prefill_attention_ref`. Rows of padding, which belong to no sequence, are not written."""
    launch, out = prefill_launch(
        *(q, k_cache, v_cache, page_table, query_start, context_len, scale, max_query, out, k_scale, v_scale),
        recent=recent,
        new=new,
    )
    launch.run()
    return out


def prefill_launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    scale: float,
    max_query: int,
    out: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tile: Tile | None = None,
    recent: Recent | None = None,
    new: Sequence[Tensor] | None = None,
) -> tuple[Launch, Tensor]:
    """The launch, and the output."""
    tokens, heads, dim = q.shape
    page, kv_heads, width = k_cache.shape[1:]
    assert all(x.is_contiguous() for x in (k_cache, v_cache))
    assert q.stride()[1:] == (dim, 1), "the heads of a token lie behind one another"
    bits = 16 if k_scale is None else 8 if width == dim else 4
    group = heads // kv_heads
    device = device_of(q)
    if tile is None and q.dtype == torch.float32 and device.arch:
        tile = FLOAT32_TILE
    tile = tile or _tile(device, dim, bits, max_query * group, "r" * bool(recent))
    num_seqs = len(context_len)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    rings: tuple[Tensor | None, ...] = (None,) * 6
    rows = 0, 0
    if recent is not None and new is not None:
        assert all(x.stride()[1:] == (dim, 1) for x in new), "the heads of a token lie behind one another"
        rings = recent.k, recent.v, recent.seats, recent.first, *new
        rows = new[0].stride(0), new[1].stride(0)
    launch = Launch(
        prefill_attention_kernel,
        (kv_heads, tokens // (tile.rows // group) + num_seqs if tokens else 0),
        (
            *(q, k_cache, v_cache, k_scale, v_scale, page_table, query_start, context_len, *rings, out),
            *(q.stride(0), out.stride(0), page_table.stride(0), kv_heads * width, *rows, num_seqs),
            scale * math.log2(math.e),
        ),
        {
            "GROUP": group,
            "KVH": kv_heads,
            "D": dim,
            "WIDTH": width,
            "PAD": max(power_of_2(width), 16),
            "PAGE": page,
            "BITS": bits,
            "COMPUTE": TRITON_TYPES[q.dtype],
            "ROWS": tile.rows,
            "BLOCK": tile.columns,
            **recents.constants(recent, device, tile),
        },
        tile.warps,
        tile.stages,
    )
    return launch, out


def _tile(device: Device, dim: int, bits: int, most_rows: int, recent: str) -> Tile:
    """The tuned tile, or one of fewer rows if no chunk fills half of it (drafts being verified, say)."""
    tiles = TILES if bits == 16 else QUANTISED_TILES
    tile = tile_for("prefill_attention", f"d{dim}b{bits}{recent}", tiles, device)
    rows = max(power_of_2(most_rows), 16)
    if rows >= tile.rows:
        return tile
    small = candidates(tiles, device)[0]
    return Tile(rows, min(small.columns, 64), 4, small.stages)
