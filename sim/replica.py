"""One engine as a SimPy process: plan, take the time the cost model says, commit.

This is the whole loop that the real engine runs on tensors. With asynchronous scheduling the next step is planned when
the current one starts, before its tokens are known; a step then lasts as long as the device or the host takes, whichever
is longer. While consecutive steps are all alike the process leaps over them (`sim.leaping`), priced in one vector
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
from serving.plan import StepPlan
from serving.request import Request
from serving.scheduler import Scheduler
from sim.books import Books, row_of
from sim.clock import STEP, Clock
from sim.leaping import Leap
from sim.log import RequestLog
from sim.noise import NoiseStream
from sim.pipeline import serve_pipeline
from sim.record import Floats, Status
from sim.speculation import Speculation
from sim.step_costs import StepCosts

if TYPE_CHECKING:
    from sim.api_server import ApiServer


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
        self.priority = STEP + index
        """Boundaries of several replicas at the very same time are taken in order of replica, leaping or not."""
        self.scheduler = scheduler
        speculator = None if speculation is None else speculation.perturbed(pricer).speculator()
        requests.speculates |= speculation is not None
        self.costs = StepCosts(pricer, noise, speculator)
        self.books = Books(index, scheduler, requests, finished, server, speculator)
        self.steps = self.books.steps
        self._leap = Leap(clock, self.priority, self.steps)
        self._requests, self._finished, self._server = requests, finished, server
        self.coming = 0
        """Requests that the API server is about to send."""
        self._fast_forward = fast_forward
        self.now_s = 0.0
        self._idle: Event | None = None
        self._moved: Event | None = None
        self._unread: list[tuple[Request, str]] = []
        """Requests to stop at the next step boundary, and why."""
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
        passed, over = self.clock.boundary, self._leap.steps_over
        self._detach()
        if over:
            self._resume_after(over)
            self._detach()
            self.clock.boundary = passed
        self._idle, self.coming = None, 0
        self._leap.forget()
        known = self.scheduler.seqs.known
        lost = [
            (each, (int(known[each.slot]) if each.slot >= 0 else each.num_tokens) - each.prompt_tokens)
            for each in self.scheduler.unfinished()
        ]
        self.books.restart(self.scheduler)
        return lost if self._server is None else self._server.halted(self, lost)

    def restart(self, scheduler: Scheduler) -> None:
        """Begin again with an empty engine; the log goes on."""
        self._detach()
        self.scheduler = scheduler
        self.books.restart(scheduler)
        self._idle = None
        self._leap.forget()
        self.now_s = self.clock.now
        self.process = self.clock.process(self._loop())

    def stop(self, at_s: float) -> None:
        """The run ends at `at_s`, before which nothing else happens: log the steps of a leap that are over by then."""
        ends_s = self._leap.ends_s
        if ends_s is not None and (over := int(np.searchsorted(ends_s, at_s, side="right"))):
            self._detach()
            self._leap.is_last = True
            self._resume_after(over)

    def _resume_after(self, steps: int) -> None:
        timer = self._leap.timer
        assert timer is not None
        self._leap.end_after(steps)
        self.process._resume(timer)

    def _detach(self) -> None:
        """Nothing wakes the process any more."""
        for event in (self.process.target, self._moved):
            if event is not None and event.callbacks and self.process._resume in event.callbacks:
                event.callbacks.remove(self.process._resume)

    # ---- what is here --------------------------------------------------------------------------------------

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
        return sum(row_of(request) < self._requests.count for request in waiting)

    @property
    def used_pages(self) -> int:
        """KV pages that running sequences hold now, within a leap too."""
        return self.scheduler.used_pages + self._leap.pages_taken(self.scheduler)

    @property
    def leap_ends_s(self) -> Floats:
        """Ends of the steps of the leap in progress that are over by now, none outside one."""
        return self._leap.passed_s

    def open_range(self, request: Request) -> tuple[int, int, int] | None:
        """Steps that have given a running request tokens since its last range: the first, how many, tokens in each."""
        return self.books.open_range(request, len(self._leap.passed_s))

    @property
    def drafts(self) -> DraftCounts | None:
        """What became of drafts here; None where none are made."""
        return None if self.costs.speculator is None else self.costs.speculator.counts

    @property
    def draft_log(self) -> DraftLog | None:
        """What drafts add to the work of its steps; None where none are made."""
        return None if self.costs.speculator is None else self.costs.speculator.steps

    # ---- arrivals ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> bool:
        """A request is sent here. False when it is rejected."""
        return self.queue(request) if self._server is None else self._server.submit(request, self)

    def answered(self, request: Request, now_s: float) -> None:
        """The server has the whole answer to a request that was sent here."""
        self._finished(request, now_s)

    def queue(self, request: Request) -> bool:
        """A request reaches this engine's queue. False when the scheduler rejects it."""
        row, leap = row_of(request), self._leap
        self._requests.replica[row] = self.index
        if leap.ends_s is not None and self.scheduler.fair is not None:
            leap.charge(self.scheduler)
        if not self.scheduler.add(request):
            self._requests.status[row] = int(Status.REJECTED)
            self._requests.reason[row] = request.reason
            return False
        if self._idle is not None:
            self.wake()
        elif leap.ends_s is not None:
            self._moved = leap.cut() or self._moved
        return True

    def wake(self) -> None:
        """Let the loop plan again now, if it sleeps."""
        if self._idle is not None:
            idle, self._idle = self._idle, None
            self._moved = timer = self.clock.at(self.clock.now, self.priority)
            timer.callbacks, idle.callbacks = idle.callbacks, []

    def abort(self, request: Request, reason: str) -> None:
        """Stop working for a request at the next step boundary: it fails, for `reason`."""
        self._unread.append((request, reason))
        if self._leap.ends_s is not None:
            self._moved = self._leap.cut() or self._moved

    def drop_unread(self) -> None:
        """Stop working for those whose clients are gone."""
        for request, reason in self._unread:
            if not request.done:
                self.books.fail(request, self.now_s, reason)
        self._unread = []

    @property
    def wake_s(self) -> float:
        """When the policy wants to be asked again."""
        return self.scheduler.wake_s

    def sleep(self) -> Generator[Event, object, None]:
        """Wait until somebody arrives or the policy wants to be asked again."""
        wake_s = self.wake_s
        if wake_s < float("inf"):
            timer = self.clock.at(max(wake_s, self.clock.now), self.priority)
            self._idle = timer
            yield timer
        else:
            self._idle = Event(self.clock)
            yield self._idle
        self._idle = None
        self.now_s = max(self.now_s, self.clock.now)

    # ---- the loop, synchronous and asynchronous ------------------------------------------------------------

    def _serve(self) -> Generator[Event, object, None]:
        scheduler, clock, costs, books, leap = self.scheduler, self.clock, self.costs, self.books, self._leap
        while True:
            if self._unread:
                self.drop_unread()
            plan = scheduler.plan(self.now_s)
            if plan is None:
                yield from self.sleep()
                continue
            books.admit(plan, self.now_s)
            books.leave(plan, self.now_s)
            if not len(plan):
                continue
            gpu_s, host_s = costs.step_s(plan, len(self.steps))
            start_s, end_s = self.now_s, self.now_s + (host_s + gpu_s)
            yield clock.at(end_s, self.priority)
            self.now_s = end_s
            clock.boundary = (end_s, self.priority)
            books.commit(plan, start_s, end_s, gpu_s, host_s)
            if not self._fast_forward or self._unread:
                continue
            if steps := leap.length(scheduler, plan, gpu_s, end_s):
                context_sum = plan.decode_context_sum + len(plan)
                gpu = costs.leap_s(plan, context_sum, plan.decode_context_max + 1, len(self.steps), steps)
                self.now_s = yield from leap.run(
                    scheduler, plan, end_s, gpu, gpu + host_s, host_s, context_sum
                )
                if leap.is_last:
                    return

    def _serve_async(self) -> Generator[Event, object, None]:
        scheduler, clock, costs, books, leap = self.scheduler, self.clock, self.costs, self.books, self._leap
        current: StepPlan | None = None
        gpu_s = host_s = 0.0
        while True:
            if self._unread:
                self.drop_unread()
            if (
                self._fast_forward
                and current is not None
                and (steps := leap.length(scheduler, current, gpu_s, self.now_s))
            ):
                context_sum, longest = current.decode_context_sum, current.decode_context_max
                gpu = costs.leap_s(current, context_sum, longest, len(self.steps), steps)
                self.now_s = yield from leap.run(
                    scheduler, current, self.now_s, gpu, np.maximum(gpu, host_s), host_s, context_sum
                )
                if leap.is_last:
                    return
                gpu_s = costs.step_s(current, len(self.steps))[0]
                if self._unread:
                    self.drop_unread()
            ahead = scheduler.plan(self.now_s)
            if ahead is not None:
                books.admit(ahead, self.now_s)
            has_rows = ahead is not None and len(ahead) > 0
            if has_rows:
                assert ahead is not None
                next_gpu_s, next_host_s = costs.step_s(ahead, len(self.steps) + (current is not None))
            if current is None:
                if ahead is not None:
                    books.leave(ahead, self.now_s)
                if has_rows:
                    self.now_s += next_host_s
                    yield clock.at(self.now_s, self.priority)
                    current, gpu_s, host_s = ahead, next_gpu_s, next_host_s
                elif ahead is None:
                    yield from self.sleep()
                continue
            start_s = self.now_s
            self.now_s = start_s + (max(gpu_s, next_host_s) if has_rows else gpu_s)
            yield clock.at(self.now_s, self.priority)
            clock.boundary = (self.now_s, self.priority)
            books.commit(current, start_s, self.now_s, gpu_s, host_s)
            if ahead is not None:
                books.leave(ahead, self.now_s)
            current = ahead if has_rows else None
            if has_rows:
                gpu_s, host_s = next_gpu_s, next_host_s

    def settle(self) -> None:
        """Write down what unfinished requests have produced so far, when a run ends before they do."""
        self.books.settle()
