"""Where tokens wait between the step that made them and the client that reads them. Its size is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sim.wire import slice_end_s
from tokentwin.server.backend import Delta, Failed


@dataclass(frozen=True, slots=True)
class Slices:
    """Tokens gather for `slice_s` of a clock, whose times `Mailbox.put` is given too."""

    slice_s: float
    call_at: Callable[[float, Callable[[], None]], Callable[[], None]]
    """Does something at a time, after all tokens of that time; returns what calls it off."""


class Mailbox:
    """Deltas of the answers to one request; those of one answer are joined while they wait.

    An answer's first token is due at once, and so is its end; what comes between gathers until there are `interval`
    tokens or its slice ends, as in `sim.wire.Stream`. What is due wakes the reader. More than `limit` tokens that nobody
    reads close the box: the reader gets `Failed`, and no more is kept.
    """

    def __init__(self, interval: int = 1, limit: int = 1 << 14, slices: Slices | None = None) -> None:
        self._interval = interval
        self._limit = limit
        self._slices = slices
        self._due: dict[int, Delta] = {}
        self._gathering: dict[int, Delta] = {}
        self._first_s: dict[int, float] = {}
        """By answer that has begun when it did."""
        self._ends: dict[int, tuple[float, Callable[[], None]]] = {}
        """By answer in a slice when that ends, and what calls the end off."""
        self._waiting_tokens = 0
        self._ready = asyncio.Event()
        self._failure: Failed | None = None
        self.is_last: Callable[[Delta], bool] | None = None
        """Asked of each delta whether the answer ends with it, though it does not say so; it does not gather then."""

    @property
    def gathers(self) -> bool:
        """Tokens may wait here for others."""
        return self._interval > 1 or self._slices is not None

    def put(self, delta: Delta, time_s: float = 0.0) -> bool:
        """Add to an answer what its engine gave at `time_s`; an answer's times must not decrease.

        False when nobody will read it: the box is closed, now or before.
        """
        if self._failure is not None:
            return False
        index = delta.index
        ends = delta.finish_reason is not None or (self.is_last is not None and self.is_last(delta))
        if self._ends and self._ends.get(index, (time_s,))[0] < time_s:
            self._release(index)  # the slice is over, and whoever should have said so is late
        self._waiting_tokens += len(delta.token_ids)
        if (waiting := self._gathering.get(index)) is None:
            waiting = self._gathering[index] = delta
        else:
            waiting.grow(delta)
        if self._waiting_tokens > self._limit:
            self.fail(Failed(f"more than {self._limit} tokens waited for a client that does not read them"))
            return False
        if ends or self._is_due(waiting, time_s):
            self._release(index)
        return True

    def fail(self, error: Failed) -> None:
        """Close the box and wake the reader with an error."""
        self.close()
        self._failure = error
        self._ready.set()

    def close(self) -> None:
        """Nobody reads any more."""
        self._failure = self._failure or Failed("nobody reads this")
        self._due.clear()
        self._gathering.clear()
        for _, call_off in self._ends.values():
            call_off()
        self._ends.clear()

    async def get(self) -> list[Delta]:
        """The deltas that are due, at least one. Raises `Failed` once the box is closed."""
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure
        due = list(self._due.values())
        for delta in due:
            self._waiting_tokens -= len(delta.token_ids)
        self._due.clear()
        self._ready.clear()
        return due

    def _is_due(self, waiting: Delta, time_s: float) -> bool:
        """Whether what gathers need not wait; if it has to, it is seen to that it does not wait for ever."""
        index = waiting.index
        if index not in self._first_s:
            if not waiting.token_ids:
                return False
            self._first_s[index] = time_s
            return True
        if self._slices is None:
            return len(waiting.token_ids) >= self._interval
        if index not in self._ends:
            end_s = slice_end_s(self._first_s[index], time_s, self._slices.slice_s)
            if end_s <= time_s:
                return True
            self._ends[index] = end_s, self._slices.call_at(end_s, partial(self._slice_ended, index))
        return self._ends[index][0] <= time_s

    def _slice_ended(self, index: int) -> None:
        del self._ends[index]
        self._release(index)

    def _release(self, index: int) -> None:
        """What gathers of an answer is due."""
        if self._ends and (end := self._ends.pop(index, None)) is not None:
            end[1]()
        delta = self._gathering.pop(index)
        if (due := self._due.get(index)) is None:
            self._due[index] = delta
        else:
            due.grow(delta)
        self._ready.set()
