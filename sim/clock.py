"""SimPy's environment with events at absolute times, so that no time is rounded by adding a delay to `now`."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappush
from typing import Any

import simpy
from simpy.events import NORMAL, Event

STEP = NORMAL + 1
"""Priority of step boundaries: whoever arrives at the very same time is seen by the step that starts then."""
LATE = STEP + (1 << 40)
"""Priority of what happens on the network: after all step boundaries of the same time."""


class Clock(simpy.Environment):
    """A SimPy environment whose processes can wait until a time instead of for a delay."""

    boundary: tuple[float, int] = (-1.0, STEP)
    """Time and priority of the last step boundary that was passed."""

    def at(self, time_s: float, priority: int = STEP) -> Event:
        """An event that happens at `time_s`."""
        event = Event(self)
        event._ok = True
        event._value = None
        heappush(self._queue, (time_s, priority, next(self._eid), event))  # type: ignore[misc]
        return event

    def drop(self, event: Event) -> None:
        """Forget an event that has not happened. Takes as long as the queue is."""
        self._queue = [entry for entry in self._queue if entry[3] is not event]
        heapify(self._queue)

    def call_at(self, time_s: float, action: Callable[[], Any]) -> None:
        """Run `action()` at `time_s`, before any step that starts then."""
        event = self.at(time_s, NORMAL)
        assert event.callbacks is not None
        event.callbacks.append(lambda _: action())
