"""Held-out errors of every shipped profile as one table: `python -m calibration.kernel_errors [--write PAGE]`.

Read from the profiles, where the fits left them (`python -m calibration.ship` fits again); no data is needed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from calibration.doc_tables import markdown, write_between
from costmodel.profile import KernelFit, list_profiles, load_profile
from serving.errors import UsageError

GOALS = {"gemm": 0.06, "prefill": 0.06, "decode": 0.06, "all_reduce": 0.08}
"""Largest mean absolute error wanted on shapes (of an all-reduce: sizes) that were left out of the fit."""

MEASURED_GOAL = 0.02
"""The same at measured shapes, residual table included."""

_SECTION = "kernel errors"


def table() -> str:
    """One row per device and kernel with a goal; errors above it are in bold."""
    rows = []
    for device in list_profiles():
        for name, fit in load_profile(device).kernels():
            goal = GOALS.get(name.split("/")[0])
            if goal is not None and fit.errors.held_out is not None:
                rows.append([device, name.replace("/", " "), f"{fit.num_points:,}", *_errors(fit, goal)])
    return markdown(
        ["device", "kernel", "points", "measured shapes", "shapes left out", "bias", "goal"], rows
    )


def _errors(fit: KernelFit, goal: float) -> list[str]:
    errors = fit.errors
    assert errors.held_out is not None
    assert errors.held_out_bias is not None
    assert errors.measured is not None
    left_out = f"{errors.held_out:.1%}"
    measured = f"{errors.measured:.2%}"
    return [
        measured if errors.measured <= MEASURED_GOAL else f"**{measured}**",
        left_out if errors.held_out <= goal else f"**{left_out}**",
        f"{errors.held_out_bias:+.1%}",
        f"{goal:.0%}",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and write it into a page if asked to."""
    parser = argparse.ArgumentParser(prog="python -m calibration.kernel_errors", description=__doc__)
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="put the table between its marks in this page"
    )
    given = parser.parse_args(arguments)
    text = table()
    try:
        if given.write is not None:
            write_between(given.write, _SECTION, text)
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
