"""Replicas that come and go: pools behind routers, an autoscaler, failures, and prefill apart from decode.

`Fleet` stands where a plain run has its router. A request that was let in is in `_live` until it ends; it sits in a
replica, in a router, on a link between pools, in a pause before a retry, or in `_pending` while nobody can serve it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from serving.request import Request, State
from serving.scheduler import Scheduler
from sim.admission import Door, p95
from sim.clock import Clock
from sim.fleet.plan import FleetPlan, PoolPlan
from sim.fleet.record import FleetRecord, Ints, ReplicaState
from sim.fleet.scaler import Scaler
from sim.fleet.spec import KvTransfer
from sim.log import RequestLog
from sim.noise import StepNoise
from sim.record import Status
from sim.replica import Replica
from sim.router import Router, RouterOptions, make_router

if TYPE_CHECKING:
    from sim.api_server import ApiServer

_EXISTING = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DOWN)
_HOLDS_REQUESTS = (ReplicaState.READY, ReplicaState.DRAINING)


@dataclass(slots=True, eq=False)
class Slot:
    """A place for a replica; `epoch` tells events that were meant for an earlier life."""

    index: int
    pool: Pool
    replica: Replica
    state: ReplicaState = ReplicaState.STOPPED
    epoch: int = 0
    served: bool = False
    link_free_s: float = 0.0
    """When the link to the decode pool is free again."""

    @property
    def outstanding(self) -> int:
        """Requests running or waiting here."""
        return self.replica.outstanding if self.state in _HOLDS_REQUESTS else 0

    @property
    def is_empty(self) -> bool:
        """Whether nobody is waiting for anything from here."""
        return self.state not in _HOLDS_REQUESTS or self.replica.is_empty


@dataclass(slots=True, eq=False)
class Pool:
    """A pool at run time."""

    plan: PoolPlan
    router: Router
    scaler: Scaler | None
    slots: list[Slot] = field(default_factory=list)

    def refusal(self, request: Request) -> str:
        """Why the pool's limits rule a request out; empty when they do not."""
        return self.slots[0].replica.scheduler.refusal(request)

    def has_room(self, request: Request) -> bool:
        """Whether a request may have a second token here."""
        return self.slots[0].replica.scheduler.longest > request.prompt_tokens + 1

    def count(self, *states: ReplicaState) -> int:
        """Replicas in one of the states."""
        return sum(slot.state in states for slot in self.slots)


class Fleet:
    """The serving side of a world with more to it than fixed replicas behind one router.

    `make_request(row)` makes a request anew, `output_tokens[row]` is its length, and `ended(row)` is told when one that
    was let in ends.
    """

    def __init__(
        self,
        clock: Clock,
        log: RequestLog,
        plan: FleetPlan,
        make_request: Callable[[int], Request],
        output_tokens: Sequence[int],
        ended: Callable[[int], None],
        *,
        fast_forward: bool = True,
        noise: StepNoise | None = None,
        server: ApiServer | None = None,
    ) -> None:
        self.clock, self.log, self.plan = clock, log, plan
        self._server = server
        self._whole = frozenset(log.unstreamed)
        """Requests that show nothing before their end."""
        self._make_request, self._output_tokens, self._ended = make_request, output_tokens, ended
        self._fast_forward, self._noise = fast_forward, noise
        options = RouterOptions(plan.seed, plan.prefix_tokens, plan.load_factor, plan.session_of)
        self.entry = make_router(plan.router, (), options)
        self.decode = make_router("least_kv") if any(p.role == "decode" for p in plan.pools) else None
        self.slots: list[Slot] = []
        self._events: list[tuple[float, int, int]] = []
        self._live: dict[int, None] = {}
        self._pending: list[Request] = []
        self._transfers: dict[int, tuple[Slot, int]] = {}
        self._retries: dict[int, int] = {}
        self._prefill_replica: dict[int, int] = {}
        self._transfer_s: dict[int, float] = {}
        self._ended_ttfts: deque[tuple[float, float, float]] = deque()
        self._window_s = max(
            [0.0, *(p.autoscaler.window_s for p in plan.pools if p.autoscaler)]
            + ([plan.admission.deadline_window_s] if plan.admission else [])
            + ([plan.admission.shed.window_s] if plan.admission and plan.admission.shed else [])
        )
        self.lost_tokens = 0
        self._rngs: dict[int, np.random.Generator] = {}
        self._door = None if plan.admission is None else Door(plan.admission, self)
        self.pools = [
            Pool(
                pool,
                self.decode if pool.role == "decode" and self.decode is not None else self.entry,
                None if pool.autoscaler is None else Scaler(pool.autoscaler),
            )
            for pool in plan.pools
        ]
        for pool in self.pools:
            for _ in range(pool.plan.replicas):
                self._ready(self._place(pool))
        for pool in self.pools:
            if pool.scaler is not None:
                self._look_later(pool, pool.scaler)
        if plan.failures is not None:
            for outage in plan.failures.schedule:
                clock.call_at(outage.time_s, lambda o=outage: self._outage(o.replica, o.down_s))  # type: ignore[misc]

    @property
    def replicas(self) -> list[Replica]:
        """Every replica that ever was, by index."""
        return [slot.replica for slot in self.slots]

    def _routers(self) -> list[Router]:
        return [self.entry] if self.decode is None else [self.entry, self.decode]

    # ---- requests ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> bool:
        """A request arrives. False when it is refused: status and reason are in the log."""
        row = _row(request)
        reason = self._refusal(request)
        if not reason and self._door is not None:
            reason = self._door.refuses(request, self.log.sent_s[row], self.clock.now)
        if reason:
            self.log.status[row], self.log.reason[row] = int(Status.REJECTED), reason
            return False
        self._live[row] = None
        self._route(request)
        return True

    def _refusal(self, request: Request) -> str:
        """Why no pool of some role can ever serve a request; empty when it can be served."""
        for router in self._routers():
            reasons = [pool.refusal(request) for pool in self.pools if pool.router is router]
            if all(reasons):
                return reasons[0]
        return ""

    def _route(self, request: Request) -> None:
        """Send a request where its prompt is computed, or let it wait for a replica."""
        if not self.entry.replicas:
            self._hold(request)
            return
        if self.decode is not None:
            request.max_tokens = 1
        self._submit(self.entry, request)

    def _submit(self, router: Router, request: Request) -> None:
        """To a replica that can serve it: the router's choice, or the least loaded of those whose limits allow it."""
        pools = [pool for pool in self.pools if pool.router is router]
        if len(pools) > 1 and any(reasons := [pool.refusal(request) for pool in pools]):
            fits = [pool for pool, reason in zip(pools, reasons, strict=True) if not reason]
            able = [s.replica for p in fits for s in p.slots if s.state is ReplicaState.READY]
            if able:
                min(able, key=router.load).submit(request)
            else:
                self._hold(request)
            return
        accepted = router.submit(request)
        assert accepted, request.reason  # `submit` has asked before it let the request in

    def _replica_finished(self, request: Request, now_s: float) -> None:
        row = _row(request)
        slot = self.slots[self.log.replica[row]]
        if (
            slot.pool.plan.role == "prefill"
            and self._output_tokens[row] > 1
            and any(pool.has_room(request) for pool in self.pools if pool.router is self.decode)
        ):
            self._hand_over(row, request, slot)
        else:
            self._end(row)
        slot.pool.router.finished()
        if slot.state is ReplicaState.DRAINING and slot.is_empty:
            self._set(slot, ReplicaState.STOPPED)

    def _end(self, row: int) -> None:
        first_s, now_s = self.log.prefill_done_s[row], self.clock.now
        if row in self._whole and not math.isnan(first_s):
            first_s = now_s
        del self._live[row]
        if self._window_s and not math.isnan(first_s):
            ended = self._ended_ttfts
            ended.append((now_s, first_s, first_s - self.log.sent_s[row]))
            while ended[0][0] < now_s - self._window_s:
                ended.popleft()
        self._ended(row)

    def _fail(self, row: int, reason: str) -> None:
        self.log.status[row], self.log.reason[row] = int(Status.FAILED), reason
        self.log.engine_done_s[row] = self.clock.now
        self._end(row)

    # ---- prefill apart from decode -------------------------------------------------------------------------

    def _hand_over(self, row: int, request: Request, slot: Slot) -> None:
        """The first token is out: send the prompt's KV to the decode pool."""
        log, link, now_s = self.log, self.plan.kv_transfer or KvTransfer(), self.clock.now
        log.status[row], log.reason[row], log.engine_done_s[row] = int(Status.UNFINISHED), "", math.nan
        self._prefill_replica[row] = slot.index
        num_bytes = request.prompt_tokens * slot.pool.plan.kv_bytes_per_token
        slot.link_free_s = max(now_s, slot.link_free_s) + num_bytes / (link.bandwidth_gb_per_s * 1e9)
        arrives_s = slot.link_free_s + link.latency_ms / 1000
        self._transfer_s[row] = arrives_s - now_s
        life = slot.epoch
        self._transfers[row] = (slot, life)
        self.clock.call_at(arrives_s, lambda: self._arrived(row, slot, life))

    def _arrived(self, row: int, slot: Slot, life: int) -> None:
        """The KV is there: the request goes on as one that was preempted and kept its KV."""
        if self._transfers.get(row) != (slot, life):
            return
        del self._transfers[row]
        request = self._make_request(row)
        request.state = State.PREEMPTED
        request.num_tokens = request.prompt_tokens + 1
        request.external_tokens = request.prompt_tokens
        self._decode(request)

    def _decode(self, request: Request) -> None:
        assert self.decode is not None
        if self.decode.replicas:
            self._submit(self.decode, request)
        else:
            self._hold(request)

    # ---- the lives of replicas -----------------------------------------------------------------------------

    def _set(self, slot: Slot, state: ReplicaState) -> None:
        slot.state = state
        slot.epoch += 1
        self._events.append((self.clock.now, slot.index, int(state)))

    def _place(self, pool: Pool) -> Slot:
        """A place where no replica is."""
        for slot in pool.slots:
            if slot.state is ReplicaState.STOPPED:
                return slot
        index = len(self.slots)
        replica = Replica(
            self.clock,
            index,
            self._scheduler(pool),
            pool.plan.pricer,
            self.log,
            self._replica_finished,
            fast_forward=self._fast_forward,
            noise=None if self._noise is None else self._noise.stream(index),
            speculation=pool.plan.speculation,
            server=self._server,
        )
        slot = Slot(index, pool, replica)
        self.slots.append(slot)
        pool.slots.append(slot)
        return slot

    def _scheduler(self, pool: Pool) -> Scheduler:
        plan = pool.plan
        return Scheduler(plan.config, plan.make_policy() if plan.make_policy is not None else None)

    def _leave(self, slot: Slot) -> None:
        """The router gives the replica no more."""
        router = slot.pool.router
        router.remove(slot.replica)
        if not router.replicas:
            self._pending += router.withdraw()

    def _start(self, slot: Slot) -> None:
        """Begin a cold start."""
        self._set(slot, ReplicaState.STARTING)
        epoch = slot.epoch
        self.clock.call_at(
            self.clock.now + slot.pool.plan.cold_start_s,
            lambda: self._ready(slot) if slot.epoch == epoch else None,
        )

    def _ready(self, slot: Slot) -> None:
        """The replica serves from now on."""
        if slot.served:
            slot.replica.restart(self._scheduler(slot.pool))
        slot.served = True
        slot.link_free_s = 0.0
        self._set(slot, ReplicaState.READY)
        slot.pool.router.add(slot.replica, slot.pool.plan.weight)
        self._draw_failure(slot)
        self._flush()
        slot.pool.router.finished()

    def _flush(self) -> None:
        """Requests that waited for a replica try again."""
        pending, self._pending = self._pending, []
        for request in pending:
            if request.external_tokens:
                self._decode(request)
            else:
                self._route(request)

    def _hold(self, request: Request) -> None:
        """Keep a request until a replica is there for it; it fails when none will ever be."""
        router = self.decode if request.external_tokens else self.entry
        for pool in self.pools:
            lives = pool.scaler is not None or pool.count(*_EXISTING)
            if pool.router is router and lives and not pool.refusal(request):
                self._pending.append(request)
                return
        row = _row(request)
        self.lost_tokens += bool(request.external_tokens)
        self._forget([row])
        self._fail(row, "no replica is left")

    def _hold_again(self) -> None:
        """A replica went away for good: those who wait for it fail."""
        pending, self._pending = self._pending, []
        for request in pending:
            self._hold(request)

    # ---- failures ------------------------------------------------------------------------------------------

    def _draw_failure(self, slot: Slot) -> None:
        failures = self.plan.failures
        if failures is None or failures.mtbf_s is None or failures.mttr_s is None:
            return
        rng = self._rngs.get(slot.index)
        if rng is None:
            seed = np.random.SeedSequence((self.plan.seed, 0xFA11, slot.index))
            rng = self._rngs[slot.index] = np.random.Generator(np.random.PCG64(seed))
        up_s, down_s = rng.exponential(failures.mtbf_s), rng.exponential(failures.mttr_s)
        epoch = slot.epoch
        self.clock.call_at(
            self.clock.now + up_s,
            lambda: self._break(slot, down_s) if slot.epoch == epoch else None,
        )

    def _outage(self, index: int, down_s: float | None) -> None:
        """A failure of the schedule; a replica that is not up cannot fail."""
        if index < len(self.slots) and self.slots[index].state in (*_HOLDS_REQUESTS, ReplicaState.STARTING):
            self._break(self.slots[index], down_s)

    def _break(self, slot: Slot, down_s: float | None) -> None:
        """A replica fails: its KV and prefix cache are gone, and its requests begin again or fail."""
        was = slot.state
        lost: list[int] = []
        if was in _HOLDS_REQUESTS:
            if was is ReplicaState.READY:
                self._leave(slot)
            for request, tokens in slot.replica.halt():
                self.lost_tokens += tokens
                lost.append(_row(request))
        for row in [row for row, (source, _) in self._transfers.items() if source is slot]:
            del self._transfers[row]
            self.lost_tokens += 1
            lost.append(row)
        if was is ReplicaState.DRAINING or down_s is None:
            self._set(slot, ReplicaState.STOPPED)
        else:
            self._set(slot, ReplicaState.DOWN)
            epoch = slot.epoch
            self.clock.call_at(
                self.clock.now + down_s, lambda: self._start(slot) if slot.epoch == epoch else None
            )
        self._forget(lost)
        for row in lost:
            self._retry(row, slot.index)
        self._hold_again()

    def _forget(self, rows: list[int]) -> None:
        """What an attempt that failed has written; its tokens count as never received."""
        log, gone = self.log, set(rows)
        for row in rows:
            log.scheduled_s[row] = log.prefill_done_s[row] = log.engine_done_s[row] = math.nan
            log.output_tokens[row] = log.cached_tokens[row] = log.preemptions[row] = 0
            log.replica[row] = -1
            self._prefill_replica.pop(row, None)
            self._transfer_s.pop(row, None)
        if gone:
            log.ranges = [entry for entry in log.ranges if entry[0] not in gone]

    def _retry(self, row: int, replica: int) -> None:
        failures = self.plan.failures
        assert failures is not None
        count = self._retries.get(row, 0)
        if count >= failures.max_retries:
            self._fail(row, f"replica {replica} failed; {count} retries used")
            return
        self._retries[row] = count + 1
        pause_s = failures.retry_backoff_s * 2**count
        if pause_s:
            self.clock.call_at(self.clock.now + pause_s, lambda: self._route(self._make_request(row)))
        else:
            self._route(self._make_request(row))

    # ---- autoscaling ---------------------------------------------------------------------------------------

    def _look_later(self, pool: Pool, scaler: Scaler) -> None:
        self.clock.call_at(self.clock.now + scaler.spec.interval_s, lambda: self._look(pool, scaler))

    def _look(self, pool: Pool, scaler: Scaler) -> None:
        current = pool.count(*_EXISTING)
        wanted = scaler.decide(self.clock.now, max(current, 1), self._metrics(pool, scaler, max(current, 1)))
        for _ in range(wanted - current):
            self._start(self._place(pool))
        for slot in self._victims(pool, current - wanted):
            self._retire(slot)
        self._look_later(pool, scaler)

    def _metrics(self, pool: Pool, scaler: Scaler, current: int) -> dict[str, float]:
        """Means over the replicas there are; one that is starting or down counts with 0."""
        ready = [s.replica for s in pool.slots if s.state is ReplicaState.READY]
        share = pool.plan.weight * current
        share /= share + sum(
            p.plan.weight * max(p.count(*_EXISTING), 1)
            for p in self.pools
            if p.router is pool.router and p is not pool
        )
        queued = share * (pool.router.unsent() + self._num_pending(pool.router))
        out = {
            "outstanding": (queued + sum(r.outstanding for r in ready)) / current,
            "waiting": (queued + sum(r.scheduler.num_waiting for r in ready)) / current,
        }
        targets = scaler.spec.targets()
        if "kv_cache_usage" in targets:
            used = sum(r.used_pages / r.scheduler.config.num_pages for r in ready)
            out["kv_cache_usage"] = used / current
        if "p95_ttft_s" in targets:
            done, waits = self.ttfts(self.clock.now - scaler.spec.window_s)
            out["p95_ttft_s"] = p95([*done, *waits])
        return out

    def _victims(self, pool: Pool, count: int) -> list[Slot]:
        """Whom to take away: those that do not serve yet or any more, then those with the fewest requests."""
        existing = [slot for slot in pool.slots if slot.state in _EXISTING]
        existing.sort(key=lambda s: (s.state is ReplicaState.READY, s.outstanding, -s.index))
        return existing[: max(count, 0)]

    def _retire(self, slot: Slot) -> None:
        if slot.state is ReplicaState.READY:
            self._leave(slot)
            if not slot.is_empty:
                self._set(slot, ReplicaState.DRAINING)
                return
        self._set(slot, ReplicaState.STOPPED)

    # ---- what the door sees --------------------------------------------------------------------------------

    @property
    def num_outstanding(self) -> int:
        """Requests let in and not ended."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Requests let in that no engine runs yet."""
        queued = sum(s.replica.num_waiting for s in self.slots if s.state in _HOLDS_REQUESTS)
        decode = self.decode.unsent() if self.decode is not None else 0
        return queued + self.entry.unsent() + decode + len(self._pending)

    @property
    def num_without_token(self) -> int:
        """Requests let in that have shown no token yet."""
        first_s, whole = self.log.prefill_done_s, self._whole
        return sum(row in whole or math.isnan(first_s[row]) for row in self._live)

    def _num_pending(self, router: Router) -> int:
        return sum((router is self.decode) is bool(request.external_tokens) for request in self._pending)

    def ttfts(self, from_s: float) -> tuple[list[float], list[float]]:
        """TTFTs of first tokens since `from_s`, and waits so far of those without one; at the engine."""
        sent_s, first_s, now_s = self.log.sent_s, self.log.prefill_done_s, self.clock.now
        whole = self._whole
        done = [ttft_s for _, at_s, ttft_s in self._ended_ttfts if at_s >= from_s]
        done += [
            first_s[row] - sent_s[row] for row in self._live if first_s[row] >= from_s and row not in whole
        ]
        return done, [now_s - sent_s[row] for row in self._live if row in whole or math.isnan(first_s[row])]

    # ---- the record ----------------------------------------------------------------------------------------

    def record(self, rows: Ints) -> FleetRecord:
        """What happened to the fleet; `rows` of the workload in the order of the request table."""
        events = self._events
        return FleetRecord(
            pools=tuple(pool.plan.facts() for pool in self.pools),
            pool_of=np.array([self.pools.index(slot.pool) for slot in self.slots], np.int64),
            event_s=np.array([e[0] for e in events], np.float64),
            event_replica=np.array([e[1] for e in events], np.int64),
            event_state=np.array([e[2] for e in events], np.int64),
            retries=np.array([self._retries.get(row, 0) for row in rows.tolist()], np.int64),
            prefill_replica=np.array([self._prefill_replica.get(r, -1) for r in rows.tolist()], np.int64),
            kv_transfer_s=np.array([self._transfer_s.get(r, math.nan) for r in rows.tolist()], np.float64),
            lost_tokens=self.lost_tokens,
        )


def _row(request: Request) -> int:
    assert isinstance(request.id, int)
    return request.id
