"""Kernels of one worker between measured sizes: its tiles follow each other, so that time runs straight."""

from __future__ import annotations

import numpy as np

from calibration.fit import Kriging, formula_seconds, residual_table
from calibration.tables import Samples
from costmodel.kernels import FORMULAS, Hardware
from costmodel.profile import KernelFit

_STAIR = 16.0
"""Formulas step at multiples of it."""


def straight(fit: KernelFit, samples: Samples, hw: Hardware) -> KernelFit:
    """The fit with time running straight between measured numbers of tokens.

    Tiles of one worker follow each other; what of the formula's stairs is real, lies between measured sizes.
    """
    assert fit.residual is not None
    axis = FORMULAS[fit.kind][3].index("m" if fit.kind == "gemm" else "tokens")
    columns = np.concatenate([samples.shape, np.delete(samples.grid, axis, 1)], 1)
    shapes, grids, seconds = [samples.shape], [samples.grid], [samples.seconds]
    for series in np.unique(columns, axis=0):
        rows = np.flatnonzero((columns == series).all(1))
        rows = rows[np.argsort(samples.grid[rows, axis])]
        sizes = samples.grid[rows, axis]
        edges = np.arange(_STAIR, sizes[-1], _STAIR)
        wanted = np.setdiff1d(np.concatenate([edges, edges + 1.0]), sizes)
        wanted = wanted[(wanted > sizes[0]) & (wanted < sizes[-1])]
        grid = np.repeat(samples.grid[rows[:1]], len(wanted), 0)
        grid[:, axis] = wanted
        shapes.append(np.repeat(samples.shape[rows[:1]], len(wanted), 0))
        grids.append(grid)
        seconds.append(np.interp(wanted, sizes, samples.seconds[rows]))
    dense = Samples(fit.kind, np.concatenate(shapes), np.concatenate(grids), np.concatenate(seconds))
    ratio = np.log(dense.seconds / formula_seconds(fit.kind, fit.coefficients, hw, dense))
    return fit.model_copy(update={"residual": residual_table(dense, ratio, Kriging.of(fit.residual))})
