"""What one replica writes down: its steps, and of each request when it ran, which steps gave it tokens, and its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from serving.plan import StepPlan
from serving.request import Request
from serving.scheduler import Scheduler
from sim.log import RequestLog, StepLog
from sim.record import Status
from sim.speculation import Speculator

if TYPE_CHECKING:
    from sim.api_server import ApiServer


def row_of(request: Request) -> int:
    """Row of the log: its number."""
    assert isinstance(request.id, int)
    return request.id


class Books:
    """Of a replica's whole life. `finished(request, time_s)` is told of every end."""

    def __init__(
        self,
        index: int,
        scheduler: Scheduler,
        log: RequestLog,
        finished: Callable[[Request, float], None],
        server: ApiServer | None,
        speculator: Speculator | None,
    ) -> None:
        self._index, self._log, self._finished = index, log, finished
        self._server, self._speculator = server, speculator
        self.scheduler = scheduler
        self.steps = StepLog()
        self._starts: dict[int, int] = {}
        """By request the step that gave it its first token since its last range."""
        self._open: dict[int, tuple[int, int, int]] = {}
        """By request whose steps may give several tokens: its last range (first step, steps, tokens in each)."""

    def restart(self, scheduler: Scheduler) -> None:
        """The replica failed, and begins again with an empty engine: what was open is lost."""
        self.scheduler = scheduler
        self._starts, self._open = {}, {}

    @property
    def _by_step(self) -> bool:
        """Whether a request's tokens need not lie one in each step."""
        return self._speculator is not None or self.scheduler.config.pipelined

    def admit(self, plan: StepPlan, now_s: float) -> None:
        """Requests that a plan lets in."""
        log = self._log
        for request, cached_tokens, resumed in plan.admitted:
            if not resumed:
                row = row_of(request)
                log.scheduled_s[row] = now_s
                log.cached_tokens[row] = cached_tokens

    def leave(self, plan: StepPlan, now_s: float) -> None:
        """Requests that planning took out of the running set: their token stream stops here for now."""
        for request in plan.preempted:
            self._log.preemptions[row_of(request)] += 1
            self._close(request, request.num_tokens)
        for request in plan.truncated:
            self.end(request, now_s)

    def commit(self, plan: StepPlan, start_s: float, now_s: float, gpu_s: float, host_s: float) -> None:
        """Log the step that ended now, give out its tokens and let go of who finished."""
        scheduler, log = self.scheduler, self._log
        step = len(self.steps)
        tokens = area = context = 0
        for request, count, before, last in plan.chunks:
            tokens += count
            area += count * before + count * (count + 1) // 2
            context += before + count
            if last:
                row = row_of(request)
                self._starts[row] = step
                if log.prefill_done_s[row] != log.prefill_done_s[row]:
                    log.prefill_done_s[row] = now_s
        for slot in plan.starved:
            if (starved := scheduler.seqs.requests[slot]) is not None:
                self._close(starved, int(scheduler.seqs.known[slot]))
                self._starts[row_of(starved)] = step + 1
        self.steps.add(
            (
                start_s,
                now_s,
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
            self.end(ended, now_s)

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
        log, last, row = self._log, self._open, row_of(request)
        log.output_tokens[row] += count
        if (before := last.get(row)) is not None:
            if before[2] == count and before[0] + before[1] == step:
                last[row] = (before[0], before[1] + 1, count)
                return
            log.ranges.append((row, self._index, *before))
        last[row] = (step, 1, count)

    def end(self, request: Request, now_s: float) -> None:
        """A request has all its tokens."""
        self._close(request, request.num_tokens)
        log, row = self._log, row_of(request)
        self._starts.pop(row, None)
        log.engine_done_s[row] = now_s
        log.status[row] = int(Status.FINISHED)
        log.reason[row] = request.reason
        if self._server is None or not self._server.ended(request, now_s):
            self._finished(request, now_s)

    def fail(self, request: Request, now_s: float, reason: str) -> None:
        """Stop working for a request; what it has been given stays."""
        log, row = self._log, row_of(request)
        known = self.scheduler.seqs.known
        self._close(request, int(known[request.slot]) if request.slot >= 0 else request.num_tokens)
        self._starts.pop(row, None)
        self.scheduler.abort(request)
        log.engine_done_s[row], log.status[row], log.reason[row] = now_s, int(Status.FAILED), reason
        self._finished(request, now_s)

    def _close(self, request: Request, num_tokens: int) -> None:
        """Write down the tokens of `request` since its last range, which lie in consecutive steps."""
        log, row = self._log, row_of(request)
        if self._by_step:
            if (last := self._open.pop(row, None)) is not None:
                log.ranges.append((row, self._index, *last))
            return
        produced = num_tokens - request.prompt_tokens
        count = produced - log.output_tokens[row]
        if count > 0:
            log.ranges.append((row, self._index, self._starts[row], count))
            log.output_tokens[row] = produced

    def open_range(self, request: Request, leapt: int) -> tuple[int, int, int] | None:
        """Steps that have given a running request tokens since its last range, the last `leapt` in a leap.

        The first of them, how many, and the tokens in each.
        """
        row = row_of(request)
        if self._by_step:
            return self._open.get(row)
        if request.slot < 0 or row not in self._starts:
            return None
        produced = int(self.scheduler.seqs.known[request.slot]) - request.prompt_tokens
        count = produced - self._log.output_tokens[row] + leapt
        return (self._starts[row], count, 1) if count > 0 else None

    def settle(self) -> None:
        """Write down what unfinished requests have produced so far, when a run ends before they do."""
        known = self.scheduler.seqs.known
        for request in list(self.scheduler.running()):
            produced = int(known[request.slot]) - request.prompt_tokens
            if produced > 0 and row_of(request) in self._starts:
                self._close(request, request.prompt_tokens + produced)
        # Tokens that arrived after their request was preempted.
        self._log.ranges += [(row, self._index, *last) for row, last in self._open.items()]
        self._open = {}
