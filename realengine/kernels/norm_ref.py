"""RMSNorm, with or without a residual added first."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x²) + eps) * weight` over the last axis, in float32.

    With `residual` the sum `x + residual` is normalised, and returned as well: it is the next residual.
    """
    if residual is None:
        return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
    total = x + residual
    return torch.nn.functional.rms_norm(total.float(), x.shape[-1:], weight.float(), eps).to(x.dtype), total
