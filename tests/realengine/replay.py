"""Play a recorded run of the real engine again in the twin, and say what each scheduler decided."""

from __future__ import annotations

from typing import Any

from costmodel.prices import Prices
from realengine.engine import Engine
from realengine.recorder import Event
from serving.plan import ONE_EACH, StepOutcome, StepPlan
from serving.policies import BatchPolicy
from serving.request import Request, TokenKeys
from serving.scheduler import Scheduler
from sim.clock import Clock
from sim.log import RequestLog
from sim.replica import Replica
from sim.step_costs import StepCosts

Decision = dict[str, Any]


def watch(scheduler: Scheduler) -> list[Decision]:
    """Everything that this scheduler's plans decide from now on, page tables included."""
    decisions: list[Decision] = []
    plan_step = scheduler.plan

    def plan(now_s: float) -> StepPlan | None:
        plan = plan_step(now_s)
        if plan is not None:
            decisions.append({"now_s": now_s} | decision(scheduler, plan))
        return plan

    scheduler.plan = plan  # type: ignore[method-assign]
    return decisions


def decision(scheduler: Scheduler, plan: StepPlan) -> Decision:
    seqs = scheduler.seqs
    return {
        "index": plan.index,
        "rows": [
            (
                seqs.request(slot).id,
                new,
                context,
                tuple(seqs.pages_of(slot).tolist()),
            )
            for slot, new, context in zip(
                plan.slots.tolist(), plan.num_new.tolist(), plan.context.tolist(), strict=True
            )
        ],
        "samples": None if plan.samples is None else plan.samples.tolist(),
        "chunks": [(c.request.id, c.num_tokens, c.context, c.last) for c in plan.chunks],
        "admitted": [(a.request.id, a.cached_tokens, a.resumed) for a in plan.admitted],
        "preempted": [request.id for request in plan.preempted],
        "truncated": [request.id for request in plan.truncated],
        "starved": list(plan.starved),
        "num_running": plan.num_running,
        "num_waiting": plan.num_waiting,
        "used_pages": plan.used_pages,
        "num_padding": plan.num_padding,
        "free": scheduler.pool.num_free,
        "copies": list(plan.copies),
        "swap_out": [(m.sources.tolist(), m.targets.tolist()) for m in plan.swap_out],
        "swap_in": [(m.sources.tolist(), m.targets.tolist()) for m in plan.swap_in],
    }


class Twin:
    """The twin's replica in simulated time, given the arrivals, aborts, step times and tokens of a real run."""

    def __init__(self, engine: Engine, policy: BatchPolicy | None) -> None:
        events = engine.recorder.events
        assert events is not None
        self.clock = Clock()
        scheduler = Scheduler(engine.config, policy)
        self.decisions = watch(scheduler)
        outcomes = iter([event.outcome for event in events if event.kind == "commit"])
        commit = scheduler.commit

        def commit_recorded(plan: StepPlan, _: StepOutcome = ONE_EACH) -> list[Request]:
            outcome = next(outcomes)
            assert outcome is not None
            return commit(plan, outcome)

        scheduler.commit = commit_recorded  # type: ignore[method-assign]
        self.log = RequestLog(len(engine.recorder.requests))
        recorded = engine.recorder.steps
        planned_s = [e.time_s for e in events if e.kind == "plan" and e.plan is not None and len(e.plan)]

        class Recorded(StepCosts):
            def step_s(self, plan: StepPlan, step: int) -> tuple[float, float]:
                row = recorded[step]
                # With nothing in flight, an asynchronous step begins when the host has launched it.
                return row.end_s - row.start_s, max(0.0, row.start_s - planned_s[step])

        unused: Prices = None  # type: ignore[assignment]
        self.replica = Replica(
            self.clock, 0, scheduler, unused, self.log, lambda request, time_s: None, fast_forward=False
        )
        self.replica.costs = Recorded(unused, None, None)
        self.requests: dict[int, Request] = {}
        for event in events:
            if event.kind in ("add", "abort"):
                self.clock.call_at(event.time_s, lambda event=event: self._repeat(event))  # type: ignore[misc]

    def _repeat(self, event: Event) -> None:
        theirs = event.request
        assert theirs is not None
        assert isinstance(theirs.id, int)
        if event.kind == "abort":
            ours = self.requests[theirs.id]
            self.replica.scheduler.abort(ours)
            self.replica.books.end(ours, self.replica.now_s)
            return
        config = self.replica.scheduler.config
        keys = TokenKeys(config.page_tokens, event.prompt) if config.enable_prefix_caching else ()
        ours = Request(
            theirs.id,
            theirs.prompt_tokens,
            theirs.max_tokens,
            theirs.arrival_s,
            theirs.priority,
            theirs.deadline_s,
            None,
            keys,
            theirs.tenant,
            theirs.weight,
            theirs.session,
            theirs.turn,
        )
        if event.sibling is not None:
            ours.sibling = self.requests[event.sibling.id]
        self.requests[theirs.id] = ours
        self.replica.submit(ours)

    def run(self) -> None:
        """Until nothing is left to happen."""
        self.clock.run()
