"""SimPy's environment with events at absolute times, so that no time is rounded by adding a delay to `now`."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Any

import simpy
from simpy.events import NORMAL, Event

STEP = NORMAL + 1
"""Priority of step boundaries: whoever arrives at the very same time is seen by the step that starts then."""


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

    def call_at(self, time_s: float, action: Callable[[], Any]) -> None:
        """Run `action()` at `time_s`, before any step that starts then."""
        event = self.at(time_s, NORMAL)
        assert event.callbacks is not None
        event.callbacks.append(lambda _: action())
