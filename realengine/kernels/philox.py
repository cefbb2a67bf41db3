"""`philox_ref.uniform` in Triton: the same numbers, bit for bit."""

from __future__ import annotations

import triton.language as tl

from realengine.kernels.launch import jit


@jit
def uniform(seed, position, STREAM: tl.constexpr):  # type: ignore[no-untyped-def]
    """float64 in [0, 1) for a request's seed and a token's position."""
    counter = position.to(tl.int32)
    nothing = counter * 0
    a, b, _, _ = tl.philox(seed, counter, nothing, nothing + STREAM, nothing)
    return ((a >> 5).to(tl.uint64) * 67108864 + (b >> 6).to(tl.uint64)).to(
        tl.float64
    ) * 1.1102230246251565e-16
