"""Products with quantised weights by the engine's kernels: Triton on CUDA, their references elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from realengine.kernels import Operators
from realengine.kernels.quant_gemm_ref import pack_int4
from realengine.quant import FP8_MOST, Fp8Matrix, Int4Matrix, Int8Matrix, Matrix


class KernelInt8Linear:
    """`x -> x Wᵀ + bias`, a float32 scale per channel."""

    def __init__(self, matrix: Int8Matrix, bias: Tensor | None, kernels: Operators) -> None:
        self._levels, self._scale = matrix.levels.contiguous(), matrix.scale.float().contiguous()
        self._bias, self._kernels = bias, kernels

    @property
    def nbytes(self) -> int:
        return self._levels.nbytes + self._scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._kernels.quant_gemm_int8(x, self._levels, self._scale)
        return out if self._bias is None else out.add_(self._bias)


class KernelInt4Linear:
    """`x -> x Wᵀ + bias`: per group a float16 scale and a zero point of 8 bits."""

    def __init__(self, matrix: Int4Matrix, bias: Tensor | None, kernels: Operators) -> None:
        self._group, self._order = matrix.group, matrix.order
        self._packed = pack_int4(matrix.levels, matrix.group).contiguous()
        self._scales = matrix.scales.T.to(torch.float16).contiguous()
        self._zeros = matrix.zeros.T.contiguous()
        self._bias, self._kernels = bias, kernels

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes + self._scales.nbytes + self._zeros.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        out: Tensor = self._kernels.quant_gemm_int4(x, self._packed, self._scales, self._zeros, self._group)
        return out if self._bias is None else out.add_(self._bias)


class KernelFp8Linear:
    """`x -> x Wᵀ + bias`. Per channel on a device with fp8 products, activations are scaled row by row and multiplied
    in fp8; blocks, and other devices, dequantise the weights for every product."""

    def __init__(self, matrix: Fp8Matrix, bias: Tensor | None) -> None:
        self._matrix, self._bias = matrix, bias
        self._native = not matrix.blocked and has_fp8_products(matrix.values.device)

    @property
    def nbytes(self) -> int:
        return self._matrix.values.nbytes + self._matrix.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if not self._native:
            return linear(x, self._matrix.dense().to(x.dtype), self._bias)
        scale = (x.abs().amax(dim=1, keepdim=True).float() / FP8_MOST).clamp_(min=1e-12)  # pragma: no cover
        rows = (x.float() / scale).to(torch.float8_e4m3fn)  # pragma: no cover
        out = torch._scaled_mm(  # pragma: no cover - needs a GPU
            rows, self._matrix.values.T, scale, self._matrix.scales.T.contiguous(), out_dtype=x.dtype
        )
        return out if self._bias is None else out.add_(self._bias)  # pragma: no cover


def has_fp8_products(device: torch.device) -> bool:
    """Whether the device multiplies e4m3 numbers row by row (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def kernel_linear(
    matrix: Matrix, bias: Tensor | None, kernels: Operators
) -> KernelInt8Linear | KernelInt4Linear | KernelFp8Linear:
    """`x -> x matrixᵀ + bias` for x [T, K] on the matrix's device."""
    if isinstance(matrix, Int8Matrix):
        return KernelInt8Linear(matrix, bias, kernels)
    if isinstance(matrix, Int4Matrix):
        return KernelInt4Linear(matrix, bias, kernels)
    return KernelFp8Linear(matrix, bias)
