"""Copies of whole pages (copy on write, swapping within a device)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def copy_pages(caches: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """`cache[dst[i]] = cache[src[i]]` in every cache, as if all were read before any is written."""
    for cache in caches:
        cache.index_copy_(0, dst.long(), cache.index_select(0, src.long()))
