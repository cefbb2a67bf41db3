"""What FlashInfer would be told: its page offsets, pages and last pages describe the very tokens of our table."""

from __future__ import annotations

import torch

from realengine.kernels.bench_peers import _pages, decode_peer, flashinfer


def test_the_table_as_offsets_and_last_pages() -> None:
    table = torch.tensor([[3, 1, 9], [2, 5, 8]], dtype=torch.int32)
    offsets, pages, last = _pages(table, 20, 16)
    assert offsets.tolist() == [0, 2, 4]
    assert pages.tolist() == [3, 1, 2, 5]
    assert last.tolist() == [4, 4]
    assert _pages(table, 48, 16)[2].tolist() == [16, 16]


def test_no_peer_without_a_gpu_or_the_library() -> None:
    cache = torch.zeros(4, 16, 1, 8)
    if flashinfer() is None or not torch.cuda.is_available():
        assert (
            decode_peer(torch.zeros(1, 2, 8), cache, cache, torch.ones(1, 1, dtype=torch.int32), 16) is None
        )
