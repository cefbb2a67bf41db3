"""When replicas fail, and how often a request is sent again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sim.clock import Clock
from sim.fleet.pool import HOLDS_REQUESTS, Slot
from sim.fleet.record import Ints, ReplicaState
from sim.fleet.spec import Failures


class Breakdowns:
    """`fail(slot, down_s)` is told of each; None is for good."""

    def __init__(
        self,
        clock: Clock,
        spec: Failures | None,
        seed: int,
        slots: Sequence[Slot],
        fail: Callable[[Slot, float | None], None],
    ) -> None:
        self._clock, self._spec, self._seed, self._slots, self._fail = clock, spec, seed, slots, fail
        self._rngs: dict[int, np.random.Generator] = {}
        self._retries: dict[int, int] = {}

    def begin(self) -> None:
        """The run begins: failures that are known beforehand will happen."""
        for outage in self._spec.schedule if self._spec is not None else ():
            self._clock.call_at(outage.time_s, lambda o=outage: self._outage(o.replica, o.down_s))  # type: ignore[misc]

    def draw(self, slot: Slot) -> None:
        """A replica is ready: draw when it will fail, where failures are drawn."""
        spec = self._spec
        if spec is None or spec.mtbf_s is None or spec.mttr_s is None:
            return
        rng = self._rngs.get(slot.index)
        if rng is None:
            seed = np.random.SeedSequence((self._seed, 0xFA11, slot.index))
            rng = self._rngs[slot.index] = np.random.Generator(np.random.PCG64(seed))
        up_s, down_s = rng.exponential(spec.mtbf_s), rng.exponential(spec.mttr_s)
        epoch = slot.epoch
        self._clock.call_at(
            self._clock.now + up_s,
            lambda: self._fail(slot, down_s) if slot.epoch == epoch else None,
        )

    def _outage(self, index: int, down_s: float | None) -> None:
        """A failure of the schedule; a replica that is not up cannot fail."""
        if index < len(self._slots):
            slot = self._slots[index]
            if slot.state in (*HOLDS_REQUESTS, ReplicaState.STARTING):
                self._fail(slot, down_s)

    def pause_s(self, row: int) -> float | None:
        """How long to wait before a request is sent again; None when all its retries are used."""
        assert self._spec is not None
        count = self._retries.get(row, 0)
        if count >= self._spec.max_retries:
            return None
        self._retries[row] = count + 1
        return self._spec.retry_backoff_s * float(2**count)

    def retries(self, rows: list[int]) -> Ints:
        """By row, how often it was sent again."""
        return np.array([self._retries.get(row, 0) for row in rows], np.int64)
