"""What a kernel that prefills and decodes spends on thread blocks without work, from timings of mixed batches.

A mixed kernel takes as long as its longest prefill chunk alone or, if that is more, as all its work: the chunk's share
of a busy device, the decodes, and the empty blocks of `costmodel.kernels.empty_tile_s`. The decodes' part is whatever
number fits each (batch, context) best, so only the product of decode rows and chunk length tells of empty blocks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from calibration.tables import Samples
from costmodel.kernels import MIXED_QUERY_TILE, Hardware
from costmodel.predict import Kernel
from costmodel.profile import KernelFit

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_CANDIDATES_S = np.arange(0.0, 801e-9, 20e-9)
"""Multiprocessor seconds of an empty block that are tried."""

_CROWD = 64.0
"""Chunks side by side at which a chunk's share of a busy device is taken, as in `costmodel.attention`."""


class MixedRows:
    """Mixed timings (grid: chunk, earlier context, batch, context) with what their prefill chunk takes."""

    def __init__(self, mixed: Samples, prefill: KernelFit, hw: Hardware) -> None:
        kernel = Kernel("prefill", prefill, hw)
        chunk, before, batch, _ = mixed.grid.T
        self.alone_s = np.empty(len(mixed))
        self.share_s = np.empty(len(mixed))
        shapes, which = np.unique(mixed.shape, axis=0, return_inverse=True)
        for s, shape in enumerate(shapes):
            rows = which.ravel() == s
            alone = kernel.seconds(shape.tolist(), 1.0, chunk[rows], before[rows])
            crowd = kernel.seconds(shape.tolist(), _CROWD, chunk[rows], before[rows])
            self.alone_s[rows] = alone
            self.share_s[rows] = np.minimum(kernel.launch_s + (crowd - kernel.launch_s) / _CROWD, alone)
        tiles = np.ceil(chunk / MIXED_QUERY_TILE) - 1.0
        self.empty = batch * tiles * mixed.shape[:, 0] / hw.num_sms
        """Empty blocks per multiprocessor."""
        self.seconds = mixed.seconds
        self._decodes = np.unique(
            np.concatenate([mixed.shape, mixed.grid[:, 2:]], axis=1), axis=0, return_inverse=True
        )[1].ravel()

    def predicted(self, empty_block_s: float, seen: Mask) -> Floats:
        """Seconds of every row, the decodes' part taken from the rows `seen`; NaN where those tell nothing."""
        empty_s = self.empty * empty_block_s
        telling = seen & (self.seconds > 1.25 * self.alone_s)
        rest = self.seconds - self.share_s - empty_s
        order = np.flatnonzero(telling)
        order = order[np.argsort(self._decodes[order], kind="stable")]
        groups, first = np.unique(self._decodes[order], return_index=True)
        decodes = np.full(int(self._decodes.max()) + 1, np.nan)
        for group, rows in zip(groups, np.split(order, first[1:]), strict=True):
            if len(rows) >= 3:
                decodes[group] = max(float(np.median(rest[rows])), 1e-7)
        return np.asarray(np.maximum(self.alone_s, self.share_s + decodes[self._decodes] + empty_s))

    def error(self, empty_block_s: float, seen: Mask, judged: Mask) -> float:
        """Mean absolute relative error on the rows `judged`."""
        relative = self.predicted(empty_block_s, seen)[judged] / self.seconds[judged] - 1.0
        return float(np.nanmean(np.abs(relative)))

    def best(self, seen: Mask) -> float:
        """The time of an empty block that fits the rows `seen` best."""
        return float(min(_CANDIDATES_S, key=lambda t: self.error(float(t), seen, seen)))


def fit_empty_block(mixed: Samples, prefill: KernelFit, hw: Hardware) -> float:
    """Multiprocessor seconds of a thread block without work."""
    rows = MixedRows(mixed, prefill, hw)
    return round(rows.best(np.ones(len(mixed), bool)), 10)


def without_empty_blocks(mixed: Samples, hw: Hardware, empty_block_s: float) -> Samples:
    """The mixed timings less their empty blocks."""
    chunk, _, batch, _ = mixed.grid.T
    tiles = np.ceil(chunk / MIXED_QUERY_TILE) - 1.0
    empty_s = batch * tiles * mixed.shape[:, 0] * empty_block_s / hw.num_sms
    return replace(mixed, seconds=np.maximum(mixed.seconds - empty_s, 1e-7))


def held_out_mixed_error(mixed: Samples, prefill: KernelFit, hw: Hardware, *, empty_blocks: bool) -> float:
    """Mean absolute relative error on mixed batches whose chunk length was left out, a quarter of them at a time."""
    rows = MixedRows(mixed, prefill, hw)
    lengths = np.unique(mixed.grid[:, 0])
    errors = np.full(len(mixed), np.nan)
    for fold in range(4):
        out = np.isin(mixed.grid[:, 0], lengths[fold::4])
        time = rows.best(~out) if empty_blocks else 0.0
        errors[out] = np.abs(rows.predicted(time, ~out)[out] / mixed.seconds[out] - 1.0)
    return float(np.nanmean(errors))
