"""How far a table contradicts itself: `python -m calibration.table_floor DEVICE:FORMAT [...]`.

Each timing of products is predicted from all the others, those of the same shape at the neighbouring numbers of tokens
included. A fit that has seen no timing of a shape knows less, so this is about as well as one can do. Needs the public
kernel tables, and the shipped profiles for their formulas.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calibration.assemble import gemm_samples
from calibration.doc_tables import markdown
from calibration.fit import formula_seconds
from calibration.ship import RECIPES, table_paths
from calibration.tables import Samples, read_table
from costmodel.datasheet import device_facts
from costmodel.formats import GEMM_FORMATS, hardware
from costmodel.profile import load_profile
from costmodel.residual import covariance, left_out
from serving.errors import UsageError

Floats = npt.NDArray[np.float64]

_SHAPE_SCALES = ((0.7, 3.0), (1.5, 6.0))
_SHAPE_NUGGETS = (0.1, 1.0, 10.0)
_TOKEN_SCALES = (0.3, 1.0, 3.0)
_TOKEN_NUGGETS = (0.3, 1.0, 3.0, 10.0)
"""Settings that are tried; the best is taken, which makes the figure smaller rather than larger."""


def floor(samples: Samples, log_ratio: Floats) -> float:
    """Mean absolute relative error of predicting every timing of products from all the others.

    `log_ratio` (N,) is log(measured / formula). First a timing's ratio is kriged from other shapes at as many tokens,
    then what all of its shape's other timings leave of that is added.
    """
    shapes, row = np.unique(samples.shape, axis=0, return_inverse=True)
    tokens, column = np.unique(samples.grid[:, 0], return_inverse=True)
    table = np.full((len(shapes), len(tokens)), np.nan)
    table[row.ravel(), column.ravel()] = log_ratio
    apart = np.log(tokens)[:, None]
    best = np.inf
    for scales, noise in product(_SHAPE_SCALES, _SHAPE_NUGGETS):
        rest = np.full_like(table, np.nan)
        for j in range(len(tokens)):
            known = ~np.isnan(table[:, j])
            gram = covariance(*2 * (np.log(shapes[known]),), np.array(scales), "cityblock")
            rest[known, j] = left_out(gram + noise * np.eye(len(gram)), table[known, j])
        for scale, nugget in product(_TOKEN_SCALES, _TOKEN_NUGGETS):
            error = np.full_like(table, np.nan)
            for i in range(len(shapes)):
                known = ~np.isnan(table[i])
                gram = covariance(apart[known], apart[known], np.array([scale]), "cityblock")
                error[i, known] = left_out(gram + nugget * np.eye(len(gram)), rest[i, known])
            best = min(best, float(np.nanmean(np.abs(np.expm1(-error)))))
    return best


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each of the products asked for."""
    parser = argparse.ArgumentParser(prog="python -m calibration.table_floor", description=__doc__)
    parser.add_argument("products", nargs="+", metavar="DEVICE:FORMAT", help="such as l40s:bfloat16")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/kernels"))
    given = parser.parse_args(arguments)
    rows = []
    try:
        for wanted in given.products:
            device, _, dtype = wanted.partition(":")
            fit = load_profile(device).gemm.get(dtype)
            if fit is None or not fit.fitted:
                raise UsageError(f"{wanted}: not measured; use DEVICE:FORMAT such as l40s:bfloat16")
            samples = _samples(device, dtype, given.data)
            facts = device_facts(device)
            base = formula_seconds("gemm", fit.coefficients, hardware(facts, GEMM_FORMATS[dtype]), samples)
            all_others = floor(samples, np.log(samples.seconds / base))
            assert fit.errors.held_out is not None
            rows.append([device, dtype, f"{fit.errors.held_out:.1%}", f"{all_others:.1%}"])
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(
        markdown(["device", "format", "shapes left out", "every other timing known"], rows) + "\n"
    )
    return 0


def _samples(device: str, dtype: str, data: Path) -> Samples:
    """The timings that the shipped fit was made of."""
    paths, formats = table_paths(RECIPES[device], data)
    tables = [read_table(p) for p in paths if "_gemm_" in p.name and dtype in formats.get(p.name, (dtype,))]
    return gemm_samples(tables, dtype, device_facts(device))


if __name__ == "__main__":
    raise SystemExit(main())
