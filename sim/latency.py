"""Latencies of requests and tokens in a run, and statistics of them. Seconds throughout.

Definitions are those of `vllm bench serve`; docs/metrics.md gives each formula. What a whole run amounts to
is in `sim.metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.record import Floats, Ints, RunRecord, Status

Bools = npt.NDArray[np.bool_]

DEFAULT_PERCENTILES = (50.0, 90.0, 95.0, 99.0)
RUNGS = (0.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 100.0)
"""Percentiles that bound the intervals of those between them (`sim.intervals`)."""
STAGES = (
    "blocked",
    "network",
    "gateway",
    "tokenize",
    "queue",
    "prefill",
    "decode",
    "detokenize",
    "stream",
    "reader",
)
SELDOM = ("blocked", "gateway", "stream", "reader")
"""Stages that are shown where there is any of them."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of every request in seconds, by row of the request table; NaN where it did not happen."""

    ttft_s: Floats
    """From the client's send to its first token."""
    tpot_s: Floats
    """(E2EL − TTFT) / (output tokens − 1); 0 with one token or none. NaN unless finished."""
    e2el_s: Floats
    """From the client's send to its last token. NaN unless finished."""
    queue_s: Floats
    prefill_s: Floats
    decode_s: Floats


def latencies(record: RunRecord) -> Latencies:
    """The per-request latencies of a run."""
    r = record.requests
    finished = r.status == Status.FINISHED
    ttft_s = r.first_token_s - r.sent_s
    e2el_s = np.where(finished, r.last_token_s - r.sent_s, np.nan)
    tpot_s = np.where(r.output_tokens > 1, (e2el_s - ttft_s) / np.maximum(r.output_tokens - 1, 1), 0.0)
    return Latencies(
        ttft_s=ttft_s,
        tpot_s=np.where(finished, tpot_s, np.nan),
        e2el_s=e2el_s,
        queue_s=r.scheduled_s - r.queued_s,
        prefill_s=r.prefill_done_s - r.scheduled_s,
        decode_s=r.engine_done_s - r.prefill_done_s,
    )


def stage_times(record: RunRecord) -> dict[str, Floats]:
    """Seconds that each finished request spent in each of `STAGES`; they add up to its E2EL.

    Those on the network are of the request's way in and of its last event's way out; `stream` is what is left.
    Waits after a preemption are in the stage that was interrupted. Rows that did not finish are NaN.
    """
    r, lat = record.requests, latencies(record)
    known = {
        "blocked": r.blocked_s,
        "network": r.network_s,
        "gateway": r.gateway_s,
        "tokenize": r.tokenize_s,
        "queue": lat.queue_s,
        "prefill": lat.prefill_s,
        "decode": lat.decode_s,
        "detokenize": r.detokenize_s,
        "reader": r.reader_s,
    }
    rest_s = lat.e2el_s - sum(known.values(), start=np.zeros(len(r)))
    rounding_s = 1e-9 * np.maximum(1.0, np.abs(np.nan_to_num(r.last_token_s)))
    known["stream"] = np.where(np.abs(rest_s) < rounding_s, 0.0, rest_s)
    finished = r.status == Status.FINISHED
    return {name: np.where(finished, known[name], np.nan) for name in STAGES}


@dataclass(frozen=True, slots=True)
class Pooled:
    """A multiset of durations: `counts[i]` times `values_s[i]`, sorted by value."""

    values_s: Floats
    counts: Ints

    @property
    def size(self) -> int:
        return int(self.counts.sum())


def inter_token_gaps(record: RunRecord, keep: Bools | None = None) -> Pooled:
    """Gaps between consecutive token events, pooled over the finished requests (or the rows `keep`).

    A range of n tokens holds n − 1 gaps, each the distance of two neighbouring steps: instead of listing them
    per token, count how many ranges span each pair of steps. Cost follows steps and ranges, not tokens.
    """
    if keep is None:
        keep = record.requests.status == Status.FINISHED
    if (d := record.deliveries) is not None:
        owners = d.owners()
        gaps_s = np.diff(d.seen_s)[(owners[1:] == owners[:-1]) & keep[owners[1:]]]
        return pooled(gaps_s)
    t, end_s = record.tokens, record.steps.end_s
    owner = np.repeat(np.arange(len(record.requests)), np.diff(t.offsets))
    mine = keep[owner] & (t.count > 0)
    owner, first, count = owner[mine], t.first_step[mine], t.count[mine]
    size = len(end_s) + 1
    opened, closed = np.bincount(first, minlength=size), np.bincount(first + count - 1, minlength=size)
    spans = np.cumsum(opened - closed)[: max(len(end_s) - 1, 0)]
    within = np.flatnonzero(spans)
    follows = np.flatnonzero(owner[1:] == owner[:-1]) if len(owner) else np.empty(0, np.int64)
    between_s = end_s[first[follows + 1]] - end_s[(first + count - 1)[follows]]
    values_s = np.concatenate([end_s[within + 1] - end_s[within], between_s])
    counts = np.concatenate([spans[within], np.ones(len(between_s), np.int64)])
    order = np.argsort(values_s, kind="stable")
    return Pooled(values_s[order], counts[order])


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Statistics of one latency in seconds; all NaN when `count` is 0."""

    count: int
    mean_s: float
    median_s: float
    std_s: float
    """Population standard deviation (ddof 0)."""
    max_s: float
    percentiles_s: tuple[tuple[float, float], ...]
    """(percentile, value), with numpy's linear interpolation."""
    rungs_s: tuple[tuple[float, float], ...] = ()
    """(percentile, value) at `RUNGS`."""

    def at(self, percentile: float) -> float:
        """The value at a percentile that was asked for; KeyError otherwise."""
        return dict(self.percentiles_s)[percentile]


def percentile_s(pool: Pooled, percentile: float) -> float:
    """Linear percentile of a multiset, as `numpy.percentile` gives; infinities are allowed."""
    return percentiles_s(pool, (percentile,))[0]


def percentiles_s(pool: Pooled, percentiles: Sequence[float]) -> list[float]:
    """`percentile_s` of several."""
    upto = np.cumsum(pool.counts)
    if not len(upto) or not upto[-1]:
        return [math.nan] * len(percentiles)
    positions = [(int(upto[-1]) - 1) * (p / 100) for p in percentiles]
    ranks = [rank for at in positions for rank in (math.floor(at), math.ceil(at))]
    ends = iter(pool.values_s[np.searchsorted(upto, ranks, side="right")].tolist())
    return [
        a if a == b or at == int(at) else a + (b - a) * (at - int(at))
        for at, a, b in zip(positions, ends, ends, strict=True)
    ]


def latency_stats(pool: Pooled, percentiles: Sequence[float] = DEFAULT_PERCENTILES) -> LatencyStats:
    """Statistics of a multiset of durations."""
    size = pool.size
    if not size:
        nan = math.nan
        return LatencyStats(0, nan, nan, nan, nan, tuple((p, nan) for p in percentiles))
    mean_s = float(np.dot(pool.values_s, pool.counts) / size)
    variance = float(np.dot((pool.values_s - mean_s) ** 2, pool.counts) / size)
    median_s, *values_s = percentiles_s(pool, (50.0, *percentiles, *RUNGS))
    shown, rungs = values_s[: len(percentiles)], values_s[len(percentiles) :]
    return LatencyStats(
        size,
        mean_s,
        median_s,
        math.sqrt(variance),
        float(pool.values_s[-1]),
        tuple(zip(map(float, percentiles), shown, strict=True)),
        tuple(zip(RUNGS, rungs, strict=True)),
    )


def pooled(values_s: Floats) -> Pooled:
    """A multiset from plain values, NaN left out."""
    kept = np.sort(values_s[~np.isnan(values_s)])
    return Pooled(kept, np.ones(len(kept), dtype=np.int64))


def token_seconds(record: RunRecord, keep: Bools) -> Floats:
    """When each token of the rows `keep` reached its client, request by request, shape (tokens,)."""
    if (d := record.deliveries) is not None:
        events = keep[d.owners()]
        return np.repeat(d.seen_s[events], d.tokens[events])
    t, r = record.tokens, record.requests
    owner = np.repeat(np.arange(len(r)), np.diff(t.offsets))
    mine = keep[owner] & (t.count > 0)
    owner, first, count = owner[mine], t.first_step[mine], t.count[mine]
    if not len(owner):
        return np.empty(0)
    before = np.cumsum(count) - count
    step = np.arange(int(count.sum())) + np.repeat(first - before, count)
    if t.per_step is not None:
        several = np.repeat(t.per_step[mine], count)
        step, count = np.repeat(step, several), np.add.reduceat(several, before)
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    lag_s = np.full(len(r), 0.0)
    lag_s[owner[starts]] = r.first_token_s[owner[starts]] - record.steps.end_s[first[starts]]
    times_s: Floats = record.steps.end_s[step]
    times_s += np.repeat(lag_s[owner], count)
    return times_s
