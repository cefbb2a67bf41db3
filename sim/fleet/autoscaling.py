"""An autoscaler looks at its pool now and then, and starts replicas or takes some away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.admission import p95
from sim.fleet.pool import EXISTING, Pool, Slot
from sim.fleet.record import ReplicaState
from sim.fleet.scaler import Scaler

if TYPE_CHECKING:
    from sim.fleet.fleet import Fleet


class Autoscaling:
    """Of one pool."""

    def __init__(self, fleet: Fleet, pool: Pool, scaler: Scaler) -> None:
        self._fleet, self._pool, self._scaler = fleet, pool, scaler
        self._look_later()

    def _look_later(self) -> None:
        clock = self._fleet.clock
        clock.call_at(clock.now + self._scaler.spec.interval_s, self._look)

    def _look(self) -> None:
        fleet, pool = self._fleet, self._pool
        current = pool.count(*EXISTING)
        wanted = self._scaler.decide(fleet.clock.now, max(current, 1), self._metrics(max(current, 1)))
        for _ in range(wanted - current):
            fleet.start(fleet.place(pool))
        for slot in self._victims(current - wanted):
            fleet.retire(slot)
        self._look_later()

    def _metrics(self, current: int) -> dict[str, float]:
        """Means over the replicas there are; one that is starting or down counts with 0."""
        fleet, pool = self._fleet, self._pool
        ready = [s.replica for s in pool.slots if s.state is ReplicaState.READY]
        share = pool.plan.weight * current
        share /= share + sum(
            p.plan.weight * max(p.count(*EXISTING), 1)
            for p in fleet.pools
            if p.router is pool.router and p is not pool
        )
        queued = share * (pool.router.unsent() + fleet.num_pending(pool.router))
        out = {
            "outstanding": (queued + sum(r.outstanding for r in ready)) / current,
            "waiting": (queued + sum(r.scheduler.num_waiting for r in ready)) / current,
        }
        targets = self._scaler.spec.targets()
        if "kv_cache_usage" in targets:
            used = sum(r.used_pages / r.scheduler.config.num_pages for r in ready)
            out["kv_cache_usage"] = used / current
        if "p95_ttft_s" in targets:
            done, waits = fleet.view.ttfts(fleet.clock.now - self._scaler.spec.window_s)
            out["p95_ttft_s"] = p95([*done, *waits])
        return out

    def _victims(self, count: int) -> list[Slot]:
        """Whom to take away: those that do not serve yet or any more, then those with the fewest requests."""
        existing = [slot for slot in self._pool.slots if slot.state in EXISTING]
        existing.sort(key=lambda s: (s.state is ReplicaState.READY, s.outstanding, -s.index))
        return existing[: max(count, 0)]
