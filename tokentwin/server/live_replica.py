"""A replica of the twin whose clients are real: `sim.replica`'s very loop, telling each step's tokens as it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from costmodel.prices import Prices
from serving.plan import ONE_EACH, StepOutcome, StepPlan
from serving.request import Request
from serving.scheduler import Scheduler
from sim.books import Books
from sim.clock import Clock
from sim.log import RequestLog
from sim.noise import NoiseStream
from sim.replica import Replica
from sim.speculation import Speculation
from tokentwin.server.backend import Delta, Meters, Timing
from tokentwin.server.mailbox import Mailbox

if TYPE_CHECKING:
    from tokentwin.server.twin_beams import TwinSearch


@dataclass(slots=True, eq=False)
class Answer:
    """One answer being made: the scheduler's request, and where its tokens go."""

    request: Request
    mailbox: Mailbox
    index: int
    script: Sequence[int]
    """The tokens it will have, over and over."""
    offset: int
    arrival_s: float
    stops_itself: bool
    """Its length is the twin's choice, so that it ends with "stop" and not for length."""
    search: TwinSearch | None = None
    """It is one token behind a hypothesis of this beam search; `index` is the hypothesis' place."""
    replica: LiveReplica | None = None
    slot: int = -1
    scheduled_s: float = math.nan
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    told: int = 0
    """Tokens that went to the mailbox."""

    def token(self, position: int) -> int:
        """The answer's token number `position`."""
        return self.script[(self.offset + position) % len(self.script)]

    def timing(self) -> Timing:
        """When things happened, as far as they did."""
        request = self.request
        return Timing(
            self.arrival_s,
            self.scheduled_s,
            self.first_token_s,
            self.last_token_s,
            request.prompt_tokens,
            self.told,
            max(0, request.cached_tokens),
        )


class LiveReplica(Replica):
    """Keeps no log, so that it can run for ever; never leaps, because every token is due at its own time.

    `answers` are those that are wanted, by request; whoever aborts one takes it out. `ended(answer, reason)` is told
    of every other end, and `unread(answer)` of one whose mailbox takes no more; both take it out.
    """

    def __init__(
        self,
        clock: Clock,
        index: int,
        scheduler: Scheduler,
        pricer: Prices,
        meters: Meters,
        answers: dict[Request, Answer],
        ended: Callable[[Answer, str], None],
        unread: Callable[[Answer], object],
        speculation: Speculation | None = None,
        noise: NoiseStream | None = None,
    ) -> None:
        super().__init__(
            clock,
            index,
            scheduler,
            pricer,
            RequestLog(0),
            lambda request, now_s: None,
            fast_forward=False,
            speculation=speculation,
            noise=noise,
        )
        self._answers = answers
        self.books = self._telling = Telling(self, meters, answers, ended, unread)

    @property
    def preemptions(self) -> int:
        """So far."""
        return self._telling.preemptions

    def submit(self, request: Request) -> bool:
        """A request reaches the queue, unless it was aborted on its way."""
        answer = self._answers.get(request)
        if answer is None:
            return True
        answer.replica = self
        added = self.scheduler.add(request)
        assert added, request.reason
        self.wake()
        return True


class Telling(Books):
    """Tells answers of their tokens instead of writing them down."""

    def __init__(
        self,
        replica: LiveReplica,
        meters: Meters,
        answers: dict[Request, Answer],
        ended: Callable[[Answer, str], None],
        unread: Callable[[Answer], object],
    ) -> None:
        super().__init__(
            replica.index,
            replica.scheduler,
            RequestLog(0),
            lambda request, now_s: None,
            None,
            replica.costs.speculator,
        )
        self._meters, self._answers = meters, answers
        self._tell_end, self._tell_unread = ended, unread
        # Preempted while a step that makes their token is in flight, by the row that they had in it.
        self._late: dict[int, Answer] = {}
        self.preemptions = 0

    def admit(self, plan: StepPlan, now_s: float) -> None:
        """As `Books.admit`."""
        for request, _, resumed in plan.admitted:
            answer = self._answers[request]
            answer.slot = request.slot
            if not resumed:
                answer.scheduled_s = now_s
        for request in plan.preempted:
            if request.stale_tokens:
                self._late[self._answers[request].slot] = self._answers[request]

    def leave(self, plan: StepPlan, now_s: float) -> None:
        """As `Books.leave`."""
        self.preemptions += len(plan.preempted)
        for request in plan.truncated:
            if (answer := self._answers.get(request)) is not None:
                self._tell(answer, now_s, finished=True)

    def commit(self, plan: StepPlan, start_s: float, now_s: float, gpu_s: float, host_s: float) -> None:
        """As `Books.commit`."""
        requests = self.scheduler.seqs.requests
        rows: list[Answer | None] = []
        for slot in plan.slots.tolist():
            request = requests[slot]
            rows.append(self._answers.get(request) if request is not None else self._late.pop(slot, None))
        if plan.samples is not None:
            rows = [
                row if samples else None for row, samples in zip(rows, plan.samples.tolist(), strict=True)
            ]
        outcome = self._outcome(rows) if self._speculator is None else self._verified(plan, rows)
        finished = set(self.scheduler.commit(plan, outcome))
        self._meters.step(plan.num_tokens)
        for answer in rows:
            if answer is not None and answer.request in self._answers:
                self._tell(answer, now_s, finished=answer.request in finished)

    def _outcome(self, rows: list[Answer | None]) -> StepOutcome:
        """The tokens of the step, where pages are found again by what they hold."""
        if not self.scheduler.config.enable_prefix_caching:
            return ONE_EACH
        return StepOutcome(tokens=[() if row is None else (row.token(row.told),) for row in rows])

    def _verified(self, plan: StepPlan, rows: list[Answer | None]) -> StepOutcome:
        """The same with drafts: as many tokens as stand."""
        assert self._speculator is not None
        outcome, _, given = self._speculator.outcome(plan, self.scheduler)
        if self.scheduler.config.enable_prefix_caching:
            outcome.tokens = [
                () if row is None else [row.token(row.told + i) for i in range(count)]
                for row, count in zip(rows, given.tolist(), strict=True)
            ]
        return outcome

    def _tell(self, answer: Answer, now_s: float, *, finished: bool) -> None:
        request = answer.request
        if answer.search is not None:
            answer.told, answer.last_token_s = 1, now_s
            self._tell_end(answer, "length")
            return
        known = int(self.scheduler.seqs.known[request.slot]) if request.slot >= 0 else request.num_tokens
        count = known - request.prompt_tokens - answer.told
        if count > 0:
            if answer.told:
                self._meters.tokens(count, now_s - answer.last_token_s)
            else:
                answer.first_token_s = now_s
                self._meters.first_token(now_s - answer.arrival_s)
            answer.last_token_s = now_s
        elif not finished:
            return
        tokens = [answer.token(answer.told + i) for i in range(count)]
        answer.told += count
        if not finished:
            if not answer.mailbox.put(Delta(answer.index, tokens), now_s):
                self._tell_unread(answer)
            return
        whole = answer.told >= request.max_tokens
        reason = "stop" if answer.stops_itself and whole else "length"
        answer.mailbox.put(Delta(answer.index, tokens, "", reason, None, answer.timing()), now_s)
        self._tell_end(answer, reason)
