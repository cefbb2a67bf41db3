"""Recent tokens as they were, beside quantised pages: what the attention kernels and the write share.

The rings are described in `recent_ref`. They are read where they lie, as pages are: a token's row is worked out from its
position, and a head of a token is contiguous.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from realengine.kernels.launch import Device, Launch, Tile, jit, power_of_2
from realengine.kernels.recent_ref import Recent

BLOCKS = {0: 16, 80: 32, 90: 64}
"""Per architecture, most recent tokens per tile: they have 2 to 4 times the bytes of those for which tiles are chosen."""
STAGES = 3
"""Addresses need no table, so that these are two tiles ahead."""


def constants(recent: Recent | None, device: Device, tile: Tile) -> dict[str, int]:
    """What a kernel is compiled with; a window of 0 leaves all of it out."""
    block = BLOCKS[max(arch for arch in BLOCKS if arch <= device.arch)]
    return {
        "WINDOW": recent.tokens if recent is not None else 0,
        "RECENT": min(tile.columns, block),
        "STAGES": min(tile.stages, STAGES),
    }


@jit
def num_blocks(context, started, BLOCK: tl.constexpr, WINDOW: tl.constexpr, RECENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of one new token's context: where pages end, tiles of pages, tiles of all. `started` points at `first`."""
    edge = context
    if WINDOW:
        edge = tl.maximum(context - WINDOW, tl.load(started).to(tl.int32))
    pages = tl.cdiv(edge, BLOCK)
    blocks = pages
    if WINDOW:
        blocks += tl.cdiv(context - edge, RECENT)
    return edge, pages, blocks


@jit
def attend_recent(  # type: ignore[no-untyped-def]
    acc_low, acc_high, top, total, q_low, q_high, first, last, begin, end, edge, last_seen, k, v, base, k_row,
    v_row, scale,
    WINDOW: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, BITS: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Online softmax over the tiles `first` to `last` of tokens from `begin` to `end`.

    Token t is in row `base + t % WINDOW` of k and v, or without a window in `base + t`. CAUSAL: rows see tokens from
    their `edge` to `last_seen` only.
    """
    cells = tl.arange(0, PAD)
    for block in tl.range(first, last, num_stages=STAGES):
        token = begin + block * BLOCK + tl.arange(0, BLOCK)
        inside = token < end
        at = base + token
        if WINDOW:
            at = base + token % WINDOW
        real = inside[:, None] & (cells < WIDTH)[None, :]
        k_at = k + at.to(tl.int64)[:, None] * k_row + cells[None, :]
        k_low = tl.load(k_at, mask=real, other=0.0).to(COMPUTE)
        scores = tl.dot(q_low, tl.trans(k_low), input_precision="tf32x3")
        if BITS == 4:
            k_high = tl.load(k_at + WIDTH, mask=real, other=0.0).to(COMPUTE)
            scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="tf32x3")
        seen = inside[None, :]
        if CAUSAL:
            seen &= (token[None, :] >= edge[:, None]) & (token[None, :] <= last_seen[:, None])
        scores = tl.where(seen, scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(COMPUTE)
        v_at = v + at.to(tl.int64)[:, None] * v_row + cells[None, :]
        v_low = tl.load(v_at, mask=real, other=0.0).to(COMPUTE)
        acc_low = tl.dot(weights, v_low, acc_low * shrink[:, None], input_precision="tf32x3")
        if BITS == 4:
            v_high = tl.load(v_at + WIDTH, mask=real, other=0.0).to(COMPUTE)
            acc_high = tl.dot(weights, v_high, acc_high * shrink[:, None], input_precision="tf32x3")
        top = new_top
    return acc_low, acc_high, top, total


@jit
def write_recent_kernel(  # type: ignore[no-untyped-def]
    k, v, rows, slots, recent_k, recent_v, k_row, v_row, CELLS: tl.constexpr, PAD: tl.constexpr
):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    cells = tl.arange(0, PAD)
    inside = cells < CELLS
    new_k = tl.load(k + row * k_row + cells, mask=inside, other=0.0)
    new_v = tl.load(v + row * v_row + cells, mask=inside, other=0.0)
    tl.store(recent_k + slot * CELLS + cells, new_k, mask=inside)
    tl.store(recent_v + slot * CELLS + cells, new_v, mask=inside)


def write_recent(
    k: Tensor, v: Tensor, rows: Tensor, slots: Tensor, recent_k: Tensor, recent_v: Tensor
) -> None:
    """See `recent_ref`. The rows of k and v may be strided."""
    write_recent_launch(k, v, rows, slots, recent_k, recent_v).run()


def write_recent_launch(
    k: Tensor, v: Tensor, rows: Tensor, slots: Tensor, recent_k: Tensor, recent_v: Tensor
) -> Launch:
    """The launch."""
    heads, dim = k.shape[1:]
    for x in (k, v):
        assert x.stride()[1:] == (dim, 1), "the heads of a token lie behind one another"
    cells = heads * dim
    return Launch(
        write_recent_kernel,
        (len(rows),),
        (k, v, rows, slots, recent_k, recent_v, k.stride(0), v.stride(0)),
        {"CELLS": cells, "PAD": power_of_2(cells)},
        warps=max(1, min(power_of_2(cells) // 256, 8)),
    )
