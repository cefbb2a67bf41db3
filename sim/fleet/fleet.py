"""Replicas that come and go: pools behind routers, an autoscaler, failures, and prefill apart from decode.

`Fleet` stands where a plain run has its router. A request that was let in is in `live` until it ends; it sits in a
replica, in a router, on a link between pools, in a pause before a retry, or in `pending` while nobody can serve it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from serving.request import Request, State
from serving.scheduler import Scheduler
from sim.admission import Door
from sim.books import row_of
from sim.clock import Clock
from sim.fleet.autoscaling import Autoscaling
from sim.fleet.breakdowns import Breakdowns
from sim.fleet.plan import FleetPlan
from sim.fleet.pool import EXISTING, HOLDS_REQUESTS, Pool, Slot
from sim.fleet.record import FleetRecord, Ints, ReplicaState
from sim.fleet.scaler import Scaler
from sim.fleet.spec import KvTransfer
from sim.fleet.transfers import Transfers
from sim.fleet.view import View
from sim.log import RequestLog
from sim.noise import StepNoise
from sim.record import Status
from sim.replica import Replica
from sim.router import Router, RouterOptions, make_router

if TYPE_CHECKING:
    from sim.api_server import ApiServer


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
        self._make_request, self._output_tokens, self._ended = make_request, output_tokens, ended
        self._fast_forward, self._noise = fast_forward, noise
        options = RouterOptions(plan.seed, plan.prefix_tokens, plan.load_factor, plan.session_of)
        self.entry = make_router(plan.router, (), options)
        self.decode = make_router("least_kv") if any(p.role == "decode" for p in plan.pools) else None
        self.slots: list[Slot] = []
        self._events: list[tuple[float, int, int]] = []
        self.live: dict[int, None] = {}
        """Requests let in and not ended."""
        self.pending: list[Request] = []
        """Those that wait for a replica that can serve them."""
        self.lost_tokens = 0
        self._transfers = Transfers(clock, plan.kv_transfer or KvTransfer(), self._arrived)
        self.view = View(self, plan)
        self._door = None if plan.admission is None else Door(plan.admission, self.view)
        self.pools = [
            Pool(
                pool,
                self.decode if pool.role == "decode" and self.decode is not None else self.entry,
                None if pool.autoscaler is None else Scaler(pool.autoscaler),
            )
            for pool in plan.pools
        ]
        self._breakdowns = Breakdowns(clock, plan.failures, plan.seed, self.slots, self._break)
        for pool in self.pools:
            for _ in range(pool.plan.replicas):
                self._ready(self.place(pool))
        for pool in self.pools:
            if pool.scaler is not None:
                Autoscaling(self, pool, pool.scaler)
        self._breakdowns.begin()

    @property
    def replicas(self) -> list[Replica]:
        """Every replica that ever was, by index."""
        return [slot.replica for slot in self.slots]

    def _routers(self) -> list[Router]:
        return [self.entry] if self.decode is None else [self.entry, self.decode]

    # ---- requests ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> bool:
        """A request arrives. False when it is refused: status and reason are in the log."""
        row = row_of(request)
        reason = self._refusal(request)
        if not reason and self._door is not None:
            reason = self._door.refuses(request, self.log.sent_s[row], self.clock.now)
        if reason:
            self.log.status[row], self.log.reason[row] = int(Status.REJECTED), reason
            return False
        self.live[row] = None
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
        row = row_of(request)
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
        del self.live[row]
        self.view.ended(row)
        self._ended(row)

    def _fail(self, row: int, reason: str) -> None:
        self.log.status[row], self.log.reason[row] = int(Status.FAILED), reason
        self.log.engine_done_s[row] = self.clock.now
        self._end(row)

    # ---- prefill apart from decode -------------------------------------------------------------------------

    def _hand_over(self, row: int, request: Request, slot: Slot) -> None:
        """The first token is out: send the prompt's KV to the decode pool."""
        log = self.log
        log.status[row], log.reason[row], log.engine_done_s[row] = int(Status.UNFINISHED), "", math.nan
        self._transfers.begin(row, request, slot)

    def _arrived(self, row: int) -> None:
        """The KV is there: the request goes on as one that was preempted and kept its KV."""
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

    def place(self, pool: Pool) -> Slot:
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
            self.pending += router.withdraw()

    def start(self, slot: Slot) -> None:
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
        self._breakdowns.draw(slot)
        self._flush()
        slot.pool.router.finished()

    def retire(self, slot: Slot) -> None:
        """Take a replica away; it finishes what it has."""
        if slot.state is ReplicaState.READY:
            self._leave(slot)
            if not slot.is_empty:
                self._set(slot, ReplicaState.DRAINING)
                return
        self._set(slot, ReplicaState.STOPPED)

    def _flush(self) -> None:
        """Requests that waited for a replica try again."""
        pending, self.pending = self.pending, []
        for request in pending:
            if request.external_tokens:
                self._decode(request)
            else:
                self._route(request)

    def num_pending(self, router: Router) -> int:
        """Requests that wait for a replica of a router."""
        return sum((router is self.decode) is bool(request.external_tokens) for request in self.pending)

    def _hold(self, request: Request) -> None:
        """Keep a request until a replica is there for it; it fails when none will ever be."""
        router = self.decode if request.external_tokens else self.entry
        for pool in self.pools:
            lives = pool.scaler is not None or pool.count(*EXISTING)
            if pool.router is router and lives and not pool.refusal(request):
                self.pending.append(request)
                return
        row = row_of(request)
        self.lost_tokens += bool(request.external_tokens)
        self._forget([row])
        self._fail(row, "no replica is left")

    def _hold_again(self) -> None:
        """A replica went away for good: those who wait for it fail."""
        pending, self.pending = self.pending, []
        for request in pending:
            self._hold(request)

    # ---- failures ------------------------------------------------------------------------------------------

    def _break(self, slot: Slot, down_s: float | None) -> None:
        """A replica fails: its KV and prefix cache are gone, and its requests begin again or fail."""
        was = slot.state
        lost: list[int] = []
        if was in HOLDS_REQUESTS:
            if was is ReplicaState.READY:
                self._leave(slot)
            for request, tokens in slot.replica.halt():
                self.lost_tokens += tokens
                lost.append(row_of(request))
        sending = self._transfers.break_off(slot)
        self.lost_tokens += len(sending)
        lost += sending
        if was is ReplicaState.DRAINING or down_s is None:
            self._set(slot, ReplicaState.STOPPED)
        else:
            self._set(slot, ReplicaState.DOWN)
            epoch = slot.epoch
            self.clock.call_at(
                self.clock.now + down_s, lambda: self.start(slot) if slot.epoch == epoch else None
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
            self._transfers.forget(row)
        if gone:
            log.ranges = [entry for entry in log.ranges if entry[0] not in gone]

    def _retry(self, row: int, replica: int) -> None:
        pause_s = self._breakdowns.pause_s(row)
        if pause_s is None:
            assert self.plan.failures is not None
            self._fail(row, f"replica {replica} failed; {self.plan.failures.max_retries} retries used")
        elif pause_s:
            self.clock.call_at(self.clock.now + pause_s, lambda: self._route(self._make_request(row)))
        else:
            self._route(self._make_request(row))

    # ---- the record ----------------------------------------------------------------------------------------

    def record(self, rows: Ints) -> FleetRecord:
        """What happened to the fleet; `rows` of the workload in the order of the request table."""
        events = self._events
        prefill_replica, kv_transfer_s = self._transfers.columns(rows.tolist())
        return FleetRecord(
            pools=tuple(pool.plan.facts() for pool in self.pools),
            pool_of=np.array([self.pools.index(slot.pool) for slot in self.slots], np.int64),
            event_s=np.array([e[0] for e in events], np.float64),
            event_replica=np.array([e[1] for e in events], np.int64),
            event_state=np.array([e[2] for e in events], np.int64),
            retries=self._breakdowns.retries(rows.tolist()),
            prefill_replica=prefill_replica,
            kv_transfer_s=kv_transfer_s,
            lost_tokens=self.lost_tokens,
        )
