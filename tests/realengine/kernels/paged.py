"""Batches over a paged cache in which every slot that no sequence has written is poisoned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from realengine.kernels.kv_quant_ref import dequantize_kv, quantize_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass
class Paged:
    """Sequences in pages, and the same K and V without pages, `[context, KVH, D]` each."""

    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    page_table: Tensor
    context_len: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def paged(
    contexts: list[int], kv_heads: int, dim: int, page: int, dtype: torch.dtype, bits: int = 16
) -> Paged:
    """Random K and V of sequences of these lengths, in pages in random order."""
    num_pages = [-(-context // page) for context in contexts]
    ids = 1 + torch.randperm(sum(num_pages) + 2)
    total = len(ids) + 1
    scales = torch.full((total, page, kv_heads), torch.nan) if bits != 16 else None
    caches = [_poisoned(total, page, kv_heads, dim, dtype, bits) for _ in range(2)]
    steps = [None if scales is None else scales.clone() for _ in range(2)]
    # Entries of the table beyond a sequence's pages point at a page of poison.
    table = torch.full((len(contexts), max(num_pages) + 1), int(ids[-1]), dtype=torch.int32)
    kept: list[list[Tensor]] = [[], []]
    at = 0
    for row, (context, pages) in enumerate(zip(contexts, num_pages, strict=True)):
        table[row, :pages] = ids[at : at + pages]
        at += pages
        token = torch.arange(context)
        slots = table[row, token // page].long() * page + token % page
        for which in range(2):
            x = torch.randn(context, kv_heads, dim).to(dtype)
            if bits == 16:
                caches[which].flatten(0, 1)[slots] = x
            else:
                quantised, scale = quantize_kv(x, bits)
                caches[which].flatten(0, 1)[slots] = quantised
                step = steps[which]
                assert step is not None
                step.flatten(0, 1)[slots] = scale
                x = dequantize_kv(quantised, scale, bits, dtype)
            kept[which].append(x.to(DEVICE))
    lengths = torch.tensor(contexts, dtype=torch.int32)
    on = [x if x is None else x.to(DEVICE) for x in (*caches, *steps, table, lengths)]
    return Paged(*on, *kept)  # type: ignore[arg-type]


def _poisoned(pages: int, page: int, kv_heads: int, dim: int, dtype: torch.dtype, bits: int) -> Tensor:
    if bits == 16:
        return torch.full((pages, page, kv_heads, dim), torch.nan, dtype=dtype)
    if bits == 8:
        return torch.full((pages, page, kv_heads, dim), 127, dtype=torch.int8)
    return torch.full((pages, page, kv_heads, dim // 2), 255, dtype=torch.uint8)


def plain_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention by its formula, in float64; q [n, H, D] are the last n of the tokens."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * scale
    new, context = scores.shape[1:]
    unseen = torch.ones(new, context, dtype=torch.bool, device=q.device).triu(context - new + 1)
    weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
    return (weights @ v).transpose(0, 1).to(q.dtype)


def close(got: Tensor, expected: Tensor, tolerance: float | None = None) -> bool:
    """Finite, and equal within `tolerance` of the largest expected number."""
    tolerance = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    if not got.numel():
        return got.shape == expected.shape
    size = max(float(expected.abs().max()), 1e-6)
    return (
        bool(got.isfinite().all())
        and float((got.double() - expected.double()).abs().max()) <= tolerance * size
    )
