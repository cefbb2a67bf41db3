"""A workload: who sends what, when, and which prompts share a prefix. Columns, no behaviour of servers.

Prefix identity is a list of segments per request. A segment (end, stream) says: tokens [0, end) of this
prompt (and, for a conversation, of its answer) equal the first `end` tokens of every request that carries the
same stream there. Tokens past the last segment are unique to the request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.record import Floats, Ints, Tenant

MAX_PAGES_PER_REQUEST = 1 << 20


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """At most `max_concurrency` requests in flight: the next is sent when one ends (not before its own
    `sent_s`)."""

    max_concurrency: int


@dataclass(frozen=True, slots=True)
class Workload:
    """`n` requests sorted by `sent_s` (stable)."""

    name: str
    sent_s: Floats
    """When the client sends; for a session's later turns, the earliest time (see `think_s`)."""
    prompt_tokens: Ints
    output_tokens: Ints
    tenant: Ints
    priority: Ints
    """vLLM's meaning: lower is served first."""
    segment_offsets: Ints
    """Shape (n + 1,): segments of request i are rows offsets[i]:offsets[i+1]."""
    segment_ends: Ints
    segment_streams: Ints
    after: Ints
    """Row of the request whose answer this one waits for (the session's previous turn), or -1."""
    think_s: Floats
    """Pause between that answer's last token and this request; 0 where `after` is -1."""
    tenants: tuple[Tenant, ...] = (Tenant(),)
    closed_loop: ClosedLoop | None = None
    warnings: tuple[str, ...] = ()
    """One line each, such as "12 of 19,366 rows dropped: GeneratedTokens is 0"."""
    meta: dict[str, Any] = field(default_factory=dict)
    """JSON values: dataset, file, sha256, request_rate, burstiness, …"""
    beam_width: Ints | None = None
    """Hypotheses of each request's beam search, 0 where it asks for none; None where no request does."""
    best_of: Ints | None = None
    """Answers that are sampled to each request, of which one is shown; None where no request asks for several."""

    def __len__(self) -> int:
        return len(self.sent_s)

    def come_whole(self) -> npt.NDArray[np.bool_]:
        """For each request whether its answer is shown all at once: of beam searches and best-of."""
        whole = np.zeros(len(self), np.bool_)
        if self.beam_width is not None:
            whole |= self.beam_width > 0
        if self.best_of is not None:
            whole |= self.best_of > 1
        return whole

    def engine_requests(self) -> Ints:
        """For each request how many it is to the engine: a search of w hypotheses 1 + w (tokens - 1), best-of k is k."""
        count = np.ones(len(self), np.int64) if self.best_of is None else np.maximum(self.best_of, 1)
        if self.beam_width is not None:
            count = np.where(self.beam_width > 0, 1 + self.beam_width * (self.output_tokens - 1), count)
        return count

    def conversations(self) -> tuple[Ints, Ints]:
        """For each request the row that began its conversation and its turn from 0; row -1 where it is no turn of any."""
        first = np.arange(len(self))
        turn = np.zeros(len(self), np.int64)
        before = self.after
        while (later := before >= 0).any():
            first[later] = before[later]
            turn[later] += 1
            before = np.where(later, self.after[before], -1)
        goes_on = np.zeros(len(self), np.bool_)
        goes_on[self.after[self.after >= 0]] = True
        first[(turn == 0) & ~goes_on] = -1
        return first, turn

    def repeats(self) -> Ints:
        """For each request the first with the same prompt and length of answer, itself where there is none before.

        A prompt is the same where shared segments cover all of it and are the same.
        """
        first: dict[tuple[object, ...], int] = {}
        out = np.arange(len(self))
        for row in np.flatnonzero(np.diff(self.segment_offsets) > 0).tolist():
            lo, hi = int(self.segment_offsets[row]), int(self.segment_offsets[row + 1])
            prompt, ends = int(self.prompt_tokens[row]), self.segment_ends[lo:hi]
            if ends[-1] < prompt:
                continue
            needed = int(np.searchsorted(ends, prompt)) + 1
            streams = tuple(self.segment_streams[lo : lo + needed].tolist())
            more = tuple(0 if c is None else int(c[row]) for c in (self.beam_width, self.best_of))
            key = (prompt, int(self.output_tokens[row]), more, tuple(ends[: needed - 1].tolist()), streams)
            out[row] = first.setdefault(key, row)
        return out

    def page_keys(self, row: int, page_tokens: int) -> list[int]:
        """Prefix identity of the full pages of request `row` that may be shared: one int per page, equal
        exactly where the page and everything before it are equal."""
        lo, hi = int(self.segment_offsets[row]), int(self.segment_offsets[row + 1])
        if lo == hi:
            return []
        ends = self.segment_ends[lo:hi]
        pages = np.arange(int(ends[-1]) // page_tokens)
        segment = np.searchsorted(ends, (pages + 1) * page_tokens - 1, side="right")
        keys: list[int] = (self.segment_streams[lo:hi][segment] * MAX_PAGES_PER_REQUEST + pages).tolist()
        return keys
