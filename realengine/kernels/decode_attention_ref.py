"""Attention of one new token per sequence over its pages."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from realengine.kernels.kv_quant_ref import dequantize_kv


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    scale: float,
    out: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """softmax(q Kᵀ · scale) V per sequence and head; zeros where `context_len` is 0.

    The heads of a group are the query rows of their KV head, so that K and V are gathered once and never repeated. What
    lies in the pages beyond a sequence's end may be anything, NaN included.
    """
    out = torch.empty_like(q) if out is None else out
    batch, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    longest = int(context_len.max()) if batch else 0
    if longest == 0:
        return out.zero_()
    rows = q.view(batch, kv_heads, heads // kv_heads, dim)
    k, v = gather_kv(k_cache, v_cache, page_table, longest, q, k_scale, v_scale)
    visible = torch.arange(longest, device=q.device) < context_len.unsqueeze(1)
    if bool(visible.all()):
        result = scaled_dot_product_attention(rows, k, v, scale=scale)
    else:
        unseen = ~visible[:, None, :, None]
        k, v = k.masked_fill_(unseen, 0), v.masked_fill_(unseen, 0)
        result = scaled_dot_product_attention(rows, k, v, visible[:, None, None, :], scale=scale)
        result = result.masked_fill((context_len == 0)[:, None, None, None], 0)
    return out.copy_(result.reshape(batch, heads, dim))


def gather_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    length: int,
    like: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The first `length` tokens of each row of `page_table` as `[B, KVH, length, D]`, a copy in the type of `like`."""
    size = k_cache.shape[1]
    pages = page_table[:, : -(-length // size)].long()
    batch = len(pages)

    def gather(cache: Tensor, scales: Tensor | None) -> Tensor:
        tokens = cache.index_select(0, pages.flatten()).view(batch, -1, *cache.shape[2:])[:, :length]
        if scales is not None:
            bits = 8 if cache.shape[-1] == like.shape[-1] else 4
            steps = scales.index_select(0, pages.flatten()).view(batch, -1, scales.shape[-1])[:, :length]
            tokens = dequantize_kv(tokens, steps, bits, like.dtype)
        return tokens.to(like.dtype).transpose(1, 2)

    return gather(k_cache, k_scale), gather(v_cache, v_scale)
