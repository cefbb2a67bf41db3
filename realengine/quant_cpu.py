"""Products with quantised weights on the CPU. Weights stay in 8 or 4 bits in memory.

Few tokens: PyTorch's weight-only products, which read the small weights at the speed of memory. Many tokens: their time
grows faster with the tokens than a plain product's, so weights are dequantised a block of channels at a time, in a buffer
that stays in the cache, and multiplied by oneDNN. The changeovers below were measured on matrices from 1 to 32 MB.
float32, and shapes that PyTorch's products lack, always go by blocks; so does fp8, which the CPU has no product for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from costmodel.formats import FP8_BLOCK
from realengine.kernels.quant_gemm_ref import pack_int4
from realengine.quant import Fp8Matrix, Int4Matrix, Int8Matrix, Matrix, from_fp8

INT8_FEW_TOKENS = 32
INT4_FEW_TOKENS = 64
BLOCK_NUMBERS = 1 << 19
"""Weights that are dequantised at a time: they stay in the cache, and calls are few."""
_TILE = 64
"""Channels that PyTorch's int4 packing lays side by side on CPUs with AVX-512."""


class _Blocked(ABC):
    """A product by blocks of dequantised channels; `blocks` yields (first channel, dense weights [channels, K])."""

    def __init__(self, channels: int, inputs: int, bias: Tensor | None, order: Tensor | None = None) -> None:
        self.shape = (channels, inputs)
        self.block = max(128, BLOCK_NUMBERS // inputs // 128 * 128)
        """Channels that are dequantised at a time."""
        self._bias, self._order = bias, order

    @abstractmethod
    def blocks(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """First channel and dense weights of each block."""

    def few(self, x: Tensor) -> Tensor | None:
        """The product where there is a faster way; None where there is not."""
        return None

    def __call__(self, x: Tensor) -> Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        out = self.few(x)
        if out is None:
            out = x.new_empty(x.shape[0], self.shape[0])
            for first, weights in self.blocks(x.dtype):
                torch.mm(x, weights.T, out=out[:, first : first + len(weights)])
        return out if self._bias is None else out.add_(self._bias)


class Int8Linear(_Blocked):
    """`x -> x Wᵀ + bias` with `Int8Matrix` weights. `dtype` is that of x."""

    def __init__(self, matrix: Int8Matrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(*matrix.shape, bias)
        self._levels = matrix.levels.contiguous()
        self._scale = matrix.scale.to(dtype)
        self._few = INT8_FEW_TOKENS if dtype != torch.float32 else 0

    @property
    def nbytes(self) -> int:
        return self._levels.nbytes + self._scale.nbytes

    def few(self, x: Tensor) -> Tensor | None:
        if x.shape[0] > self._few:
            return None
        return torch._weight_int8pack_mm(x.contiguous(), self._levels, self._scale)

    def blocks(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        channels, inputs = self.shape
        buffer = torch.empty(min(self.block, channels), inputs, dtype=dtype)
        for first in range(0, channels, self.block):
            levels = self._levels[first : first + self.block]
            block = buffer[: len(levels)].copy_(levels)
            yield first, block.mul_(self._scale[first : first + self.block].unsqueeze(1))


class Int4Linear(_Blocked):
    """`x -> x Wᵀ + bias` with `Int4Matrix` weights, held as PyTorch's int4 product wants them."""

    def __init__(self, matrix: Int4Matrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(*matrix.shape, bias, matrix.order)
        self._group = matrix.group
        # w = (level - 8) * scale + offset
        scales = matrix.scales.float()
        offsets = (8.0 - matrix.zeros.float()) * scales
        self._numbers = torch.stack((scales.T, offsets.T), dim=2).to(dtype).contiguous()
        pack: Any = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self._packed = pack(matrix.levels.to(torch.int32), 1)
        tiled = _tiled(self._packed, matrix.shape)
        self._readable = tiled is not None and torch.equal(tiled, matrix.levels)

    @staticmethod
    def takes(matrix: Int4Matrix, dtype: torch.dtype) -> bool:
        """Whether PyTorch has a fast product of this type and shape."""
        return dtype in (torch.bfloat16, torch.float16) and matrix.shape[0] % 16 == 0

    @property
    def nbytes(self) -> int:
        return int(self._packed.nbytes + self._numbers.nbytes)

    def few(self, x: Tensor) -> Tensor | None:
        if x.shape[0] > INT4_FEW_TOKENS and self._readable:
            return None
        product: Any = torch.ops.aten._weight_int4pack_mm_for_cpu
        out: Tensor = product(x.contiguous(), self._packed, self._group, self._numbers)
        return out

    def blocks(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        inputs = self.shape[1]
        half, at_once = _TILE // 2, self.block // _TILE
        tiles = self._packed.view(-1, inputs, half)
        for first in range(0, len(tiles), at_once):
            packed = tiles[first : first + at_once].transpose(0, 1)
            buffer = torch.empty(inputs, packed.shape[1], _TILE, dtype=dtype)
            buffer[..., :half] = (packed & 15).view(torch.int8).sub_(8)
            buffer[..., half:] = (packed >> 4).view(torch.int8).sub_(8)
            weights = buffer.flatten(1)
            grouped = weights.view(-1, self._group, weights.shape[1])
            columns = slice(first * _TILE, first * _TILE + weights.shape[1])
            # In one piece: numbers that lie two apart are ten times as slow.
            scales, offsets = self._numbers[:, None, columns].movedim(-1, 0).contiguous()
            torch.addcmul(offsets, grouped, scales, out=grouped)
            yield first * _TILE, weights.T


class PlainInt4Linear(_Blocked):
    """`Int4Linear` for float32 and for shapes that PyTorch's product does not take: always by blocks."""

    def __init__(self, matrix: Int4Matrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(*matrix.shape, bias, matrix.order)
        self._group = matrix.group
        self._packed = pack_int4(matrix.levels, matrix.group)
        self._scales = matrix.scales.to(dtype).contiguous()
        self._zeros = matrix.zeros.contiguous()

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes + self._scales.nbytes + self._zeros.nbytes

    def blocks(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        channels, inputs = self.shape
        half = self._group // 2
        buffer = torch.empty(min(self.block, channels), inputs // self._group, self._group, dtype=dtype)
        for first in range(0, channels, self.block):
            rows = slice(first, first + self.block)
            packed = self._packed[rows].view(-1, inputs // self._group, half)
            block = buffer[: len(packed)]
            block[..., :half] = packed & 15
            block[..., half:] = packed >> 4
            block.sub_(self._zeros[rows].unsqueeze(2)).mul_(self._scales[rows].unsqueeze(2))
            yield first, block.flatten(1)


class Fp8Linear(_Blocked):
    """`x -> x Wᵀ + bias` with `Fp8Matrix` weights, dequantised for every product: smaller in memory, not faster."""

    def __init__(self, matrix: Fp8Matrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(*matrix.shape, bias)
        self._matrix = Fp8Matrix(matrix.values.contiguous(), matrix.scales.contiguous())

    @property
    def nbytes(self) -> int:
        return self._matrix.values.nbytes + self._matrix.scales.nbytes

    def blocks(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        matrix, blocked = self._matrix, self._matrix.blocked
        for first in range(0, self.shape[0], self.block):
            rows = slice(first, first + self.block)
            values = matrix.values[rows]
            scales = (
                matrix.scales[first // FP8_BLOCK : -(-rows.stop // FP8_BLOCK)]
                if blocked
                else matrix.scales[rows]
            )
            yield first, from_fp8(values, dtype).mul_(Fp8Matrix(values, scales).spread_scales().to(dtype))


def quantised_linear(matrix: Matrix, bias: Tensor | None, dtype: torch.dtype) -> _Blocked:
    """`x -> x matrixᵀ + bias` for x of `dtype` [T, K]."""
    if isinstance(matrix, Int8Matrix):
        return Int8Linear(matrix, bias, dtype)
    if isinstance(matrix, Fp8Matrix):
        return Fp8Linear(matrix, bias, dtype)
    kind = Int4Linear if Int4Linear.takes(matrix, dtype) else PlainInt4Linear
    return kind(matrix, bias, dtype)


def _tiled(packed: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """The levels in PyTorch's packing if it is that of AVX-512: per 64 channels and input, 32 bytes of two channels."""
    channels, inputs = shape
    if channels % _TILE:
        return None
    tiles = packed.view(-1, inputs, _TILE // 2)
    levels = torch.cat((tiles & 15, tiles >> 4), dim=2)
    return levels.transpose(1, 2).reshape(channels, inputs)
