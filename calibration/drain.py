"""Decode steps of a real run by themselves, read off its end: `python -m calibration.drain [--write PAGE]`.

Once nobody waits and the last prompt is read, a run only decodes. Its requests end one after another, each with the last
token of some step, so that between two ends lie a few whole steps of the same sequences: how many is plain as long as
they are few. What a step took is compared with its price at the contexts the sequences had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibration.doc_tables import markdown, page_command
from calibration.observed import Case
from calibration.runs_vllm import read_runs
from calibration.step_times import RUNS, Times, read_times
from costmodel.prices import Prices
from sim.deployment import build
from sim.record import Floats

MOST_STEPS = 3
"""Between two ends: a price that is 10 % off is less than a third of a step off by then."""
_OFF_STEPS = 0.35
"""How far from a whole number of priced steps a stretch may be; further off, its number of steps is in doubt."""
WIDTH = 16
"""Sequences of one row of the table."""
_SECTION = "drain"
_NEWEST = "0.20"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Whole steps of the same `sequences` between two ends: how many, what one took, and its price."""

    sequences: int
    steps: int
    took_s: float
    priced_s: float


def begins_s(case: Case, times: Times) -> float:
    """From when on the run only decodes: after its last first token, and the second in which somebody last waited."""
    waiting = case.observed.series.get("waiting")
    last = float(times.first_token_s.max())
    if waiting is None or not np.any(waiting > 0):
        return last
    return max(last, float(case.observed.time_s[np.flatnonzero(waiting > 0)[-1]]) + 1.0)


def stretches(case: Case, times: Times, prices: Prices) -> list[Stretch]:
    """The stretches of a run's end, when nothing but decodes went on, largest batch first."""
    now = begins_s(case, times)
    left = np.flatnonzero(times.last_token_s > now)
    left = left[np.argsort(times.last_token_s[left], kind="stable")]
    ends = times.last_token_s[left]
    final = (case.workload.prompt_tokens + case.workload.output_tokens)[left].astype(float)
    took = np.diff(ends, prepend=now)

    def price(first: int, remaining: Floats) -> float:
        contexts = np.maximum(final[first:] - remaining, 1.0)
        size = len(contexts)
        return prices.step_s(size, size, (), size, int(contexts.sum()), int(contexts.max()))

    # From the end backwards: how many tokens each has left follows from the stretches after.
    found: list[Stretch] = []
    to_end = np.zeros(len(left))
    for first in range(len(left) - 1, -1, -1):
        steps = round(took[first] / price(first, to_end[first:]))
        cost = price(first, to_end[first:] + steps / 2)
        # The first stretch begins within a step that may hold prompts too.
        if first and 0 < steps <= MOST_STEPS and abs(took[first] / cost - steps) <= _OFF_STEPS:
            found.append(Stretch(len(left) - first, steps, float(took[first]) / steps, cost))
        to_end[first:] += steps
    return found[::-1]


def by_size(found: Sequence[Stretch]) -> dict[int, tuple[int, float, float]]:
    """(steps, mean seconds taken, mean price) by class of sequences: class c holds c * WIDTH + 1 to (c + 1) * WIDTH."""
    classes: dict[int, list[Stretch]] = {}
    for stretch in found:
        classes.setdefault((stretch.sequences - 1) // WIDTH, []).append(stretch)
    return {
        c: (
            (steps := sum(s.steps for s in some)),
            sum(s.took_s * s.steps for s in some) / steps,
            sum(s.priced_s * s.steps for s in some) / steps,
        )
        for c, some in sorted(classes.items())
    }


def table(folder: Path) -> str:
    """Milliseconds of decode steps at the ends of the runs and their prices, a row per class of sequences."""
    columns: dict[str, dict[int, tuple[int, float, float]]] = {}
    for name, run in RUNS.items():
        case = read_runs(folder, run, None, None)
        times = read_times(folder, case.name)
        built = build(case.deployment)
        columns[name] = by_size(stretches(case, times, built.pricer))
        if built.profile.other_gemms:
            newest = build(case.deployment.model_copy(update={"engine_version": _NEWEST}))
            columns[f"{name}, priced with CUDA 13's products"] = by_size(
                stretches(case, times, newest.pricer)
            )
    rows = []
    for c in sorted({c for column in columns.values() for c in column}):
        cells = [
            f"{100 * (priced / took - 1):+.1f} % of {took * 1e3:.2f} ms ({steps})" if steps >= 3 else "—"
            for steps, took, priced in (column.get(c, (0, 1.0, 1.0)) for column in columns.values())
        ]
        rows.append([f"{c * WIDTH + 1} to {(c + 1) * WIDTH}", *cells])
    return markdown(["sequences", *columns], rows)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and write it into a page if asked to."""
    return page_command(
        "python -m calibration.drain", __doc__, _SECTION, table, "../shared/data/yardstick", arguments
    )


if __name__ == "__main__":
    raise SystemExit(main())
