"""The steps of two runs side by side: how many are alike, and the first that is not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibration.recorded import COMPOSITION
from sim.record import RunRecord


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first step, in each replica's order, that computes something else in the two runs."""

    replica: int
    step: int
    """Number of the step in its replica; equals `identical` steps before it."""
    a: dict[str, float]
    """What A's step computes, or nothing where A has no such step."""
    b: dict[str, float]
    columns: tuple[str, ...]
    """What differs."""


def _by_replica(record: RunRecord) -> dict[int, np.ndarray[Any, np.dtype[np.float64]]]:
    columns = np.stack([getattr(record.steps, name).astype(np.float64) for name in COMPOSITION], axis=1)
    return {int(r): columns[record.steps.replica == r] for r in np.unique(record.steps.replica)}


def _first(a: Any, b: Any) -> int:
    """Index of the first row that differs; the length of both when none does."""
    shared = min(len(a), len(b))
    differs = np.flatnonzero((a[:shared] != b[:shared]).any(axis=1))
    return int(differs[0]) if len(differs) else shared


def identical_steps(a: RunRecord, b: RunRecord) -> int:
    """Steps before the first difference, summed over replicas."""
    first, second = _by_replica(a), _by_replica(b)
    return sum(_first(first[r], second[r]) for r in first if r in second)


def first_difference(a: RunRecord, b: RunRecord) -> FirstDifference | None:
    """The earliest step (by A's clock) whose composition differs between the runs; None when all are alike."""
    first, second = _by_replica(a), _by_replica(b)
    empty = np.empty((0, len(COMPOSITION)))
    found: list[tuple[float, FirstDifference]] = []
    for replica in sorted(first.keys() | second.keys()):
        mine, theirs = first.get(replica, empty), second.get(replica, empty)
        at = _first(mine, theirs)
        if at == len(mine) == len(theirs):
            continue
        rows = [
            dict(zip(COMPOSITION, rows_of[at].tolist(), strict=True)) if at < len(rows_of) else {}
            for rows_of in (mine, theirs)
        ]
        columns = tuple(name for name in COMPOSITION if rows[0].get(name) != rows[1].get(name))
        starts_s = a.steps.start_s[a.steps.replica == replica]
        when_s = float(starts_s[at]) if at < len(starts_s) else math.inf
        found.append((when_s, FirstDifference(replica, at, rows[0], rows[1], columns)))
    return min(found, key=lambda entry: entry[0])[1] if found else None
