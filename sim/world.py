"""A workload against a deployment, in simulated time: clients and network, router, replicas; out comes a `RunRecord`."""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from simpy.events import Event

from costmodel.prices import Prices
from serving.config import SchedulerConfig
from serving.draft_counts import total
from serving.draft_steps import draft_steps
from serving.policies import BatchPolicy
from serving.request import Request
from serving.scheduler import Scheduler
from sim.api_server import ApiServer
from sim.beam import check_beams
from sim.best_of import check_best_of
from sim.clients import TOO_SLOW, Clients
from sim.clock import Clock
from sim.fleet.fleet import Fleet
from sim.fleet.plan import FleetPlan
from sim.lockstep import Lockstep, Rank
from sim.log import RequestLog, request_table, step_table
from sim.network import Delivering, check_gathering
from sim.noise import StepNoise
from sim.record import Floats, RunRecord, Status
from sim.replica import Replica
from sim.router import Router, RouterOptions, make_router
from sim.speculation import Speculation
from sim.workload.types import Workload


@dataclass(frozen=True, slots=True)
class Frontend:
    """Work between the client's socket and the scheduler's queue, and back.

    `overhead_s` is spent once per request (HTTP, gateway), tokenising per prompt token, detokenising per output token
    (it delays each token, it does not slow the engine: it runs beside it).
    """

    overhead_s: float = 0.0
    tokenize_s_per_token: float = 0.0
    detokenize_s_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is, for a progress bar."""

    sim_s: float
    done: int
    total: int
    wall_s: float


_PROGRESS_EVERY_S = 0.1


def run_world(
    workload: Workload,
    config: SchedulerConfig,
    pricer: Prices,
    *,
    make_policy: Callable[[], BatchPolicy] | None = None,
    num_replicas: int = 1,
    router: str = "round_robin",
    frontend: Frontend | None = None,
    fast_forward: bool = True,
    until_s: float = math.inf,
    progress: Callable[[Progress], None] | None = None,
    noise: StepNoise | None = None,
    options: RouterOptions | None = None,
    fleet: FleetPlan | None = None,
    watch: Callable[[_World], None] | None = None,
    speculation: Speculation | None = None,
    response_cache: bool = False,
    delivering: Delivering | None = None,
    lockstep: bool = False,
) -> RunRecord:
    """Simulate `workload` until every request has ended, or until `until_s`.

    Each replica has a scheduler and a policy of its own; `noise` jitters the device time of its steps. A `fleet` stands
    in for `num_replicas` and `router`; `config` is then that of its first pool.
    KeyboardInterrupt ends the run early: the record then holds what happened so far and is marked `interrupted`.
    `watch` is told of the world before it runs, for somebody who looks at it from another thread. With `response_cache`
    a request that repeats one already answered is answered at once, without an engine. `delivering` follows the streams
    to their clients; the round trips are then its own. In `lockstep` the replicas share their experts and step together;
    the prices are then `costmodel.prices.LockstepPrices`.
    """
    check_best_of(workload)
    check_beams(workload, drafts=_all_draft(speculation, fleet))
    check_gathering(workload, delivering)
    world = _World(
        workload,
        config,
        pricer,
        make_policy,
        num_replicas,
        router,
        frontend or Frontend(),
        fast_forward,
        noise,
        options,
        fleet,
        speculation,
        delivering,
        lockstep,
    )
    if response_cache:
        world.repeats = workload.repeats().tolist()
    if watch is not None:
        watch(world)
    collecting = gc.isenabled()
    gc.disable()  # nothing here is cyclic garbage; collections would only walk the growing logs
    try:
        interrupted = world.run(until_s, progress)
    finally:
        if collecting:
            gc.enable()
    return world.record(interrupted)


def _all_draft(speculation: Speculation | None, fleet: FleetPlan | None) -> bool:
    if fleet is None:
        return speculation is not None
    return all(pool.speculation is not None for pool in fleet.pools)


class _World:
    def __init__(
        self,
        workload: Workload,
        config: SchedulerConfig,
        pricer: Prices,
        make_policy: Callable[[], BatchPolicy] | None,
        num_replicas: int,
        router: str,
        frontend: Frontend,
        fast_forward: bool,
        noise: StepNoise | None,
        options: RouterOptions | None,
        fleet: FleetPlan | None,
        speculation: Speculation | None,
        delivering: Delivering | None,
        lockstep: bool,
    ) -> None:
        self.workload = workload
        self.config = config
        self.clock = Clock()
        self.log = RequestLog(len(workload))
        self.frontend = frontend
        self.done = 0
        rtt_s = np.array([tenant.rtt_s for tenant in workload.tenants], np.float64)
        self.rtt_s: Floats = rtt_s[workload.tenant]
        self.tokenize_s = workload.prompt_tokens.astype(np.float64) * frontend.tokenize_s_per_token
        self._delay_s: list[float] = (self.rtt_s / 2 + frontend.overhead_s + self.tokenize_s).tolist()
        self._way_out_s: list[float] = (self.rtt_s / 2 + frontend.detokenize_s_per_token).tolist()
        self._prompt: list[int] = workload.prompt_tokens.tolist()
        self._output: list[int] = workload.output_tokens.tolist()
        self._tenant: list[int] = workload.tenant.tolist()
        self._priority: list[int] = workload.priority.tolist()
        self._deadline_s = [
            tenant.goodput_ttft_s if tenant.goodput_ttft_s is not None else math.inf
            for tenant in workload.tenants
        ]
        self._weight = [tenant.weight for tenant in workload.tenants]
        self._has_keys = np.diff(workload.segment_offsets) > 0
        self._turn: list[int] | None = None
        if config.kv_eviction == "session":
            first, turn = workload.conversations()
            self._first_turn, self._turn = first.tolist(), turn.tolist()
        # Turns that wait for an answer, by the request they wait for.
        self._next_turns: dict[int, list[int]] = {}
        for row in np.flatnonzero(workload.after >= 0).tolist():
            self._next_turns.setdefault(int(workload.after[row]), []).append(row)
        self.server: ApiServer | None = None
        if workload.beam_width is not None or workload.best_of is not None:
            self.server = ApiServer(self.clock, self.log, workload)
        closed = workload.closed_loop
        self._seats = closed.max_concurrency if closed is not None else math.inf
        self._ready: deque[int] = deque()
        self.fleet: Fleet | None = None
        self.router: Router | Fleet
        if fleet is None:
            kept = options or RouterOptions()
            if router == "session":
                kept = replace(kept, session_of=session_names(workload))
            make: Callable[..., Replica] = partial(Rank, Lockstep()) if lockstep else Replica
            self.replicas = [
                make(
                    self.clock,
                    index,
                    Scheduler(config, make_policy() if make_policy is not None else None),
                    pricer,
                    self.log,
                    self._finished,
                    fast_forward=fast_forward,
                    noise=None if noise is None else noise.stream(index),
                    speculation=speculation,
                    server=self.server,
                )
                for index in range(num_replicas)
            ]
            self.router = make_router(router, self.replicas, kept)
        else:
            self.router = self.fleet = Fleet(
                self.clock,
                self.log,
                replace(fleet, session_of=session_names(workload)),
                self._request,
                self._output,
                lambda row: self._ended(row, self.clock.now + self._way_out_s[row]),
                fast_forward=fast_forward,
                noise=noise,
                server=self.server,
            )
        self.net: Clients | None = None
        if delivering is not None:
            self.net = Clients(
                self.clock,
                self.log,
                delivering,
                tenant=workload.tenant,
                first_turn=workload.conversations()[0],
                prompt_tokens=workload.prompt_tokens,
                overhead_s=frontend.overhead_s,
                tokenize_s=self.tokenize_s,
                detokenize_s=frontend.detokenize_s_per_token,
                replicas=lambda: self.replicas if self.fleet is None else self.fleet.replicas,
                arrived=self._queue,
                done=self._client_done,
                abort=self._abort,
            )
        self.repeats: list[int] | None = None
        """Of each request the first that is the very same, where there is a cache of answers."""
        self._answered: set[int] = set()
        """Of those firsts the ones whose answer is in the cache."""
        self._all_done: Event = self.clock.event()
        if len(workload):
            self.clock.process(self._send_on_time())
        else:
            self._all_done.succeed()

    # ---- clients -------------------------------------------------------------------------------------------

    def _send_on_time(self) -> Generator[Event, object, None]:
        """Requests that wait for nobody are ready at their own time."""
        sent_s = self.workload.sent_s.tolist()
        waits = self.workload.after.tolist()
        clock = self.clock
        for row, time_s in enumerate(sent_s):
            if waits[row] < 0:
                if time_s > clock.now:
                    yield clock.at(time_s, priority=1)
                self._ready_to_send(row)

    def _ready_to_send(self, row: int) -> None:
        """The client wants to send; in a closed loop it may first have to wait for one of its requests to end."""
        if self._seats > 0:
            self._seats -= 1
            self._send(row)
        else:
            self._ready.append(row)

    def _send(self, row: int) -> None:
        now_s = self.clock.now
        self.log.sent_s[row] = now_s
        if self.net is not None:
            self.net.send(row)
            return
        delay_s = self._delay_s[row]
        if delay_s:
            self.clock.call_at(now_s + delay_s, lambda: self._queue(row))
        else:
            self._queue(row)

    def _queue(self, row: int) -> None:
        """The request joins the server's queue."""
        now_s = self.clock.now
        self.log.queued_s[row] = now_s
        if self.repeats is not None and self.repeats[row] in self._answered:
            self._answered_before(row, now_s)
            return
        if not self.router.submit(self._request(row)):
            self._ended(row, now_s + self._way_out_s[row])

    def _answered_before(self, row: int, now_s: float) -> None:
        """The whole answer comes out of the cache: no engine sees the request, and its replica stays -1."""
        log = self.log
        log.scheduled_s[row] = log.prefill_done_s[row] = log.engine_done_s[row] = now_s
        log.output_tokens[row], log.reason[row] = self._output[row], "length"
        log.status[row] = int(Status.FINISHED)
        self._ended(row, now_s + self._way_out_s[row])

    def _request(self, row: int) -> Request:
        """A request as the scheduler sees it, at the start of its way."""
        log = self.log
        keys: Sequence[int] = ()
        if self._has_keys[row] and self.config.enable_prefix_caching:
            keys = self.workload.page_keys(row, self.config.page_tokens)
            if self.server is not None and self.server.beams is not None:
                keys = self.server.beams.found(keys)
        tenant = self._tenant[row]
        request = Request(
            row,
            self._prompt[row],
            self._output[row],
            log.queued_s[row],
            self._priority[row],
            log.sent_s[row] + self._deadline_s[tenant],
            None,
            keys,
            tenant,
            self._weight[tenant],
        )
        if self._turn is not None and self._first_turn[row] >= 0:
            request.session, request.turn = self._first_turn[row], self._turn[row]
        if self.net is not None:
            self.net.requests[row] = request
        return request

    def _finished(self, request: Request, now_s: float) -> None:
        assert isinstance(request.id, int)
        assert not isinstance(self.router, Fleet)
        self.router.finished()
        self._ended(request.id, now_s + self._way_out_s[request.id])

    def _ended(self, row: int, client_s: float) -> None:
        """The client has its answer (or its refusal) at `client_s`."""
        self.done += 1
        if self.repeats is not None and self.log.status[row] == Status.FINISHED:
            self._answered.add(self.repeats[row])
        if self.done == len(self.workload):
            self._all_done.succeed()
        if self.net is not None:
            self.net.ended(row)
        elif self._seats < math.inf or self._next_turns:
            self.clock.call_at(max(client_s, self.clock.now), lambda: self._client_done(row))

    def _abort(self, row: int) -> None:
        """The client of a request has been cut off: its engine stops."""
        assert self.net is not None
        request = self.net.requests[row]
        self.replicas[self.log.replica[row]].abort(request, TOO_SLOW)

    def _client_done(self, row: int) -> None:
        self._seats += 1
        if self._ready:
            self._ready_to_send(self._ready.popleft())
        for turn in self._next_turns.pop(row, ()):
            ready_s = max(
                self.clock.now + float(self.workload.think_s[turn]), float(self.workload.sent_s[turn])
            )
            self.clock.call_at(ready_s, lambda turn=turn: self._ready_to_send(turn))  # type: ignore[misc]

    # ---- running -------------------------------------------------------------------------------------------

    def run(self, until_s: float, progress: Callable[[Progress], None] | None) -> bool:
        """Advance simulated time; True when the user interrupted it."""
        try:
            if progress is None and until_s == math.inf:
                self._run_to_the_end()
            else:
                self._run_with_progress(until_s, progress)
        except KeyboardInterrupt:
            self._stop(self.clock.now)
            return True
        return False

    def _stop(self, at_s: float) -> None:
        """The steps of leaps in progress that are over at `at_s` have happened."""
        for replica in self.replicas if self.fleet is None else self.fleet.replicas:
            replica.stop(at_s)

    def _run_to_the_end(self) -> None:
        step, done = self.clock.step, self._all_done
        queue_empty = math.inf
        while not done.processed and self.clock.peek() != queue_empty:
            step()

    def _run_with_progress(self, until_s: float, progress: Callable[[Progress], None] | None) -> None:
        started_s = told_s = time.perf_counter()
        step, done, peek = self.clock.step, self._all_done, self.clock.peek
        count = 0
        while not done.processed and peek() <= until_s and peek() != math.inf:
            step()
            count += 1
            if progress is not None and not count & 255:
                now_s = time.perf_counter()
                if now_s - told_s >= _PROGRESS_EVERY_S:
                    told_s = now_s
                    progress(Progress(self.clock.now, self.done, len(self.workload), now_s - started_s))
        if until_s < math.inf and not done.processed:
            self._stop(until_s)
        if progress is not None:
            wall_s = time.perf_counter() - started_s
            progress(Progress(self.clock.now, self.done, len(self.workload), wall_s))

    # ---- the record ----------------------------------------------------------------------------------------

    def record(self, interrupted: bool) -> RunRecord:
        """Everything that happened, as tables."""
        log, workload, server = self.log, self.workload, self.server
        if self.fleet is not None:
            self.replicas = self.fleet.replicas
        for replica in self.replicas:
            replica.settle()
        if self.net is not None:
            self.net.finish()
        if self.server is not None:
            self.server.settle()
        log.drop_guests()
        steps = step_table([replica.steps for replica in self.replicas])
        logs = [replica.steps for replica in self.replicas]
        last_token_s = np.full(len(workload), np.nan)
        base = np.cumsum([0, *(len(steps_of) for steps_of in logs[:-1])])
        for row, replica_index, first, count, *_ in log.ranges:
            last_token_s[row] = steps.end_s[base[replica_index] + first + count - 1]
        if self.repeats is not None:
            done_s, done = np.array(log.engine_done_s), np.array(log.status) == Status.FINISHED
            cached = done & (np.array(log.replica) < 0)
            last_token_s[cached] = done_s[cached]
        requests, rows = request_table(
            log,
            prompt_tokens=workload.prompt_tokens,
            max_output_tokens=workload.output_tokens,
            tenant=workload.tenant,
            rtt_s=self.rtt_s,
            overhead_s=self.frontend.overhead_s,
            tokenize_s=self.tokenize_s,
            detokenize_s=self.frontend.detokenize_s_per_token,
            last_token_s=last_token_s,
        )
        deliveries = None
        if self.net is not None:
            requests, deliveries = self.net.table(requests, rows)
        warnings = list(workload.warnings)
        unsent = len(workload) - len(rows)
        unfinished = int(np.count_nonzero(requests.status == Status.UNFINISHED))
        if unfinished or unsent:
            warnings.append(
                f"{unfinished + unsent} of {len(workload)} requests had not ended when the run did"
            )
        return RunRecord(
            requests=requests,
            steps=steps,
            tokens=log.token_ranges(rows, logs),
            tenants=workload.tenants,
            num_pages=self.config.num_pages,
            page_tokens=self.config.page_tokens,
            num_replicas=len(self.replicas),
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            end_s=float(steps.end_s.max()) if len(steps) else float(self.clock.now),
            interrupted=interrupted,
            warnings=tuple(warnings),
            drafts=total(replica.drafts for replica in self.replicas),
            draft_steps=draft_steps([r.draft_log for r in self.replicas], [len(log) for log in logs]),
            beams=None if server is None or server.beams is None else server.beams.counts,
            candidates=None if server is None or server.candidates is None else server.candidates.counts,
            deliveries=deliveries,
            fleet=None if self.fleet is None else self.fleet.record(rows),
        )


def session_names(workload: Workload) -> Callable[[Request], int | None]:
    """What names the session of a request: its first turn's row; None for one that has no other turns."""
    names = [row if row >= 0 else None for row in workload.conversations()[0].tolist()]

    def name(request: Request) -> int | None:
        assert isinstance(request.id, int)
        return names[request.id]

    return name
