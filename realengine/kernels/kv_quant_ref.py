"""Quantised KV: one scale per token and head, so that writing a token never touches another one's numbers.

int8 holds round(x / s) with s = max|x| / 127. int4 holds round(x / s) + 8 with s = max|x| / 7; byte j of a head packs
element j (low nibble) and element j + head_dim / 2 (high nibble), so that a kernel unpacks two contiguous halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = {8: 127.0, 4: 7.0}


def quantize_kv(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """`x [..., head_dim]` as int8 (bits 8) or packed uint8 (bits 4), and its float32 scales `[...]`."""
    x = x.float()
    scale = x.abs().amax(dim=-1) / LEVELS[bits]
    # A head of zeros has scale 0; dividing by 1 keeps its numbers 0.
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    whole = torch.round(x / divisor.unsqueeze(-1)).to(torch.int8)
    if bits == 8:
        return whole, scale
    low, high = (whole + 8).view(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4), scale


def dequantize_kv(quantised: Tensor, scale: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The inverse of `quantize_kv`, up to half a scale."""
    if bits == 4:
        quantised = torch.cat((quantised & 15, quantised >> 4), dim=-1).to(torch.int8) - 8
    return (quantised.float() * scale.unsqueeze(-1)).to(dtype)
