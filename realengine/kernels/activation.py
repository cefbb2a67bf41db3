"""silu(gate) · up in one pass: two reads, one write, nothing kept.

Each thread issues two 16-byte loads of the gate and two of the up half before it computes.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from realengine.kernels.launch import Launch, ceil_div, jit, power_of_2


@jit
def silu_mul_kernel(gate_up, out, row_stride, N: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    cells = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cells < N
    gate = tl.load(gate_up + row * row_stride + cells, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + N + cells, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * N + cells, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `activation_ref`."""
    launch, out = silu_mul_launch(gate_up)
    launch.run()
    return out


def silu_mul_launch(gate_up: Tensor) -> tuple[Launch, Tensor]:
    """The launch, and its output."""
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width)
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(power_of_2(width), 2048)
    constants = {"N": width, "BLOCK": block}
    grid = (len(rows), ceil_div(width, block))
    return Launch(silu_mul_kernel, grid, (rows, out, rows.stride(0)), constants, warps=4), out
