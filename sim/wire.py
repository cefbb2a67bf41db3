"""Bytes on their way to a client: streams of events, channels that keep order and window, and the line they share.

An event may go onto the line when it has left the server, the event before it in its channel has gone, and the
channel's window has room for it. The line carries one event after the other, first come first served. Half a round trip
later it is there, and the client takes it when it is done with the one before. Everything follows from the times at which
events leave the server, so that a line is looked at only when somebody wants to know.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import inf


def slice_end_s(first_s: float, time_s: float, slice_s: float) -> float:
    """When the slice ends in which a token comes at `time_s`; slices follow each other from the first token on."""
    slices = -(-round((time_s - first_s) / slice_s, 9) // 1)
    return max(first_s + slices * slice_s, time_s)


class Stream:
    """One answer: its events as they leave the server, and when the client takes each of them."""

    __slots__ = (
        "complete",
        "event_bytes",
        "full_bytes",
        "interval",
        "lag_s",
        "left_s",
        "pace_s",
        "passed_s",
        "pending",
        "pending_s",
        "row",
        "seen_s",
        "sizes",
        "slice_s",
        "token_bytes",
        "tokens",
        "until_s",
    )

    def __init__(
        self,
        row: int,
        *,
        interval: int = 1,
        slice_s: float = 0.0,
        lag_s: float = 0.0,
        event_bytes: float = 0.0,
        token_bytes: float = 0.0,
        pace_s: float = 0.0,
    ) -> None:
        self.row = row
        self.interval, self.slice_s, self.lag_s = interval, slice_s, lag_s
        self.event_bytes, self.token_bytes = event_bytes, token_bytes
        self.pace_s = pace_s
        self.left_s: list[float] = []
        """When each event leaves the server."""
        self.tokens: list[int] = []
        self.sizes: list[float] = []
        self.passed_s: list[float] = []
        """When each event went onto the line, or queued there."""
        self.seen_s: list[float] = []
        """When the client took each."""
        self.pending = 0
        self.pending_s = 0.0
        self.until_s = inf
        """When what has gathered is sent, under time slices."""
        self.complete = False

    def give(self, time_s: float, tokens: int) -> None:
        """The engine gave tokens. Times must not decrease."""
        if self.until_s < time_s:
            self._send(self.until_s)
        if not self.left_s and not self.pending:
            self.pending = tokens
            self._send(time_s)
            return
        self.pending += tokens
        self.pending_s = time_s
        if self.slice_s:
            if self.until_s == inf:
                self.until_s = slice_end_s(self.left_s[0] - self.lag_s, time_s, self.slice_s)
            if self.until_s <= time_s:
                self._send(time_s)
        elif self.pending >= self.interval:
            self._send(time_s)

    def passed(self, now_s: float) -> None:
        """No token came by now: a slice that is over is sent."""
        if self.until_s <= now_s:
            self._send(self.until_s)

    def end(self, time_s: float) -> None:
        """The answer is whole: what has gathered goes at once. An answer without tokens is one event too."""
        if self.pending or not self.left_s:
            self._send(time_s)
        self.complete = True

    def _send(self, time_s: float) -> None:
        self.left_s.append(time_s + self.lag_s)
        self.tokens.append(self.pending)
        self.sizes.append(self.event_bytes + self.token_bytes * max(self.pending - 1, 0))
        self.pending, self.until_s = 0, inf

    @property
    def delivered(self) -> bool:
        """Whether the client has all of it."""
        return self.complete and len(self.seen_s) == len(self.left_s)


class Channel:
    """What keeps order and has a window: a connection of HTTP/1.1, or a stream of HTTP/2."""

    __slots__ = (
        "_reader_s",
        "_unread",
        "_unread_bytes",
        "half_rtt_s",
        "last_s",
        "streams",
        "window_bytes",
    )

    def __init__(self, half_rtt_s: float, window_bytes: float) -> None:
        self.half_rtt_s, self.window_bytes = half_rtt_s, window_bytes
        self.streams: deque[Stream] = deque()
        """In the order in which they are answered."""
        self.last_s = -inf
        self._reader_s = -inf
        self._unread: deque[tuple[float, float]] = deque()
        self._unread_bytes = 0.0

    def next_s(self) -> float:
        """When the next event may go onto the line; infinite while it is not known."""
        if not self.streams:
            return inf
        stream = self.streams[0]
        place = len(stream.seen_s)
        if place == len(stream.left_s):
            return inf
        at_s = max(stream.left_s[place], self.last_s)
        while self._unread and self._unread_bytes + stream.sizes[place] > self.window_bytes:
            read_s, size = self._unread.popleft()
            self._unread_bytes -= size
            at_s = max(at_s, read_s + self.half_rtt_s)
        self.last_s = at_s  # so that room that was made once is not asked for again
        return at_s

    def ends_at_least_s(self) -> float:
        """A time before which the last event of the answer in front cannot go; infinite while the answer grows.

        The client has to take all of it but what fits into the window.
        """
        if not self.streams or not self.streams[0].complete:
            return inf
        stream = self.streams[0]
        at_s = max(stream.left_s[-1], self.last_s)
        if self.window_bytes < inf and stream.pace_s:
            fit = int(self.window_bytes / max(stream.event_bytes, 1.0)) + 2
            unread = sum(stream.tokens[len(stream.seen_s) : -fit])
            at_s = max(at_s, self._reader_s + unread * stream.pace_s)
        return at_s

    def broken(self, now_s: float) -> None:
        """The connection is gone, with all that was unread in it; what is still to come takes another."""
        self.streams.popleft()
        self._unread.clear()
        self._unread_bytes = 0.0
        self.last_s, self._reader_s = now_s, min(self._reader_s, now_s)

    def take(self, at_s: float, departs_s: float) -> Stream:
        """The next event queues for the line at `at_s` and has left it at `departs_s`."""
        stream = self.streams[0]
        place = len(stream.seen_s)
        seen_s = max(departs_s + self.half_rtt_s, self._reader_s)
        stream.passed_s.append(at_s)
        stream.seen_s.append(seen_s)
        self._reader_s = seen_s + stream.tokens[place] * stream.pace_s
        if self.window_bytes < inf:
            self._unread.append((seen_s, stream.sizes[place]))
            self._unread_bytes += stream.sizes[place]
        if stream.delivered:
            self.streams.popleft()
        return stream


class Wire:
    """The line to one client."""

    __slots__ = ("_queue", "_waits", "free_s", "s_per_byte")

    def __init__(self, s_per_byte: float) -> None:
        self.s_per_byte = s_per_byte
        self.free_s = -inf
        self._queue: list[tuple[float, int, Channel]] = []
        self._waits: set[int] = set()

    def offer(self, channel: Channel) -> None:
        """The channel may have something new to send."""
        if id(channel) not in self._waits and (at_s := channel.next_s()) < inf:
            heappush(self._queue, (at_s, channel.streams[0].row, channel))
            self._waits.add(id(channel))

    def withdraw(self, channel: Channel) -> None:
        """What the channel had next will not be sent."""
        self._queue = sorted(entry for entry in self._queue if entry[2] is not channel)
        self._waits.discard(id(channel))

    def advance(self, until_s: float) -> list[Stream]:
        """Carry all that queues by `until_s`; returns the answers of which the last event did."""
        done = []
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            at_s, _, channel = heappop(queue)
            self._waits.discard(id(channel))
            place = len(channel.streams[0].seen_s)
            size = channel.streams[0].sizes[place]
            self.free_s = departs_s = max(self.free_s, at_s) + size * self.s_per_byte
            stream = channel.take(at_s, departs_s)
            if stream.delivered:
                done.append(stream)
            self.offer(channel)
        return done


def alone(stream: Stream, channel: Channel, s_per_byte: float) -> tuple[float, float]:
    """When the client would have the last event of an answer, were the line its own: reading at once, and as it does."""
    free_s = -inf
    for left_s, size in zip(stream.left_s, stream.sizes, strict=True):
        free_s = (left_s if left_s > free_s else free_s) + size * s_per_byte
    at_once_s = free_s + channel.half_rtt_s
    if not stream.pace_s and channel.window_bytes == inf:
        return at_once_s, at_once_s
    again = Stream(stream.row, pace_s=stream.pace_s)
    again.left_s, again.tokens, again.sizes = stream.left_s, stream.tokens, stream.sizes
    again.complete = True
    own = Channel(channel.half_rtt_s, channel.window_bytes)
    own.streams.append(again)
    wire = Wire(s_per_byte)
    wire.offer(own)
    wire.advance(inf)
    return at_once_s, again.seen_s[-1]
