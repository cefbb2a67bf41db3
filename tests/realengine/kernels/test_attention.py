"""Paged attention: kernels against references, references against the formula, with poison wherever nobody wrote."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from realengine.kernels import (
    decode_attention,
    decode_attention_ref,
    prefill_attention,
    prefill_attention_ref,
)
from tests.realengine.kernels.paged import DEVICE, close, paged, plain_attention

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = [
    # heads, KV heads (group), head_dim, page, type, bits of the cache
    (4, 4, 64, 16, F32, 16),
    (9, 3, 64, 16, BF16, 16),
    (4, 1, 80, 32, F32, 16),
    (8, 1, 96, 16, F16, 16),
    (8, 2, 128, 48, BF16, 16),
    (3, 1, 128, 16, F32, 16),
    (9, 3, 64, 16, F32, 8),
    (8, 1, 128, 16, BF16, 8),
    (4, 4, 80, 16, F32, 4),
    (8, 2, 128, 32, BF16, 4),
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page", "dtype", "bits"), SHAPES)
def test_decode_equals_the_reference_and_the_formula(
    heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype, bits: int
) -> None:
    contexts = [1, page - 1, page, page + 1, 0, 3 * page + 5]
    batch = paged(contexts, kv_heads, dim, page, dtype, bits)
    q = torch.randn(len(contexts), heads, dim).to(dtype).to(DEVICE)
    args = (q, batch.k_cache, batch.v_cache, batch.page_table, batch.context_len, dim**-0.5)
    scales = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    expected = decode_attention_ref.paged_decode_attention(*args, **scales)
    for row, context in enumerate(contexts):
        plain = torch.zeros(1, heads, dim, dtype=dtype, device=DEVICE)
        if context:
            plain = plain_attention(q[row : row + 1], batch.keys[row], batch.values[row], dim**-0.5)
        assert close(expected[row : row + 1], plain)
    assert close(decode_attention.paged_decode_attention(*args, **scales), expected)


@pytest.mark.parametrize("context", [1, 31, 32, 33, 127, 128, 129, 400])
def test_decode_of_one_sequence_is_the_same_in_one_part_and_in_many(context: int) -> None:
    batch = paged([context], 2, 64, 16, F32)
    q = torch.randn(1, 4, 64, device=DEVICE)
    caches = (batch.k_cache, batch.v_cache)
    wide = torch.nn.functional.pad(batch.page_table, (0, 40 - batch.page_table.shape[1]))
    for table in (batch.page_table, wide):  # a wider table allows more parts
        got = decode_attention.paged_decode_attention(q, *caches, table, batch.context_len, 0.125)
        assert close(got, plain_attention(q, batch.keys[0], batch.values[0], 0.125))


def test_decode_writes_where_it_is_told_and_nowhere_else() -> None:
    batch = paged([20, 5], 2, 64, 16, F32)
    q = torch.randn(2, 4, 64, device=DEVICE)
    wide = torch.full((2, 6, 64), 7.0, device=DEVICE)
    args = (q, batch.k_cache, batch.v_cache, batch.page_table, batch.context_len, 0.125)
    out = decode_attention.paged_decode_attention(*args, out=wide[:, :4])
    assert close(out.contiguous(), decode_attention_ref.paged_decode_attention(*args))
    assert (wide[:, 4:] == 7).all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page", "dtype", "bits"), SHAPES)
def test_prefill_equals_the_reference_and_the_formula(
    heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype, bits: int
) -> None:
    # A first token; an empty chunk; a decode; a whole prompt; a chunk across a page end; one that ends on a page.
    chunks = [1, 0, 1, page + 1, 20, 7]
    contexts = [1, 5, 2 * page, page + 1, 2 * page + 3, 3 * page]
    batch = paged(contexts, kv_heads, dim, page, dtype, bits)
    starts = [0, *torch.tensor(chunks).cumsum(0).tolist()]
    q = torch.randn(starts[-1], heads, dim).to(dtype).to(DEVICE)
    query_start = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    args = (
        q,
        batch.k_cache,
        batch.v_cache,
        batch.page_table,
        query_start,
        batch.context_len,
        dim**-0.5,
        max(chunks),
    )
    scales = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    expected = prefill_attention_ref.paged_prefill_attention(*args, **scales)
    for row, (start, end) in enumerate(pairwise(starts)):
        if end > start:
            plain = plain_attention(q[start:end], batch.keys[row], batch.values[row], dim**-0.5)
            assert close(expected[start:end], plain)
    assert close(prefill_attention.paged_prefill_attention(*args, **scales), expected)


@pytest.mark.parametrize("chunk", [15, 16, 17, 31, 32, 33])
def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives(chunk: int) -> None:
    length, heads, dim = 50, 3, 64
    batch = paged([length], 1, dim, 16, F32)
    q = torch.randn(length, heads, dim, device=DEVICE)
    whole = plain_attention(q, batch.keys[0], batch.values[0], 0.125)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        query_start, context = (
            torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, end - start], [end])
        )
        got = prefill_attention.paged_prefill_attention(
            q[start:end], batch.k_cache, batch.v_cache, batch.page_table, query_start, context, 0.125, chunk
        )
        assert close(got, whole[start:end])


def test_prefill_of_nothing_and_rows_of_padding() -> None:
    batch = paged([4], 1, 64, 16, F32)
    query_start = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    q = torch.randn(6, 2, 64, device=DEVICE)
    out = torch.full_like(q, 7.0)
    args = (batch.k_cache, batch.v_cache, batch.page_table, query_start, batch.context_len, 0.125, 4)
    prefill_attention.paged_prefill_attention(q, *args, out=out)
    assert close(out[:4], plain_attention(q[:4], batch.keys[0], batch.values[0], 0.125))
    assert (out[4:] == 7).all()
    none = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    args = (batch.k_cache, batch.v_cache, batch.page_table, none, batch.context_len, 0.125, 0)
    assert prefill_attention.paged_prefill_attention(q[:0], *args).shape == (0, 2, 64)


def test_parts_keep_every_multiprocessor_busy_and_none_is_tiny() -> None:
    h200 = decode_attention.Device("H200", 90, 132)
    assert decode_attention.num_splits(h200, 64, 8, 4096) * 64 * 8 >= 8 * 132
    assert decode_attention.num_splits(h200, 1024, 8, 4096) == 1
    assert decode_attention.num_splits(h200, 1, 8, 4096) == 4096 // decode_attention.LEAST_TOKENS
    assert decode_attention.num_splits(h200, 1, 8, 16) == 1
