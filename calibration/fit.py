"""Fit one kernel's formula and residual table to samples, and measure how well it does on shapes left out.

Coefficients are positive and fitted as logarithms, to the logarithm of the time, with a robust loss and a
weak pull to the defaults (so that a coefficient the data say nothing about stays where it was).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from calibration.tables import Samples
from costmodel.kernels import FORMULAS, Hardware
from costmodel.profile import FitErrors, KernelFit, KernelKind, ResidualTable
from costmodel.residual import Residuals, kriging_weights, shape_features

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

_NOT_FITTED: dict[str, tuple[str, ...]] = {
    "gemm": ("l2_io",),
    "prefill": ("context_splits", "pack_gqa", "query_tile"),
    "decode": ("mha_splits",),
    "decode_mixed": ("empty_block_s",),
}
"""Coefficients that are switches: given, or chosen among `_CHOICES` by what fits best."""

_CHOICES: dict[str, tuple[dict[str, float], ...]] = {
    "decode": ({"mha_splits": 1.0}, {"mha_splits": 128.0}),
    "prefill": tuple({"pack_gqa": p, "query_tile": t} for p in (0.0, 1.0) for t in (64.0, 128.0)),
}

_STARTS: dict[str, tuple[dict[str, float], ...]] = {
    "gemm": (
        {},
        {"eff_rows": 0.02},
        {"prologue_s": 3e-6, "l2_gain": 3.0},
        {"split_s": 2e-5, "l2_gain": 3.0},
    ),
}
"""Where else to begin than at the defaults: which tiles a library has, and what a block costs before it multiplies,
are told apart from far off only."""

_FIRST_STEPS = 20

_SHAPES_NEEDED = {"gemm": 50}
"""Shapes from which on they outweigh the defaults as much as their rows say."""

_LEFT_OUT: dict[str, tuple[int, dict[str, float]]] = {"prefill": (10, {"l2_gain": 0.0})}
"""By kind: the term that fewer shapes than this cannot tell from the others, left out."""

_BOUNDS: dict[str, tuple[float, float]] = {
    "smoothing": (0.05, 12.0),
    "throttle": (1e-4, 0.3),
    "hbm_efficiency": (0.1, 1.1),
    "occupancy_half": (1e-3, 3.0),
    "lone_block": (0.3, 3.0),
    "softness": (1e-3, 0.999),
    "l2_gain": (1e-3, 8.0),
    "l2_share": (0.01, 1.5),
    "l2_power": (1.0, 16.0),
    "l2_copies": (0.3, 12.0),
    "quant_efficiency": (0.05, 8.0),
}


class Kriging(NamedTuple):
    """How residuals are carried to other shapes; the fields are those of `ResidualTable`."""

    length_scales: tuple[float, ...]
    nugget: float
    metric: Literal["euclidean", "cityblock"] = "euclidean"
    clip: float | None = None

    @staticmethod
    def of(table: ResidualTable) -> Kriging:
        return Kriging(tuple(table.length_scales), table.nugget, table.metric, table.clip)


_KRIGING: dict[str, tuple[Kriging, ...]] = {
    "gemm": (
        Kriging((0.7, 3.0), 0.1, "cityblock"),
        Kriging((1.5, 6.0), 0.05, "cityblock"),
        Kriging((6.0, 6.0), 0.05, "cityblock", 2.5),
        Kriging((5.0, 10.0), 0.05),
    ),
    "prefill": (
        Kriging((6.0, 6.0, 4.0, 8.0), 0.01, "cityblock"),
        Kriging((12.0, 6.0), 0.002, "cityblock"),
        Kriging((6.0, 12.0, 4.0), 0.01, "cityblock"),
        Kriging((6.0, 12.0), 0.005),
    ),
    "decode": (
        Kriging((12.0, 1.5), 0.01),
        Kriging((12.0, 1.5), 0.01, "cityblock"),
        Kriging((12.0, 1.5, 0.5), 0.005, "cityblock"),
        Kriging((4.0, 2.0), 0.02),
    ),
    "decode_mixed": (Kriging((4.0, 2.0), 0.02),),
    "all_reduce": (Kriging((2.0,), 0.02),),
    "moe": (Kriging((2.0, 2.0), 0.05),),
    "elementwise": (Kriging((2.0,), 0.05),),
    "sampler": (Kriging((2.0,), 0.05),),
}
"""Settings to choose from, by which predicts left-out shapes best."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to fit. `folds` = 0 skips the held-out evaluation."""

    folds: int = 4
    seed: int = 0
    prior_weight: float = 0.02
    loss_scale: float = 0.08
    max_evaluations: int = 60


DEFAULT_OPTIONS = Options()


def fit_coefficients(
    kind: KernelKind,
    samples: Samples,
    hw: Hardware,
    options: Options = DEFAULT_OPTIONS,
    start: dict[str, float] | None = None,
) -> dict[str, float]:
    """Coefficients of `kind`'s formula for `samples`; those that start at 0 stay there."""
    from scipy.optimize import least_squares  # slow to import, only needed here

    formula, defaults, _, _ = FORMULAS[kind]
    begun = start or defaults
    names = [c for c in defaults if c not in _NOT_FITTED.get(kind, ()) and begun[c] > 0.0]
    fixed = {c: v for c, v in begun.items() if c not in names}
    prior = np.log([defaults[c] for c in names])
    begin = np.log([begun[c] for c in names])
    low = np.array(
        [np.log(_BOUNDS[c][0]) if c in _BOUNDS else p - 6.0 for c, p in zip(names, prior, strict=True)]
    )
    high = np.array(
        [np.log(_BOUNDS[c][1]) if c in _BOUNDS else p + 6.0 for c, p in zip(names, prior, strict=True)]
    )
    axes = [*samples.shape.T, *samples.grid.T]
    target = np.log(samples.seconds)
    pull = options.prior_weight * np.sqrt(len(samples) / 1000.0)
    # Rows of a shape err alike: what is said of many coefficients by few shapes is worth little.
    pull *= max(1.0, _SHAPES_NEEDED.get(kind, 0) / len(np.unique(samples.shape, axis=0)))

    def misfit(theta: Floats) -> Floats:
        coefficients = dict(zip(names, np.exp(theta).tolist(), strict=True)) | fixed
        error = np.clip(np.log(formula(coefficients, hw, *axes)) - target, -3.0, 3.0)
        return np.concatenate([error, pull * (theta - prior)])

    found = least_squares(
        misfit,
        np.clip(begin, low + 1e-6, high - 1e-6),
        bounds=(low, high),
        loss="soft_l1",
        f_scale=options.loss_scale,
        diff_step=[1e-3],
        max_nfev=options.max_evaluations,
    )
    return dict(zip(names, np.exp(found.x).tolist(), strict=True)) | fixed


def choose_coefficients(
    kind: KernelKind, samples: Samples, hw: Hardware, options: Options, fixed: dict[str, float]
) -> dict[str, float]:
    """Coefficients with the switches of `fixed`, and the others set to whatever fits best."""
    fewest, without = _LEFT_OUT.get(kind, (0, {}))
    few = len(np.unique(samples.shape, axis=0)) < fewest
    defaults = {**FORMULAS[kind][1], **(without if few else {}), **fixed}

    def best(settings: Iterable[dict[str, float]], some: Samples, options: Options) -> dict[str, float]:
        tried = [fit_coefficients(kind, some, hw, options, {**defaults, **setting}) for setting in settings]
        return min(tried, key=lambda c: _errors(formula_seconds(kind, c, hw, some), some)[0])

    if kind in _STARTS:
        # A few steps on some of the rows tell which start leads somewhere.
        some = samples.subset(np.arange(len(samples)) % max(1, len(samples) // 1000) == 0)
        defaults = best(_STARTS[kind], some, replace(options, max_evaluations=_FIRST_STEPS))
    return best(_CHOICES.get(kind, ({},)), samples, options)


def formula_seconds(
    kind: KernelKind, coefficients: dict[str, float], hw: Hardware, samples: Samples
) -> Floats:
    """The bare formula at every sample."""
    return FORMULAS[kind][0](coefficients, hw, *samples.shape.T, *samples.grid.T)


def residual_table(samples: Samples, log_ratio: Floats, kriging: Kriging) -> ResidualTable:
    """Residuals of `samples` on the product of their grid values; holes are filled from neighbours."""
    shapes, row = np.unique(samples.shape, axis=0, return_inverse=True)
    axes, columns = [], []
    for d in range(samples.grid.shape[1]):
        values, index = np.unique(samples.grid[:, d], return_inverse=True)
        axes.append(values)
        columns.append(index.ravel())
    table = np.full((len(shapes), *(len(a) for a in axes)), np.nan)
    table[(row.ravel(), *columns)] = log_ratio
    table = _fill(table, shape_features(shapes, len(kriging.length_scales)), axes, kriging)
    return ResidualTable(
        shapes=shapes.tolist(),
        grid=[a.tolist() for a in axes],
        log_ratio_e4=np.rint(table.reshape(len(shapes), -1) * 1e4).astype(int).tolist(),
        length_scales=list(kriging.length_scales),
        nugget=kriging.nugget,
        metric=kriging.metric,
        clip=kriging.clip,
    )


def _fill(table: Floats, shapes: Floats, axes: list[Floats], kriging: Kriging) -> Floats:
    """Fill holes: between measured points of a series, then from other shapes, then from the nearest
    point."""
    last = np.log1p(axes[-1])
    flat = table.reshape(-1, len(last))
    for series in flat:
        known = ~np.isnan(series)
        if known.any() and not known.all():
            inside = (last >= last[known][0]) & (last <= last[known][-1]) & ~known
            series[inside] = np.interp(last[inside], last[known], series[known])
    columns = table.reshape(len(shapes), -1)
    if len(shapes) > 1:
        missing = np.isnan(columns)
        patterns, which = np.unique(missing, axis=1, return_inverse=True)
        for p in range(patterns.shape[1]):
            hole = patterns[:, p]
            if not hole.any() or hole.all():
                continue
            scales = np.array(kriging.length_scales)
            weights = kriging_weights(shapes[~hole], shapes[hole], scales, kriging.nugget, kriging.metric)
            here = np.flatnonzero(which.ravel() == p)
            columns[np.ix_(hole, here)] = weights @ columns[np.ix_(~hole, here)]
    points = np.stack(np.meshgrid(*(np.log1p(a) for a in axes), indexing="ij"), -1).reshape(-1, len(axes))
    for line in columns:
        hole = np.isnan(line)
        if hole.any():
            known = np.flatnonzero(~hole)
            gap = ((points[hole][:, None, :] - points[known][None, :, :]) ** 2).sum(-1)
            line[hole] = line[known[np.argmin(gap, axis=1)]] if len(known) else 0.0
    return columns.reshape(table.shape)


def corrected_seconds(base: Floats, table: ResidualTable, samples: Samples) -> Floats:
    """`base` (the formula) with the residuals of `table` applied at every sample."""
    residuals = Residuals(table)
    result = base.copy()
    shapes, row = np.unique(samples.shape, axis=0, return_inverse=True)
    for i, shape in enumerate(shapes):
        here = row.ravel() == i
        points = [samples.grid[here, d] for d in range(samples.grid.shape[1])]
        result[here] = base[here] * np.exp(residuals.at(shape.tolist(), points))
    return result


def shape_groups(samples: Samples) -> Ints:
    """One group per measured shape: (n, k) of a GEMM, (heads, KV heads) of attention."""
    return np.unique(samples.shape, axis=0, return_inverse=True)[1].ravel()


def grid_groups(samples: Samples) -> Ints:
    """One group per grid point: the message size of a collective, in rising order."""
    return np.unique(samples.grid, axis=0, return_inverse=True)[1].ravel()


def held_out_seconds(
    kind: KernelKind,
    samples: Samples,
    hw: Hardware,
    groups: Callable[[Samples], Ints] = shape_groups,
    options: Options = DEFAULT_OPTIONS,
    start: dict[str, float] | None = None,
) -> tuple[Floats, Kriging]:
    """Predictions for every sample by fits (formula and residuals) that saw no sample of its group's fold.

    Of the kernel's few kriging settings the one with the least error is used, and returned.
    """
    group = groups(samples)
    count = int(group.max()) + 1
    folds = min(options.folds, count)
    # Sizes are left out in turn, so that a hole is one size wide; shapes at random.
    order = (
        np.arange(count) if groups is grid_groups else np.random.default_rng(options.seed).permutation(count)
    )
    fold = np.empty(count, np.intp)
    fold[order] = np.arange(count) % folds
    predicted = {kriging: np.full(len(samples), np.nan) for kriging in _KRIGING[kind]}
    for f in range(folds):
        out = fold[group] == f
        if out.all():
            continue
        inside, outside = samples.subset(~out), samples.subset(out)
        coefficients = fit_coefficients(kind, inside, hw, options, start)
        ratio = np.log(inside.seconds / formula_seconds(kind, coefficients, hw, inside))
        base = formula_seconds(kind, coefficients, hw, outside)
        for kriging, seconds in predicted.items():
            seconds[out] = corrected_seconds(base, residual_table(inside, ratio, kriging), outside)
    best = min(predicted, key=lambda kriging: _errors(predicted[kriging], samples)[0])
    return predicted[best], best


def leave_nk_out(samples: Samples, hw: Hardware, options: Options = DEFAULT_OPTIONS) -> tuple[float, float]:
    """(mean absolute, mean signed) relative error of a GEMM fit on (n, k) pairs it never saw, a quarter at
    a time."""
    start = choose_coefficients("gemm", samples, hw, options, {})
    return _errors(held_out_seconds("gemm", samples, hw, shape_groups, options, start)[0], samples)


def leave_shape_out(
    kind: KernelKind, samples: Samples, hw: Hardware, options: Options = DEFAULT_OPTIONS
) -> tuple[float, float]:
    """(mean absolute, mean signed) relative error of an attention fit on (heads, KV heads) pairs it never
    saw."""
    start = choose_coefficients(kind, samples, hw, options, {})
    return _errors(held_out_seconds(kind, samples, hw, shape_groups, options, start)[0], samples)


def leave_size_out(
    kind: KernelKind, samples: Samples, hw: Hardware, options: Options = DEFAULT_OPTIONS
) -> tuple[float, float]:
    """(mean absolute, mean signed) relative error on grid points (message sizes) it never saw, at known
    shapes."""
    return _errors(held_out_seconds(kind, samples, hw, grid_groups, options)[0], samples)


def _errors(predicted: Floats, samples: Samples) -> tuple[float, float]:
    relative = predicted / samples.seconds - 1.0
    relative = relative[np.isfinite(relative)]
    return float(np.mean(np.abs(relative))), float(np.mean(relative))


def measurement_noise(samples: Samples, base: Floats) -> float:
    """Log standard deviation of one timing: how its ratio to the formula leaves the line through its neighbours.

    Neighbours are those along the last grid axis within a factor of e; 0.03 where the grid is too coarse to tell.
    """
    keys = np.concatenate([samples.shape, samples.grid[:, :-1]], axis=1)
    series = np.unique(keys, axis=0, return_inverse=True)[1].ravel()
    order = np.lexsort((samples.grid[:, -1], series))
    ratio = np.log(samples.seconds[order] / base[order])
    s, x = series[order], np.log1p(samples.grid[order, -1])
    same = (s[2:] == s[:-2]) & (x[2:] - x[:-2] < 1.0)
    if not same.any():
        return 0.03
    share = (x[1:-1] - x[:-2]) / np.maximum(x[2:] - x[:-2], 1e-9)
    bend = ratio[1:-1] - (ratio[:-2] * (1 - share) + ratio[2:] * share)
    spread = 1.4826 * float(np.median(np.abs(bend[same] - np.median(bend[same]))))
    return round(max(0.003, spread / float(np.sqrt(1.5))), 4)


def fit_kernel(
    kind: KernelKind,
    samples: Samples,
    hw: Hardware,
    *,
    options: Options = DEFAULT_OPTIONS,
    groups: Callable[[Samples], Ints] = shape_groups,
    fixed: dict[str, float] | None = None,
) -> KernelFit:
    """Formula, residual table, errors and hull of one kernel."""
    coefficients = choose_coefficients(kind, samples, hw, options, fixed or {})
    base = formula_seconds(kind, coefficients, hw, samples)
    train, _ = _errors(base, samples)
    held: tuple[float | None, float | None] = (None, None)
    kriging = _KRIGING[kind][0]
    if options.folds and groups(samples).max() > 0:
        predicted, kriging = held_out_seconds(kind, samples, hw, groups, options, coefficients)
        held = _errors(predicted, samples)
    table = residual_table(samples, np.log(samples.seconds / base), kriging)
    measured, _ = _errors(corrected_seconds(base, table, samples), samples)
    _, _, shape_axes, grid_axes = FORMULAS[kind]
    both = np.concatenate([samples.shape, samples.grid], axis=1)
    hull = {
        a: (float(c.min()), float(c.max())) for a, c in zip((*shape_axes, *grid_axes), both.T, strict=True)
    }
    return KernelFit(
        kind=kind,
        coefficients={c: float(f"{v:.6g}") for c, v in coefficients.items()},
        shape_axes=list(shape_axes),
        grid_axes=list(grid_axes),
        residual=table,
        errors=FitErrors(
            train=_round(train),
            measured=_round(measured),
            held_out=_round(held[0]),
            held_out_bias=_round(held[1]),
        ),
        hull=hull,
        num_points=len(samples),
        cleaning=dict(samples.dropped),
        noise_log_std=measurement_noise(samples, base),
        source=samples.source,
    )


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
