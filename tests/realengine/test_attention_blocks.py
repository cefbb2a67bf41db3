"""Attention in blocks against the definition, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from realengine.attention_blocks import BLOCK_TOKENS, block_attention, blocks_win, padded


def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √D) v over what each token may see, head by head."""
    q, k, v = (x.double() for x in (q, k, v))
    (tokens, heads, dim), (context, kv_heads, _) = q.shape, k.shape
    out = torch.empty(tokens, heads, dim, dtype=torch.float64)
    for token in range(tokens):
        seen = context - tokens + token + 1
        for head in range(heads):
            of = head // (heads // kv_heads)
            weights = (k[:seen, of] @ q[token, head] / dim**0.5).softmax(0)
            out[token, head] = weights @ v[:seen, of]
    return out.view(tokens, -1)


def drawn(
    tokens: int, before: int, kv_heads: int, group: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(tokens * 1000 + before)
    shapes = (tokens, kv_heads * group, dim), *2 * ((tokens + before, kv_heads, dim),)
    q, k, v = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    return q, k, v


@given(
    tokens=st.integers(1, 2 * BLOCK_TOKENS + 5),
    before=st.integers(0, 70),
    kv_heads=st.sampled_from([1, 3]),
    group=st.sampled_from([1, 3, 8]),
    dim=st.sampled_from([32, 80]),
)
@example(tokens=BLOCK_TOKENS, before=0, kv_heads=3, group=3, dim=64)
@example(tokens=BLOCK_TOKENS + 1, before=1, kv_heads=3, group=3, dim=64)
@settings(max_examples=12, deadline=None)
def test_equals_the_definition(tokens: int, before: int, kv_heads: int, group: int, dim: int) -> None:
    q, k, v = drawn(tokens, before, kv_heads, group, dim, torch.float32)
    torch.testing.assert_close(
        block_attention(q, k, v, len(k)).double(), definition(q, k, v), rtol=1e-4, atol=1e-5
    )
    fill = torch.full((padded(len(k)) - len(k), *k.shape[1:]), 9.0)
    longer = block_attention(q, torch.cat((k, fill)), torch.cat((v, fill)), len(k))
    torch.testing.assert_close(longer.double(), definition(q, k, v), rtol=1e-4, atol=1e-5)


def test_bfloat16_errs_by_roundings_alone() -> None:
    """Scores, probabilities and sums are rounded once each, to 2⁻⁹ of themselves; scores here are at most 4."""
    q, k, v = drawn(130, 40, 3, 3, 64, torch.bfloat16)
    error = (block_attention(q, k, v, len(k)).double() - definition(q, k, v)).abs()
    assert error.max() < 2**-9 * (4 + 1 + 1) * v.abs().max()


def test_what_comes_later_is_never_seen() -> None:
    """Huge keys and values of the last token change nothing before it."""
    tokens = BLOCK_TOKENS + 20
    q, k, v = drawn(tokens, 0, 1, 2, 32, torch.float32)
    k[-1], v[-1] = 1e4, 1e4
    with_last = block_attention(q, k, v, tokens)
    torch.testing.assert_close(with_last[:-1].double(), definition(q, k, v)[:-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tokens", "context", "wins"),
    [
        (torch.bfloat16, 16, 2048, True),
        (torch.bfloat16, 4, 512, False),
        (torch.float32, 256, 256, True),
        (torch.float32, 256, 257, False),
        (torch.float32, 64, 64, False),
    ],
)
def test_taken_where_measured_to_win(dtype: torch.dtype, tokens: int, context: int, wins: bool) -> None:
    assert blocks_win(dtype, tokens, context) is wins
