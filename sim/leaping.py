"""A replica's leap over steps that are all alike: how far, how it is cut short, what it leaves in the log."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
from simpy.events import Event

from serving.leap import leap, steady_steps
from serving.plan import StepPlan
from serving.scheduler import Scheduler
from sim.clock import Clock
from sim.log import StepLog
from sim.record import Floats

MAX_LEAP = 4096


class Leap:
    """The leap in progress, if any. Its steps are logged and applied when it wakes, as many as were run."""

    def __init__(self, clock: Clock, priority: int, steps: StepLog) -> None:
        self._clock, self._priority, self._steps = clock, priority, steps
        self.ends_s: Floats | None = None
        """Ends of its steps; None outside one."""
        self.timer: Event | None = None
        self.is_last = False
        """The run has ended within it."""
        self._cut_at: int | None = None
        self._charged = 0
        """Steps that are on the tenants' accounts under fair sharing."""

    def forget(self) -> None:
        """The replica failed."""
        self.ends_s = self.timer = None

    # ---- how far -------------------------------------------------------------------------------------------

    def length(self, scheduler: Scheduler, plan: StepPlan, step_s: float, now_s: float) -> int:
        """Steps to leap over: about as many as fit before the next event, 0 where too few to be worth it."""
        if plan.chunks or len(plan) != scheduler.num_running or not step_s > 0:
            return 0
        if plan.num_padding != scheduler.policy.padding(scheduler) or plan.swap_out or plan.swap_in:
            return 0
        expected = (self._clock.peek() - now_s) / step_s
        if expected < 3:
            return 0
        steps = steady_steps(scheduler, plan if scheduler.config.async_scheduling else None)
        if steps < 3:
            return 0
        return min(steps, MAX_LEAP, int(expected) + 2) if expected < MAX_LEAP else min(steps, MAX_LEAP)

    def run(
        self,
        scheduler: Scheduler,
        plan: StepPlan,
        now_s: float,
        gpu_s: Floats,
        step_s: Floats,
        host_s: float,
        context_sum: int,
    ) -> Generator[Event, object, float]:
        """Sleep through up to `len(step_s)` steps and log them; returns when the last of those that were run ended."""
        steps = len(step_s)
        ends_s = np.cumsum(np.concatenate(((now_s,), step_s)))
        num_waiting = scheduler.num_waiting
        self.ends_s, self._cut_at, self._charged = ends_s[1:], None, 0
        self.timer = self._clock.at(float(ends_s[-1]), self._priority)
        yield self.timer
        if self._cut_at is not None:
            steps = self._cut_at + 1
        self.ends_s = self.timer = None
        now_s = float(ends_s[steps])
        self._clock.boundary = (now_s, self._priority)
        asynchronous = scheduler.config.async_scheduling
        self._log(scheduler, plan, ends_s[: steps + 1], gpu_s[:steps], host_s, context_sum, num_waiting)
        leap(scheduler, steps, plan if asynchronous else None, self._charged)
        return now_s

    def _log(
        self,
        scheduler: Scheduler,
        plan: StepPlan,
        ends_s: Floats,
        gpu_s: Floats,
        host_s: float,
        context_sum: int,
        num_waiting: int,
    ) -> None:
        rows, steps = len(plan), len(gpu_s)
        # Pages as single steps would have logged them: each sequence holds what its tokens so far need.
        seqs, size = scheduler.seqs, scheduler.config.page_tokens
        slots = seqs.order_array()
        slack = seqs.capacity[slots] - seqs.computed[slots]
        taken_at = [np.arange(first, steps, size) for first in slack.tolist() if first < steps]
        grown = np.zeros(steps + 1, np.int64)
        if taken_at:
            np.add.at(grown, np.concatenate(taken_at), 1)
        used = scheduler.used_pages + np.cumsum(grown)[:steps]
        block = np.zeros((steps, 15))
        block[:, 0] = ends_s[:-1]
        block[:, 1] = ends_s[1:]
        block[:, 2] = gpu_s
        block[:, 3] = host_s
        block[:, 4] = rows
        block[:, 7] = rows
        block[:, 8] = context_sum + rows * np.arange(steps)
        block[:, 11] = rows
        block[:, 12] = num_waiting
        block[:, 13] = used
        if scheduler.config.async_scheduling:
            # The first step is the one in flight, planned before the leap; the last plan is in flight after it.
            block[1:, 13] = used[:-1]
            block[0, 11:14] = plan.num_running, plan.num_waiting, plan.used_pages
            plan.num_running, plan.num_waiting = rows, num_waiting
        self._steps.add_block(block)

    # ---- looked at and cut short ---------------------------------------------------------------------------

    @property
    def passed_s(self) -> Floats:
        """Ends of its steps that are over by now, none outside one."""
        if self.ends_s is None:
            return np.empty(0)
        return self.ends_s[: np.searchsorted(self.ends_s, self._clock.now, side="right")]

    @property
    def steps_over(self) -> int:
        """Steps that have ended, 0 outside one.

        A boundary at this very time is over if a replica after this one in order has already passed its own.
        """
        if self.ends_s is None:
            return 0
        over = self._clock.boundary > (self._clock.now, self._priority)
        return int(np.searchsorted(self.ends_s, self._clock.now, side="right" if over else "left"))

    def pages_taken(self, scheduler: Scheduler) -> int:
        """KV pages that the leap has taken so far."""
        if self.ends_s is None:
            return 0
        # The step in progress has been planned as well, under asynchronous scheduling the one after it.
        seqs, size = scheduler.seqs, scheduler.config.page_tokens
        slots = seqs.order_array()
        lacking = self.steps_over + 1 - (seqs.capacity[slots] - seqs.computed[slots])
        return int(((lacking[lacking > 0] + size - 1) // size).sum())

    def charge(self, scheduler: Scheduler) -> None:
        """Put the steps so far on the tenants' accounts: whoever comes is lifted to what others have had by now."""
        over = self.steps_over
        scheduler.charge_outputs(scheduler.seqs.order_array(), over - self._charged)
        self._charged = over

    def cut(self) -> Event | None:
        """End the leap at the first step boundary from now on. The timer that wakes it; None if it ends there anyway."""
        assert self.ends_s is not None
        assert self.timer is not None
        at = self.steps_over
        if self._cut_at is not None or at >= len(self.ends_s) - 1:
            return None
        self._cut_at = at
        timer = self._clock.at(float(self.ends_s[at]), self._priority)
        timer.callbacks, self.timer.callbacks = self.timer.callbacks, []
        return timer

    def end_after(self, steps: int) -> None:
        """So many steps were run, whoever wakes it."""
        self._cut_at = steps - 1
