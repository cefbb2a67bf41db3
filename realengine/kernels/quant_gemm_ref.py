"""Products with weights of 8 or 4 bits, and how such weights are made.

int8: `w [N, K]`, `scale [N]`, a row per output channel. int4: groups of `group` inputs share a scale and a zero point,
`w = (nibble - zero) * scale` with `scales, zeros [K/group, N]` (one row per step of a kernel along K). Byte j of a group
packs its element j (low nibble) and element j + group / 2 (high), so that a kernel unpacks two contiguous halves.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quant_gemm_int8(x: Tensor, w_int8: Tensor, scale: Tensor) -> Tensor:
    """`x [..., K] @ (w * scale).T`."""
    return (x @ w_int8.to(x.dtype).T) * scale.to(x.dtype)


def quant_gemm_int4(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, group: int = 128) -> Tensor:
    """`x [..., K] @ w.T` for `packed [N, K/2]`."""
    return x @ dequantize_int4(packed, scales, zeros, group).to(x.dtype).T


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight [N, K]` as int8 with one float32 scale per row: max|w| / 127."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / 127
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(weight / divisor.unsqueeze(1)).to(torch.int8), scale


def quantize_int4(weight: Tensor, group: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """`weight [N, K]` as (packed, float32 scales, uint8 zeros): 16 levels from a group's smallest to largest number.

    Zero points are whole numbers from 0 to 15, so that 0 is a level of every group.
    """
    grouped = weight.float().reshape(len(weight), -1, group)
    low, high = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
    scales = (high - low) / 15
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    zeros = torch.round(-low / scales).clamp(0, 15)
    levels = torch.round(grouped / scales.unsqueeze(2) + zeros.unsqueeze(2)).clamp(0, 15).to(torch.uint8)
    return pack_int4(levels.flatten(1), group), scales.T.contiguous(), zeros.T.to(torch.uint8).contiguous()


def pack_int4(levels: Tensor, group: int = 128) -> Tensor:
    """Numbers 0 to 15 `[N, K]` as bytes `[N, K/2]`."""
    low, high = levels.view(len(levels), -1, group).chunk(2, dim=2)
    return (low | (high << 4)).flatten(1)


def unpack_int4(packed: Tensor, group: int = 128) -> Tensor:
    """The inverse of `pack_int4`."""
    halves = packed.view(len(packed), -1, group // 2)
    return torch.cat((halves & 15, halves >> 4), dim=2).flatten(1)


def dequantize_int4(packed: Tensor, scales: Tensor, zeros: Tensor, group: int = 128) -> Tensor:
    """`(nibble - zero) * scale` in float32."""
    levels = unpack_int4(packed, group).float().view(len(packed), -1, group)
    return ((levels - zeros.T.float().unsqueeze(2)) * scales.T.float().unsqueeze(2)).flatten(1)
