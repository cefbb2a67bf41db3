"""A run while it goes on, as columns: read from another thread, of the twin's world or of the engine.

Whoever runs it is not stopped for this: lists are copied as they are at the moment, so that figures of one reading may be
a step apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.draft_steps import DraftLog, draft_steps
from sim.log import STEP_COLUMNS, StepLog
from sim.record import Floats, Ints

TIMES = ("sent_s", "queued_s", "scheduled_s", "prefill_done_s", "engine_done_s")


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a run is. Columns of requests have one row per request (NaN where it did not happen), of steps per step."""

    now_s: float
    """On the run's clock: simulated seconds of the twin."""
    times_s: dict[str, Floats]
    """By the names in `TIMES`; of an answer that is shown whole `prefill_done_s` is its end."""
    prompt_tokens: Ints
    output_tokens: Ints
    """Known once a request has ended."""
    status: Ints
    reason: Sequence[str]
    steps: dict[str, Floats]
    """By the names in `sim.log.STEP_COLUMNS`, and in `serving.draft_steps` where the twin verifies drafts."""
    running: int
    waiting: int
    kv_usage: float
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int


Read = Callable[[], Reading]


def of_world(world: Any) -> Read:
    """Of a `sim.world` that is being run."""

    def read() -> Reading:
        log, replicas = world.log, list((world.fleet or world).replicas)
        schedulers = [replica.scheduler for replica in replicas]
        pages = sum(scheduler.config.num_pages for scheduler in schedulers)
        # Rows beyond are hypotheses of beam searches.
        own = slice(len(world.workload))
        times_s = {name: np.array(getattr(log, name)[own], np.float64) for name in TIMES}
        times_s["prefill_done_s"][log.unstreamed] = times_s["engine_done_s"][log.unstreamed]
        return Reading(
            float(world.clock.now),
            times_s,
            world.workload.prompt_tokens,
            np.array(log.output_tokens[own], np.int64),
            np.array(log.status[own], np.int64),
            log.reason[own],
            _steps([replica.steps for replica in replicas], [replica.draft_log for replica in replicas]),
            sum(scheduler.num_running for scheduler in schedulers),
            sum(scheduler.num_waiting for scheduler in schedulers),
            sum(scheduler.used_pages for scheduler in schedulers) / max(pages, 1),
            sum(scheduler.prefix_queries_tokens for scheduler in schedulers),
            sum(scheduler.prefix_hit_tokens for scheduler in schedulers),
            sum(log.preemptions),
        )

    return read


def of_engine(engine: Any) -> Read:
    """Of a `realengine` engine, from now on: what it did before is left out."""
    first, skipped, origin_s = len(engine.recorder.requests), len(engine.recorder.steps), engine.now_s()

    def read() -> Reading:
        recorder, scheduler = engine.recorder, engine.scheduler
        rows, steps = recorder.requests[first:], recorder.steps[skipped:]

        def column(name: str) -> Ints:
            return np.array([getattr(row, name) for row in rows], np.int64)

        points = {"start_s", "end_s"}
        return Reading(
            engine.now_s() - origin_s,
            {name: np.array([getattr(row, name) for row in rows], np.float64) - origin_s for name in TIMES},
            column("prompt_tokens"),
            column("output_tokens"),
            column("status"),
            [row.reason for row in rows],
            {
                name: np.array([getattr(step, name) for step in steps], np.float64)
                - (origin_s if name in points else 0.0)
                for name in STEP_COLUMNS
            },
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.used_pages / max(scheduler.config.num_pages, 1),
            scheduler.prefix_queries_tokens,
            scheduler.prefix_hit_tokens,
            int(column("preemptions").sum()),
        )

    return read


def _steps(logs: Sequence[StepLog], drafts: Sequence[DraftLog | None]) -> dict[str, Floats]:
    """Columns of all steps so far, without flushing the logs, which belong to the thread that runs."""
    peeked = [log.peek() for log in logs]
    parts = [part for of_log in peeked for part in of_log]
    table = np.concatenate(parts) if parts else np.empty((0, len(STEP_COLUMNS)))
    found = draft_steps(drafts, [sum(map(len, of_log)) for of_log in peeked])
    drafting = {} if found is None else {name: c.astype(np.float64) for name, c in found.columns().items()}
    return {name: table[:, i] for i, name in enumerate(STEP_COLUMNS)} | drafting
