"""Data-parallel ranks that share their experts and therefore step together, as vLLM V1's engine cores do it.

Each rank has a scheduler and a KV cache of its own. A step of the group begins when all ranks have planned, lasts as
long as the slowest of them, and ends for all at once; a rank with nothing to do takes part in the others' steps, and
writes nothing down. The loops are those of a lone replica (`sim.replica`) with a plan for each rank. Nothing is leapt
over.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

from simpy.events import Event

from costmodel.prices import LockstepPrices
from serving.plan import StepPlan
from serving.request import Request
from sim.replica import Replica
from sim.step_costs import priced_step

Plans = list[StepPlan | None]


class Rank(Replica):
    """A replica whose steps are those of its group; the group's process is that of its first rank."""

    def __init__(self, group: Lockstep, *args: Any, **options: Any) -> None:
        self.group = group
        group.ranks.append(self)
        super().__init__(*args, **options)

    def _loop(self) -> Generator[Event, object, None]:
        group = self.group
        if self is not group.ranks[0]:
            return _led()
        return group.serve_async() if self.scheduler.config.async_scheduling else group.serve()

    @property
    def wake_s(self) -> float:
        """When a policy of the group wants to be asked again."""
        return min(rank.scheduler.wake_s for rank in self.group.ranks)

    def queue(self, request: Request) -> bool:
        """A request reaches this rank's queue, and wakes the group. False when the scheduler rejects it."""
        added = super().queue(request)
        if added:
            self.group.ranks[0].wake()
        return added


class Lockstep:
    """The ranks that step together, each of which joins as it is made."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.steps = 0
        """So many have ended."""

    def serve(self) -> Generator[Event, object, None]:
        """Synchronous scheduling."""
        first = self.ranks[0]
        while True:
            plans = self._plan()
            if all(plan is None for plan in plans):
                yield from self._sleep()
                continue
            self._leave(plans)
            rows = _with_rows(plans)
            if rows is None:
                continue
            gpu_s, host_s = self._price(rows, self.steps)
            start_s, end_s = first.now_s, first.now_s + (host_s + gpu_s)
            yield first.clock.at(end_s, first.priority)
            self._commit(rows, start_s, end_s, gpu_s, host_s)

    def serve_async(self) -> Generator[Event, object, None]:
        """Asynchronous scheduling: the next step is planned when the current one starts."""
        first = self.ranks[0]
        current: Plans | None = None
        gpu_s = host_s = next_gpu_s = next_host_s = 0.0
        while True:
            plans = self._plan()
            ahead = _with_rows(plans)
            if ahead is not None:
                next_gpu_s, next_host_s = self._price(ahead, self.steps + (current is not None))
            if current is None:
                self._leave(plans)
                if ahead is not None:
                    self._set_now(first.now_s + next_host_s)
                    yield first.clock.at(first.now_s, first.priority)
                    current, gpu_s, host_s = ahead, next_gpu_s, next_host_s
                elif all(plan is None for plan in plans):
                    yield from self._sleep()
                continue
            start_s = first.now_s
            end_s = start_s + (gpu_s if ahead is None else max(gpu_s, next_host_s))
            yield first.clock.at(end_s, first.priority)
            self._commit(current, start_s, end_s, gpu_s, host_s)
            self._leave(plans)
            current, gpu_s, host_s = ahead, next_gpu_s, next_host_s

    # ---- parts of a step -----------------------------------------------------------------------------------

    def _plan(self) -> Plans:
        plans = []
        for rank in self.ranks:
            rank.drop_unread()
            plan = rank.scheduler.plan(rank.now_s)
            if plan is not None:
                rank.books.admit(plan, rank.now_s)
            plans.append(plan)
        return plans

    def _leave(self, plans: Plans) -> None:
        for rank, plan in zip(self.ranks, plans, strict=True):
            if plan is not None:
                rank.books.leave(plan, rank.now_s)

    def _price(self, rows: Plans, step: int) -> tuple[float, float]:
        """(device time, host time) of the slowest rank, of what will be the group's step number `step`."""
        pricer = cast(LockstepPrices, self.ranks[0].costs.pricer)
        seconds = pricer.lockstep_s([None if plan is None else priced_step(plan) for plan in rows])
        gpu_s = host_s = 0.0
        for rank, plan, own_s in zip(self.ranks, rows, seconds, strict=True):
            costs = rank.costs
            if plan is not None:
                host_s = max(host_s, costs.host_s(plan))
                if plan.swap_out or plan.swap_in:
                    own_s += costs.moves_s(plan)
            gpu_s = max(gpu_s, costs.noisy(own_s, step))
        return gpu_s, host_s

    def _commit(self, rows: Plans, start_s: float, end_s: float, gpu_s: float, host_s: float) -> None:
        self._set_now(end_s)
        self.steps += 1
        self.ranks[0].clock.boundary = (end_s, self.ranks[0].priority)
        for rank, plan in zip(self.ranks, rows, strict=True):
            if plan is not None:
                rank.books.commit(plan, start_s, end_s, gpu_s, host_s)

    def _sleep(self) -> Generator[Event, object, None]:
        yield from self.ranks[0].sleep()
        self._set_now(self.ranks[0].now_s)

    def _set_now(self, now_s: float) -> None:
        for rank in self.ranks:
            rank.now_s = now_s


def _with_rows(plans: Plans) -> Plans | None:
    """The plans that compute something; None where none does."""
    rows = [plan if plan is not None and len(plan) else None for plan in plans]
    return None if all(plan is None for plan in rows) else rows


def _led() -> Generator[Event, object, None]:
    """Of a rank that another one leads: nothing."""
    return
    yield
