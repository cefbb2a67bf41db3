"""Quantised matrices as the engine loads them, and how a plain matrix becomes one: rounding to nearest.

A matrix [out, in] is int8 with a scale per output channel; 4-bit levels in groups of inputs that share a scale and a zero
point; or fp8 (e4m3) with a scale per channel or per block. What a device multiplies is laid out from these once
(`quant_cpu`, `quant_kernels`); embeddings, norms and the LM head stay in the engine's type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from costmodel.formats import FP8_BLOCK, QUANTIZATIONS, int4_group
from serving.errors import UsageError, nearest

SCHEMES = ("int8_wo", "int4_wo", "fp8", "fp8_block")
"""Formats that a plain checkpoint can be quantised to at loading."""
FP8_MOST = 448.0
"""The largest e4m3 number."""
SYMMETRIC_ZERO = 8

Share = Callable[[Tensor], Tensor]
"""A rank's part of a tensor, cut along its first or its second axis."""


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """`levels [N, K]` int8 times `scale [N]` float32."""

    levels: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.levels.shape[0], self.levels.shape[1]

    def dense(self) -> Tensor:
        """float32 [N, K]."""
        return self.levels.float() * self.scale.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """`(levels - zeros) * scales`: levels uint8 [N, K] from 0 to 15, scales and zeros [N, K / group].

    Zero points are whole numbers from 0 to 16; all 8 is the symmetric case. `order [K]` says which input column j
    multiplies, where a checkpoint sorted its inputs; None when column j is input j.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.levels.shape[0], self.levels.shape[1]

    @property
    def group(self) -> int:
        return self.levels.shape[1] // self.scales.shape[1]

    def dense(self) -> Tensor:
        """float32 [N, K], columns in the order of the inputs."""
        rows, inputs = self.shape
        grouped = self.levels.float().view(rows, -1, self.group) - self.zeros.float().unsqueeze(2)
        weight = (grouped * self.scales.float().unsqueeze(2)).view(rows, inputs)
        if self.order is None:
            return weight
        out = torch.empty_like(weight)
        out[:, self.order] = weight
        return out


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """`values [N, K]` float8 e4m3 times `scales` float32: [N, 1] per channel, or one per 128 × 128 block."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def blocked(self) -> bool:
        return self.scales.shape != (self.values.shape[0], 1)

    def dense(self) -> Tensor:
        """float32 [N, K]."""
        return self.values.float() * self.spread_scales()

    def spread_scales(self) -> Tensor:
        """Scales that broadcast against the values."""
        if not self.blocked:
            return self.scales
        rows, inputs = self.shape
        spread = self.scales.repeat_interleave(FP8_BLOCK, 0)[:rows]
        return spread.repeat_interleave(FP8_BLOCK, 1)[:, :inputs]


Matrix = Int8Matrix | Int4Matrix | Fp8Matrix


def scheme_of(quantization: str | None, packed: str | None = None) -> str | None:
    """The format of `--quantization` for a checkpoint whose own is `packed` (awq, gptq, fp8, or None when it is plain).

    None: weights stay as they are. Raises `UsageError` for what the engine does not run or a checkpoint contradicts.
    """
    name = None if quantization in (None, "none") else quantization
    if packed is not None:
        if name is not None and name.removesuffix("_marlin").removesuffix("_block") != packed:
            raise UsageError(
                f"--quantization {name}: the checkpoint is quantised by {packed}; leave the option out, or give a "
                "16-bit checkpoint"
            )
        return None
    if name is None:
        return None
    if name not in QUANTIZATIONS:
        raise UsageError(f"--quantization {name!r} is not known; {nearest(name, SCHEMES)}")
    if name.startswith(("awq", "gptq")):
        raise UsageError(
            f"--quantization {name}: the checkpoint has no {name.removesuffix('_marlin')} weights; int4_wo rounds a "
            "16-bit checkpoint to nearest"
        )
    scheme = QUANTIZATIONS[name]
    if scheme not in SCHEMES:
        raise UsageError(
            f"--quantization {name}: the engine has {', '.join(SCHEMES)}; simulate prices the others"
        )
    return scheme


def quantize(weight: Tensor, scheme: str, scale_dtype: torch.dtype = torch.float32) -> Matrix:
    """`weight [N, K]` rounded to nearest in one of `SCHEMES`.

    Scales are rounded to `scale_dtype`, in which the device keeps them, before anything is divided by them: that costs
    no accuracy. Raises `UsageError` for a width that no group divides.
    """
    weight = weight.float()
    if scheme == "int8_wo":
        scale = _kept(weight.abs().amax(dim=1) / 127, scale_dtype)
        levels = torch.round(weight / scale.unsqueeze(1)).clamp_(-127, 127)
        return Int8Matrix(levels.to(torch.int8), scale)
    if scheme == "int4_wo":
        return quantize_int4(weight, scale_dtype=scale_dtype)
    if scheme == "fp8":
        scale = (weight.abs().amax(dim=1, keepdim=True) / FP8_MOST).clamp_(min=1e-12)
        return Fp8Matrix(to_fp8(weight / scale), scale)
    blocks = _blocks(weight)
    scales = (blocks.abs().amax(dim=(1, 3)) / FP8_MOST).clamp_(min=1e-12)
    spread = Fp8Matrix(torch.empty_like(weight, dtype=torch.float8_e4m3fn), scales).spread_scales()
    return Fp8Matrix(to_fp8(weight / spread), scales)


def quantize_int4(
    weight: Tensor,
    group: int | None = None,
    *,
    symmetric: bool = False,
    scale_dtype: torch.dtype = torch.float32,
) -> Int4Matrix:
    """16 levels per group, from its smallest to its largest number; `symmetric`: -8 to 7 steps around zero.

    The group is 128, or the largest of 64 and 32 that divides the width. Raises `UsageError` when none does.
    """
    weight = weight.float()
    rows, inputs = weight.shape
    group = group or int4_group(inputs)
    if group is None or inputs % group:
        raise UsageError(f"int4_wo: {inputs} inputs of a layer are no multiple of 32; use int8_wo")
    grouped = weight.view(rows, -1, group)
    if symmetric:
        scales = _kept(grouped.abs().amax(dim=2) / 7.5, scale_dtype)
        zeros = torch.full_like(scales, SYMMETRIC_ZERO)
    else:
        low, high = grouped.amin(dim=2).clamp_(max=0), grouped.amax(dim=2).clamp_(min=0)
        scales = _kept((high - low) / 15, scale_dtype)
        zeros = torch.round(-low / scales).clamp_(0, 15)
    levels = torch.round(grouped / scales.unsqueeze(2) + zeros.unsqueeze(2)).clamp_(0, 15)
    return Int4Matrix(levels.view(rows, inputs).to(torch.uint8), scales, zeros.to(torch.uint8))


def to_fp8(x: Tensor) -> Tensor:
    """To e4m3, the largest number where x is larger (PyTorch's own cast gives NaN there)."""
    return x.clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)


def from_fp8(values: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 on the CPU to `dtype`, exactly, thirty times as fast as PyTorch's cast. NaN becomes ±480.

    A byte's low 7 bits, moved up by 4, are the exponent and mantissa of a bfloat16 that is 2^120 times too small: the
    difference of the exponents' biases, 127 - 7. Its sign is moved by sign extension.
    """
    bits = values.view(torch.int8).to(torch.int16).mul_(16).bitwise_and_(_SIGN_AND_NUMBER)
    return bits.view(torch.bfloat16).mul_(2.0**120).to(dtype)


_SIGN_AND_NUMBER = -0x7810
"""0x87F0 as a signed number."""


def join(matrices: Sequence[Matrix]) -> Matrix | None:
    """Matrices of the same inputs one below the other; None where they cannot be one."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    if isinstance(first, Int8Matrix):
        eights = [m for m in matrices if isinstance(m, Int8Matrix)]
        return Int8Matrix(torch.cat([m.levels for m in eights]), torch.cat([m.scale for m in eights]))
    if isinstance(first, Fp8Matrix):
        floats = [m for m in matrices if isinstance(m, Fp8Matrix)]
        if any(m.blocked and m.shape[0] % FP8_BLOCK for m in floats[:-1]):
            return None
        return Fp8Matrix(torch.cat([m.values for m in floats]), torch.cat([m.scales for m in floats]))
    fours = [m for m in matrices if isinstance(m, Int4Matrix)]
    if len({m.group for m in fours}) > 1 or not all(_same_order(first, m) for m in fours):
        return None
    return Int4Matrix(
        torch.cat([m.levels for m in fours]),
        torch.cat([m.scales for m in fours]),
        torch.cat([m.zeros for m in fours]),
        first.order,
    )


def cut_rows(matrix: Matrix, share: Share) -> Matrix:
    """A rank's output channels."""
    if isinstance(matrix, Int8Matrix):
        return Int8Matrix(share(matrix.levels), share(matrix.scale))
    if isinstance(matrix, Int4Matrix):
        return Int4Matrix(share(matrix.levels), share(matrix.scales), share(matrix.zeros), matrix.order)
    return Fp8Matrix(share(matrix.values), share(matrix.scales))


def cut_columns(matrix: Matrix, share: Share, ranks: int) -> Matrix:
    """A rank's inputs. Raises `UsageError` where groups do not divide among ranks."""
    if ranks == 1:
        return matrix
    if isinstance(matrix, Int8Matrix):
        return Int8Matrix(share(matrix.levels), matrix.scale)
    if isinstance(matrix, Int4Matrix):
        if matrix.order is not None or matrix.scales.shape[1] % ranks:
            raise UsageError(
                f"--tensor-parallel-size {ranks}: the checkpoint's groups of {matrix.group} inputs do not divide "
                "among ranks"
            )
        return Int4Matrix(share(matrix.levels), share(matrix.scales), share(matrix.zeros))
    return Fp8Matrix(share(matrix.values), share(matrix.scales) if matrix.blocked else matrix.scales)


def moved(matrix: Matrix, device: torch.device) -> Matrix:
    """The same on `device`."""
    if isinstance(matrix, Int8Matrix):
        return Int8Matrix(matrix.levels.to(device), matrix.scale.to(device))
    if isinstance(matrix, Fp8Matrix):
        return Fp8Matrix(matrix.values.to(device), matrix.scales.to(device))
    order = None if matrix.order is None else matrix.order.to(device)
    return Int4Matrix(matrix.levels.to(device), matrix.scales.to(device), matrix.zeros.to(device), order)


def _kept(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as they will be kept, in float32; a channel or group of zeros gets 1."""
    scale = scale.to(dtype).float()
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _blocks(weight: Tensor) -> Tensor:
    """[N / 128, 128, K / 128, 128], zeros added where the sides are no multiples."""
    rows, inputs = weight.shape
    down, right = (-rows) % FP8_BLOCK, (-inputs) % FP8_BLOCK
    padded = torch.nn.functional.pad(weight, (0, right, 0, down))
    return padded.view(-1, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)


def _same_order(a: Int4Matrix, b: Int4Matrix) -> bool:
    if a.order is None or b.order is None:
        return a.order is b.order
    return torch.equal(a.order, b.order)
