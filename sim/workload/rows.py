"""What a reader or generator hands over: lengths of requests, maybe times and shared prefixes, before
arrivals."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.record import Floats, Ints


@dataclass(frozen=True, slots=True)
class Segments:
    """Shared prefixes by request: rows offsets[i]:offsets[i + 1] of (ends, streams); see
    `sim.workload.types`."""

    offsets: Ints
    ends: Ints
    streams: Ints
    """Numbered from 0 within one tenant."""

    @property
    def num_streams(self) -> int:
        """One more than the largest stream."""
        return int(self.streams.max()) + 1 if len(self.streams) else 0

    @classmethod
    def none(cls, count: int) -> Segments:
        """No request shares anything."""
        empty = np.zeros(0, dtype=np.int64)
        return cls(np.zeros(count + 1, dtype=np.int64), empty, empty)

    @classmethod
    def one_each(cls, ends: Ints, streams: Ints) -> Segments:
        """One segment per request; requests whose end is 0 have none."""
        has = ends > 0
        return cls(np.concatenate(([0], np.cumsum(has))).astype(np.int64), ends[has], streams[has])

    def take(self, rows: Ints) -> Segments:
        """Segments of the given requests, in that order (repeats allowed)."""
        counts = np.diff(self.offsets)[rows]
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], counts)
        return Segments(offsets, self.ends[index], self.streams[index])

    def prepend(self, ends: Ints, streams: Ints) -> Segments:
        """A segment in front of each request's own, which move up by its length; ends of 0 add none."""
        counts = np.diff(self.offsets)
        has = ends > 0
        offsets = np.concatenate(([0], np.cumsum(counts + has))).astype(np.int64)
        first = offsets[:-1]
        new_ends = np.empty(offsets[-1], dtype=np.int64)
        new_streams = np.empty_like(new_ends)
        new_ends[first[has]] = ends[has]
        new_streams[first[has]] = streams[has]
        index = np.arange(len(self.ends)) + np.repeat(first + has - self.offsets[:-1], counts)
        new_ends[index] = self.ends + np.repeat(ends, counts)
        new_streams[index] = self.streams
        return Segments(offsets, new_ends, new_streams)

    def append(self, ends: Ints, streams: Ints) -> Segments:
        """A segment behind each request's own; ends are absolute and must not be smaller than the last one
        there."""
        counts = np.diff(self.offsets)
        offsets = np.concatenate(([0], np.cumsum(counts + 1))).astype(np.int64)
        new_ends = np.empty(offsets[-1], dtype=np.int64)
        new_streams = np.empty_like(new_ends)
        new_ends[offsets[1:] - 1] = ends
        new_streams[offsets[1:] - 1] = streams
        index = np.arange(len(self.ends)) + np.repeat(offsets[:-1] - self.offsets[:-1], counts)
        new_ends[index] = self.ends
        new_streams[index] = self.streams
        return Segments(offsets, new_ends, new_streams)


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests of one dataset in file order, or sorted by time where there are times."""

    prompt_tokens: Ints
    output_tokens: Ints
    time_s: Floats | None = None
    """Seconds since the first request."""
    segments: Segments | None = None
    conversation: Ints | None = None
    """Rows with equal numbers, which are neighbours, are turns of one conversation; prompts are then the new
    tokens."""
    warnings: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    """JSON values: path, sha256, how tokens were counted."""
    beam_width: Ints | None = None
    """Hypotheses of each request's beam search, 0 for none; None where the file says nothing of beams."""

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def take(self, rows: npt.NDArray[np.int64]) -> Rows:
        """The given rows in that order (repeats allowed), without `conversation`."""
        return replace(
            self,
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            time_s=None if self.time_s is None else self.time_s[rows],
            segments=None if self.segments is None else self.segments.take(rows),
            conversation=None,
            beam_width=None if self.beam_width is None else self.beam_width[rows],
        )
