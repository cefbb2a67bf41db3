"""Causal attention of chunks of several sequences over their pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from realengine.kernels.decode_attention_ref import attend_with_recent, gather_kv
from realengine.kernels.recent_ref import Recent


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    scale: float,
    max_query: int,
    out: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    recent: Recent | None = None,
    new: Sequence[Tensor] | None = None,
) -> Tensor:
    """Rows query_start[i] to query_start[i+1] of q are the last tokens of sequence i, whose KV is in its pages.

    A token sees itself and what came before it. Rows of padding, which belong to no sequence, are not written.
    `max_query` bounds the tokens of a chunk (the Triton kernel picks its tile by it). With `recent` the last tokens of
    each query are read as they were: from rings, and from `new`, the chunks' own K and V [T, KVH, D], which rings do not
    hold yet.
    """
    out = torch.empty_like(q) if out is None else out
    kv_heads = k_cache.shape[2]
    group = q.shape[1] // kv_heads
    starts = query_start.tolist()
    for i, context in enumerate(context_len.tolist()):
        start, end = starts[i], starts[i + 1]
        if start == end:
            continue
        assert end - start <= min(context, max_query), (
            "a chunk is part of its context and no longer than max_query"
        )
        if recent is not None and new is not None:
            pages = (k_cache, v_cache, page_table[i : i + 1], context, q, k_scale, v_scale)
            own = new[0][start:end], new[1][start:end]
            out[start:end] = attend_with_recent(q[start:end], pages, scale, recent, i, own)
            continue
        k, v = gather_kv(k_cache, v_cache, page_table[i : i + 1], context, q, k_scale, v_scale)
        # [1, KVH, group * tokens, D]: the heads of a group are rows of their KV head, as in the Triton kernel.
        rows = (
            q[start:end].view(-1, kv_heads, group, q.shape[2]).permute(1, 2, 0, 3).flatten(1, 2).unsqueeze(0)
        )
        visible = None
        if end - start > 1:
            last_seen = torch.arange(context - (end - start), context, device=q.device)
            visible = torch.arange(context, device=q.device) <= last_seen.repeat(group).unsqueeze(1)
        result = scaled_dot_product_attention(rows, k, v, visible, scale=scale)
        out[start:end] = result[0].view(kv_heads, group, end - start, -1).permute(2, 0, 1, 3).flatten(1, 2)
    return out
