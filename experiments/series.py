"""What a picture is drawn from: columns of a run reduced to what a screen can show, extremes kept.

Numbers only; no plotting library here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.latency import Bools, token_seconds
from sim.record import Floats, Ints, RunRecord, StepTable
from sim.saturation import count_at

NUM_BUCKETS = 480


@dataclass(frozen=True, slots=True)
class Band:
    """A quantity over time: mean, lowest and highest value within each bucket of time, shape (buckets,)."""

    time_s: Floats
    """Middle of each bucket."""
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True)
class StepFunction:
    """A quantity that holds `values[i]` from `times_s[i]` to the next time; 0 before the first."""

    times_s: Floats
    values: Floats


def over_replicas(steps: StepTable, column: Floats | Ints) -> StepFunction:
    """Sum over replicas of a column of the step table; a replica counts 0 between steps with a gap."""
    times: list[Floats] = []
    changes: list[Floats] = []
    for replica in np.unique(steps.replica):
        mine = steps.replica == replica
        start_s, end_s, value = steps.start_s[mine], steps.end_s[mine], column[mine].astype(np.float64)
        gap = np.append(start_s[1:] - end_s[:-1] > 1e-9, True)
        t = np.concatenate([start_s, end_s[gap]])
        v = np.concatenate([value, np.zeros(int(gap.sum()))])
        order = np.argsort(t, kind="stable")
        times.append(t[order])
        changes.append(np.diff(v[order], prepend=0.0))
    if not times:
        return StepFunction(np.empty(0), np.empty(0))
    t, change = np.concatenate(times), np.concatenate(changes)
    order = np.argsort(t, kind="stable")
    return StepFunction(t[order], np.cumsum(change[order]))


def band(function: StepFunction, from_s: float, to_s: float, num_buckets: int = NUM_BUCKETS) -> Band:
    """Reduce a step function to buckets of equal time; the lowest and highest values inside each are kept."""
    edges = np.linspace(from_s, to_s, num_buckets + 1)
    t, v = function.times_s, function.values
    at_edge = (
        np.concatenate([[0.0], v])[np.searchsorted(t, edges, side="right")]
        if len(t)
        else np.zeros(len(edges))
    )
    inside = (t > from_s) & (t < to_s)
    all_t = np.concatenate([edges[:-1], t[inside]])
    all_v = np.concatenate([at_edge[:-1], v[inside]])
    order = np.argsort(all_t, kind="stable")
    all_t, all_v = all_t[order], all_v[order]
    first = np.searchsorted(all_t, edges[:-1], side="left")
    held_s = np.diff(all_t, append=to_s)
    mean = np.add.reduceat(all_v * held_s, first) / np.maximum(np.add.reduceat(held_s, first), 1e-300)
    low, high = np.minimum.reduceat(all_v, first), np.maximum.reduceat(all_v, first)
    return Band((edges[1:] + edges[:-1]) / 2, np.clip(mean, low, high), low, high)


def in_system(record: RunRecord) -> StepFunction:
    """Requests sent and not yet done, over time."""
    r = record.requests
    kept = ~np.isnan(r.queued_s)
    times_s = np.unique(np.concatenate([r.sent_s[kept], r.last_token_s[kept & ~np.isnan(r.last_token_s)]]))
    return StepFunction(times_s, count_at(times_s, r.sent_s[kept], r.last_token_s[kept]))


def rate_per_s(
    times_s: Floats, from_s: float, to_s: float, num_buckets: int = NUM_BUCKETS
) -> tuple[Floats, Floats]:
    """Events per second in buckets of equal time: (middles, rates)."""
    edges = np.linspace(from_s, to_s, num_buckets + 1)
    counts = np.histogram(times_s[~np.isnan(times_s)], edges)[0]
    return (edges[1:] + edges[:-1]) / 2, counts / max((to_s - from_s) / num_buckets, 1e-300)


def output_rate_per_s(record: RunRecord, from_s: float, to_s: float) -> tuple[Floats, Floats]:
    """Tokens received by clients per second, over time."""
    some: Bools = record.requests.output_tokens > 0
    return rate_per_s(token_seconds(record, some), from_s, to_s, NUM_BUCKETS // 2)


def percentile_by_window(
    at_s: Floats, values: Floats, window_s: float, from_s: float, percentile: float, *, least: int = 5
) -> tuple[Floats, Floats]:
    """A percentile of the values in each window of time: (middles, percentiles), where enough are."""
    known = ~np.isnan(values)
    which = ((at_s[known] - from_s) // window_s).astype(np.int64)
    order = np.argsort(which, kind="stable")
    starts = np.flatnonzero(np.diff(which[order], prepend=-1))
    groups = np.split(values[known][order], starts[1:]) if len(starts) else []
    kept = [
        (which[order][s], np.percentile(g, percentile))
        for s, g in zip(starts, groups, strict=True)
        if len(g) >= least
    ]
    middles = np.array([from_s + (w + 0.5) * window_s for w, _ in kept])
    return middles, np.array([p for _, p in kept])


def ecdf(values: Floats, max_points: int = 1200) -> tuple[Floats, Floats]:
    """Sorted values and the share at or below each; thinned in the middle, whole in the upper tail."""
    ordered = np.sort(values[~np.isnan(values)])
    n = len(ordered)
    keep = np.arange(n)
    if n > max_points:
        tail = max_points // 6
        keep = np.unique(np.concatenate([np.linspace(0, n - 1, max_points - tail).astype(int), keep[-tail:]]))
    return ordered[keep], (keep + 1) / max(n, 1)


def thin(rows: Ints, weight: Floats, max_rows: int) -> Ints:
    """At most `max_rows` of the rows: the heaviest third, and an even pick of the others."""
    if len(rows) <= max_rows:
        return rows
    order = np.argsort(-weight, kind="stable")
    heavy, rest = order[: max_rows // 3], np.sort(order[max_rows // 3 :])
    picked = rest[np.linspace(0, len(rest) - 1, max_rows - len(heavy)).astype(int)]
    kept: Ints = rows[np.sort(np.concatenate([heavy, picked]))]
    return kept
