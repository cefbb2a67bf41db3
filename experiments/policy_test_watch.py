"""A policy under watch: the twin runs it step by step, and whatever breaks a rule is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.policy_test_cases import Case
from serving.errors import UsageError
from serving.policies import BatchPolicy, load_policy
from sim.deployment import Built
from sim.deployment_limits import policy_options
from sim.record import RunRecord, Status
from sim.workload import Workload
from sim.world import Frontend, run_world

if TYPE_CHECKING:
    from serving.config import SchedulerConfig
    from serving.request import Request
    from serving.scheduler import Scheduler
    from serving.step import Step

STANDSTILL = 200
"""Calls at one instant without a token that are a loop and not a plan."""
MOST_OVERTAKEN = 100
"""Later requests that may end before an earlier one does."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A rule that was broken."""

    kind: str
    """One of the names of `experiments.policy_test.CHECKS`."""
    words: str


class Broken(Exception):
    """Ends a run at the step in which a rule was broken. SimPy makes it anew from its arguments."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(kind, words)
        self.problem = Problem(kind, words)


class Watched(BatchPolicy):
    """Passes every call on, and looks at the scheduler before and after. Never leapt over."""

    name = "watched"

    def __init__(self, inner: BatchPolicy, most_calls: int) -> None:
        self.inner = inner
        self.most_calls = most_calls
        self.num_calls = 0
        self.scheduler: Scheduler | None = None
        self.idle: str = ""
        """The first time that nothing was scheduled although something could have been."""
        self._at_s = -1.0
        self._still = 0

    def schedule(self, step: Step) -> None:
        self.scheduler = step.scheduler
        self.num_calls += 1
        self.inner.schedule(step)
        self._check(step)

    def padding(self, scheduler: Scheduler) -> int:
        return self.inner.padding(scheduler)

    def refuses(self, request: Request, config: SchedulerConfig) -> str | None:
        return self.inner.refuses(request, config)

    def _check(self, step: Step) -> None:
        scheduler = step.scheduler
        live = set(scheduler._serials)
        running = list(scheduler.running())
        waiting = list(scheduler.waiting)
        lost = live - set(running) - set(waiting)
        if lost:
            raise Broken("loses", f"neither waiting nor running: {_ids(lost)} {_when(step)}")
        if len(running) + len(waiting) != len(live):
            raise Broken("loses", f"a request is queued twice or runs while it waits {_when(step)}")
        try:
            scheduler.check()
        except AssertionError as error:
            raise Broken("leaks", f"{error} {_when(step)}") from None
        if len(running) > step.config.max_num_seqs:
            raise Broken("limits", f"{len(running)} run where {step.config.max_num_seqs} may {_when(step)}")
        if step.now_s > self._at_s or step.num_tokens:
            self._at_s, self._still = step.now_s, 0
        self._still += 1
        if self._still > STANDSTILL:
            raise Broken("ends", f"it preempts and plans nothing, for ever {_when(step)}")
        if self.num_calls > self.most_calls:
            raise Broken(
                "ends", f"no end after {self.num_calls} steps: requests are computed again and again"
            )
        if not step.num_tokens and not self.idle and not scheduler.in_flight and self._could_run(step):
            self.idle = f"{_ids(waiting or running)} could run and nothing is scheduled {_when(step)}"

    def _could_run(self, step: Step) -> bool:
        scheduler = step.scheduler
        if scheduler.num_running:
            return any(step.wanted(request) > 0 for request in scheduler.running())
        return any(not request.stale_tokens for request in scheduler.waiting)


def _when(step: Step) -> str:
    return f"at {step.now_s * 1e3:.3f} ms"


def _ids(requests: Any) -> str:
    ids = sorted(request.id for request in requests)
    shown = ", ".join(map(str, ids[:4])) + (", …" if len(ids) > 4 else "")
    return f"request{'s' if len(ids) > 1 else ''} {shown}"


def watch(case: Case, built: Built, workload: Workload) -> tuple[RunRecord | None, Watched, Problem | None]:
    """Run a case step by step; the record (None when a rule was broken), the watcher, and the first problem."""
    options = policy_options(built.deployment)
    tokens = int(workload.prompt_tokens.sum() + workload.output_tokens.sum())
    watched = Watched(load_policy(built.deployment.policy, **options), 1000 + 20 * tokens)
    try:
        record = run(built, workload, watched, fast_forward=False)
    except Broken as broken:
        return None, watched, broken.problem
    except UsageError as error:
        return None, watched, Problem("raises", str(error))
    except Exception as error:
        return None, watched, Problem("raises", f"{type(error).__name__}: {error}")
    return record, watched, _at_the_end(record, watched, built)


def _at_the_end(record: RunRecord, watched: Watched, built: Built) -> Problem | None:
    left = np.flatnonzero(record.requests.status == Status.UNFINISHED)
    if len(left) or len(record.requests) == 0:
        ids = ", ".join(map(str, record.requests.request_id[left][:4].tolist()))
        return Problem("ends", f"request {ids} never ended: nothing is scheduled and nothing will happen")
    if watched.scheduler is not None and watched.scheduler.pool.num_free != built.limits.num_pages:
        missing = built.limits.num_pages - watched.scheduler.pool.num_free
        return Problem(
            "leaks", f"{missing} of {built.limits.num_pages} pages are not free when nobody is left"
        )
    return None


def run(built: Built, workload: Workload, policy: BatchPolicy, *, fast_forward: bool) -> RunRecord:
    """The twin of a case with a given policy object. Raises KeyboardInterrupt when interrupted."""
    d = built.deployment
    record = run_world(
        workload,
        built.limits,
        built.pricer,
        make_policy=lambda: policy,
        frontend=Frontend(
            d.frontend_overhead_ms / 1e3, d.tokenize_us_per_token / 1e6, d.detokenize_us_per_token / 1e6
        ),
        fast_forward=fast_forward,
    )
    if record.interrupted:
        raise KeyboardInterrupt
    return record


def differs(a: RunRecord, b: RunRecord) -> str:
    """The first column in which two records differ, or nothing."""
    tables: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
        ("requests", a.requests.columns(), b.requests.columns()),
        ("steps", a.steps.columns(), b.steps.columns()),
    )
    for table, mine, theirs in tables:
        for name, values in mine.items():
            other = theirs[name]
            if len(values) != len(other):
                return f"{len(values)} and {len(other)} {table}"
            same = values == other
            if values.dtype.kind == "f":
                same = same | (np.isnan(values) & np.isnan(other))
            if not np.all(same):
                row = int(np.flatnonzero(~np.asarray(same))[0])
                return f"{name} of {table[:-1]} {row} is {values[row]} and {other[row]}"
    return ""


def overtaken(record: RunRecord, victim: int) -> int:
    """Requests that arrived after `victim` and ended before it."""
    r = record.requests
    end_s = np.where(np.isnan(r.engine_done_s), np.inf, r.engine_done_s)
    row = int(np.flatnonzero(r.request_id == victim)[0])
    return int(((r.request_id > victim) & (end_s < end_s[row])).sum())
