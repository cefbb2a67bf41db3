"""How much one run's sample can say: percentiles of few requests, and means of values that follow one another.

For a recorded run, real or simulated, without simulating it again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sim.intervals import t975
from sim.latency import latencies
from sim.metrics import Summary
from sim.record import Floats, RunRecord, Status

BATCHES = 20
"""Batches of batch means: few enough that each outlasts the correlation, enough for a t interval (Schmeiser 1982
finds no gain beyond 30)."""


@dataclass(frozen=True, slots=True)
class ThinPercentile:
    """A percentile of too few samples: nothing observed bounds it from above with 97.5 % confidence."""

    name: str
    """Such as `p99_ttft`."""
    samples: int
    needed: int

    @property
    def words(self) -> str:
        """In a sentence's words."""
        p, metric = self.name.split("_", 1)
        near = "nearly the maximum" if self.samples * (1 - float(p[1:]) / 100) < 1 else "few samples"
        return (
            f"{p.upper()} {metric.upper()} of {self.samples} samples is {near}; {self.needed} would bound it"
        )


def samples_needed(percentile: float) -> int:
    """Fewest independent samples whose maximum exceeds the true percentile with probability 97.5 %.

    All n lie below it with probability (p/100)^n: 72 samples for P95, 368 for P99. From so many on a 95 % interval of
    order statistics exists; with fewer a percentile is a guess at the maximum.
    """
    if percentile >= 100:
        return 1
    return math.ceil(math.log(0.025) / math.log(percentile / 100)) if percentile > 0 else 1


def thin_percentiles(summary: Summary) -> tuple[ThinPercentile, ...]:
    """The summary's percentiles above the median that its number of requests cannot support."""
    found = []
    for metric in ("ttft", "tpot", "e2el"):
        if metric not in summary.metrics:
            continue
        stats = getattr(summary, metric)
        for p, _ in stats.percentiles_s:
            needed = samples_needed(p)
            if 50 < p < 100 and 0 < stats.count < needed:
                found.append(ThinPercentile(f"p{p:g}_{metric}", stats.count, needed))
    return tuple(found)


def batch_means(values: Floats, batches: int = BATCHES) -> tuple[float, float]:
    """(mean, half width of its 95 % interval) of a stationary, autocorrelated sequence in time order.

    Consecutive values are averaged in `batches` batches, which are treated as independent; to treat the values so makes
    intervals that are far too narrow. NaN half width with fewer than two values a batch.
    """
    size = len(values) // batches
    if size < 2:
        return (float(values.mean()) if len(values) else math.nan), math.nan
    means = values[len(values) - size * batches :].reshape(batches, size).mean(axis=1)
    half = t975(batches - 1) * float(means.std(ddof=1)) / math.sqrt(batches)
    return float(values.mean()), half


def mean_intervals(record: RunRecord) -> dict[str, tuple[float, float, float]]:
    """(mean, low, high) in seconds of mean TTFT, TPOT, E2EL and ITL of one recorded run, sampling error alone.

    Requests are taken in order of sending, token gaps in order of time.
    """
    lat, done = latencies(record), record.requests.status == Status.FINISHED
    several = done & (record.requests.output_tokens > 1)
    series = {
        "mean_ttft": lat.ttft_s[done],
        "mean_tpot": lat.tpot_s[several],
        "mean_e2el": lat.e2el_s[done],
        "mean_itl": gaps_in_time_order(record),
    }
    out = {}
    for name, values in series.items():
        mean, half = batch_means(values)
        out[name] = (mean, mean - half, mean + half)
    return out


def gaps_in_time_order(record: RunRecord) -> Floats:
    """Gaps between consecutive tokens of finished requests, ordered by the later token, shape (gaps,)."""
    rows = np.flatnonzero(record.requests.status == Status.FINISHED)
    followed = record.deliveries is not None
    times = [
        record.event_times_s(int(row)) if followed else record.engine_token_times_s(int(row)) for row in rows
    ]
    gaps = [np.diff(t) for t in times if len(t) > 1]
    if not gaps:
        return np.empty(0)
    at = np.concatenate([t[1:] for t in times if len(t) > 1])
    ordered: Floats = np.concatenate(gaps)[np.argsort(at, kind="stable")]
    return ordered
