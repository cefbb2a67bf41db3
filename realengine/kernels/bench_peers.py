"""FlashInfer's paged attention on the same caches, where it is installed: the peer that serving engines use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 128 << 20
Peer = Callable[[], object]


def flashinfer() -> Any | None:
    """The library, or None where it is not installed."""
    return import_module("flashinfer") if find_spec("flashinfer") is not None else None


def decode_peer(q: Tensor, k: Tensor, v: Tensor, table: Tensor, length: int) -> Peer | None:
    """One token q [B, H, D] a sequence over caches [pages, page, KVH, D]; every sequence holds `length` tokens."""
    library = flashinfer()
    if library is None or not q.is_cuda:
        return None
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(_workspace(q), "NHD", use_tensor_cores=True)
    wrapper.plan(
        *_pages(table, length, k.shape[1]),
        q.shape[1],
        k.shape[2],
        q.shape[2],
        k.shape[1],
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    return lambda: wrapper.run(q, (k, v))


def prefill_peer(q: Tensor, k: Tensor, v: Tensor, table: Tensor, starts: Tensor, length: int) -> Peer | None:
    """Chunks q [T, H, D] bounded by `starts`, each the last of `length` tokens of its sequence."""
    library = flashinfer()
    if library is None or not q.is_cuda:
        return None
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(_workspace(q), "NHD")
    wrapper.plan(
        starts,
        *_pages(table, length, k.shape[1]),
        q.shape[1],
        k.shape[2],
        q.shape[2],
        k.shape[1],
        causal=True,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    return lambda: wrapper.run(q, (k, v))


def _workspace(q: Tensor) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)


def _pages(table: Tensor, length: int, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """The page table as offsets, pages one sequence behind the other, and how full each last page is."""
    sequences, pages = table.shape[0], -(-length // page)
    offsets = torch.arange(sequences + 1, dtype=torch.int32, device=table.device) * pages
    last = torch.full((sequences,), length - (pages - 1) * page, dtype=torch.int32, device=table.device)
    return offsets, table[:, :pages].flatten().contiguous(), last
