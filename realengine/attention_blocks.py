"""Causal attention of a chunk on the CPU as plain products, a block of queries after another.

A block multiplies what its last query sees and no more, so that a whole prompt costs half of the square, and its scores
stay in the cache between the products. PyTorch's fused kernel does neither.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK_TOKENS = 64
"""Queries of a block: larger ones compute more that nobody sees, smaller ones call more often."""


def blocks_win(dtype: torch.dtype, tokens: int, context: int) -> bool:
    """Whether blocks were faster than PyTorch's fused attention, for 9 and 32 heads on one and two threads."""
    if dtype == torch.bfloat16:
        return tokens >= 16
    return tokens == context and 128 <= tokens <= 512


def block_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last T of C tokens, [T, H * D], for q [T, H, D] and k and v [C, KVH, D] in one type.

    Scores and probabilities are rounded to that type, where the fused kernel rounds the probabilities alone.
    """
    tokens, heads, dim = q.shape
    context, kv_heads = k.shape[0], k.shape[1]
    group = heads // kv_heads
    queries = (q * dim**-0.5).view(tokens, kv_heads, group, dim).transpose(0, 1)
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
    out = q.new_empty(tokens, kv_heads, group, dim)
    later = _later_tokens(q.dtype)
    for start in range(0, tokens, BLOCK_TOKENS):
        end = min(start + BLOCK_TOKENS, tokens)
        size, seen = end - start, context - tokens + end
        block = queries[:, start:end].reshape(kv_heads, size * group, dim)
        scores = torch.bmm(block, keys[:, :, :seen])
        scores.view(kv_heads, size, group, seen)[..., seen - size :].add_(later[:size, :, :size])
        part = torch.bmm(torch.softmax(scores, dim=-1), values[:, :seen])
        out[start:end].transpose(0, 1).copy_(part.view(kv_heads, size, group, dim))
    return out.view(tokens, heads * dim)


@cache
def _later_tokens(dtype: torch.dtype) -> Tensor:
    """Minus infinity where a token of a block would see a later one, [BLOCK_TOKENS, 1, BLOCK_TOKENS]."""
    return torch.full((BLOCK_TOKENS, BLOCK_TOKENS), float("-inf"), dtype=dtype).triu(1).unsqueeze(1)
