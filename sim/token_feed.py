"""What engines have given so far, told to streams when somebody looks: ends of steps, a leap in progress among them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sim.clock import Clock
from sim.log import RequestLog
from sim.record import Status
from sim.wire import Stream

if TYPE_CHECKING:
    from serving.request import Request
    from sim.replica import Replica


class TokenFeed:
    """Reads the log and the replicas, and remembers how far it has read each."""

    def __init__(self, clock: Clock, log: RequestLog, replicas: Callable[[], Sequence[Replica]]) -> None:
        self._clock, self._log, self._replicas = clock, log, replicas
        self._ranges: dict[int, list[tuple[int, ...]]] = {}
        """By request the ranges of the log that its stream has not been told of."""
        self._ranges_read = 0
        self._place: dict[int, tuple[int, int]] = {}
        """By request: replica and step up to which its stream has been told."""
        self._ends: dict[int, array[float]] = {}
        """By replica the ends of its steps, as far as they were read."""
        self._whole = frozenset(log.unstreamed)
        """Requests that are answered by one message."""

    def __call__(self, stream: Stream, request: Request | None, now_s: float) -> None:
        """Tell a stream of the tokens that its engine has given by now, and of its end.

        `request` is as the scheduler last saw it; without it only what is in the log counts.
        """
        log, row = self._log, stream.row
        if stream.complete:
            return
        whole = row in self._whole
        if log.status[row] == Status.FINISHED and (whole or log.replica[row] < 0):
            stream.give(
                log.engine_done_s[row], log.output_tokens[row]
            )  # the latter out of the response cache
        elif whole and log.status[row] == Status.UNFINISHED:
            return
        self._read_ranges()
        for entry in () if whole else self._ranges.pop(row, ()):
            self._give(stream, entry[1], entry[2], entry[3], entry[4] if len(entry) > 4 else 1)
        if log.status[row] != Status.UNFINISHED:
            done_s = log.engine_done_s[row]
            stream.end(self._clock.now if math.isnan(done_s) else done_s)
            self._place.pop(row, None)
        elif request is not None and log.replica[row] >= 0:
            replica = self._replicas()[log.replica[row]]
            if (opened := replica.open_range(request)) is not None:
                self._give(stream, replica.index, *opened)
            stream.passed(now_s)

    def _read_ranges(self) -> None:
        ranges = self._log.ranges
        for entry in ranges[self._ranges_read :]:
            if entry[0] < self._log.count and entry[0] not in self._whole:
                self._ranges.setdefault(entry[0], []).append(entry)
        self._ranges_read = len(ranges)

    def _give(self, stream: Stream, index: int, first: int, count: int, each: int) -> None:
        """Tokens of `count` steps from `first` on, without those that the stream has been told of."""
        known_of, known = self._place.get(stream.row, (index, 0))
        begin = max(first, known) if known_of == index else first
        for end_s in self._step_ends(index, begin, first + count):
            stream.give(end_s, each)
        self._place[stream.row] = (index, max(begin, first + count))

    def _step_ends(self, index: int, begin: int, stop: int) -> list[float]:
        """Ends of some steps of a replica."""
        ends = self._ends.setdefault(index, array("d"))
        replica = self._replicas()[index]
        if len(ends) < stop:
            ends.extend(replica.steps.ends_s(len(ends)))
        found = ends[begin:stop].tolist()
        if len(ends) < stop:
            found += replica.leap_ends_s[max(begin - len(ends), 0) : stop - len(ends)].tolist()
        return found
