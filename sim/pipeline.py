"""The loop of an engine whose layers lie on the stages of a pipeline, as vLLM V1's engine core runs it.

While fewer steps than stages are in flight another is planned, of sequences that are in none of them (a prompt's next
chunk may follow the one before it); otherwise, or when nothing can be planned, the core waits for the oldest. A step
passes the stages one after the other, and each stage takes the steps in their order. Bubbles arise by themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from simpy.events import Event

from costmodel.prices import StagedPrices
from serving.plan import StepPlan
from sim.record import RunRecord

if TYPE_CHECKING:
    from sim.replica import Replica


@dataclass(slots=True)
class Stages:
    """When each stage is done with what it was given."""

    free_s: list[float]

    def enter(self, time_s: float, stage_s: Sequence[float], transfer_s: float) -> float:
        """A step enters at `time_s`; returns when it leaves the last stage.

        Stage s begins when stage s - 1 of this step has handed over and stage s of the step before is done.
        """
        end_s = time_s
        for stage, seconds in enumerate(stage_s):
            start_s = end_s if stage == 0 else end_s + transfer_s
            end_s = max(start_s, self.free_s[stage]) + seconds
            self.free_s[stage] = end_s
        return end_s


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    planned_s: float
    end_s: float
    gpu_s: float
    host_s: float


def serve_pipeline(replica: Replica) -> Generator[Event, object, None]:
    """Plan, send through the stages, commit in order.

    The log has a step from when the one before it ended (or from when it was planned) to its own end, so that steps do
    not overlap, and as device time the mean over the stages: what is left of a step is host work and bubbles.
    """
    scheduler, clock = replica.scheduler, replica.clock
    depth = scheduler.config.pipeline_parallel_size
    stages = Stages([0.0] * depth)
    flights: deque[_Flight] = deque()
    ended_s = 0.0
    while True:
        plan = scheduler.plan(replica.now_s)
        if plan is not None:
            replica.books.admit(plan, replica.now_s)
            replica.books.leave(plan, replica.now_s)
            if not len(plan):
                continue
            planned_s = replica.now_s
            stage_s, transfer_s, host_s = _price(replica, plan, len(replica.steps) + len(flights))
            # The core and the first stage's worker prepare a step while the stages are busy with those before it.
            replica.now_s = planned_s + host_s
            if host_s:
                yield clock.at(replica.now_s, replica.priority)
            end_s = stages.enter(replica.now_s, stage_s, transfer_s)
            flights.append(_Flight(plan, planned_s, end_s, sum(stage_s) / depth, host_s))
            if len(flights) < depth and flights[0].end_s > replica.now_s:
                continue
        if not flights:
            yield from replica.sleep()
            continue
        oldest = flights.popleft()
        if oldest.end_s > replica.now_s:
            yield clock.at(oldest.end_s, replica.priority)
            replica.now_s = oldest.end_s
        clock.boundary = (replica.now_s, replica.priority)
        _give_tokens(replica, oldest.plan)
        start_s = max(oldest.planned_s, ended_s)
        replica.books.commit(oldest.plan, start_s, replica.now_s, oldest.gpu_s, oldest.host_s)
        ended_s = replica.now_s


def bubble_share(record: RunRecord) -> float | None:
    """Share of the time with steps in flight in which a stage idles, in the mean over the stages; None without stages.

    m equal steps sent at once through P stages leave (P - 1) / (m + P - 1). Host work that delays a step counts. Of a
    fleet, the replicas of pools with stages count, each by its number of stages.
    """
    s = record.steps
    stages = np.full(len(s), (record.meta.get("deployment") or {}).get("pipeline_parallel_size", 1))
    if record.fleet is not None and any(pool.pipeline_parallel_size > 1 for pool in record.fleet.pools):
        stages = record.fleet.per_replica("pipeline_parallel_size")[s.replica]
    if not (stages > 1).any():
        return None
    weight = np.where(stages > 1, stages, 0)
    busy_s = float((weight * (s.end_s - s.start_s)).sum())
    return max(0.0, 1.0 - float((weight * s.gpu_s).sum()) / busy_s)


def _price(replica: Replica, plan: StepPlan, step: int) -> tuple[list[float], float, float]:
    """(device time on each stage, time of a transfer between two, host time) of what will be step number `step`."""
    pricer = cast(StagedPrices, replica.costs.pricer)
    stage_s = pricer.stage_s(
        plan.num_tokens,
        plan.num_sampled,
        [(chunk.num_tokens, chunk.context) for chunk in plan.chunks],
        plan.num_decodes,
        plan.decode_context_sum,
        plan.decode_context_max,
    )
    if (noise := replica.costs.noise) is not None:
        factor = noise.at(step)
        stage_s = [seconds * factor for seconds in stage_s]
        if noise.stalls_any:
            stage_s[0] += noise.stall_at(step)
    host_s = pricer.host_s(len(plan.slots), plan.num_tokens)
    return stage_s, pricer.transfer_s(plan.num_tokens), host_s


def _give_tokens(replica: Replica, plan: StepPlan) -> None:
    slots = plan.slots if plan.samples is None else plan.slots[plan.samples]
    step = len(replica.steps)
    for slot in slots.tolist():
        request = replica.scheduler.in_flight_request(slot)
        if request is not None and not request.done:
            replica.books.give(request, step)
