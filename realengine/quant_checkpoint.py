"""Checkpoints whose weights are quantised already: AWQ, GPTQ and fp8 folders, by their `quantization_config`.

AWQ (gemm layout): `qweight int32 [K, N/8]`, `qzeros int32 [K/group, N/8]`, `scales [K/group, N]`. An int32 holds eight
output channels, nibble i that of channel `AWQ_CHANNELS[i]`. w = (q - z) * s.

GPTQ: `qweight int32 [K/8, N]`, eight inputs in a row from the low nibble up; `qzeros int32 [K/group, N/8]`, eight
channels in a row, holding z - 1 (checkpoint_format "gptq") or z ("gptq_v2"); `scales [K/group, N]`; `g_idx int32 [K]`,
the group of each input, which rises unless the checkpoint was made with `desc_act`. w = (q - z) * s.

fp8: `weight` e4m3 with `weight_scale` (one per tensor or per channel) or `weight_scale_inv` (one per 128 × 128 block);
either multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from costmodel.formats import FP8_BLOCK
from realengine.checkpoint import Checkpoint
from realengine.quant import Fp8Matrix, Int4Matrix, Matrix
from serving.errors import UsageError

AWQ_CHANNELS = (0, 2, 4, 6, 1, 3, 5, 7)
GROUPS = (32, 64, 128)
"""Group sizes that the products have."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a folder's matrices are stored."""

    method: Literal["awq", "gptq", "fp8"]
    where: str
    """The folder, for errors."""
    group: int = 128
    zero_less_1: bool = False
    """GPTQ: stored zero points are one too small."""
    blocked: bool = False
    """fp8: a scale per 128 × 128 block."""

    def holds(self, checkpoint: Checkpoint, name: str) -> bool:
        """Whether the matrix `name` (….weight) is quantised; folders leave some as they were."""
        stem = name.removesuffix("weight")
        if self.method == "fp8":
            return checkpoint.has(stem + "weight_scale") or checkpoint.has(stem + "weight_scale_inv")
        return checkpoint.has(stem + "qweight")

    def matrix(self, checkpoint: Checkpoint, name: str) -> Matrix:
        """The matrix `name`. Raises `UsageError` for shapes that are not this layout's."""
        stem = name.removesuffix("weight")
        try:
            if self.method == "fp8":
                return self._fp8(checkpoint, stem)
            qweight, qzeros = checkpoint.tensor(stem + "qweight"), checkpoint.tensor(stem + "qzeros")
            scales = checkpoint.tensor(stem + "scales")
            if self.method == "awq":
                return self._checked(from_awq(qweight, qzeros, scales))
            g_idx = checkpoint.tensor(stem + "g_idx") if checkpoint.has(stem + "g_idx") else None
            return self._checked(from_gptq(qweight, qzeros, scales, g_idx, zero_less_1=self.zero_less_1))
        except UsageError as error:
            raise UsageError(f"--model {self.where}: {stem[:-1]}: {error}") from None
        except (RuntimeError, IndexError, ZeroDivisionError):
            raise UsageError(
                f"--model {self.where}: {stem[:-1]} does not have the shapes of a {self.method} matrix"
            ) from None

    def _checked(self, matrix: Int4Matrix) -> Int4Matrix:
        rows, inputs = matrix.shape
        if not matrix.scales.shape == matrix.zeros.shape == (rows, inputs / self.group):
            raise UsageError(
                f"scales {tuple(matrix.scales.T.shape)} do not fit {rows} by {inputs} weights in groups of {self.group}"
            )
        return matrix

    def _fp8(self, checkpoint: Checkpoint, stem: str) -> Fp8Matrix:
        values = checkpoint.tensor(stem + "weight")
        if values.dtype != torch.float8_e4m3fn:
            raise UsageError(f"fp8 weights of type {values.dtype}; the engine reads float8_e4m3fn")
        if checkpoint.has(stem + "weight_scale_inv"):
            scales = checkpoint.tensor(stem + "weight_scale_inv").float()
            if scales.shape != tuple(-(-side // FP8_BLOCK) for side in values.shape):
                raise UsageError(f"fp8 scales of shape {tuple(scales.shape)}; blocks must be 128 × 128")
            return Fp8Matrix(values, scales)
        scale = checkpoint.tensor(stem + "weight_scale").float().reshape(-1, 1)
        return Fp8Matrix(values, scale.expand(values.shape[0], 1).contiguous())


def packing_of(config: Mapping[str, Any], folder: Path) -> Packing | None:
    """From `quantization_config`; None for a plain checkpoint. Raises `UsageError` for what the engine cannot read."""
    section = config.get("quantization_config")
    if section is None:
        return None
    where = f"--model {folder}"
    if not isinstance(section, Mapping):
        raise UsageError(f"{where}: quantization_config is no object")
    method = section.get("quant_method")
    if method == "fp8":
        blocks = section.get("weight_block_size")
        if blocks is not None and list(blocks) != [FP8_BLOCK, FP8_BLOCK]:
            raise UsageError(f"{where}: fp8 blocks of {blocks}; the engine reads [128, 128]")
        return Packing("fp8", str(folder), blocked=blocks is not None)
    if method not in ("awq", "gptq"):
        raise UsageError(f"{where}: weights quantised by {method!r}; the engine reads awq, gptq and fp8")
    bits, group = (
        section.get("bits", section.get("w_bit")),
        section.get("group_size", section.get("q_group_size")),
    )
    if bits != 4:
        raise UsageError(f"{where}: {method} weights of {bits} bits; the engine reads 4 bits")
    if group not in GROUPS:
        raise UsageError(f"{where}: {method} groups of {group} inputs; the engine reads {GROUPS}")
    if method == "awq":
        version = str(section.get("version", "gemm")).lower()
        if version != "gemm":
            raise UsageError(f"{where}: AWQ layout {version!r}; the engine reads 'gemm'")
        return Packing("awq", str(folder), group)
    stored = section.get("checkpoint_format", "gptq")
    if stored not in ("gptq", "gptq_v2"):
        raise UsageError(f"{where}: GPTQ layout {stored!r}; the engine reads gptq and gptq_v2")
    return Packing("gptq", str(folder), group, zero_less_1=stored == "gptq")


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Int4Matrix:
    """An AWQ matrix."""
    place = torch.argsort(torch.tensor(AWQ_CHANNELS))

    def channels(packed: Tensor) -> Tensor:
        return _nibbles(packed)[:, :, place].flatten(1)

    return Int4Matrix(
        channels(qweight).T.contiguous(), scales.float().T.contiguous(), channels(qzeros).T.contiguous()
    )


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, *, zero_less_1: bool
) -> Int4Matrix:
    """A GPTQ matrix. Where groups are not in a row, columns are put into an order in which they are."""
    levels = _nibbles(qweight).permute(1, 0, 2).flatten(1).contiguous()
    zeros = _nibbles(qzeros).flatten(1).T.contiguous() + int(zero_less_1)
    scales = scales.float().T.contiguous()
    inputs, groups = levels.shape[1], scales.shape[1]
    if g_idx is None or torch.equal(g_idx.long(), torch.arange(inputs) // (inputs // groups)):
        return Int4Matrix(levels, scales, zeros)
    order = torch.argsort(g_idx.long(), stable=True)
    if not torch.equal(g_idx.long()[order], torch.arange(inputs) // (inputs // groups)):
        raise UsageError("g_idx does not divide the inputs into groups of equal size")
    return Int4Matrix(levels[:, order].contiguous(), scales, zeros, order)


def _nibbles(packed: Tensor) -> Tensor:
    """int32 [A, B] as its eight nibbles, the low one first: uint8 [A, B, 8]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (torch.bitwise_right_shift(packed.unsqueeze(2), shifts) & 15).to(torch.uint8)
