"""A real run beside its twin: figures with signed errors, samples for distributions, series over time.

Plain numbers and JSON. Reading runs is in `calibration.runs_*`, running the twin in `calibration.validate`,
pictures in `experiments.validation_report`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.record import Floats

METRICS = ("ttft", "tpot", "e2el")
STATISTICS = ("mean", "median", "p90", "p95", "p99")
SCHEMA = "tokentwin-validation/1"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the real run and of the twin, in milliseconds."""

    metric: str
    statistic: str
    real_ms: float
    twin_ms: float
    label: str = ""
    """Which point of a sweep; "" for a single run."""
    excluded: str = ""
    """Why the figure does not count in the errors ("kv-saturated"), or "" where it does."""

    @property
    def error(self) -> float:
        """Signed relative error of the twin, as a fraction of the real figure."""
        return self.twin_ms / self.real_ms - 1.0 if self.real_ms else math.nan


@dataclass(frozen=True, slots=True)
class SeriesPair:
    """A quantity over time in both runs, at the times of the real one."""

    name: str
    unit: str
    time_s: Floats
    real: Floats
    twin: Floats

    @property
    def rms(self) -> float:
        """Root of the mean squared difference, in `unit`."""
        return float(np.sqrt(np.mean((self.twin - self.real) ** 2)))


@dataclass(frozen=True, slots=True)
class Pages:
    """KV pages of one replica as the memory model predicts them, and as the real engine counted them."""

    predicted: int
    recorded: int | None
    used: int
    """What the twin ran with."""

    @property
    def error(self) -> float | None:
        return self.predicted / self.recorded - 1.0 if self.recorded else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Side by side of one run, or of the points of a sweep. `to_json()` is what the command saves."""

    title: str
    settings: Mapping[str, Any]
    """Deployment of the twin and where the real run came from, JSON values."""
    figures: tuple[Figure, ...]
    samples: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)
    """Per metric, seconds of every request: (real, twin), each in its own order of arrival."""
    series: tuple[SeriesPair, ...] = ()
    pages: Pages | None = None
    notes: tuple[str, ...] = ()
    """How settings were decided and what is not compared."""

    def counted(self, metric: str | None = None) -> list[Figure]:
        """Figures that count in the errors, of one metric or of all."""
        return [f for f in self.figures if not f.excluded and metric in (None, f.metric)]

    def excluded(self) -> list[Figure]:
        return [f for f in self.figures if f.excluded]

    def mean_error(self, metric: str | None = None) -> float:
        """Mean absolute relative error over the counted figures; NaN without any."""
        return mean_absolute(self.counted(metric))

    def bias(self, metric: str | None = None) -> float:
        """Mean signed relative error over the counted figures."""
        errors = [f.error for f in self.counted(metric)]
        return float(np.mean(errors)) if errors else math.nan

    def worst(self, metric: str | None = None) -> Figure:
        """The counted figure with the largest absolute error. ValueError without any."""
        return max(self.counted(metric), key=lambda f: abs(f.error))

    def within(self, tolerance: float) -> bool:
        """Whether the mean absolute error of the counted figures is at most `tolerance` (a fraction)."""
        return bool(self.mean_error() <= tolerance)

    def to_json(self) -> dict[str, Any]:
        """JSON values: errors as fractions, times in the unit of the key's name."""
        metrics = [m for m in METRICS if self.counted(m)]
        return {
            "schema": SCHEMA,
            "title": self.title,
            "settings": dict(self.settings),
            "mean_absolute_error": self.mean_error(),
            "bias": self.bias(),
            "largest_error": self.worst().error,
            "by_metric": {
                m: {"mean_absolute_error": self.mean_error(m), "bias": self.bias(m)} for m in metrics
            },
            "figures": [
                {
                    "label": f.label,
                    "metric": f.metric,
                    "statistic": f.statistic,
                    "real_ms": f.real_ms,
                    "twin_ms": f.twin_ms,
                    "error": f.error,
                    "excluded": f.excluded,
                }
                for f in self.figures
            ],
            "series": [
                {
                    "name": s.name,
                    "unit": s.unit,
                    "rms_difference": s.rms,
                    "time_s": s.time_s.tolist(),
                    "real": s.real.tolist(),
                    "twin": s.twin.tolist(),
                }
                for s in self.series
            ],
            "kv_pages": None
            if self.pages is None
            else {
                "predicted": self.pages.predicted,
                "recorded": self.pages.recorded,
                "used": self.pages.used,
                "error": self.pages.error,
            },
            "notes": list(self.notes),
        }


def mean_absolute(figures: Iterable[Figure]) -> float:
    """Mean absolute relative error; NaN without figures."""
    errors = [abs(f.error) for f in figures]
    return float(np.mean(errors)) if errors else math.nan


def statistics_ms(values_s: Floats) -> dict[str, float]:
    """`STATISTICS` of seconds, in milliseconds; percentiles are numpy's linear ones. NaN values are left out."""
    kept = values_s[~np.isnan(values_s)] * 1e3
    if not len(kept):
        return {}
    points = np.percentile(kept, (50, 90, 95, 99))
    return dict(zip(STATISTICS, (float(kept.mean()), *points.tolist()), strict=True))


def figures_of(samples: Mapping[str, tuple[Floats, Floats]]) -> tuple[Figure, ...]:
    """The side-by-side figures of each metric that both runs have."""
    found = []
    for metric, (real, twin) in samples.items():
        mine, theirs = statistics_ms(twin), statistics_ms(real)
        found += [
            Figure(metric, name, theirs[name], mine[name])
            for name in STATISTICS
            if name in mine and name in theirs
        ]
    return tuple(found)


def at_times(time_s: Floats, start_s: Floats, end_s: Floats, values: Sequence[float] | Floats) -> Floats:
    """Value of a step column at `time_s`: that of the step running then; 0 where none runs."""
    column = np.asarray(values, np.float64)
    row = np.searchsorted(end_s, time_s, side="right")
    inside = np.minimum(row, len(end_s) - 1)
    running = (row < len(end_s)) & (start_s[inside] <= time_s)
    return np.where(running, column[inside], 0.0)
