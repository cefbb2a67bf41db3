"""Quantising and dequantising KV in Triton; the format is described in `kv_quant_ref`.

The two halves of a head are separate tiles, because int4 packs them into one byte and the rotary kernel has them so.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from realengine.kernels.launch import Launch, ceil_div, jit, jit_for_any, power_of_2

ROWS = 16
"""Heads per program."""


@jit
def round_to_even(x):  # type: ignore[no-untyped-def]
    # Adding 1.5 * 2^23 leaves no bits for a fraction; the hardware rounds to nearest even.
    return (x + 12582912.0) - 12582912.0


@jit
def head_scale(low, high, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The step of each row, and what to divide by: a row of zeros is divided by 1."""
    scale = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1)) / LEVELS
    return scale, tl.where(scale > 0.0, scale, 1.0)


@jit
def store_quantised(  # type: ignore[no-untyped-def]
    base, cells, low, high, divisor, inside, BITS: tl.constexpr, HALF: tl.constexpr
):
    """Write both halves of the heads at `base + cells` (the cells of the low half)."""
    low = round_to_even(low / divisor[:, None])
    high = round_to_even(high / divisor[:, None])
    if BITS == 8:
        tl.store(base + cells, low.to(tl.int8), mask=inside)
        tl.store(base + cells + HALF, high.to(tl.int8), mask=inside)
    else:
        byte = (low + 8.0).to(tl.int32) | ((high + 8.0).to(tl.int32) << 4)
        tl.store(base + cells, byte.to(tl.uint8), mask=inside)


@jit_for_any("rows")
def quantize_kv_kernel(  # type: ignore[no-untyped-def]
    x, out, scales, rows, BITS: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cell = tl.arange(0, PAD)
    inside = (row < rows)[:, None] & (cell < HALF)[None, :]
    start = row.to(tl.int64)[:, None] * (2 * HALF) + cell[None, :]
    low = tl.load(x + start, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + start + HALF, mask=inside, other=0.0).to(tl.float32)
    scale, divisor = head_scale(low, high, 127.0 if BITS == 8 else 7.0)
    tl.store(scales + row, scale, mask=row < rows)
    WIDTH: tl.constexpr = 2 * HALF if BITS == 8 else HALF
    cells = row.to(tl.int64)[:, None] * WIDTH + cell[None, :]
    store_quantised(out, cells, low, high, divisor, inside, BITS, HALF)


@jit_for_any("rows")
def dequantize_kv_kernel(  # type: ignore[no-untyped-def]
    quantised,
    scales,
    out,
    rows,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cell = tl.arange(0, PAD)
    inside = (row < rows)[:, None] & (cell < HALF)[None, :]
    scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
    WIDTH: tl.constexpr = 2 * HALF if BITS == 8 else HALF
    cells = row.to(tl.int64)[:, None] * WIDTH + cell[None, :]
    low = tl.load(quantised + cells, mask=inside, other=0)
    if BITS == 8:
        high = tl.load(quantised + cells + HALF, mask=inside, other=0).to(tl.float32)
        low = low.to(tl.float32)
    else:
        high = (low >> 4).to(tl.float32) - 8.0
        low = (low & 15).to(tl.float32) - 8.0
    start = row.to(tl.int64)[:, None] * (2 * HALF) + cell[None, :]
    tl.store(out + start, (low * scale).to(out.dtype.element_ty), mask=inside)
    tl.store(out + start + HALF, (high * scale).to(out.dtype.element_ty), mask=inside)


def quantize_kv(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """See `kv_quant_ref`."""
    launch, out, scales = quantize_kv_launch(x, bits)
    launch.run()
    return out, scales


def dequantize_kv(quantised: Tensor, scale: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """See `kv_quant_ref`."""
    launch, out = dequantize_kv_launch(quantised, scale, bits, dtype)
    launch.run()
    return out


def quantize_kv_launch(x: Tensor, bits: int) -> tuple[Launch, Tensor, Tensor]:
    """The launch, and its outputs."""
    x = x.contiguous()
    dim = x.shape[-1]
    kind, width = (torch.int8, dim) if bits == 8 else (torch.uint8, dim // 2)
    out = torch.empty((*x.shape[:-1], width), dtype=kind, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    return _launch(quantize_kv_kernel, (x, out, scales), scales.numel(), bits, dim), out, scales


def dequantize_kv_launch(
    quantised: Tensor, scale: Tensor, bits: int, dtype: torch.dtype
) -> tuple[Launch, Tensor]:
    """The launch, and its output."""
    dim = quantised.shape[-1] * (1 if bits == 8 else 2)
    out = torch.empty((*quantised.shape[:-1], dim), dtype=dtype, device=quantised.device)
    tensors = (quantised.contiguous(), scale.contiguous(), out)
    return _launch(dequantize_kv_kernel, tensors, scale.numel(), bits, dim), out


def _launch(kernel: object, tensors: tuple[Tensor, ...], rows: int, bits: int, dim: int) -> Launch:
    constants = {"BITS": bits, "HALF": dim // 2, "PAD": power_of_2(dim // 2), "ROWS": ROWS}
    return Launch(kernel, (ceil_div(rows, ROWS),), (*tensors, rows), constants, warps=2)
