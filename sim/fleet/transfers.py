"""KV on its way from where prompts are computed to where they are decoded."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from serving.request import Request
from sim.clock import Clock
from sim.fleet.pool import Slot
from sim.fleet.record import Floats, Ints
from sim.fleet.spec import KvTransfer


class Transfers:
    """Transfers queue for the link of each prefill replica. `arrived(row)` is told when one is over."""

    def __init__(self, clock: Clock, link: KvTransfer, arrived: Callable[[int], None]) -> None:
        self._clock, self._link, self._told = clock, link, arrived
        self._under_way: dict[int, tuple[Slot, int]] = {}
        self._prefill_replica: dict[int, int] = {}
        self._took_s: dict[int, float] = {}

    def begin(self, row: int, request: Request, slot: Slot) -> None:
        """A prompt's KV goes off."""
        link, now_s = self._link, self._clock.now
        num_bytes = request.prompt_tokens * slot.pool.plan.kv_bytes_per_token
        slot.link_free_s = max(now_s, slot.link_free_s) + num_bytes / (link.bandwidth_gb_per_s * 1e9)
        arrives_s = slot.link_free_s + link.latency_ms / 1000
        self._prefill_replica[row], self._took_s[row] = slot.index, arrives_s - now_s
        life = self._under_way[row] = (slot, slot.epoch)
        self._clock.call_at(arrives_s, lambda: self._arrived(row, life))

    def _arrived(self, row: int, life: tuple[Slot, int]) -> None:
        if self._under_way.get(row) == life:
            del self._under_way[row]
            self._told(row)

    def break_off(self, slot: Slot) -> list[int]:
        """A replica is gone, and so is what it was sending: the requests that were waiting for it."""
        lost = [row for row, (source, _) in self._under_way.items() if source is slot]
        for row in lost:
            del self._under_way[row]
        return lost

    def forget(self, row: int) -> None:
        """An attempt has failed."""
        self._prefill_replica.pop(row, None)
        self._took_s.pop(row, None)

    def columns(self, rows: list[int]) -> tuple[Ints, Floats]:
        """By row: the replica that computed the prompt (else -1), and the time of the transfer (else NaN)."""
        return (
            np.array([self._prefill_replica.get(row, -1) for row in rows], np.int64),
            np.array([self._took_s.get(row, math.nan) for row in rows], np.float64),
        )
