"""The kernel that `interpreter` tests itself with: a run-time loop, bfloat16 arithmetic, a bfloat16 product."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _third_and_square(x, out, rounds, N: tl.constexpr):  # type: ignore[no-untyped-def]
    cells = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + cells).to(tl.float32)
    total = tl.zeros((N, N), tl.float32)
    for _ in range(rounds):
        total += value / 8
    third = total.to(tl.bfloat16)
    tl.store(out + cells, third)
    square = tl.dot(third, third, input_precision="ieee")
    tl.store(out + N * N + cells, square.to(tl.bfloat16))


def third_and_square(x: torch.Tensor, rounds: int) -> torch.Tensor:
    """bfloat16 of `rounds` × x/8, and its matrix product with itself."""
    out = torch.empty(2, *x.shape, dtype=torch.bfloat16)
    kernel: Any = _third_and_square
    kernel[(1,)](x, out, rounds, N=x.shape[0])
    return out
