"""What the engine writes down while it serves: the very columns, ranges and meanings of the twin's run record.

Plain lists in, numpy columns out, so that whoever knows the record's types can build them by name. Events, where asked
for, hold what a replay needs: who arrived or left at which step boundary, and what each step gave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.draft_counts import DraftCounts
from serving.draft_steps import DraftLog, draft_row
from serving.plan import StepOutcome, StepPlan
from serving.request import Request, State
from serving.scheduler import Scheduler

Columns = dict[str, npt.NDArray[Any]]

_UNFINISHED, _FINISHED, _REJECTED = 0, 1, 2


@dataclass(slots=True)
class RequestRow:
    """One request, times in seconds of the engine's clock, NaN where it did not get that far."""

    request_id: int
    sent_s: float
    prompt_tokens: int
    max_output_tokens: int
    tenant: int = 0
    replica: int = -1
    queued_s: float = math.nan
    scheduled_s: float = math.nan
    prefill_done_s: float = math.nan
    engine_done_s: float = math.nan
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    network_s: float = 0.0
    tokenize_s: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    status: int = _UNFINISHED
    reason: str = ""
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """(first step, steps) of consecutive steps that gave as many tokens each."""
    verdicts: list[tuple[int, int]] = field(default_factory=list)
    """(drafted, accepted) of every decode step, where drafts are made."""
    per_step: list[int] = field(default_factory=list)
    """That many, by range; empty where every step gave one."""
    start: int = -1
    """Step that gave the first token since the last range."""


@dataclass(slots=True)
class StepRow:
    """One step; the names are the columns of the record."""

    start_s: float
    end_s: float
    gpu_s: float
    host_s: float
    num_tokens: int
    num_prefill_tokens: int
    num_prefills: int
    num_decodes: int
    decode_context_sum: int
    prefill_attention_area: float
    prefill_context_sum: int
    num_running: int
    num_waiting: int
    used_pages: int
    preemptions: int


@dataclass(slots=True)
class Event:
    """Something that a replay must repeat, at the boundary `time_s`."""

    time_s: float
    kind: str
    """"add", "abort", "plan" or "commit"."""
    request: Request | None = None
    prompt: tuple[int, ...] = ()
    sibling: Request | None = None
    plan: StepPlan | None = None
    outcome: StepOutcome | None = None


class Recorder:
    """Told by the engine's loop of every boundary. Requests are numbered by their `id`, an integer from 0 on."""

    def __init__(
        self, scheduler: Scheduler, *, events: bool = False, draft_cache: bool | None = None
    ) -> None:
        """`draft_cache`: whether a drafter that is a model has a cache of its own; None where the host drafts."""
        self.scheduler = scheduler
        self.requests: list[RequestRow] = []
        self.steps: list[StepRow] = []
        self.events: list[Event] | None = [] if events else None
        self.speculates = scheduler.config.num_speculative_tokens > 0
        self.drafts = DraftCounts()
        self.draft_log = DraftLog()
        self._draft_cache = draft_cache

    def event(self, time_s: float, kind: str, **what: Any) -> None:
        """Note an event, when events are kept."""
        if self.events is not None:
            self.events.append(Event(time_s, kind, **what))

    # ---- requests ------------------------------------------------------------------------------------------

    def sent(self, request: Request, sent_s: float) -> None:
        """A request was handed to the engine."""
        assert request.id == len(self.requests), "requests are numbered in the order in which they are sent"
        self.requests.append(
            RequestRow(len(self.requests), sent_s, request.prompt_tokens, request.max_tokens, request.tenant)
        )

    def queued(self, request: Request, now_s: float) -> None:
        """It joins the scheduler's queue, or is rejected there."""
        row = self._row(request)
        row.queued_s, row.replica = now_s, 0
        if request.state is State.REJECTED:
            row.status, row.reason = _REJECTED, request.reason

    def admitted(self, plan: StepPlan, now_s: float) -> None:
        """Requests scheduled for the first time."""
        for request, cached_tokens, resumed in plan.admitted:
            if not resumed:
                row = self._row(request)
                row.scheduled_s, row.cached_tokens = now_s, cached_tokens

    def preempted(self, request: Request) -> None:
        """Its token stream stops here for now."""
        self._row(request).preemptions += 1
        self._close(request, request.num_tokens)

    def ended(self, request: Request, now_s: float) -> None:
        """It finished or was aborted."""
        self._close(request, request.num_tokens)
        row = self._row(request)
        row.engine_done_s, row.status, row.reason = now_s, _FINISHED, request.reason

    # ---- steps ---------------------------------------------------------------------------------------------

    def step(self, plan: StepPlan, start_s: float, end_s: float, gpu_s: float, host_s: float) -> None:
        """A step ended; to be called before it is committed."""
        index = len(self.steps)
        tokens = area = context = 0
        for request, count, before, last in plan.chunks:
            tokens += count
            area += count * before + count * (count + 1) // 2
            context += before + count
            if last:
                row = self._row(request)
                row.start = index
                if math.isnan(row.prefill_done_s):
                    row.prefill_done_s = row.first_token_s = end_s
        if self.speculates:
            self.draft_log.add(index, draft_row(plan, self._draft_cache))
        for slot in plan.starved:
            if (starved := self.scheduler.seqs.requests[slot]) is not None:
                self._close(starved, int(self.scheduler.seqs.known[slot]))
                self._row(starved).start = index + 1
        self.steps.append(
            StepRow(
                start_s,
                end_s,
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

    def gave(self, request: Request, count: int) -> None:
        """The last step gave `count` tokens, where a step may give several; to be called after `step`."""
        row, step = self._row(request), len(self.steps) - 1
        if row.ranges and row.per_step[-1] == count and sum(row.ranges[-1]) == step:
            row.ranges[-1] = (row.ranges[-1][0], row.ranges[-1][1] + 1)
        else:
            row.ranges.append((step, 1))
            row.per_step.append(count)
        row.output_tokens += count
        row.last_token_s = self.steps[step].end_s

    def verified(
        self,
        requests: Sequence[Request | None],
        num_drafts: npt.NDArray[np.int64],
        num_accepted: npt.NDArray[np.int64],
    ) -> None:
        """A step verified so many drafts of each sequence, and so many stood; None where it was no decode."""
        self.drafts.count(num_drafts, num_accepted)
        for request, *verdict in zip(requests, num_drafts.tolist(), num_accepted.tolist(), strict=True):
            if request is not None:
                self._row(request).verdicts.append((verdict[0], verdict[1]))

    def settle(self) -> None:
        """Write down what unfinished requests have produced so far."""
        for request in list(self.scheduler.running()):
            self._close(request, int(self.scheduler.seqs.known[request.slot]))

    def _row(self, request: Request) -> RequestRow:
        assert isinstance(request.id, int)
        return self.requests[request.id]

    def _close(self, request: Request, num_tokens: int) -> None:
        """Write down the tokens of `request` since its last range, which lie in consecutive steps."""
        if self.speculates:
            return  # `gave` has written them down
        row = self._row(request)
        count = num_tokens - request.prompt_tokens - row.output_tokens
        if count > 0:
            row.ranges.append((row.start, count))
            row.output_tokens += count
            row.last_token_s = self.steps[row.start + count - 1].end_s

    # ---- the record ----------------------------------------------------------------------------------------

    def request_columns(self) -> Columns:
        """Columns of the record's request table, in order of sending."""
        names = [
            f.name for f in fields(RequestRow) if f.name not in ("ranges", "verdicts", "per_step", "start")
        ]
        columns = {name: np.array([getattr(row, name) for row in self.requests]) for name in names}
        columns["reason"] = np.array([row.reason for row in self.requests], object)
        return columns

    def step_columns(self) -> Columns:
        """Columns of the record's step table."""
        columns = {f.name: np.array([getattr(row, f.name) for row in self.steps]) for f in fields(StepRow)}
        return {"replica": np.zeros(len(self.steps), np.int64), **columns}

    def token_columns(self) -> Columns:
        """`offsets`, `first_step` and `count` of the record's token ranges."""
        ranges = [r for row in self.requests for r in row.ranges]
        table = np.array(ranges, np.int64).reshape(-1, 2)
        offsets = np.cumsum([0, *(len(row.ranges) for row in self.requests)], dtype=np.int64)
        columns = {"offsets": offsets, "first_step": table[:, 0].copy(), "count": table[:, 1].copy()}
        if self.speculates:
            columns["per_step"] = np.array([n for row in self.requests for n in row.per_step], np.int64)
        return columns
