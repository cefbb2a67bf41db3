"""What a reader sees of a token stream: grouping into events, a slow line, and how it feels to read along.

All functions take one answer's times in seconds, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.latency import DEFAULT_PERCENTILES, LatencyStats, latency_stats, pooled
from sim.record import Floats, Ints, RunRecord, Status

TOKENS_PER_WORD = 1.33
"""English text in the vocabularies of today's models: about three words in four tokens."""
READING_TOKENS_PER_S = 5.3
"""240 words a minute (silent reading of non-fiction: Brysbaert, 2019), in tokens."""


def event_ends(num_tokens: int, interval: int) -> Ints:
    """Index of the last token of each event: the first token alone, then every `interval`, then what is left."""
    if num_tokens < 1:
        return np.empty(0, np.int64)
    ends = np.arange(0, num_tokens, interval)
    return ends if ends[-1] == num_tokens - 1 else np.append(ends, num_tokens - 1)


def grouped(times_s: Floats, interval: int) -> Floats:
    """When each token is seen if tokens are sent `interval` at a time, as vLLM's `--stream-interval`."""
    if interval == 1 or not len(times_s):
        return times_s
    ends = event_ends(len(times_s), interval)
    return times_s[ends][np.searchsorted(ends, np.arange(len(times_s)))]


def sliced(times_s: Floats, slice_s: float) -> Floats:
    """When each token is seen if what has gathered is sent every `slice_s` after the first token, the end at once."""
    if not slice_s or not len(times_s):
        return times_s
    since = times_s - times_s[0]
    seen = times_s[0] + np.ceil(np.round(since / slice_s, 9)) * slice_s
    out: Floats = np.minimum(seen, times_s[-1])
    return out


def over_line(sent_s: Floats, seconds_each: float) -> Floats:
    """When events arrive over a line that takes `seconds_each` for one and carries them one after the other."""
    if not seconds_each or not len(sent_s):
        return sent_s
    place = np.arange(len(sent_s))
    out: Floats = np.maximum.accumulate(sent_s - place * seconds_each) + (place + 1) * seconds_each
    return out


@dataclass(frozen=True, slots=True)
class Perceived:
    """How an answer reads."""

    first_word_s: float
    """From sending to the first whole word, which shows when the next begins (or the answer ends)."""
    longest_pause_s: float
    """Between two events."""
    stalled_share: float
    """Share of the time from the first word to the end of reading in which the reader waits for text."""


def perceived(
    sent_s: float, times_s: Floats, reading_tokens_per_s: float = READING_TOKENS_PER_S
) -> Perceived:
    """How an answer reads whose tokens are seen at `times_s` (at least one)."""
    word = min(int(np.ceil(TOKENS_PER_WORD)), len(times_s) - 1)
    first_s = float(times_s[word])
    # A token is read when it is there and the one before has been read.
    pace_s = 1.0 / reading_tokens_per_s
    available = np.maximum(times_s, first_s)
    place = np.arange(len(times_s))
    read_s = np.maximum.accumulate(available - place * pace_s) + place * pace_s
    whole_s = float(read_s[-1]) + pace_s - first_s
    gaps = np.diff(times_s)
    return Perceived(
        first_word_s=first_s - sent_s,
        longest_pause_s=float(gaps.max()) if len(gaps) else 0.0,
        stalled_share=max(0.0, 1.0 - len(times_s) * pace_s / whole_s),
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """`Perceived` of every finished request of a run, shape (requests,); NaN for the others."""

    first_word_s: Floats
    longest_pause_s: Floats
    stalled_share: Floats


def reading(
    record: RunRecord,
    *,
    interval: int = 1,
    slice_s: float = 0.0,
    event_bytes: float = 0.0,
    bytes_per_s: float = float("inf"),
    reading_tokens_per_s: float = READING_TOKENS_PER_S,
) -> Reading:
    """How a run's answers read under a way of sending them that need not be the run's own.

    Tokens go `interval` at a time and then every `slice_s`; each event is `event_bytes` on a line of `bytes_per_s`.
    """
    r = record.requests
    columns = np.full((3, len(r)), np.nan)
    for row in np.flatnonzero((r.status == Status.FINISHED) & (r.output_tokens > 0)).tolist():
        seen = sliced(grouped(record.token_times_s(row), interval), slice_s)
        if event_bytes and np.isfinite(bytes_per_s):
            events, members = np.unique(seen, return_inverse=True)
            seen = over_line(events, event_bytes / bytes_per_s)[members]
        p = perceived(float(r.sent_s[row]), seen, reading_tokens_per_s)
        columns[:, row] = p.first_word_s, p.longest_pause_s, p.stalled_share
    return Reading(*columns)


@dataclass(frozen=True, slots=True)
class Perception:
    """How the finished answers of a run read, to a reader of `READING_TOKENS_PER_S`."""

    first_word: LatencyStats
    longest_pause: LatencyStats
    waiting_share: float
    """Mean share of the time of reading in which the reader waits for text: the answer is slower than reading."""
    waiting_share_p95: float

    def figures(self) -> dict[str, float]:
        """Its numbers by name, times in ms."""
        out: dict[str, float] = {}
        for name, stats in (("first_word", self.first_word), ("longest_pause", self.longest_pause)):
            out |= {f"mean_{name}_ms": stats.mean_s * 1e3, f"median_{name}_ms": stats.median_s * 1e3}
            out |= {f"p{p:g}_{name}_ms": value_s * 1e3 for p, value_s in stats.percentiles_s}
        return out | {"waiting_share": self.waiting_share, "p95_waiting_share": self.waiting_share_p95}


def perception(record: RunRecord, percentiles: Sequence[float] = DEFAULT_PERCENTILES) -> Perception:
    """How a run's answers read as they came."""
    found = reading(record)
    shares = found.stalled_share[np.isfinite(found.stalled_share)]
    return Perception(
        latency_stats(pooled(found.first_word_s), percentiles),
        latency_stats(pooled(found.longest_pause_s), percentiles),
        float(shares.mean()) if len(shares) else float("nan"),
        float(np.percentile(shares, 95)) if len(shares) else float("nan"),
    )
