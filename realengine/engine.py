"""The real engine: a thread that plans with the `serving` scheduler, runs each plan on a device and commits it.

The loop is the twin's (`sim.replica`), with tensors where the twin asks for a price. Whoever wants answers calls `add`
from any thread and is told of tokens through a listener.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from realengine.answer import Answer, Listener, TokenLogprob
from realengine.draft import text_drafter
from realengine.generation import Sampling
from realengine.inputs import step_inputs
from realengine.recorder import Recorder
from realengine.runner import Drawn, Runner
from realengine.seats import Seats
from realengine.tokenizer import Tokenizer
from serving.config import SchedulerConfig
from serving.errors import TokenTwinError, UsageError
from serving.plan import StepOutcome, StepPlan
from serving.policies import BatchPolicy
from serving.request import Request, TokenKeys
from serving.scheduler import Scheduler
from serving.speculative_config import SpeculativeConfig

_TICKS_PER_S = 2**30
_NO_DRAFTS: npt.NDArray[np.int64] = np.zeros(0, np.int64)


class EngineError(TokenTwinError):
    """The engine's thread has ended, on request or by a fault; it answers nothing any more."""


def clock_s() -> float:
    """Monotonic seconds in whole multiples of 2⁻³⁰ s, so that sums and differences of times are exact."""
    return (time.perf_counter_ns() * _TICKS_PER_S // 1_000_000_000) / _TICKS_PER_S


@dataclass(slots=True)
class _Flight:
    """A step on the device."""

    plan: StepPlan
    answers: list[Answer | None]
    """By row of the plan, as they sat when it was launched."""
    plan_rows: list[int]
    """Rows that drew a token, in the order of `Drawn`."""
    wait: Callable[[], Drawn]
    host_s: float
    num_drafts: npt.NDArray[np.int64]
    """Drafts verified of each of them; empty without speculation."""


class Engine:
    """`start()` it, `add` requests, `stop()` it. Answers of one request may be several (`Sampling.n`).

    `record_events` keeps every plan and outcome, for replays.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        *,
        policy: BatchPolicy | None = None,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        seed: int = 0,
        record_events: bool = False,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        if (config.num_speculative_tokens > 0) != (speculative is not None):
            raise UsageError("num_speculative_tokens is set by --speculative-config, and by nothing else")
        if speculative is not None and config.async_scheduling:
            raise UsageError(
                "--async-scheduling: the engine verifies drafts before it plans the next step; use --no-async-scheduling"
            )
        self.config = config
        self.scheduler = Scheduler(config, policy)
        self.runner = runner
        self.tokenizer = tokenizer
        draft_cache = None if speculative is None else speculative.draft_cache
        self.recorder = Recorder(self.scheduler, events=record_events, draft_cache=draft_cache)
        self.fault: BaseException | None = None
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        seqs = self.scheduler.seqs
        self.seats = Seats(len(seqs.requests), seqs.tables.shape[1] * config.page_tokens)
        self._speculates = speculative is not None
        self._drafter = text_drafter(speculative, len(seqs.requests)) if speculative is not None else None
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._answers: dict[Request, Answer] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._next_id = 0
        self._stopping = False
        self._started_s = clock_s()
        self._now_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- for callers, from any thread ----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """End the thread; unfinished answers end with "abort"."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self.runner.close()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens with which the model ends a text."""
        return self._eos

    def now_s(self) -> float:
        """Seconds since the engine was made."""
        return clock_s() - self._started_s

    def add(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        listener: Listener,
        *,
        priority: int = 0,
        tenant: int = 0,
        deadline_s: float = float("inf"),
        salt: str = "",
        weight: float = 1.0,
        turn: tuple[Hashable, int] | None = None,
        keys: TokenKeys | None = None,
    ) -> list[Request]:
        """Queue `sampling.n` answers to a prompt of token ids; `listener` is told of each of their tokens.

        `salt` keeps a prefix cache apart from those of other salts; `weight` is the tenant's under fair sharing; `turn`
        says of which conversation this is which turn, from 0, for the `session` eviction order. Raises `UsageError` for
        an unknown token id and `EngineError` when the engine has ended. A request that can never run is answered with
        "rejected". Who has the page keys of the prompt already, and so has had its tokens checked, may hand them over in
        `keys`, with `sampling.n` 1.
        """
        self._check_alive()
        ids = list(prompt) if keys is not None else [int(token) for token in prompt]
        vocab_size = self._vocab_size if keys is None else None
        if vocab_size is not None and any(not 0 <= token < vocab_size for token in ids):
            raise UsageError(f"the prompt holds a token id outside 0 to {vocab_size - 1}")
        requests: list[Request] = []
        with self._lock:
            sent_s = self.now_s()
            for index in range(sampling.n):
                own: TokenKeys | tuple[()] = ()
                if self.config.enable_prefix_caching:
                    own = TokenKeys(self.config.page_tokens, ids, salt) if keys is None else keys
                request = Request(
                    self._next_id,
                    len(ids),
                    sampling.max_tokens,
                    sent_s,
                    priority,
                    deadline_s,
                    None,
                    own,
                    tenant,
                    weight,
                    *(turn if turn is not None else ()),
                )
                self._next_id += 1
                seed = int(self._rng.integers(2**63)) if sampling.seed is None else sampling.seed + index
                answer = Answer(
                    request, index, list(ids), sampling, seed, self._eos, self.tokenizer, listener, sent_s
                )
                if requests:
                    request.sibling = requests[0]
                self._inbox.put(lambda answer=answer: self._queue(answer))  # type: ignore[misc]
                requests.append(request)
        return requests

    def abort(self, request: Request) -> None:
        """End an answer at the next step boundary; its pages are free then. Nothing happens to one that is over."""
        self._inbox.put(lambda: self._abort(request))

    def _check_alive(self) -> None:
        if self._stopping or self.fault is not None:
            why = f": {self.fault!r}" if self.fault is not None else ""
            raise EngineError(f"the engine has ended{why}") from self.fault

    # ---- the loop, synchronous and asynchronous ------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self.config.async_scheduling:
                self._serve_async()
            else:
                self._serve()
        except BaseException as fault:
            self.fault = fault
            self._end_all("error", repr(fault))
            raise
        self._end_all("abort", "the engine was stopped")

    def _serve(self) -> None:
        while not self._stopping:
            plan = self.scheduler.plan(self._now_s)
            self._planned(plan)
            if plan is None:
                self._sleep()
                continue
            self._leave(plan)
            if len(plan):
                start_s = self._now_s
                flight = self._launch(plan)
                drawn = flight.wait()
                self._commit(flight, drawn, start_s)

    def _serve_async(self) -> None:
        current: _Flight | None = None
        while not self._stopping or current is not None:
            start_s = self._now_s
            plan = self.scheduler.plan(start_s) if not self._stopping else None
            self._planned(plan)
            ahead = self._launch(plan) if plan is not None and len(plan) else None
            if current is not None:
                self._commit(current, current.wait(), start_s)
            elif ahead is not None:
                self._boundary()
            elif plan is None:
                self._sleep()
            if plan is not None:
                self._leave(plan)
            current = ahead

    def _boundary(self, *first: Callable[[], None] | None) -> None:
        """The time between two steps: read the clock once and take what callers sent until then."""
        messages = [*first]
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        self._now_s = self.now_s()
        for message in messages:
            if message is None:
                self._stopping = True
            else:
                message()

    def _sleep(self) -> None:
        """Wait until somebody calls or the policy wants to be asked again."""
        wait_s = self.scheduler.wake_s - self.now_s()
        message: tuple[Callable[[], None] | None, ...] = ()
        if wait_s > 0:
            with contextlib.suppress(queue.Empty):
                message = (self._inbox.get(timeout=wait_s if wait_s < threading.TIMEOUT_MAX else None),)
        self._boundary(*message)

    # ---- one step ------------------------------------------------------------------------------------------

    def _planned(self, plan: StepPlan | None) -> None:
        self.recorder.event(self._now_s, "plan", plan=plan)
        if plan is None:
            return
        self.recorder.admitted(plan, self._now_s)
        for request, _, _ in plan.admitted:
            if request.slot >= 0:
                answer = self._answers[request]
                self.seats.take(request.slot, answer.ids, answer.sampling, answer.seed)
                if self._drafter is not None:
                    self._drafter.take(request.slot)

    def _launch(self, plan: StepPlan) -> _Flight:
        begun_s = clock_s()
        seqs = self.scheduler.seqs
        inputs = step_inputs(plan, seqs, self.seats, self.config.page_tokens)
        drawing = inputs.sample_seats
        draws = self.seats.draws(drawing if inputs.draft is None else drawing[inputs.draft.owners])
        answers = [self._answers.get(seqs.request(slot)) for slot in plan.slots.tolist()]
        wait = self.runner.launch(inputs, draws)
        verified = _NO_DRAFTS if inputs.draft is None else inputs.draft.num_drafts
        return _Flight(plan, answers, inputs.plan_rows.tolist(), wait, clock_s() - begun_s, verified)

    def _leave(self, plan: StepPlan) -> None:
        """Requests that planning took out of the running set."""
        for request in plan.preempted:
            self.recorder.preempted(request)
        for request in plan.truncated:
            self.recorder.ended(request, self._now_s)
            self._answers.pop(request).end("length")

    def _commit(self, flight: _Flight, drawn: Drawn, start_s: float) -> None:
        """A step's tokens have arrived: give them out and let go of who finished."""
        self._boundary()
        plan = flight.plan
        self.recorder.step(plan, start_s, self._now_s, drawn.device_s, self._now_s - start_s - drawn.device_s)
        rows = flight.plan_rows
        given = self._given(flight, drawn)
        tokens: list[Sequence[int]] = [()] * len(plan)
        stopped = np.zeros(len(plan), np.bool_)
        for row, new in zip(rows, given, strict=True):
            answer = flight.answers[row]
            if answer is not None and not answer.over:
                for count, token in enumerate(new, 1):
                    if answer.append(token) is not None:
                        stopped[row] = True
                        new = new[:count]
                        break
                tokens[row] = new
        drafts = self._drafts(flight, drawn, tokens, stopped) if drawn.counts is not None else None
        outcome = StepOutcome(tokens=tokens, stopped=stopped if stopped.any() else None, drafts=drafts)
        self.recorder.event(self._now_s, "commit", plan=plan, outcome=outcome)
        finished = {request: request.reason for request in self.scheduler.commit(plan, outcome)}
        for at, row in enumerate(rows):
            answer = flight.answers[row]
            if answer is None or answer.over:
                continue
            if self._speculates:
                self.recorder.gave(answer.request, len(tokens[row]))
            reason = "stop" if stopped[row] else finished.get(answer.request)
            answer.emit(tokens[row], _logprobs(drawn, at, tokens[row], answer.sampling), reason)
        for request in finished:
            self.recorder.ended(request, self._now_s)
            del self._answers[request]

    def _given(self, flight: _Flight, drawn: Drawn) -> list[list[int]]:
        """The tokens of each drawing row, written down for the steps that come."""
        plan, rows = flight.plan, flight.plan_rows
        slots, ends = plan.slots[rows], (plan.context + plan.num_new)[rows]
        if drawn.counts is None:
            self.seats.tokens[slots, ends] = drawn.tokens
            return [[token] for token in drawn.tokens.tolist()]
        seqs = self.scheduler.seqs
        given = [new[:count] for new, count in zip(drawn.tokens.tolist(), drawn.counts.tolist(), strict=True)]
        answers = [flight.answers[row] for row in rows]
        decoding = [
            a.request if a is not None and not a.over and len(a.ids) > a.num_prompt else None for a in answers
        ]
        self.recorder.verified(decoding, flight.num_drafts, drawn.counts - 1)
        if plan.drafts is not None:
            ends = ends - plan.drafts[rows]
        for at, (slot, first) in enumerate(zip(slots.tolist(), ends.tolist(), strict=True)):
            # Nothing is known of tokens past the limit, and no stop condition may be met there.
            new = given[at] = given[at][: int(seqs.finish[slot] - seqs.known[slot])]
            self.seats.tokens[slot, first : first + len(new)] = new
        return given

    def _drafts(
        self, flight: _Flight, drawn: Drawn, tokens: list[Sequence[int]], stopped: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int64]:
        """Put the drafts for the next step behind the text of each sequence; how many, by row of the plan."""
        plan, seats = flight.plan, self.seats
        assert plan.num_to_draft is not None
        made = np.zeros(len(plan), np.int64)
        for at, row in enumerate(flight.plan_rows):
            slot, most = int(plan.slots[row]), int(plan.num_to_draft[row])
            seats.num_drafts[slot] = 0
            answer = flight.answers[row]
            if not tokens[row] or stopped[row] or answer is None:
                continue
            known = len(answer.ids)
            if self._drafter is not None:
                text = seats.tokens[slot, :known]
                heard = drawn.tokens[at, : 1 + int(flight.num_drafts[at])]
                ids = self._drafter.propose(slot, text, heard, len(tokens[row]), most) if most else text[:0]
            else:
                assert drawn.drafts is not None
                assert drawn.num_drafts is not None
                ids = drawn.drafts[at, : drawn.num_drafts[at]]
            made[row] = seats.num_drafts[slot] = len(ids)
            seats.tokens[slot, known : known + len(ids)] = ids
        return made

    # ---- requests in and out -------------------------------------------------------------------------------

    def _queue(self, answer: Answer) -> None:
        request = answer.request
        self.recorder.sent(request, answer.sent_s)
        self.recorder.event(
            self._now_s, "add", request=request, prompt=tuple(answer.ids), sibling=request.sibling
        )
        accepted = self.scheduler.add(request)
        self.recorder.queued(request, self._now_s)
        if accepted:
            self._answers[request] = answer
        else:
            answer.end("rejected", request.reason)

    def _abort(self, request: Request) -> None:
        if (answer := self._answers.pop(request, None)) is None:
            return
        self.recorder.event(self._now_s, "abort", request=request)
        self.scheduler.abort(request)
        self.recorder.ended(request, self._now_s)
        answer.end("abort")

    def _end_all(self, reason: str, message: str) -> None:
        self._stopping = True
        while not self._inbox.empty():
            if (call := self._inbox.get()) is not None:
                call()
        self.recorder.settle()
        for answer in list(self._answers.values()):
            answer.end(reason, message)


def _logprobs(drawn: Drawn, at: int, tokens: Sequence[int], sampling: Sampling) -> list[TokenLogprob]:
    """What was asked for of the tokens that drawing row `at` gave."""
    if sampling.logprobs is None or drawn.logprobs is None:
        return []
    wide = drawn.counts is not None  # several tokens of each row
    own = np.atleast_1d(drawn.logprobs[at])
    out = []
    for nth, token in enumerate(tokens):
        top: tuple[tuple[int, float], ...] = ()
        if drawn.top_tokens is not None and drawn.top_logprobs is not None:
            place = (at, nth) if wide else (at,)
            pairs = zip(drawn.top_tokens[place].tolist(), drawn.top_logprobs[place].tolist(), strict=True)
            top = tuple(pairs)[: sampling.logprobs]
        out.append(TokenLogprob(token, float(own[nth]), top))
    return out
