"""One layer's rings of recent tokens in one step of the engine's kernels (`kernels.recent_ref`, `quant_recent`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from realengine.batch import Batch, LayerCache
from realengine.kernels import Operators
from realengine.kernels.recent_ref import Recent


class RecentLayer:
    """What each kernel is told of the rings, by keyword.

    Decodes write to their rings with their pages. A chunk's queries still read what its last tokens replace, so its K
    and V stay beside the rings until `keep`.
    """

    def __init__(self, batch: Batch, cache: LayerCache, k: Tensor, v: Tensor) -> None:
        assert batch.recent is not None
        assert cache.recent_k is not None
        assert cache.recent_v is not None
        self._window, self._rings = batch.recent, (cache.recent_k, cache.recent_v)
        decodes, rows = batch.num_decodes, len(batch.page_table)
        rings = Recent(*self._rings, self._window.seats, self._window.first, self._window.tokens)
        self.write: dict[str, Any] = {"recent": (*self._rings, self._window.slots)}
        self.decodes: dict[str, Any] = {"recent": rings.rows(0, decodes)}
        self.chunks: dict[str, Any] = {}
        self._new: tuple[Tensor, Tensor] | None = None
        if decodes < rows:
            self._new = torch.empty_like(k, memory_format=torch.contiguous_format), v
            self.write["k_out"] = self._new[0]
            self.chunks = {"recent": rings.rows(decodes, rows), "new": [x[decodes:] for x in self._new]}

    def keep(self, kernels: Operators) -> None:
        """Write the last tokens of chunks into the rings; after attention."""
        if self._new is not None:
            kernels.write_recent(*self._new, self._window.late_rows, self._window.late_slots, *self._rings)


class NoRecent:
    """A layer without rings."""

    write: dict[str, Any] = {}  # noqa: RUF012 - never changed
    decodes = chunks = write

    def keep(self, kernels: Operators) -> None:
        pass
