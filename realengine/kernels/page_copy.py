"""Copies of pages in all layers' caches by one launch: the kernel finds the caches in a table of their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from realengine.kernels.launch import Launch, ceil_div, jit

WORDS = 4096
"""Four-byte words per program: four 16-byte loads in flight per thread of 8 warps."""


@jit
def copy_pages_kernel(caches, src, dst, page_words, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    base = tl.load(caches + tl.program_id(2)).to(tl.pointer_type(tl.int32))
    base = tl.multiple_of(base, 16)
    pair = tl.program_id(0)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = words < page_words
    source = tl.load(src + pair).to(tl.int64) * page_words
    target = tl.load(dst + pair).to(tl.int64) * page_words
    tl.store(base + target + words, tl.load(base + source + words, mask=inside, other=0), mask=inside)


def copy_pages(caches: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """See `page_copy_ref`; here no page may be both a source and a target. Caches of other shapes go by themselves."""
    for launch in copy_pages_launches(caches, src, dst):
        launch.run()


def copy_pages_launches(caches: Sequence[Tensor], src: Tensor, dst: Tensor) -> list[Launch]:
    """One launch per size of page among the caches."""
    by_words: dict[int, list[Tensor]] = {}
    for cache in caches:
        assert cache.is_contiguous()
        by_words.setdefault(cache[0].nbytes // 4, []).append(cache)
    launches = []
    for words, alike in by_words.items():
        if alike[0].is_meta:
            table = torch.empty(len(alike), dtype=torch.int64, device="meta")
        else:
            table = _address_table(tuple(cache.data_ptr() for cache in alike), alike[0].device)
        grid = (len(src), ceil_div(words, WORDS), len(alike))
        launches.append(Launch(copy_pages_kernel, grid, (table, src, dst, words), {"WORDS": WORDS}, warps=8))
    return launches


@lru_cache(maxsize=16)
def _address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)
