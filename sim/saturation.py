"""Is the deployment keeping up? A statistical test for a queue that grows, and what holds the run back.

A single number cannot tell a busy server from a drowning one: a stable queue at 95 % load is long, a
saturated one after a minute is short. What differs is drift, so that is what is tested.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from sim.latency import latencies
from sim.meta import meta_value
from sim.record import Floats, RunRecord, Status

NUM_BATCHES = 20
CRITICAL_T = 2.093
"""97.5 % point of Student's t with NUM_BATCHES − 1 degrees of freedom: a one-sided test at 2.5 %."""
MIN_ARRIVALS = 60
"""Fewer arrivals in the tested window say nothing either way."""
MIN_BACKLOG_SHARE = 0.02
"""Growth below this share of the arrivals is not worth an alarm, however regular it is."""


class Load(StrEnum):
    """What the drift test concludes."""

    STABLE = "stable"
    SATURATED = "saturated"
    CLOSED_LOOP = "closed loop"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Drift:
    """Growth of a count over a window, with a standard error that allows for autocorrelation."""

    start: float
    end: float
    per_s: float
    t: float
    """Mean growth per batch over its standard error."""

    @property
    def grows(self) -> bool:
        return self.t > CRITICAL_T


@dataclass(frozen=True, slots=True)
class Saturation:
    """Verdict of the drift test over the open-loop arrival window, and its evidence."""

    load: Load
    reason: str
    window_s: tuple[float, float] = (math.nan, math.nan)
    """The part of the arrival window that was tested, after the warm-up."""
    arrivals: int = 0
    waiting: Drift | None = None
    """Requests in the scheduler's queue that were never scheduled."""
    in_system: Drift | None = None


def count_at(times_s: Floats, plus_s: Floats, minus_s: Floats) -> Floats:
    """How many of the intervals [plus, minus) are open at each time. NaN and infinity never happen."""
    opened = np.searchsorted(np.sort(plus_s[~np.isnan(plus_s)]), times_s, side="right")
    closed = np.searchsorted(np.sort(minus_s[~np.isnan(minus_s)]), times_s, side="right")
    return (opened - closed).astype(np.float64)


def drift(counts: Floats, window_s: float) -> Drift:
    """Test whether a count grows, from its values at the ends of equal batches of time, shape (batches + 1,).

    Successive lengths of a queue depend on one another, so a regression on them finds trends in noise. Its
    increments over long batches hardly do: above capacity they have a positive mean, and below it they cancel
    (what arrives in one batch leaves in another), which makes the test conservative there. The statistic is
    Student's t of the mean increment.
    """
    steps = np.diff(counts)
    start, end = float(counts[0]), float(counts[-1])
    per_s = (end - start) / window_s if window_s > 0 else 0.0
    error = float(steps.std(ddof=1)) / math.sqrt(len(steps))
    mean = float(steps.mean())
    t = mean / error if error > 0 else math.copysign(math.inf, mean) if mean else 0.0
    return Drift(start, end, per_s, t)


def saturation(record: RunRecord) -> Saturation:
    """Whether requests arrive faster than they leave, over the window in which they arrive.

    The warm-up is dropped first: until the first requests have been served once, the number in the system
    grows on any server. Saturated means that the queue of waiting requests grows, or, where the batch itself
    is what still grows, that the number in the system does although the arrival rate does not.
    """
    if closed_loop(record):
        return Saturation(Load.CLOSED_LOOP, "a closed loop never sends more than its concurrency allows")
    r = record.requests
    if not len(r):
        return Saturation(Load.INCONCLUSIVE, "no request was sent")
    first_s, last_s = float(r.sent_s.min()), float(r.sent_s.max())
    served_s = (latencies(record).e2el_s - (r.scheduled_s - r.queued_s))[r.status == Status.FINISHED]
    warmup_s = float(np.percentile(served_s, 95)) if len(served_s) else 0.0
    from_s = first_s + min(warmup_s, (last_s - first_s) / 2)
    arrivals = int(np.count_nonzero(r.sent_s >= from_s))
    if last_s <= first_s:
        return Saturation(Load.INCONCLUSIVE, "all requests arrived at once, which is a batch and not a load")
    if warmup_s > (last_s - first_s) / 2 or arrivals < MIN_ARRIVALS:
        needed = f"{MIN_ARRIVALS} arrivals after the warm-up of {warmup_s:,.{0 if warmup_s >= 100 else 2}f} s"
        return Saturation(Load.INCONCLUSIVE, f"too short to tell: needs at least {needed}")
    edges_s = np.linspace(from_s, last_s, NUM_BATCHES + 1)
    gone_s = np.where(r.status == Status.FINISHED, r.last_token_s, np.nan)
    taken_s = np.where(r.status >= Status.REJECTED, np.nan, r.scheduled_s)
    kept = r.status < Status.REJECTED
    waiting = drift(count_at(edges_s, r.queued_s[kept], taken_s[kept]), last_s - from_s)
    in_system = drift(count_at(edges_s, r.sent_s[kept], gone_s[kept]), last_s - from_s)
    rate = np.diff(np.searchsorted(np.sort(r.sent_s), edges_s)).astype(np.float64)
    saturated = _worth_it(waiting, arrivals) or (_worth_it(in_system, arrivals) and not _rises(rate))
    grew = waiting if _worth_it(waiting, arrivals) else in_system
    what = "queue" if grew is waiting else "number in the system"
    reason = (
        f"the {what} went from {grew.start:.0f} to {grew.end:.0f} while {arrivals} requests arrived "
        f"({grew.t:.1f} standard errors; {CRITICAL_T:.1f} would be drift)"
    )
    load = Load.SATURATED if saturated else Load.STABLE
    return Saturation(load, reason, (from_s, last_s), arrivals, waiting, in_system)


def closed_loop(record: RunRecord) -> bool:
    """Whether a limit on concurrency held clients back: max_concurrency is set and was reached."""
    limit = meta_value(record, "max_concurrency")
    if limit is None:
        return False
    r = record.requests
    gone_s = np.where(r.status == Status.UNFINISHED, np.nan, r.last_token_s)
    rejected = r.status >= Status.REJECTED
    at_send = count_at(r.sent_s, r.sent_s[~rejected], gone_s[~rejected])
    return bool(len(r) and at_send.max() >= min(int(limit), len(r)))


def _worth_it(drift: Drift, arrivals: int) -> bool:
    return drift.grows and drift.end - drift.start > MIN_BACKLOG_SHARE * arrivals


def _rises(counts: Floats) -> bool:
    """Whether counts per batch have an upward trend (Mann-Kendall, normal approximation, 2.5 %)."""
    n = len(counts)
    later = np.triu(np.sign(counts[None, :] - counts[:, None]), 1).sum()
    return bool(later / math.sqrt(n * (n - 1) * (2 * n + 5) / 18) > 1.96)
