"""Clients on a network: connections that requests wait for, answers on their way back, clients that are too slow.

Engines feel nothing of it but through requests: one that waits for a connection comes later, and so does one that is
sent when an answer has arrived (and a client that is cut off leaves its engine). So tokens are not followed one by one.
When an answer is whole, its client's line is brought up to that time, from the ends of steps that the replicas have
logged, and looked at again when it next does something, until the client has the answer.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sim.clock import LATE, Clock
from sim.log import RequestLog
from sim.network import Delivering, Line
from sim.record import Deliveries, Floats, Ints, RequestTable, Status
from sim.token_feed import TokenFeed
from sim.wire import Channel, Stream, Wire, alone

if TYPE_CHECKING:
    from serving.request import Request
    from sim.replica import Replica

TOO_SLOW = "the client did not read in time"


class Client:
    """One machine that sends requests, with its line and its connections."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.wire = Wire(line.down_s_per_byte)
        self.up_free_s = -math.inf
        self.opened = self.idle = 0
        self.ready_s = math.nan
        """When the connection of HTTP/2 stands."""
        self.waiting: deque[int] = deque()
        """Requests that wait for a connection."""
        self.active: dict[int, Channel] = {}
        """Channels by request whose answer is not all on its way."""
        self.outstanding: dict[Channel, int] = {}
        """Of each pipeline the requests whose answers the client does not have."""
        self.looks_s = math.inf
        """When somebody looks next."""

    @property
    def opens(self) -> bool:
        """The next request opens another pipeline, for none is free and there may be more."""
        return len(self.outstanding) < self.line.connections and all(self.outstanding.values())

    def channel(self, row: int, stream: Stream) -> Channel:
        """The channel of a request that is sent now."""
        line = self.line
        if line.pipelines:
            channel = self._new() if self.opens else min(self.outstanding, key=self.outstanding.__getitem__)
            self.outstanding[channel] = self.outstanding.get(channel, 0) + 1
        else:
            channel = self._new()
        channel.streams.append(stream)
        self.active[row] = channel
        return channel

    def _new(self) -> Channel:
        return Channel(self.line.rtt_s / 2, self.line.window_bytes)


class Clients:
    """All clients of a run.

    `arrived(row)` is told when a request is at the server and tokenised, `done(row)` when its client has the answer,
    `abort(row)` when the engine should stop working for one that does not read.
    """

    def __init__(
        self,
        clock: Clock,
        log: RequestLog,
        net: Delivering,
        *,
        tenant: Ints,
        first_turn: Ints,
        prompt_tokens: Ints,
        overhead_s: float,
        tokenize_s: Floats,
        detokenize_s: float,
        replicas: Callable[[], Sequence[Replica]],
        arrived: Callable[[int], None],
        done: Callable[[int], None],
        abort: Callable[[int], None],
    ) -> None:
        self.clock, self.log, self.net = clock, log, net
        self._arrived, self._done, self._abort = arrived, done, abort
        self._feed = TokenFeed(clock, log, replicas)
        self._overhead_s, self._tokenize_s = overhead_s, tokenize_s.tolist()
        self._lag_s = detokenize_s + net.gateway_event_s
        self._prompt = prompt_tokens.tolist()
        count = len(tenant)
        self._tenant = tenant.tolist()
        self._whose = self._deal(first_turn)
        self._clients: dict[tuple[int, int], Client] = {}
        self._streams: dict[int, Stream] = {}
        """By request whose answer is not all on its way."""
        self.requests: dict[int, Request] = {}
        """As the scheduler last saw them, of answers that are not whole."""
        self.held_s = [0.0] * count
        self.blocked_s, self.way_in_s = [0.0] * count, [0.0] * count
        self.way_out_s, self.reader_s = [0.0] * count, [0.0] * count
        self._taken: dict[int, tuple[array[float], array[int]]] = {}
        """By request whose stream is over: when its client took each event, and their tokens."""

    def _deal(self, first_turn: Ints) -> list[int]:
        """A client for each request, by number among those of its tenant."""
        own = np.where(first_turn >= 0, first_turn, np.arange(len(first_turn)))
        out = own.copy()
        groups = np.zeros(len(own), np.int64) if self.net.shared else np.array(self._tenant, np.int64)
        for index, line in enumerate(self.net.lines[:1] if self.net.shared else self.net.lines):
            if line.clients is not None:
                mine = np.flatnonzero(groups == index)
                _, first, place = np.unique(own[mine], return_index=True, return_inverse=True)
                out[mine] = np.argsort(np.argsort(first))[place] % line.clients
        numbers: list[int] = out.tolist()
        return numbers

    def _client(self, row: int) -> Client:
        key = (0 if self.net.shared else self._tenant[row], self._whose[row])
        if (client := self._clients.get(key)) is None:
            client = self._clients[key] = Client(self.net.lines[key[0]])
        return client

    # ---- requests on their way ---------------------------------------------------------------------------------

    def send(self, row: int) -> None:
        """The client wants to send a request now; it may have to wait for a connection."""
        client = self._client(row)
        line, now_s = client.line, self.clock.now
        handshake_s = line.handshakes * line.rtt_s
        if line.waits:
            if client.idle:
                client.idle -= 1
                self._sent(client, row, now_s)
            elif client.opened < line.connections:
                client.opened += 1
                self._sent(client, row, now_s, opening_s=handshake_s)
            else:
                client.waiting.append(row)
            return
        opens = math.isnan(client.ready_s)
        if line.pipelines:
            opens = client.opens
        if opens:
            client.ready_s = now_s + handshake_s
        self._sent(client, row, now_s, opening_s=max(client.ready_s - now_s, 0.0))

    def _sent(self, client: Client, row: int, now_s: float, *, opening_s: float = 0.0) -> None:
        """A request goes off when its connection stands and the uploads before it are over."""
        line, net = client.line, self.net
        stream = self._streams[row] = Stream(
            row,
            interval=net.stream_interval,
            slice_s=net.stream_slice_s,
            lag_s=self._lag_s,
            event_bytes=net.event_bytes,
            token_bytes=net.token_bytes,
            pace_s=net.lines[self._tenant[row]].pace_s,
        )
        client.channel(row, stream)
        begins_s = max(now_s + opening_s, client.up_free_s)
        upload_s = self._prompt[row] * net.token_bytes * line.up_s_per_byte
        client.up_free_s = begins_s + upload_s
        self.held_s[row] = now_s - self.log.sent_s[row] + (begins_s - (now_s + opening_s))
        self.way_in_s[row] = opening_s + upload_s + line.rtt_s / 2
        there_s = begins_s + (upload_s + line.rtt_s / 2 + self._overhead_s + self._tokenize_s[row])
        if there_s > now_s:
            self.clock.call_at(there_s, lambda: self._arrived(row))
        else:
            self._arrived(row)
        if net.buffer_bytes < math.inf:
            self._look(client, now_s + net.send_timeout_s)

    # ---- answers on their way ----------------------------------------------------------------------------------

    def ended(self, row: int) -> None:
        """The engine is done with a request (or refused it)."""
        if row in self._taken:  # cut off before
            self.log.status[row], self.log.reason[row] = int(Status.FAILED), TOO_SLOW
            return
        self._look(self._client(row), self.clock.now)

    def _look(self, client: Client, at_s: float) -> None:
        if at_s < client.looks_s:
            client.looks_s = at_s
            event = self.clock.at(at_s, LATE)
            assert event.callbacks is not None
            event.callbacks.append(lambda _: self._looked(client, at_s))

    def _looked(self, client: Client, at_s: float) -> None:
        if client.looks_s != at_s:
            return
        client.looks_s = math.inf
        self.clock.boundary = (at_s, LATE)
        again_s = self._bring_up(client, at_s)
        if again_s < math.inf:
            self._look(client, again_s)

    def _bring_up(self, client: Client, now_s: float) -> float:
        """Bring a client's line up to now; returns when to look again, infinite when the next answer will say."""
        for row, channel in client.active.items():
            stream = self._streams[row]
            if not stream.complete:
                self._feed(stream, self.requests.get(row), now_s)
                client.wire.offer(channel)
        self._carried(client, client.wire.advance(now_s))
        again_s = min((channel.ends_at_least_s() for channel in client.active.values()), default=math.inf)
        if self.net.buffer_bytes < math.inf and client.active:
            again_s = min(again_s, self._cut_slow(client, now_s))
        return again_s

    def _carried(self, client: Client, streams: list[Stream]) -> None:
        for stream in streams:
            row = stream.row
            channel = client.active.pop(row)
            self._account(client, stream, channel)
            self._retire(stream)
            event = self.clock.at(max(stream.seen_s[-1], self.clock.now), LATE)
            assert event.callbacks is not None
            event.callbacks.append(lambda _, row=row, by=channel: self._received(client, by, row))  # type: ignore[misc]

    def _received(self, client: Client, channel: Channel, row: int) -> None:
        """The client has the whole answer, and its connection is free."""
        self.clock.boundary = (self.clock.now, LATE)
        self.requests.pop(row, None)
        self._freed(client, channel)
        self._done(row)

    def _freed(self, client: Client, channel: Channel, *, broken: bool = False) -> None:
        """A connection of HTTP/1.1 is free for who waits, or has to be opened again."""
        if client.line.pipelines:
            client.outstanding[channel] -= 1
        if not client.line.waits:
            return
        if client.waiting:
            again_s = client.line.handshakes * client.line.rtt_s if broken else 0.0
            self._sent(client, client.waiting.popleft(), self.clock.now, opening_s=again_s)
        elif broken:
            client.opened -= 1
        else:
            client.idle += 1

    def _account(self, client: Client, stream: Stream, channel: Channel) -> None:
        """What the way of the last event consisted of."""
        row, left_s, seen_s = stream.row, stream.left_s[-1], stream.seen_s[-1]
        line = client.line
        if line.clients is None and not stream.pace_s and math.isinf(line.window_bytes):
            self.way_out_s[row] = seen_s - left_s
            return
        at_once_s, read_s = alone(stream, channel, line.down_s_per_byte)
        self.way_out_s[row] = at_once_s - left_s
        self.reader_s[row] = read_s - at_once_s
        self.blocked_s[row] = max(seen_s - read_s, 0.0)

    # ---- clients that do not read ------------------------------------------------------------------------------

    def _cut_slow(self, client: Client, now_s: float) -> float:
        """Cut streams that were at the limit of their buffer for too long; returns when the next may be."""
        timeout_s, again_s = self.net.send_timeout_s, math.inf
        for row, channel in list(client.active.items()):
            stream = self._streams[row]
            again_s = min(again_s, now_s + timeout_s)
            if channel.streams[0] is not stream:
                continue
            full_s = _full_since(stream, self.net.buffer_bytes)
            if full_s + timeout_s <= now_s:
                self._cut(client, channel, stream)
            else:
                again_s = min(again_s, full_s + timeout_s)
        return again_s if client.active else math.inf

    def _cut(self, client: Client, channel: Channel, stream: Stream) -> None:
        """The connection is closed under a client; what waited behind it in a pipeline goes on over another."""
        row = stream.row
        client.wire.withdraw(channel)
        channel.broken(self.clock.now)
        self._retire(stream, cut_s=self.clock.now)
        del client.active[row]
        client.wire.offer(channel)
        if self.log.status[row] == Status.FINISHED:
            self.log.status[row], self.log.reason[row] = int(Status.FAILED), TOO_SLOW
        else:
            self._abort(row)
        self.requests.pop(row, None)
        self._freed(client, channel, broken=True)
        self._done(row)

    # ---- the record --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The run is over: carry what is still on its way."""
        for client in self._clients.values():
            for row, channel in client.active.items():
                self._feed(self._streams[row], None, math.inf)
                client.wire.offer(channel)
            for stream in client.wire.advance(math.inf):
                self._account(client, stream, client.active.pop(stream.row))
        for stream in list(self._streams.values()):
            if not stream.delivered and self.log.status[stream.row] == Status.FINISHED:
                self.log.status[stream.row] = int(Status.UNFINISHED)  # behind one of a pipeline that goes on
            self._retire(stream)

    def _retire(self, stream: Stream, *, cut_s: float = math.inf) -> None:
        """Nothing more comes of a stream; what its client had not taken when it was cut off is lost."""
        del self._streams[stream.row]
        events = [
            (seen_s, count)
            for seen_s, count in zip(stream.seen_s, stream.tokens, strict=False)
            if count and seen_s <= cut_s
        ]
        self._taken[stream.row] = array("d", [e[0] for e in events]), array("q", [e[1] for e in events])

    def table(self, requests: RequestTable, rows: Ints) -> tuple[RequestTable, Deliveries]:
        """The request table as the clients saw it, and their events; `rows` are those of the workload."""
        d = self._deliveries(rows)
        none = np.diff(d.offsets) == 0
        at = np.append(d.seen_s, np.nan)
        first_s, last_s = at[np.where(none, -1, d.offsets[:-1])], at[np.where(none, -1, d.offsets[1:] - 1)]
        way_s = np.array(self.way_in_s) + np.array(self.way_out_s)
        columns = {
            "first_token_s": first_s,
            "last_token_s": last_s,
            "network_s": way_s[rows],
            "gateway_s": requests.gateway_s + self.net.gateway_event_s,
            "blocked_s": (np.array(self.held_s) + np.array(self.blocked_s))[rows],
            "held_s": np.array(self.held_s)[rows],
            "reader_s": np.array(self.reader_s)[rows],
        }
        return replace(requests, **columns), d

    def _deliveries(self, rows: Ints) -> Deliveries:
        offsets, seen, tokens = [0], array("d"), array("q")
        for row in rows.tolist():
            if row in self._taken:
                times_s, counts = self._taken[row]
                # A leap that the end of the run cut off had still more in it than the log.
                while sum(counts) > self.log.output_tokens[row]:
                    times_s.pop(), counts.pop()
                seen.extend(times_s)
                tokens.extend(counts)
            offsets.append(len(seen))
        return Deliveries(np.array(offsets, np.int64), np.array(seen, np.float64), np.array(tokens, np.int64))


def _full_since(stream: Stream, buffer_bytes: float) -> float:
    """Since when a stream's buffer has been full without an event leaving it; infinite when it is not full."""
    place, held = len(stream.seen_s), 0.0
    for left_s, size in zip(stream.left_s[place:], stream.sizes[place:], strict=True):
        held += size
        if held > buffer_bytes:
            return max(left_s, stream.passed_s[-1] if place else left_s)
    return math.inf
