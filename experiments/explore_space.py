"""What `tokentwin explore` shows, in one form: the points of a sweep, or the fleets of a plan.

A point is one setting of the knobs (what varies) and its figures; several runs of one point are averaged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.sweep_spec import Params
from serving.errors import UsageError

REPORT = "report.html"


@dataclass(frozen=True, slots=True)
class Point:
    """One setting and what came of it."""

    number: int
    params: Params
    """Its values of the knobs, by column of the results."""
    figures: dict[str, float | None]
    """Means over the runs, by column of the results."""
    words: dict[str, str] = field(default_factory=dict)
    """What is no number: saturated or not, and the bound."""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """95 % intervals of figures that have one, by column of the results."""
    runs: int = 1
    error: str = ""
    gpu: str = ""
    asked: Params = field(default_factory=dict)
    """What the sweep set, by flag."""
    folder: Path | None = None
    """Where its run is saved, or would be."""
    command: str = ""
    """Runs it by itself; empty where flags cannot say it."""

    @property
    def report(self) -> Path | None:
        """Its report, whether or not it is there."""
        return None if self.folder is None else self.folder / REPORT


@dataclass(frozen=True, slots=True)
class Space:
    """All points, and what they have in common."""

    kind: str
    """sweep or plan"""
    title: str
    subtitle: str
    root: Path
    knobs: tuple[str, ...]
    points: tuple[Point, ...]
    limits_ms: dict[str, float] = field(default_factory=dict)
    """Promises that were asked for, such as p95_ttft."""
    base: Params = field(default_factory=dict)
    prices: dict[str, float] = field(default_factory=dict)
    """Dollars per GPU and hour that the results were made with."""
    unit: str = ""
    """Of the capacity of a plan's fleets."""
    notes: tuple[str, ...] = ()
    flips: tuple[str, ...] = ()
    """What would flip the choice."""
    serve: str = ""
    """Serves the first fleet."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Candidates that are no points, and why."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UsageError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected a JSON object")
    return content
