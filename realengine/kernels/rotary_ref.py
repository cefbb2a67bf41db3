"""Rotary embedding of Q and K, and the write of K and V into their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from realengine.kernels.kv_quant_ref import quantize_kv
from realengine.kernels.norm_ref import rms_norm
from realengine.kernels.recent_ref import write_recent


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
    """Rotated Q; K (rotated) and V go to `slots` of the cache, where a slot is not negative.

    q [T, H, D], k and v [T, KVH, D]; cos and sin [max_positions, D/2] (halves of a head rotate against each other).
    `q_norm, k_norm [D]`: RMSNorm of each head before the rotation, as in Qwen3. With `k_scale, v_scale
    [num_pages, page_tokens, KVH]` the cache is int8, or int4 where its last axis is half a head.

    `k_out [T, KVH, D]` takes rotated K as it is. `recent` are rings of K and V (`recent_ref`) and each token's slot in
    them, int64 [T]; negative: nowhere.
    """
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)  # type: ignore[assignment]
    cosines, sines = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    q, k = _rotate(q, cosines, sines), _rotate(k, cosines, sines)
    if k_out is not None:
        k_out.copy_(k)
    if recent is not None:
        rows = (recent[2] >= 0).nonzero().squeeze(1)
        write_recent(k, v, rows, recent[2][rows], *recent[:2])
    slots = slots.long()
    if slots.numel() and int(slots.min()) < 0:
        kept = slots >= 0
        slots, k, v = slots[kept], k[kept], v[kept]
    if k_scale is not None and v_scale is not None:
        bits = 8 if k_cache.shape[-1] == q.shape[-1] else 4
        k, k_steps = quantize_kv(k, bits)
        v, v_steps = quantize_kv(v, bits)
        k_scale.flatten(0, 1)[slots] = k_steps
        v_scale.flatten(0, 1)[slots] = v_steps
    k_cache.flatten(0, 1)[slots] = k.to(k_cache.dtype)
    v_cache.flatten(0, 1)[slots] = v.to(v_cache.dtype)
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
