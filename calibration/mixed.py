"""What a kernel that prefills and decodes spends on thread blocks without work, from timings of mixed batches.

A mixed kernel takes as long as its longest prefill chunk alone or, if that is more, as all its work: the chunk's share
of a busy device, the decodes, and the empty blocks of `costmodel.kernels.empty_tile_s`; and then it waits for its
longest block (`costmodel.kernels.tail_s`). The decodes' part is whatever number fits each (batch, context) best, so
only the product of decode rows and chunk length tells of empty blocks. Nothing of the wait is fitted.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from calibration.tables import Samples
from costmodel.attention import SHORT_CHUNK
from costmodel.kernels import MIXED_QUERY_TILE, Hardware, tail_s, without_tail
from costmodel.predict import Kernel
from costmodel.profile import KernelFit

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_CANDIDATES_S = np.arange(0.0, 801e-9, 20e-9)
"""Multiprocessor seconds of an empty block that are tried."""

_TELLING = 1.25
"""Rows that take less than this times their chunk alone say nothing about their decodes."""

_CROWD = 64.0
"""Chunks side by side at which a chunk's share of a busy device is taken, as in `costmodel.attention`."""


class MixedRows:
    """Mixed timings (grid: chunk, earlier context, batch, context) with what their prefill chunk takes.

    Without `waits`, as if no kernel waited for its longest block: to see what that explains.
    """

    def __init__(self, mixed: Samples, prefill: KernelFit, hw: Hardware, *, waits: bool = True) -> None:
        kernel = Kernel("prefill", prefill, hw)
        chunk, before, batch, context = mixed.grid.T
        self.alone_s = np.empty(len(mixed))
        self.share_s = np.empty(len(mixed))
        self.longer_s = np.zeros(len(mixed))
        shapes, which = np.unique(mixed.shape, axis=0, return_inverse=True)
        for s, shape in enumerate(shapes):
            rows = which.ravel() == s
            alone = kernel.seconds(shape.tolist(), 1.0, chunk[rows], before[rows])
            crowd = kernel.seconds(shape.tolist(), _CROWD, chunk[rows], before[rows])
            self.alone_s[rows] = alone
            self.share_s[rows] = np.minimum(kernel.launch_s + (crowd - kernel.launch_s) / _CROWD, alone)
            if not waits:
                continue
            walks = [
                kernel.seconds(shape.tolist(), 1.0, SHORT_CHUNK, np.maximum(end[rows] - SHORT_CHUNK, 0.0))
                for end in (before + chunk, context)
            ]
            load = np.minimum(batch[rows] * shape[0] / hw.num_sms, 1.0)
            self.longer_s[rows] = np.maximum(walks[0] - walks[1], 0.0) * load
        tiles = np.ceil(chunk / MIXED_QUERY_TILE) - 1.0
        self.empty = batch * tiles * mixed.shape[:, 0] / hw.num_sms
        """Empty blocks per multiprocessor."""
        self.seconds = mixed.seconds
        self.work_s = without_tail(mixed.seconds, self.longer_s, self.share_s)
        """Seconds of every row less the wait for its longest block."""
        self._decodes = np.unique(
            np.concatenate([mixed.shape, mixed.grid[:, 2:]], axis=1), axis=0, return_inverse=True
        )[1].ravel()

    def predicted(self, empty_block_s: float, seen: Mask) -> Floats:
        """Seconds of every row, the decodes' part taken from the rows `seen`; NaN where those tell nothing."""
        empty_s = self.empty * empty_block_s
        telling = seen & (self.seconds > _TELLING * self.alone_s)
        rest = self.work_s - self.share_s - empty_s
        order = np.flatnonzero(telling)
        order = order[np.argsort(self._decodes[order], kind="stable")]
        groups, first = np.unique(self._decodes[order], return_index=True)
        decodes = np.full(int(self._decodes.max()) + 1, np.nan)
        for group, rows in zip(groups, np.split(order, first[1:]), strict=True):
            if len(rows) >= 3:
                decodes[group] = max(float(np.median(rest[rows])), 1e-7)
        work_s = self.share_s + decodes[self._decodes] + empty_s
        return np.asarray(np.maximum(self.alone_s, work_s + tail_s(self.longer_s, self.share_s, work_s)))

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


def decode_share(mixed: Samples, prefill: KernelFit, hw: Hardware, empty_block_s: float) -> Samples:
    """What decodes add to the work of a kernel that also prefills: shape (heads, kv_heads), grid (batch, context).

    The median over chunks is taken. Rows whose chunk alone would take most of the time say nothing about the decodes
    and are left out.
    """
    rows = MixedRows(mixed, prefill, hw)
    left = rows.work_s - rows.share_s - rows.empty * empty_block_s
    telling = rows.seconds > _TELLING * rows.alone_s
    keys = np.concatenate([mixed.shape, mixed.grid[:, 2:]], axis=1)
    added: dict[tuple[float, ...], list[float]] = {}
    for key, value in zip(keys[telling].tolist(), left[telling].tolist(), strict=True):
        added.setdefault(tuple(key), []).append(value)
    kept = {key: float(np.median(values)) for key, values in sorted(added.items()) if len(values) >= 3}
    at = np.array(list(kept)).reshape(len(kept), 4)
    dropped = Counter(mixed.dropped)
    dropped["decodes hidden behind the prefill"] += len(mixed) - int(telling.sum())
    seconds = np.maximum(np.array(list(kept.values())), 1e-7)
    return Samples("decode_mixed", at[:, :2], at[:, 2:], seconds, dropped, mixed.source)


def held_out_mixed_error(
    mixed: Samples, prefill: KernelFit, hw: Hardware, *, empty_blocks: bool = True, waits: bool = True
) -> float:
    """Mean absolute relative error on mixed batches whose chunk length was left out, a quarter of them at a time."""
    rows = MixedRows(mixed, prefill, hw, waits=waits)
    lengths = np.unique(mixed.grid[:, 0])
    errors = np.full(len(mixed), np.nan)
    for fold in range(4):
        out = np.isin(mixed.grid[:, 0], lengths[fold::4])
        time = rows.best(~out) if empty_blocks else 0.0
        errors[out] = np.abs(rows.predicted(time, ~out)[out] / mixed.seconds[out] - 1.0)
    return float(np.nanmean(errors))
