"""Products with 8- and 4-bit weights, turned round: out.T = W · x.T.

So the weights are the left operand, which a tensor core takes from registers, where they are unpacked; they never go
back to shared memory. Each weight byte is read once per tile of tokens, by 16-byte asynchronous copies along K.

* Few tokens (decode): the weights' bytes are the limit. Programs are made by splitting K until every multiprocessor has
  some; the parts are summed by a second kernel, in a fixed order, so that results do not vary from run to run.
* Many tokens (prefill): arithmetic is the limit; the order of programs keeps a group of weight tiles in L2 while the
  tokens pass by.

int4 sums each group of inputs by itself and scales the sum, one multiplication per group instead of one per weight, and
no weight is ever rounded to the type of x: levels minus zero point are exact in it.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

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
from realengine.kernels.tune import Tiles, candidates, tile_for

DEPTH = 128
"""Inputs per step along K."""
GROUPED = 8
"""Weight tiles that share the tokens in L2."""
MOST_SPLITS = 16
FEW_TOKENS = 64

TILES: Tiles = {
    0: [Tile(32, 16, 4, 1)],
    80: [Tile(128, 128, 8, 3), Tile(64, 128, 8, 3), Tile(64, 64, 4, 3)],
    90: [Tile(128, 128, 8, 3), Tile(128, 128, 8, 4), Tile(128, 256, 8, 3), Tile(128, 64, 4, 4)],
}
"""For many tokens, per architecture, the default first; rows are output channels, columns are tokens."""
FEW_TILES: Tiles = {
    0: [Tile(32, 16, 4, 1)],
    80: [Tile(64, 16, 4, 4), Tile(32, 16, 4, 5), Tile(128, 16, 4, 3)],
    90: [Tile(64, 16, 4, 5), Tile(64, 16, 4, 4), Tile(128, 16, 4, 4), Tile(128, 16, 8, 4)],
}
"""For up to 64 tokens; the columns given are the least, more tokens get the next power of two."""

FLOAT32_TILE = Tile(32, 32, 4, 2)
"""See `decode_attention.FLOAT32_TILE`."""


@jit
def gemm_tile(tile, M, N, BN: tl.constexpr, BM: tl.constexpr, GROUPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which channels and tokens the `tile`-th program computes: all tokens for GROUPED channel tiles, then the next."""
    rows = tl.cdiv(N, BN)
    columns = tl.cdiv(M, BM)
    band = tile // (GROUPED * columns)
    height = tl.minimum(rows - band * GROUPED, GROUPED)
    within = tile % (GROUPED * columns)
    channel = (band * GROUPED + within % height) * BN + tl.arange(0, BN)
    token = (within // height) * BM + tl.arange(0, BM)
    return channel, token


@jit
def store_sums(sums, out, scale, channel, token, M, N, out_row, split, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tile of out.T, or of this split's part of it."""
    inside = (token < M)[:, None] & (channel < N)[None, :]
    if scale is not None:
        sums *= tl.load(scale + channel, mask=channel < N, other=0.0).to(tl.float32)[:, None]
    if SPLITS > 1:
        out += split.to(tl.int64) * M * N
    at = out + token.to(tl.int64)[:, None] * out_row + channel[None, :]
    tl.store(at, tl.trans(sums).to(out.dtype.element_ty), mask=inside)


@jit_for_any("M")
def gemm_int8_kernel(  # type: ignore[no-untyped-def]
    x, w, scale, out, M, N, K, x_row, w_row, out_row,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr,
    GROUPED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    channel, token = gemm_tile(tl.program_id(0), M, N, BN, BM, GROUPED)
    split = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(K, BK), SPLITS)
    first = split * steps
    last = tl.minimum(first + steps, tl.cdiv(K, BK))
    # Channels and tokens beyond the end are computed from the last one's numbers and not stored: no mask in the loop.
    w_at = w + tl.minimum(channel, N - 1).to(tl.int64)[:, None] * w_row
    x_at = x + tl.minimum(token, M - 1).to(tl.int64)[:, None] * x_row
    sums = tl.zeros((BN, BM), tl.float32)
    for step in range(first, last):
        k = step * BK + tl.arange(0, BK)
        if EVEN:
            weights = tl.load(w_at + k[None, :])
            values = tl.load(x_at + k[None, :])
        else:
            weights = tl.load(w_at + k[None, :], mask=(k < K)[None, :], other=0)
            values = tl.load(x_at + k[None, :], mask=(k < K)[None, :], other=0.0)
        sums = tl.dot(weights.to(COMPUTE), tl.trans(values), sums, input_precision="tf32x3")
    store_sums(sums, out, scale, channel, token, M, N, out_row, split, SPLITS)


@jit_for_any("M")
def gemm_int4_kernel(  # type: ignore[no-untyped-def]
    x, packed, scales, zeros, out, M, N, K, x_row, w_row, out_row,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, GROUPED: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """BK is the group: a step has one scale and one zero point per channel."""
    HALF: tl.constexpr = BK // 2
    channel, token = gemm_tile(tl.program_id(0), M, N, BN, BM, GROUPED)
    split = tl.program_id(1)
    steps = tl.cdiv(K // BK, SPLITS)
    first = split * steps
    last = tl.minimum(first + steps, K // BK)
    real = tl.minimum(channel, N - 1)
    w_at = packed + real.to(tl.int64)[:, None] * w_row
    x_at = x + tl.minimum(token, M - 1).to(tl.int64)[:, None] * x_row
    cell = tl.arange(0, HALF)
    sums = tl.zeros((BN, BM), tl.float32)
    for step in range(first, last):
        levels = tl.load(w_at + step * HALF + cell[None, :])
        low = tl.load(x_at + step * BK + cell[None, :])
        high = tl.load(x_at + step * BK + HALF + cell[None, :])
        scale = tl.load(scales + step * N + real).to(tl.float32)
        zero = tl.load(zeros + step * N + real).to(tl.int8)[:, None]
        first_half = ((levels & 15).to(tl.int8) - zero).to(COMPUTE)
        second_half = ((levels >> 4).to(tl.int8) - zero).to(COMPUTE)
        group = tl.dot(first_half, tl.trans(low), input_precision="tf32x3")
        group = tl.dot(second_half, tl.trans(high), group, input_precision="tf32x3")
        sums += group * scale[:, None]
    store_sums(sums, out, None, channel, token, M, N, out_row, split, SPLITS)


@jit
def sum_splits_kernel(parts, out, cells, SPLITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * cells + cell, mask=cell < cells, other=0.0)
    tl.store(out + cell, total.to(out.dtype.element_ty), mask=cell < cells)


def quant_gemm_int8(x: Tensor, w_int8: Tensor, scale: Tensor) -> Tensor:
    """See `quant_gemm_ref`."""
    launches, out = gemm_int8_launches(x, w_int8, scale)
    for launch in launches:
        launch.run()
    return out


def quant_gemm_int4(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, group: int = 128) -> Tensor:
    """See `quant_gemm_ref`; groups of 32, 64 or 128."""
    launches, out = gemm_int4_launches(x, packed, scales, zeros, group)
    for launch in launches:
        launch.run()
    return out


def gemm_int8_launches(
    x: Tensor, w_int8: Tensor, scale: Tensor, tile: Tile | None = None
) -> tuple[list[Launch], Tensor]:
    """The one or two launches, and the output."""
    inputs = w_int8.shape[1]
    extra = {"EVEN": inputs % DEPTH == 0, "BK": DEPTH}
    return _launches(gemm_int8_kernel, x, (w_int8, scale), len(w_int8), inputs, 8, extra, tile)


def gemm_int4_launches(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, group: int, tile: Tile | None = None
) -> tuple[list[Launch], Tensor]:
    """The one or two launches, and the output."""
    inputs = packed.shape[1] * 2
    assert scales.shape == zeros.shape == (inputs // group, len(packed))
    return _launches(
        gemm_int4_kernel, x, (packed, scales, zeros), len(packed), inputs, 4, {"BK": group}, tile
    )


def _launches(
    kernel: object,
    x: Tensor,
    weights: tuple[Tensor, ...],
    channels: int,
    inputs: int,
    bits: int,
    extra: dict[str, int],
    tile: Tile | None,
) -> tuple[list[Launch], Tensor]:
    rows = x.reshape(-1, inputs)
    tokens = len(rows)
    device = device_of(x)
    if tile is None and x.dtype == torch.float32 and device.arch:
        tile = FLOAT32_TILE
    tile = tile or gemm_tile_for(device, tokens, bits)
    out = torch.empty((*x.shape[:-1], channels), dtype=x.dtype, device=x.device)
    tiles = ceil_div(channels, tile.rows) * ceil_div(tokens, tile.columns)
    splits = num_splits(device, tiles, tokens, inputs // extra["BK"])
    parts = (
        torch.empty((splits, tokens, channels), dtype=torch.float32, device=x.device) if splits > 1 else None
    )
    target = out.view(-1, channels) if parts is None else parts
    constants = {
        **extra,
        "BN": tile.rows,
        "BM": tile.columns,
        "SPLITS": splits,
        "GROUPED": GROUPED,
        "COMPUTE": TRITON_TYPES[x.dtype],
    }
    sizes = (tokens, channels, inputs, rows.stride(0), weights[0].stride(0), channels)
    product = Launch(
        kernel, (tiles, splits), (rows, *weights, target, *sizes), constants, tile.warps, tile.stages
    )
    if parts is None:
        return [product], out
    cells = tokens * channels
    join = Launch(
        sum_splits_kernel, (ceil_div(cells, 1024),), (parts, out, cells), {"SPLITS": splits, "BLOCK": 1024}
    )
    return [product, join], out


def gemm_tile_for(device: Device, tokens: int, bits: int) -> Tile:
    """The tuned tile for many tokens, or for few."""
    if tokens > FEW_TOKENS:
        return tile_for("quant_gemm", f"many b{bits}", TILES, device)
    tile = tile_for("quant_gemm", f"few b{bits}", FEW_TILES, device)
    return Tile(tile.rows, max(power_of_2(tokens), tile.columns), tile.warps, tile.stages)


def tuning_candidates(device: Device, tokens: int) -> tuple[str, list[Tile]]:
    """The case that `tokens` fall in, and its tiles."""
    if tokens > FEW_TOKENS:
        return "many", candidates(TILES, device)
    return "few", candidates(FEW_TILES, device)


def num_splits(device: Device, tiles: int, tokens: int, steps: int) -> int:
    """Parts of K, so that a product of few tokens occupies every multiprocessor twice."""
    if tokens > FEW_TOKENS or not tiles:
        return 1
    return max(1, min(2 * device.multiprocessors // tiles, steps // 4, MOST_SPLITS))
