"""What a formula misses, carried from measured shapes to unmeasured ones.

Residuals log(measured / formula) sit on the same grid for every measured shape. At a measured shape they are
used as they are, so the prediction there is the measurement; at another shape they are a kriging (Gaussian
process) mean over the shapes in log coordinates, which fades to 0, the bare formula, with distance. Single
timings that stand out from their neighbours may be cut on the way (`ResidualTable.clip`). Between grid points
residuals are interpolated linearly in log coordinates and held constant beyond the ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from costmodel.profile import ResidualTable

Floats = npt.NDArray[np.float64]


def covariance(a: Floats, b: Floats, length_scales: Floats, metric: str) -> Floats:
    """exp(-distance) (A, B) of shapes `a` (A, D) and `b` (B, D): rough, as tile and split choices are.

    The `cityblock` distance makes it a product of one factor per axis: shapes of the same n (or the same heads)
    tell of each other, whatever their k.
    """
    gap = (a[:, None, :] - b[None, :, :]) / length_scales
    distance = np.abs(gap).sum(-1) if metric == "cityblock" else np.sqrt((gap * gap).sum(-1))
    return np.asarray(np.exp(-distance))


def kriging_weights(
    shapes: Floats, target: Floats, length_scales: Floats, nugget: float, metric: str = "euclidean"
) -> Floats:
    """Weights (T, S) of measured `shapes` (S, D) at `target` shapes (T, D), both in log coordinates."""
    gram = covariance(shapes, shapes, length_scales, metric) + nugget * np.eye(len(shapes))
    return np.asarray(np.linalg.solve(gram, covariance(shapes, target, length_scales, metric))).T


def left_out(gram: Floats, rows: Floats) -> Floats:
    """What sets each of `rows` (S, ...) apart: the error of kriging it from all the others.

    `gram` (S, S) is their covariance, noise included. In closed form (Rasmussen and Williams, Gaussian Processes for
    Machine Learning, 5.12).
    """
    inverse = np.linalg.inv(gram)
    scale = np.diag(inverse)
    return np.asarray((inverse @ rows) / (scale[:, None] if rows.ndim > 1 else scale))


def clipped(
    rows: Floats, shapes: Floats, length_scales: Floats, nugget: float, metric: str, clip: float
) -> Floats:
    """`rows` (S, columns) with what sets each apart from its neighbours cut to `clip` times the usual.

    Usual is the median of its size in the column or in the whole table, whichever is larger, as a standard deviation.
    """
    if len(shapes) < 3:
        return rows
    apart = left_out(covariance(shapes, shapes, length_scales, metric) + nugget * np.eye(len(shapes)), rows)
    usual = 1.4826 * np.maximum(np.median(np.abs(apart), axis=0), np.median(np.abs(apart)))
    return np.asarray(rows - apart + np.clip(apart, -clip * usual, clip * usual))


def shape_features(shapes: Floats, num_scales: int) -> Floats:
    """Coordinates (S, num_scales) in which shapes (S, D) are near or far: their logarithms, and for attention

    one more that says whether every head has its own KV head (another kernel than grouped heads run), and one more
    whether the group is no power of two (rows of a tile go unused).
    """
    columns = [np.log(shapes)]
    if num_scales > shapes.shape[1]:
        columns.append((shapes[:, :1] == shapes[:, 1:2]).astype(np.float64))
    if num_scales > shapes.shape[1] + 1:
        octaves = np.log2(shapes[:, :1] / shapes[:, 1:2])
        columns.append((np.abs(octaves - np.rint(octaves)) > 1e-9).astype(np.float64))
    return np.concatenate(columns, axis=1)


def interpolate(axes: Sequence[Floats], table: Floats, points: Sequence[Floats]) -> Floats:
    """Multilinear interpolation of `table` (shape: lengths of `axes`) at `points`, in log(1 + x) of each
    axis."""
    result = np.zeros(np.broadcast_shapes(*(p.shape for p in points)))
    corners: list[tuple[npt.NDArray[np.intp], Floats]] = []
    for axis, x in zip(axes, points, strict=True):
        grid, at = np.log1p(axis), np.log1p(x)
        if len(grid) == 1:
            corners.append((np.zeros(at.shape, np.intp), np.zeros(at.shape)))
            continue
        low = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
        corners.append((low, np.clip((at - grid[low]) / (grid[low + 1] - grid[low]), 0.0, 1.0)))
    for corner in range(2 ** len(axes)):
        weight: Floats = np.ones(())
        index = []
        for d, (low, fraction) in enumerate(corners):
            upper = corner >> d & 1
            weight = weight * (fraction if upper else 1.0 - fraction)
            index.append(np.minimum(low + upper, len(axes[d]) - 1))
        result = result + weight * table[tuple(index)]
    return result


class Residuals:
    """A `ResidualTable` ready to be asked; `at(shape, points)` is the log correction."""

    def __init__(self, table: ResidualTable) -> None:
        self._axes = [np.asarray(a, np.float64) for a in table.grid]
        shapes = np.asarray(table.shapes, np.float64)
        self._shapes = np.log(shapes)
        self._features = shape_features(shapes, len(table.length_scales))
        self._rows = np.asarray(table.log_ratio_e4, np.float64) * 1e-4
        self._scales = np.asarray(table.length_scales, np.float64)
        self._nugget = table.nugget
        self._metric = table.metric
        self._clip = table.clip
        self._everywhere = np.asarray(table.everywhere_e4 or [0], np.float64) * 1e-4

    @cached_property
    def _carried(self) -> Floats:
        """Rows as they are carried to other shapes."""
        if self._clip is None:
            return self._rows
        return clipped(self._rows, self._features, self._scales, self._nugget, self._metric, self._clip)

    def measured(self, shape: Sequence[float]) -> bool:
        """Whether this very shape is in the table."""
        return bool(
            np.any(np.all(np.abs(self._shapes - np.log(np.asarray(shape, np.float64))) < 1e-9, axis=1))
        )

    def at(self, shape: Sequence[float], points: Sequence[Floats]) -> Floats:
        """Log correction of one shape at grid `points` (one array per grid axis, broadcast together)."""
        target = np.log(np.asarray(shape, np.float64))[None, :]
        exact = np.flatnonzero(np.all(np.abs(self._shapes - target) < 1e-9, axis=1))
        if len(exact):
            row = self._rows[exact[0]]
        else:
            near = shape_features(np.asarray(shape, np.float64)[None, :], len(self._scales))
            weights = kriging_weights(self._features, near, self._scales, self._nugget, self._metric)
            row = (weights @ self._carried)[0]
            # How many threads the linear algebra uses shows in the last digits; a run is to be the same on any machine.
            row = np.round(row, 6)
        row = row + self._everywhere
        return interpolate(self._axes, row.reshape([len(a) for a in self._axes]), points)
