"""Host memory for the KV of preempted sequences, page by page beside the device's cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from realengine.batch import LayerCache
from serving.swap import Move


class SwapStore:
    """`num_pages` host pages of every layer of `caches`; pinned where the device is not the host itself."""

    def __init__(self, caches: Sequence[LayerCache], num_pages: int) -> None:
        pin = caches[0].k.is_cuda

        def like(cache: Tensor) -> Tensor:
            return torch.zeros((num_pages, *cache.shape[1:]), dtype=cache.dtype, pin_memory=pin)

        self.pages = [LayerCache(*(like(tensor) for tensor in cache.tensors)) for cache in caches]

    def take(self, caches: Sequence[LayerCache], move: Move) -> None:
        """Device pages `move.sources` to host pages `move.targets`, in stream order."""
        for device, host in zip(caches, self.pages, strict=True):
            for to, at in zip(host.tensors, device.tensors, strict=True):
                _copy(to, at, move)

    def give(self, caches: Sequence[LayerCache], move: Move) -> None:
        """Host pages `move.sources` to device pages `move.targets`, in stream order."""
        for device, host in zip(caches, self.pages, strict=True):
            for to, at in zip(device.tensors, host.tensors, strict=True):
                _copy(to, at, move)


def _copy(target: Tensor, source: Tensor, move: Move) -> None:
    if target.device == source.device:
        target[torch.from_numpy(move.targets).long()] = source[torch.from_numpy(move.sources).long()]
        return
    # Page by page: a gathered copy would have to wait for the host.
    for to, at in zip(move.targets.tolist(), move.sources.tolist(), strict=True):
        target[to].copy_(source[at], non_blocking=True)
