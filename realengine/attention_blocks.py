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
_ROWS = 16
"""Queries are padded to multiples of this, and keys to whole blocks: oneDNN compiles a kernel for each shape that it
meets, which takes longer than the product, and in service every chunk has a shape of its own."""


def blocks_win(dtype: torch.dtype, tokens: int, context: int) -> bool:
    """Whether blocks were faster than PyTorch's fused attention, for 9 and 32 heads on one and two threads."""
    if dtype == torch.bfloat16:
        return tokens >= 16
    return tokens == context and 128 <= tokens <= 512


def padded(context: int) -> int:
    """Keys and values that `block_attention` likes to be given for so many."""
    return -(-context // BLOCK_TOKENS) * BLOCK_TOKENS


def block_attention(q: Tensor, k: Tensor, v: Tensor, context: int) -> Tensor:
    """Attention of the last T of `context` tokens, [T, H * D], for q [T, H, D] and k and v [C, KVH, D] in one type.

    Keys and values from `context` on are padding, any finite numbers. Scores and probabilities are rounded to the type
    of the activations, where the fused kernel rounds the probabilities alone.
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    rows = -(-tokens // _ROWS) * _ROWS
    queries = q.new_zeros(rows, heads, dim)
    torch.mul(q, dim**-0.5, out=queries[:tokens])
    queries = queries.view(rows, kv_heads, group, dim).transpose(0, 1)
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
    out = q.new_empty(rows, kv_heads, group, dim)
    later = _later_tokens(q.dtype)
    for start in range(0, rows, BLOCK_TOKENS):
        end = min(start + BLOCK_TOKENS, rows)
        size, first = end - start, context - tokens + start
        seen = min(padded(first + min(size, tokens - start)), len(k))
        block = queries[:, start:end].reshape(kv_heads, size * group, dim)
        scores = torch.bmm(block, keys[:, :, :seen])
        scores.view(kv_heads, size, group, seen)[..., first:].add_(later[:size, :, : seen - first])
        part = torch.bmm(torch.softmax(scores, dim=-1), values[:, :seen])
        out[start:end].transpose(0, 1).copy_(part.view(kv_heads, size, group, dim))
    return out[:tokens].view(tokens, heads * dim)


@cache
def _later_tokens(dtype: torch.dtype) -> Tensor:
    """Minus infinity where a token of a block would see a later one, [BLOCK_TOKENS, 1, 2 BLOCK_TOKENS]."""
    return torch.full((BLOCK_TOKENS, 2 * BLOCK_TOKENS), float("-inf"), dtype=dtype).triu(1).unsqueeze(1)
