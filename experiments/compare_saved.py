"""Two runs that already happened, of one workload, compared request by request.

Every request is in both runs, so its two latencies are a pair. The interval of a difference comes from a circular block
bootstrap: blocks of neighbouring requests are drawn with replacement, the same ones for both runs, because requests
that queue behind one another are no independent samples (Künsch 1989; Politis and Romano 1992). It covers another
sample of such requests. What else another run would change, such as the clocks of a device, one pair cannot say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.compare import COME_WHOLE, Change, Comparison, Metric, Variant
from experiments.saved import load_record
from serving.errors import UsageError
from sim.latency import Bools, latencies
from sim.metrics import summarise
from sim.record import Floats, Ints, RunRecord, Status
from sim.slo import TICK_S

BLOCKS = 20
"""Blocks in a sample, as many as batches in `sim.samples`: each should outlast the correlation."""
FEWEST = 2 * BLOCKS
"""Requests below which there is no interval."""
RESAMPLES = 2000
_PERCENTILES = (50.0, 90.0, 95.0, 99.0)
_CELLS = 4_000_000
"""Values resampled at a time."""
_UNPAIRED = ("request_throughput", "output_throughput", "total_token_throughput", "prefix_hit_rate")


def compare_saved(folders: Mapping[str, Path], *, seed: int = 0) -> Comparison:
    """The first saved run against each of the others. Raises UsageError where they are not of one workload."""
    names = list(folders)
    records = {name: in_order(load_record(folder)) for name, folder in folders.items()}
    base = records[names[0]]
    for name in names[1:]:
        check_same_requests(base, records[name], (names[0], name))
    return Comparison(
        names[0],
        tuple(_variant(name, base, records[name], seed) for name in names[1:]),
        f"95% intervals by a paired block bootstrap over the requests of one pair of runs ({BLOCKS} blocks, seed "
        f"{seed}): they cover the sample of requests, not what else another run would change",
        workload=f"{len(base.requests):,} requests",
        lost=max(int((r.requests.status == Status.UNFINISHED).sum()) for r in records.values()),
    )


def in_order(record: RunRecord) -> RunRecord:
    """The record with its requests in order of their number in the workload."""
    order = np.argsort(record.requests.request_id, kind="stable")
    columns = {name: column[order] for name, column in record.requests.columns().items()}
    return replace(record, requests=type(record.requests)(**columns))


def check_same_requests(a: RunRecord, b: RunRecord, names: tuple[str, str]) -> None:
    """Raise UsageError, naming the first difference, unless both runs sent the same requests."""
    first, second = a.requests, b.requests
    if len(first) != len(second):
        raise UsageError(
            f"{names[0]} and {names[1]} are not of one workload: {len(first)} requests were sent in one and "
            f"{len(second)} in the other"
        )
    for column in ("request_id", "prompt_tokens", "max_output_tokens"):
        other = np.flatnonzero(getattr(first, column) != getattr(second, column))
        if len(other):
            i = int(other[0])
            raise UsageError(
                f"{names[0]} and {names[1]} are not of one workload: {column} of request {first.request_id[i]} is "
                f"{getattr(first, column)[i]} in one and {getattr(second, column)[i]} in the other"
            )


def _variant(name: str, a: RunRecord, b: RunRecord, seed: int) -> Variant:
    done = [r.requests.status == Status.FINISHED for r in (a, b)]
    both = done[0] & done[1]
    notes = []
    if len(both) < FEWEST:
        notes.append(f"{len(both)} requests are too few for intervals; {FEWEST} would do")
    left = int((done[0] | done[1]).sum() - both.sum())
    if left:
        notes.append(f"{left} requests that finished in one run alone are not in the latencies")
    if not np.allclose(
        a.requests.sent_s - a.requests.sent_s.min(), b.requests.sent_s - b.requests.sent_s.min()
    ):
        notes.append("requests were not sent at the same times in both runs, as in a closed loop")
    first, second = summarise(a, percentiles=_PERCENTILES), summarise(b, percentiles=_PERCENTILES)
    stream = first.streams and second.streams
    if not stream:
        notes.append(COME_WHOLE)
    changes = list(_latencies(a, b, both, seed, ("ttft", "tpot", "e2el") if stream else ("ttft", "e2el")))
    changes.append(_share("failed_share", ~done[0], ~done[1], seed))
    if (limits := a.meta.get("goodput_s")) and limits == b.meta.get("goodput_s"):
        changes.append(_share("slo_attainment", _good(a, limits), _good(b, limits), seed))
    changes += [Change(Metric.of(n), getattr(first, n), getattr(second, n)) for n in _UNPAIRED]
    return Variant(name, tuple(changes), _differing(a, b), tuple(notes))


def _latencies(a: RunRecord, b: RunRecord, both: Bools, seed: int, metrics: Sequence[str]) -> list[Change]:
    first, second = latencies(a), latencies(b)
    several = (a.requests.output_tokens > 1) & (b.requests.output_tokens > 1)
    out = []
    for metric in metrics:
        rows = np.flatnonzero(both & several if metric == "tpot" else both)
        x, y = (getattr(lat, f"{metric}_s")[rows] for lat in (first, second))
        if not len(rows):
            continue
        values = list(zip(_statistics(x[None, :])[0], _statistics(y[None, :])[0], strict=True))
        ends = bootstrap(x, y, seed)
        for i, statistic in enumerate(("mean", "median", "p90", "p95", "p99")):
            before, after = values[i]
            low, high = (None, None) if ends is None else ends[i]
            out.append(_change(f"{statistic}_{metric}", before, after, low, high))
    out.append(_mean_queue(first.queue_s, second.queue_s, both, seed))
    return out


def _mean_queue(first: Floats, second: Floats, both: Bools, seed: int) -> Change:
    x, y = first[both], second[both]
    ends = bootstrap(x, y, seed) if len(x) else None
    low, high = (None, None) if ends is None else ends[0]
    mean = (float(x.mean()), float(y.mean())) if len(x) else (math.nan, math.nan)
    return _change("mean_queue", *mean, low, high)


def _good(record: RunRecord, limits_s: Mapping[str, float]) -> Bools:
    """Requests that finished within every limit."""
    lat, good = latencies(record), record.requests.status == Status.FINISHED
    for metric, limit_s in limits_s.items():
        good = good & (getattr(lat, f"{metric}_s") <= limit_s + TICK_S)
    return np.asarray(good)


def _share(name: str, first: Bools, second: Bools, seed: int) -> Change:
    x, y = first.astype(np.float64), second.astype(np.float64)
    ends = bootstrap(x, y, seed)
    low, high = (None, None) if ends is None else ends[0]
    return _change(name, float(x.mean()), float(y.mean()), low, high)


def _change(name: str, before: float, after: float, low: float | None, high: float | None) -> Change:
    if low is None or high is None:
        return Change(Metric.of(name), before, after)
    value = after - before
    return Change(Metric.of(name), before, after, min(low, value), max(high, value))


def bootstrap(x: Floats, y: Floats, seed: int) -> list[tuple[float, float]] | None:
    """95 % intervals of y minus x for mean, median, P90, P95 and P99 of paired values in order of sending.

    None below `FEWEST` pairs.
    """
    count = len(x)
    if count < FEWEST:
        return None
    length = -(-count // BLOCKS)
    resamples = max(400, min(RESAMPLES, 20_000_000 // count))
    rng = np.random.default_rng(np.random.SeedSequence((seed, count)))
    starts = rng.integers(0, count, (resamples, -(-count // length)))
    at_once = max(1, _CELLS // count)
    parts = []
    for begin in range(0, resamples, at_once):
        rows = _rows(starts[begin : begin + at_once], length, count)
        parts.append(_statistics(y[rows]) - _statistics(x[rows]))
    ends = np.percentile(np.concatenate(parts), (2.5, 97.5), axis=0)
    return [(float(low), float(high)) for low, high in ends.T]


def _rows(starts: Ints, length: int, count: int) -> Ints:
    """Rows of the samples, shape (samples, count): blocks begin at `starts` and go round at the end."""
    rows = (starts[:, :, None] + np.arange(length)).reshape(len(starts), -1)[:, :count]
    return np.asarray(rows % count)


def _statistics(values: Floats) -> Floats:
    """Mean and percentiles of each row, shape (rows, 5)."""
    points = np.percentile(values, _PERCENTILES, axis=1)
    return np.concatenate([values.mean(axis=1)[:, None], points.T], axis=1)


def _differing(a: RunRecord, b: RunRecord) -> dict[str, tuple[object, object]]:
    """Options of the two deployments that differ, as the run folders have them; "real" where one is no simulation."""
    first, second = _options(a), _options(b)
    return {
        name: (first.get(name), second.get(name))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    }


def _options(record: RunRecord) -> dict[str, object]:
    limits = record.meta.get("limits") or {}
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "async_scheduling")
    worked_out = {name: limits[name] for name in names if name in limits}
    kind = "engine" if record.meta.get("real") else "twin"
    return {
        "backend": kind,
        **(record.meta.get("deployment") or {}),
        **worked_out,
        "kv_pages": record.num_pages,
    }
