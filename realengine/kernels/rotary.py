"""Rotary embedding and the paged write of K and V, with Qwen3's norms and KV quantisation, in one kernel.

A program takes one token and up to 8 heads, of Q or of K and V. It reads each number once and writes it once: K never
goes back to memory between its norm, its rotation, its quantisation and its page. Beside quantised pages it writes K and
V as they are to rings of recent tokens (`recent_ref`), and K to `k_out` for the chunks that read it before a ring has it.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from realengine.kernels.kv_quant import head_scale, store_quantised
from realengine.kernels.launch import Launch, ceil_div, jit, power_of_2

HEADS = 8
"""Heads per program."""


@jit
def rotated_halves(x, cells, inside, norm, cell, cos, sin, eps, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The heads at `x + cells`, normalised where there is a norm, and rotated."""
    low = tl.load(x + cells, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + cells + HALF, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        shrink = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        # Addressed as a tile as large as x's, a thread loads as many numbers at once as it does of x.
        gain = tl.broadcast_to(norm + cell[None, :], cells.shape)
        low *= shrink * tl.load(gain, mask=inside, other=0.0).to(tl.float32)
        high *= shrink * tl.load(gain + HALF, mask=inside, other=0.0).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@jit
def rotary_write_kv_kernel(  # type: ignore[no-untyped-def]
    q, k, v, cos, sin, positions, slots, q_norm, k_norm, q_out, k_cache, v_cache, k_scale, v_scale, k_out,
    recent_k, recent_v, recent_slots, q_row, k_row, v_row, cache_row, eps,
    H: tl.constexpr, KVH: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    block = tl.program_id(1)
    cell = tl.arange(0, PAD)
    position = tl.load(positions + token).to(tl.int64)
    angle = position * HALF + cell[None, :]
    cosines = tl.load(cos + angle, mask=(cell < HALF)[None, :], other=0.0).to(tl.float32)
    sines = tl.load(sin + angle, mask=(cell < HALF)[None, :], other=0.0).to(tl.float32)
    if block < Q_BLOCKS:
        head = block * HEADS + tl.arange(0, HEADS)
        cells = head[:, None] * (2 * HALF) + cell[None, :]
        inside = (head < H)[:, None] & (cell < HALF)[None, :]
        low, high = rotated_halves(
            q + token * q_row, cells, inside, q_norm, cell, cosines, sines, eps, HALF
        )  # fmt: skip
        to = q_out + token * (2 * HALF * H)
        tl.store(to + cells, low.to(q_out.dtype.element_ty), mask=inside)
        tl.store(to + cells + HALF, high.to(q_out.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        head = (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
        cells = head[:, None] * (2 * HALF) + cell[None, :]
        kept = head < tl.where(slot >= 0, KVH, 0)  # a token of padding is written nowhere
        inside = kept[:, None] & (cell < HALF)[None, :]
        k_low, k_high = rotated_halves(
            k + token * k_row, cells, inside, k_norm, cell, cosines, sines, eps, HALF
        )  # fmt: skip
        v_low = tl.load(v + token * v_row + cells, mask=inside, other=0.0).to(tl.float32)
        v_high = tl.load(v + token * v_row + cells + HALF, mask=inside, other=0.0).to(tl.float32)
        k_to = k_cache + slot * cache_row
        v_to = v_cache + slot * cache_row
        if BITS == 16:
            tl.store(k_to + cells, k_low.to(k_cache.dtype.element_ty), mask=inside)
            tl.store(k_to + cells + HALF, k_high.to(k_cache.dtype.element_ty), mask=inside)
            tl.store(v_to + cells, v_low.to(v_cache.dtype.element_ty), mask=inside)
            tl.store(v_to + cells + HALF, v_high.to(v_cache.dtype.element_ty), mask=inside)
        else:
            LEVELS: tl.constexpr = 127.0 if BITS == 8 else 7.0
            WIDTH: tl.constexpr = 2 * HALF if BITS == 8 else HALF
            packed = head[:, None] * WIDTH + cell[None, :]
            scale, divisor = head_scale(k_low, k_high, LEVELS)
            tl.store(k_scale + slot * KVH + head, scale, mask=kept)
            store_quantised(k_to, packed, k_low, k_high, divisor, inside, BITS, HALF)
            scale, divisor = head_scale(v_low, v_high, LEVELS)
            tl.store(v_scale + slot * KVH + head, scale, mask=kept)
            store_quantised(v_to, packed, v_low, v_high, divisor, inside, BITS, HALF)
        if k_out is not None:
            to = k_out + token * (2 * HALF * KVH)
            tl.store(to + cells, k_low.to(k_out.dtype.element_ty), mask=inside)
            tl.store(to + cells + HALF, k_high.to(k_out.dtype.element_ty), mask=inside)
        if recent_slots is not None:
            place = tl.load(recent_slots + token).to(tl.int64)
            inside = (head < tl.where(place >= 0, KVH, 0))[:, None] & (cell < HALF)[None, :]
            k_to = recent_k + place * (2 * HALF * KVH)
            v_to = recent_v + place * (2 * HALF * KVH)
            tl.store(k_to + cells, k_low.to(recent_k.dtype.element_ty), mask=inside)
            tl.store(k_to + cells + HALF, k_high.to(recent_k.dtype.element_ty), mask=inside)
            tl.store(v_to + cells, v_low.to(recent_v.dtype.element_ty), mask=inside)
            tl.store(v_to + cells + HALF, v_high.to(recent_v.dtype.element_ty), mask=inside)


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_out: Tensor | None = None,
    recent: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """See `rotary_ref`. q, k and v may be views of one fused projection: only their rows may be strided."""
    launch, q_out = rotary_write_kv_launch(
        *(q, k, v, cos, sin, positions, k_cache, v_cache, slots, q_norm, k_norm, eps, k_scale, v_scale),
        k_out=k_out,
        recent=recent,
    )
    launch.run()
    return q_out


def rotary_write_kv_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_out: Tensor | None = None,
    recent: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Launch, Tensor]:
    """The launch, and the rotated Q."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    for x in (q, k, v):
        assert x.stride()[1:] == (dim, 1), "the heads of a token lie behind one another"
    assert all(x.is_contiguous() for x in (k_cache, v_cache, cos, sin))
    bits = 16 if k_scale is None else 8 if k_cache.shape[-1] == dim else 4
    q_out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    launch = Launch(
        rotary_write_kv_kernel,
        (tokens, ceil_div(heads, HEADS) + ceil_div(kv_heads, HEADS)),
        (
            *(q, k, v, cos, sin, positions, slots, q_norm, k_norm, q_out, k_cache, v_cache, k_scale, v_scale),
            *(k_out, *(recent or (None,) * 3)),
            *(q.stride(0), k.stride(0), v.stride(0), kv_heads * k_cache.shape[-1], eps),
        ),
        {
            "H": heads,
            "KVH": kv_heads,
            "HALF": dim // 2,
            "PAD": power_of_2(dim // 2),
            "HEADS": HEADS,
            "BITS": bits,
        },
        warps=2,
    )
    return launch, q_out
