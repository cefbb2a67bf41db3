"""One engine as a SimPy process: plan, take the time the cost model says, commit.

This is the whole loop that the real engine runs on tensors. With asynchronous scheduling the next step is planned when
the current one starts, before its tokens are known; a step then lasts as long as the device or the host takes, whichever
is longer. While consecutive steps are all alike the process leaps over them (`serving.leap`), priced in one vector
expression, and an arrival cuts the leap at the next step boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import numpy as np
from simpy.events import Event

from costmodel.prices import Prices
from serving.draft_counts import DraftCounts
from serving.draft_steps import DraftLog
from serving.leap import leap, steady_steps
from serving.plan import StepPlan
from serving.request import Request
from serving.scheduler import Scheduler
from sim.clock import STEP, Clock
from sim.log import RequestLog, StepLog
from sim.noise import NoiseStream
from sim.pipeline import serve_pipeline
from sim.record import Floats, Status
from sim.speculation import Speculation

if TYPE_CHECKING:
    from sim.api_server import ApiServer

MAX_LEAP = 4096


class Replica:
    """An engine: a scheduler, a price list and a process. `finished(request, time_s)` is told of every end."""

    def __init__(
        self,
        clock: Clock,
        index: int,
        scheduler: Scheduler,
        pricer: Prices,
        requests: RequestLog,
        finished: Callable[[Request, float], None],
        *,
        fast_forward: bool = True,
        noise: NoiseStream | None = None,
        speculation: Speculation | None = None,
        server: ApiServer | None = None,
    ) -> None:
        self.clock = clock
        self.index = index
        # Boundaries of several replicas at the very same time are taken in order of replica, leaping or not.
        self._priority = STEP + index
        self.scheduler = scheduler
        self.pricer = pricer
        self.steps = StepLog()
        self._requests = requests
        self._finished = finished
        self._server = server
        """Who makes several requests of one, where there are such requests."""
        self.coming = 0
        """Requests that it is about to send."""
        self._fast_forward = fast_forward
        self._noise = noise
        self.now_s = 0.0
        self._idle: Event | None = None
        self._leap_ends_s: Floats | None = None
        self._leap_timer: Event | None = None
        self._cut_at: int | None = None
        self._over = False
        """The run has ended within the leap in progress."""
        self._charged = 0
        """Steps of the leap in progress that are on the tenants' accounts under fair sharing."""
        self._moved: Event | None = None
        self._unread: list[tuple[Request, str]] = []
        """Requests to stop at the next step boundary, and why."""
        self._starts: dict[int, int] = {}
        self._speculator = None if speculation is None else speculation.perturbed(pricer).speculator()
        requests.speculates |= speculation is not None
        self._open: dict[int, tuple[int, int, int]] = {}
        """By request whose steps may give several tokens: its last range (first step, steps, tokens in each)."""
        self.process = clock.process(self._loop())

    def _loop(self) -> Generator[Event, object, None]:
        if self.scheduler.config.pipelined:
            return serve_pipeline(self)
        return self._serve_async() if self.scheduler.config.async_scheduling else self._serve()

    # ---- failures ------------------------------------------------------------------------------------------

    def halt(self) -> list[tuple[Request, int]]:
        """Stop dead: the step in progress is lost, and so is all KV.

        Returns the unfinished requests as they arrived, with the tokens that each has been given. Steps of a leap that
        are over by now are logged first.
        """
        passed, over = self.clock.boundary, self._steps_over()
        self._detach()
        if over:
            assert self._leap_timer is not None
            self._cut_at = over - 1
            self.process._resume(self._leap_timer)
            self._detach()
            self.clock.boundary = passed
        self._idle = self._leap_ends_s = self._leap_timer = None
        self._starts, self._open, self.coming = {}, {}, 0
        known = self.scheduler.seqs.known
        lost = [
            (each, (int(known[each.slot]) if each.slot >= 0 else each.num_tokens) - each.prompt_tokens)
            for each in self.scheduler.unfinished()
        ]
        return lost if self._server is None else self._server.halted(self, lost)

    def restart(self, scheduler: Scheduler) -> None:
        """Begin again with an empty engine; the log goes on."""
        self._detach()
        self.scheduler = scheduler
        self._idle = self._leap_ends_s = self._leap_timer = None
        self.now_s = self.clock.now
        self.process = self.clock.process(self._loop())

    def _detach(self) -> None:
        """Nothing wakes the process any more."""
        for event in (self.process.target, self._moved):
            if event is not None and event.callbacks and self.process._resume in event.callbacks:
                event.callbacks.remove(self.process._resume)

    # ---- arrivals ------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Requests running or waiting here."""
        return self.scheduler.num_unfinished + self.coming

    @property
    def is_empty(self) -> bool:
        """Whether nothing that was sent here is without its end."""
        return not self.outstanding and (self._server is None or not self._server.holds(self))

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included; what a search or best-of has made of one is none."""
        waiting = self.scheduler.waiting
        if self._server is None:
            return len(waiting)
        return sum(self._row(request) < self._requests.count for request in waiting)

    @property
    def used_pages(self) -> int:
        """KV pages that running sequences hold now, within a leap too."""
        used = self.scheduler.used_pages
        if self._leap_ends_s is None:
            return used
        # The step in progress has been planned as well, under asynchronous scheduling the one after it.
        seqs, size = self.scheduler.seqs, self.scheduler.config.page_tokens
        slots = seqs.order_array()
        lacking = self._steps_over() + 1 - (seqs.capacity[slots] - seqs.computed[slots])
        return used + int(((lacking[lacking > 0] + size - 1) // size).sum())

    def submit(self, request: Request) -> bool:
        """A request is sent here. False when it is rejected."""
        return self.queue(request) if self._server is None else self._server.submit(request, self)

    def answered(self, request: Request, now_s: float) -> None:
        """The server has the whole answer to a request that was sent here."""
        self._finished(request, now_s)

    def queue(self, request: Request) -> bool:
        """A request reaches this engine's queue. False when the scheduler rejects it."""
        row = self._row(request)
        self._requests.replica[row] = self.index
        if self._leap_ends_s is not None and self.scheduler.fair is not None:
            # Whoever comes is lifted to what the others have been served by now.
            over = self._steps_over()
            self.scheduler.charge_outputs(self.scheduler.seqs.order_array(), over - self._charged)
            self._charged = over
        if not self.scheduler.add(request):
            self._requests.status[row] = int(Status.REJECTED)
            self._requests.reason[row] = request.reason
            return False
        if self._idle is not None:
            idle, self._idle = self._idle, None
            self._wake(idle)
        elif self._leap_ends_s is not None:
            self._cut()
        return True

    def abort(self, request: Request, reason: str) -> None:
        """Stop working for a request at the next step boundary: it fails, for `reason`."""
        self._unread.append((request, reason))
        if self._leap_ends_s is not None:
            self._cut()

    def _drop(self) -> None:
        for request, reason in self._unread:
            if request.done:
                continue
            row = self._row(request)
            known = self.scheduler.seqs.known
            self._close(request, int(known[request.slot]) if request.slot >= 0 else request.num_tokens)
            self._starts.pop(row, None)
            self.scheduler.abort(request)
            log = self._requests
            log.engine_done_s[row], log.status[row], log.reason[row] = self.now_s, int(Status.FAILED), reason
            self._finished(request, self.now_s)
        self._unread = []

    def _wake(self, idle: Event) -> None:
        self._moved = timer = self.clock.at(self.clock.now, self._priority)
        timer.callbacks, idle.callbacks = idle.callbacks, []

    @property
    def leap_ends_s(self) -> Floats:
        """Ends of the steps of the leap in progress that are over by now, none outside one."""
        if self._leap_ends_s is None:
            return np.empty(0)
        return self._leap_ends_s[: np.searchsorted(self._leap_ends_s, self.clock.now, side="right")]

    def open_range(self, request: Request) -> tuple[int, int, int] | None:
        """Steps that have given a running request tokens since its last range: the first, how many, tokens in each."""
        row = self._row(request)
        if self._speculator is not None or self.scheduler.config.pipelined:
            return self._open.get(row)
        if request.slot < 0 or row not in self._starts:
            return None
        produced = int(self.scheduler.seqs.known[request.slot]) - request.prompt_tokens
        count = produced - self._requests.output_tokens[row] + len(self.leap_ends_s)
        return (self._starts[row], count, 1) if count > 0 else None

    def _steps_over(self) -> int:
        """Steps of the leap that have ended, 0 outside one.

        A boundary at this very time is over if a replica after this one in order has already passed its own.
        """
        if self._leap_ends_s is None:
            return 0
        over = self.clock.boundary > (self.clock.now, self._priority)
        return int(np.searchsorted(self._leap_ends_s, self.clock.now, side="right" if over else "left"))

    def _cut(self) -> None:
        """End the leap at the first step boundary from now on."""
        assert self._leap_ends_s is not None
        assert self._leap_timer is not None
        at = self._steps_over()
        if self._cut_at is not None or at >= len(self._leap_ends_s) - 1:
            return
        self._cut_at = at
        self._moved = timer = self.clock.at(float(self._leap_ends_s[at]), self._priority)
        timer.callbacks, self._leap_timer.callbacks = self._leap_timer.callbacks, []

    def stop(self, at_s: float) -> None:
        """The run ends at `at_s`, before which nothing else happens: log the steps of a leap that are over by then."""
        if self._leap_ends_s is None or not (
            over := int(np.searchsorted(self._leap_ends_s, at_s, side="right"))
        ):
            return
        assert self._leap_timer is not None
        self._detach()
        self._cut_at, self._over = over - 1, True
        self.process._resume(self._leap_timer)

    def _sleep(self) -> Generator[Event, object, None]:
        """Wait until somebody arrives or the policy wants to be asked again."""
        wake_s = self.scheduler.wake_s
        if wake_s < float("inf"):
            timer = self.clock.at(max(wake_s, self.clock.now), self._priority)
            self._idle = timer
            yield timer
        else:
            self._idle = Event(self.clock)
            yield self._idle
        self._idle = None
        self.now_s = max(self.now_s, self.clock.now)

    # ---- the loop, synchronous and asynchronous ------------------------------------------------------------

    def _serve(self) -> Generator[Event, object, None]:
        scheduler, clock = self.scheduler, self.clock
        while True:
            if self._unread:
                self._drop()
            plan = scheduler.plan(self.now_s)
            if plan is None:
                yield from self._sleep()
                continue
            self._admit(plan)
            self._leave(plan)
            if not len(plan):
                continue
            gpu_s, host_s = self._price(plan, len(self.steps))
            start_s, end_s = self.now_s, self.now_s + (host_s + gpu_s)
            yield clock.at(end_s, self._priority)
            self.now_s = end_s
            clock.boundary = (end_s, self._priority)
            self._commit(plan, start_s, gpu_s, host_s)
            if self._fast_forward and not self._unread and (steps := self._steps_to_leap(plan, gpu_s)):
                context_sum = plan.decode_context_sum + len(plan)
                context_max = plan.decode_context_max + 1
                gpu = self._price_leap(plan, context_sum, context_max, steps)
                steps = yield from self._leap(steps, gpu, gpu + host_s, host_s, context_sum, plan)
                leap(scheduler, steps, charged=self._charged)
                if self._over:
                    return

    def _serve_async(self) -> Generator[Event, object, None]:
        scheduler, clock = self.scheduler, self.clock
        current: StepPlan | None = None
        gpu_s = host_s = 0.0
        while True:
            if self._unread:
                self._drop()
            if self._fast_forward and current is not None and (steps := self._steps_to_leap(current, gpu_s)):
                gpu = self._price_leap(current, current.decode_context_sum, current.decode_context_max, steps)
                context_sum = current.decode_context_sum
                steps = yield from self._leap(
                    steps, gpu, np.maximum(gpu, host_s), host_s, context_sum, current
                )
                leap(scheduler, steps, current, self._charged)
                if self._over:
                    return
                gpu_s = self._price(current, len(self.steps))[0]
                if self._unread:
                    self._drop()
            ahead = scheduler.plan(self.now_s)
            if ahead is not None:
                self._admit(ahead)
            has_rows = ahead is not None and len(ahead) > 0
            if has_rows:
                assert ahead is not None
                next_gpu_s, next_host_s = self._price(ahead, len(self.steps) + (current is not None))
            if current is None:
                if ahead is not None:
                    self._leave(ahead)
                if has_rows:
                    self.now_s += next_host_s
                    yield clock.at(self.now_s, self._priority)
                    current, gpu_s, host_s = ahead, next_gpu_s, next_host_s
                elif ahead is None:
                    yield from self._sleep()
                continue
            start_s = self.now_s
            self.now_s = start_s + (max(gpu_s, next_host_s) if has_rows else gpu_s)
            yield clock.at(self.now_s, self._priority)
            clock.boundary = (self.now_s, self._priority)
            self._commit(current, start_s, gpu_s, host_s)
            if ahead is not None:
                self._leave(ahead)
            current = ahead if has_rows else None
            if has_rows:
                gpu_s, host_s = next_gpu_s, next_host_s

    def _price(self, plan: StepPlan, step: int) -> tuple[float, float]:
        """Device and host time of a plan that will be logged as step number `step`."""
        if self._speculator is not None:
            return self._price_drafts(plan, step)
        decodes = plan.num_decodes + plan.num_padding
        context_sum = plan.decode_context_sum + plan.num_padding * plan.decode_context_max
        gpu_s = self.pricer.step_s(
            plan.num_tokens + plan.num_padding,
            plan.num_sampled + plan.num_padding,
            [(chunk.num_tokens, chunk.context) for chunk in plan.chunks],
            decodes,
            context_sum,
            plan.decode_context_max,
        )
        if plan.swap_out or plan.swap_in:
            gpu_s += self.pricer.move_s(sum(len(move.sources) for move in (*plan.swap_out, *plan.swap_in)))
        if self._noise is not None:
            gpu_s = gpu_s * self._noise.at(step)
            if self._noise.stalls_any:
                gpu_s = gpu_s + self._noise.stall_at(step)
        return gpu_s, self.pricer.host_s(len(plan.slots) + plan.num_padding, plan.num_tokens)

    def _price_drafts(self, plan: StepPlan, step: int) -> tuple[float, float]:
        """The same with drafts to verify and to make."""
        assert self._speculator is not None
        self._speculator.note(step, plan)
        gpu_s = self._speculator.step_s(self.pricer, plan)
        if plan.swap_out or plan.swap_in:
            gpu_s += self.pricer.move_s(sum(len(move.sources) for move in (*plan.swap_out, *plan.swap_in)))
        if self._noise is not None:
            gpu_s = gpu_s * self._noise.at(step)
            if self._noise.stalls_any:
                gpu_s = gpu_s + self._noise.stall_at(step)
        return gpu_s, self.pricer.host_s(len(plan), plan.num_tokens) + self._speculator.host_s(plan)

    def _price_leap(self, plan: StepPlan, context_sum: int, context_max: int, steps: int) -> Floats:
        padding = plan.num_padding
        gpu_s = self.pricer.decode_run_s(
            len(plan) + padding, context_sum + padding * context_max, context_max, steps
        )
        if self._noise is None:
            return gpu_s
        first = len(self.steps)
        gpu_s = gpu_s * self._noise.run(first, steps)
        return gpu_s + self._noise.stall_run(first, steps) if self._noise.stalls_any else gpu_s

    def _steps_to_leap(self, plan: StepPlan, step_s: float) -> int:
        """Steps to leap over: about as many as fit before the next event, 0 where too few to be worth it."""
        scheduler = self.scheduler
        if plan.chunks or len(plan) != scheduler.num_running or not step_s > 0:
            return 0
        if plan.num_padding != scheduler.policy.padding(scheduler) or plan.swap_out or plan.swap_in:
            return 0
        expected = (self.clock.peek() - self.now_s) / step_s
        if expected < 3:
            return 0
        steps = steady_steps(self.scheduler, plan if self.scheduler.config.async_scheduling else None)
        if steps < 3:
            return 0
        return min(steps, MAX_LEAP, int(expected) + 2) if expected < MAX_LEAP else min(steps, MAX_LEAP)

    def _leap(
        self, steps: int, gpu: Floats, step_s: Floats, host_s: float, context_sum: int, plan: StepPlan
    ) -> Generator[Event, object, int]:
        """Sleep through up to `steps` steps and log them; returns how many were run before somebody arrived."""
        ends_s = np.cumsum(np.concatenate(((self.now_s,), step_s)))
        num_waiting = self.scheduler.num_waiting
        self._leap_ends_s, self._cut_at, self._charged = ends_s[1:], None, 0
        self._leap_timer = self.clock.at(float(ends_s[-1]), self._priority)
        yield self._leap_timer
        if self._cut_at is not None:
            steps = self._cut_at + 1
        self._leap_ends_s = self._leap_timer = None
        self.now_s = float(ends_s[steps])
        self.clock.boundary = (self.now_s, self._priority)
        rows = len(plan)
        # Pages as single steps would have logged them: each sequence holds what its tokens so far need.
        seqs, size = self.scheduler.seqs, self.scheduler.config.page_tokens
        slots = seqs.order_array()
        slack = seqs.capacity[slots] - seqs.computed[slots]
        taken_at = [np.arange(first, steps, size) for first in slack.tolist() if first < steps]
        grown = np.zeros(steps + 1, np.int64)
        if taken_at:
            np.add.at(grown, np.concatenate(taken_at), 1)
        used = self.scheduler.used_pages + np.cumsum(grown)[:steps]
        block = np.zeros((steps, 15))
        block[:, 0] = ends_s[:steps]
        block[:, 1] = ends_s[1 : steps + 1]
        block[:, 2] = gpu[:steps]
        block[:, 3] = host_s
        block[:, 4] = rows
        block[:, 7] = rows
        block[:, 8] = context_sum + rows * np.arange(steps)
        block[:, 11] = rows
        block[:, 12] = num_waiting
        block[:, 13] = used
        if self.scheduler.config.async_scheduling:
            # The first step is the one in flight, planned before the leap; the last plan is in flight after it.
            block[1:, 13] = used[:-1]
            block[0, 11:14] = plan.num_running, plan.num_waiting, plan.used_pages
            plan.num_running, plan.num_waiting = rows, num_waiting
        self.steps.add_block(block)
        return steps

    # ---- bookkeeping ---------------------------------------------------------------------------------------

    @staticmethod
    def _row(request: Request) -> int:
        assert isinstance(request.id, int)
        return request.id

    def _admit(self, plan: StepPlan) -> None:
        log = self._requests
        for request, cached_tokens, resumed in plan.admitted:
            if not resumed:
                row = self._row(request)
                log.scheduled_s[row] = self.now_s
                log.cached_tokens[row] = cached_tokens

    def _leave(self, plan: StepPlan) -> None:
        """Requests that planning took out of the running set: their token stream stops here for now."""
        for request in plan.preempted:
            self._requests.preemptions[self._row(request)] += 1
            self._close(request, request.num_tokens)
        for request in plan.truncated:
            self._end(request)

    def _close(self, request: Request, num_tokens: int) -> None:
        """Write down the tokens of `request` since its last range, which lie in consecutive steps."""
        row = self._row(request)
        if self._speculator is not None or self.scheduler.config.pipelined:
            if (last := self._open.pop(row, None)) is not None:
                self._requests.ranges.append((row, self.index, *last))
            return
        produced = num_tokens - request.prompt_tokens
        count = produced - self._requests.output_tokens[row]
        if count > 0:
            self._requests.ranges.append((row, self.index, self._starts[row], count))
            self._requests.output_tokens[row] = produced

    def _end(self, request: Request) -> None:
        self._close(request, request.num_tokens)
        row = self._row(request)
        self._starts.pop(row, None)
        log = self._requests
        log.engine_done_s[row] = self.now_s
        log.status[row] = int(Status.FINISHED)
        log.reason[row] = request.reason
        if self._server is None or not self._server.ended(request, self.now_s):
            self._finished(request, self.now_s)

    def _commit(self, plan: StepPlan, start_s: float, gpu_s: float, host_s: float) -> None:
        """Log the step that ended now, give out its tokens and let go of who finished."""
        scheduler = self.scheduler
        step = len(self.steps)
        tokens = area = context = 0
        for request, count, before, last in plan.chunks:
            tokens += count
            area += count * before + count * (count + 1) // 2
            context += before + count
            if last:
                row = self._row(request)
                self._starts[row] = step
                if self._requests.prefill_done_s[row] != self._requests.prefill_done_s[row]:
                    self._requests.prefill_done_s[row] = self.now_s
        for slot in plan.starved:
            if (starved := scheduler.seqs.requests[slot]) is not None:
                self._close(starved, int(scheduler.seqs.known[slot]))
                self._starts[self._row(starved)] = step + 1
        self.steps.add(
            (
                start_s,
                self.now_s,
                gpu_s,
                host_s,
                plan.num_tokens,
                tokens,
                len(plan.chunks),
                plan.num_decodes,
                plan.decode_context_sum,
                float(area),
                context,
                plan.num_running,
                plan.num_waiting,
                plan.used_pages,
                len(plan.preempted),
            )
        )
        finished = scheduler.commit(plan) if self._speculator is None else self._commit_drafts(plan, step)
        for ended in finished:
            self._end(ended)

    def _commit_drafts(self, plan: StepPlan, step: int) -> list[Request]:
        """Draw which drafts stand, and write down how many tokens each request got."""
        assert self._speculator is not None
        outcome, rows, given = self._speculator.outcome(plan, self.scheduler)
        for request, count in zip(rows, given.tolist(), strict=True):
            if request is not None and count:
                self.give(request, step, count)
        return self.scheduler.commit(plan, outcome)

    def give(self, request: Request, step: int, count: int = 1) -> None:
        """Write down `count` tokens of a step for a request whose tokens need not lie one in each step."""
        log, last, row = self._requests, self._open, self._row(request)
        log.output_tokens[row] += count
        if (before := last.get(row)) is not None:
            if before[2] == count and before[0] + before[1] == step:
                last[row] = (before[0], before[1] + 1, count)
                return
            log.ranges.append((row, self.index, *before))
        last[row] = (step, 1, count)

    @property
    def drafts(self) -> DraftCounts | None:
        """What became of drafts here; None where none are made."""
        return None if self._speculator is None else self._speculator.counts

    @property
    def draft_log(self) -> DraftLog | None:
        """What drafts add to the work of its steps; None where none are made."""
        return None if self._speculator is None else self._speculator.steps

    def settle(self) -> None:
        """Write down what unfinished requests have produced so far, when a run ends before they do."""
        seqs = self.scheduler.seqs
        for request in list(self.scheduler.running()):
            produced = int(seqs.known[request.slot]) - request.prompt_tokens
            if produced > 0 and self._row(request) in self._starts:
                self._close(request, request.prompt_tokens + produced)
        # Tokens that arrived after their request was preempted.
        self._requests.ranges += [(row, self.index, *last) for row, last in self._open.items()]
        self._open = {}
