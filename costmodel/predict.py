"""One kernel of one device, ready to be asked: formula, coefficients and residuals bound together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from costmodel.kernels import EARLIER, FORMULAS, Hardware
from costmodel.profile import KernelFit, KernelKind
from costmodel.residual import Residuals

Floats = npt.NDArray[np.float64]


class Kernel:
    """Seconds of one kind of kernel; without a fit, the formula with its default coefficients."""

    def __init__(self, kind: KernelKind, fit: KernelFit | None, hw: Hardware) -> None:
        self._formula, defaults, self._shape_axes, self._grid_axes = FORMULAS[kind]
        self._hw = hw
        fitted = EARLIER.get(kind, {}) | fit.coefficients if fit and fit.coefficients else {}
        self.coefficients = {**defaults, **fitted}
        self._residuals = Residuals(fit.residual) if fit and fit.residual else None
        self.kind = kind
        self.fit = fit

    @property
    def launch_s(self) -> float:
        """Floor of the kernel, below which nothing gets: launch and drain."""
        return self.coefficients["launch_s"]

    def measured(self, shape: Sequence[float]) -> bool:
        """Whether `shape` is among the measured ones."""
        return self._residuals is not None and self._residuals.measured(shape)

    def seconds(self, shape: Sequence[float], *grid: npt.ArrayLike) -> Floats:
        """Seconds at `shape` (one number per shape axis) for arrays of grid coordinates, broadcast
        together."""
        points = np.broadcast_arrays(*(np.asarray(g, np.float64) for g in grid))
        shape_arrays = [np.asarray(s, np.float64) for s in shape]
        base = self._formula(self.coefficients, self._hw, *shape_arrays, *points)
        if self._residuals is None:
            return np.asarray(base, np.float64)
        return np.asarray(base * np.exp(self._residuals.at(shape, points)), np.float64)

    def outside_hull(self, **coordinates: tuple[float, float]) -> list[str]:
        """Which of the coordinate ranges leave the measured hull, in words."""
        if self.fit is None or not self.fit.fitted:
            return [f"{self.kind}: not measured on this device (datasheet roofline)"]
        found = []
        for axis, (low, high) in coordinates.items():
            if axis not in self.fit.hull:
                continue
            least, most = self.fit.hull[axis]
            if low < least or high > most:
                found.append(outside(self.kind, axis, (low, high), (least, most)))
        return found


def outside(kind: str, axis: str, seen: tuple[float, float], measured: tuple[float, float]) -> str:
    """In words: values of an axis, from least to most, that leave what a kernel was measured at."""
    here, least, most = _range(*seen), *measured
    if least == most:
        return f"{kind}: {axis} was measured at {least:g} only; here {here}"
    return f"{kind}: {axis} {here} outside the measured {least:g} to {most:g}"


def _range(low: float, high: float) -> str:
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
