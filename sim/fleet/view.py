"""What a door and an autoscaler see of a fleet."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from sim.fleet.pool import HOLDS_REQUESTS

if TYPE_CHECKING:
    from sim.fleet.fleet import Fleet
    from sim.fleet.plan import FleetPlan


class View:
    """Counts of requests, and their TTFTs over the longest window that somebody asks for."""

    def __init__(self, fleet: Fleet, plan: FleetPlan) -> None:
        self._fleet, self._log, self._clock = fleet, fleet.log, fleet.clock
        self._whole = frozenset(fleet.log.unstreamed)
        """Requests that show nothing before their end."""
        self._ended: deque[tuple[float, float, float]] = deque()
        """Of those that had a first token: when they ended, when it came, TTFT."""
        admission = plan.admission
        self._window_s = max(
            [0.0, *(p.autoscaler.window_s for p in plan.pools if p.autoscaler)]
            + ([admission.deadline_window_s] if admission else [])
            + ([admission.shed.window_s] if admission and admission.shed else [])
        )

    def ended(self, row: int) -> None:
        """A request that was let in has ended."""
        first_s, now_s = self._log.prefill_done_s[row], self._clock.now
        if not self._window_s or math.isnan(first_s):
            return
        if row in self._whole:
            first_s = now_s
        ended = self._ended
        ended.append((now_s, first_s, first_s - self._log.sent_s[row]))
        while ended[0][0] < now_s - self._window_s:
            ended.popleft()

    @property
    def num_outstanding(self) -> int:
        """Requests let in and not ended."""
        return len(self._fleet.live)

    @property
    def num_waiting(self) -> int:
        """Requests let in that no engine runs yet."""
        fleet = self._fleet
        queued = sum(s.replica.num_waiting for s in fleet.slots if s.state in HOLDS_REQUESTS)
        decode = fleet.decode.unsent() if fleet.decode is not None else 0
        return queued + fleet.entry.unsent() + decode + len(fleet.pending)

    @property
    def num_without_token(self) -> int:
        """Requests let in that have shown no token yet."""
        first_s, whole = self._log.prefill_done_s, self._whole
        return sum(row in whole or math.isnan(first_s[row]) for row in self._fleet.live)

    def ttfts(self, from_s: float) -> tuple[list[float], list[float]]:
        """TTFTs of first tokens since `from_s`, and waits so far of those without one; at the engine."""
        sent_s, first_s, now_s = self._log.sent_s, self._log.prefill_done_s, self._clock.now
        live, whole = self._fleet.live, self._whole
        done = [ttft_s for _, at_s, ttft_s in self._ended if at_s >= from_s]
        done += [first_s[row] - sent_s[row] for row in live if first_s[row] >= from_s and row not in whole]
        return done, [now_s - sent_s[row] for row in live if row in whole or math.isnan(first_s[row])]
