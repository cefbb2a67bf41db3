"""RMSNorm with the residual addition fused in: one read of each input, one write of each output.

One program per row, the whole row in registers, so the sum of squares costs no second pass over memory. A row of 4,096
bfloat16 numbers on 8 warps is two 16-byte loads per thread and input, all issued before the first use.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from realengine.kernels.launch import Launch, jit, power_of_2


@jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, out, total, x_row, residual_row, eps, N: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cells = tl.arange(0, BLOCK)
    inside = cells < N
    value = tl.load(x + row * x_row + cells, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * residual_row + cells, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * N + cells, rounded, mask=inside)
        # What is normalised is what the next layer will read.
        value = rounded.to(tl.float32)
    gain = tl.load(weight + cells, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / N + eps) * gain
    tl.store(out + row * N + cells, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """See `norm_ref`. The rows of x and residual may be strided, their last axis is contiguous."""
    launch, out, total = rms_norm_launch(x, weight, eps, residual)
    launch.run()
    return out if total is None else (out, total)


def rms_norm_launch(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
) -> tuple[Launch, Tensor, Tensor | None]:
    """The launch, and its outputs."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    added = None if residual is None else residual.reshape(-1, width)
    added_row = 0 if added is None else added.stride(0)
    block = power_of_2(width)
    launch = Launch(
        rms_norm_kernel,
        (len(rows),),
        (rows, added, weight, out, total, rows.stride(0), added_row, eps),
        {"N": width, "BLOCK": block},
        warps=min(max(block // 512, 1), 16),
    )
    return launch, out, total
