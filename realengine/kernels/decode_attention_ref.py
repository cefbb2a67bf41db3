"""Attention of one new token per sequence over its pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from realengine.kernels.kv_quant_ref import dequantize_kv
from realengine.kernels.recent_ref import Recent, with_recent


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
    recent: Recent | None = None,
) -> Tensor:
    """softmax(q Kᵀ · scale) V per sequence and head; zeros where `context_len` is 0.

    With `recent` the last tokens, the new one included, are read from rings as they were.

    The heads of a group are the query rows of their KV head, so that K and V are gathered once and never repeated. What
    lies in the pages beyond a sequence's end may be anything, NaN included.
    """
    out = torch.empty_like(q) if out is None else out
    batch, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    longest = int(context_len.max()) if batch else 0
    if longest == 0:
        return out.zero_()
    if recent is not None:
        for i, context in enumerate(context_len.tolist()):
            if context:
                caches = (k_cache, v_cache, page_table[i : i + 1], context, q, k_scale, v_scale)
                out[i : i + 1] = attend_with_recent(q[i : i + 1], caches, scale, recent, i, None)
            else:
                out[i] = 0
        return out
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


def attend_with_recent(
    q: Tensor,
    pages: tuple[Tensor, Tensor, Tensor, int, Tensor, Tensor | None, Tensor | None],
    scale: float,
    recent: Recent,
    row: int,
    new: Sequence[Tensor] | None,
) -> Tensor:
    """Attention of the last tokens q [n, H, D] of sequence `row`; `pages` are the arguments of `gather_kv`."""
    context = pages[3]
    begin = context - len(q)
    queries = torch.arange(begin, context, device=q.device)
    old_k, old_v = (x[0].transpose(0, 1) for x in gather_kv(*pages))
    new_k, new_v = (None, None) if new is None else new
    k, seen = with_recent(old_k, recent.k, new_k, begin, recent, row, queries)
    v, _ = with_recent(old_v, recent.v, new_v, begin, recent, row, queries)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)
