"""The real engine behind the API: its thread's outputs, handed over to the event loop. Knows no torch."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from realengine.answer import Listener, Output, TokenLogprob
from realengine.generation import Sampling, one_token
from realengine.recorder import Recorder
from serving.beams import Hypothesis
from serving.config import SchedulerConfig
from serving.errors import TokenTwinError
from serving.plan import StepPlan
from serving.request import Request, TokenKeys
from serving.scheduler import Scheduler
from tokentwin.server.backend import (
    Busy,
    Codec,
    Delta,
    Failed,
    Generation,
    GenerationRequest,
    Meters,
    Refused,
    Stats,
    Timing,
)
from tokentwin.server.beams import BeamSearch
from tokentwin.server.generation import MailGeneration
from tokentwin.server.mailbox import Mailbox, Slices
from tokentwin.server.whole import BestOf, WholeGeneration, candidates

Take = Callable[[Output, float], None]
"""Told on the event loop of an output and of the end of its step, in seconds of the engine's clock."""


class Engine(Protocol):
    """What of `realengine.engine.Engine` is used here."""

    config: SchedulerConfig
    scheduler: Scheduler
    recorder: Recorder
    fault: BaseException | None

    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    def start(self) -> None: ...
    def stop(self, timeout_s: float | None = None) -> None: ...
    def now_s(self) -> float: ...
    def add(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        listener: Listener,
        *,
        priority: int = 0,
        keys: TokenKeys | None = None,
    ) -> list[Request]: ...
    def abort(self, request: Request) -> None: ...


class _Boundaries(Recorder):
    """Instead of a record of everything, which would grow for ever: what `/metrics` wants to know."""

    def __init__(self, scheduler: Scheduler, meters: Meters) -> None:
        super().__init__(scheduler)
        self._meters = meters
        self.now_s = 0.0
        self.scheduled_s: dict[Request, float] = {}
        self.preemptions = 0

    def sent(self, request: Request, sent_s: float) -> None:
        """Nothing to note."""

    def queued(self, request: Request, now_s: float) -> None:
        """Nothing to note."""

    def admitted(self, plan: StepPlan, now_s: float) -> None:
        """When requests are scheduled for the first time."""
        for request, _, resumed in plan.admitted:
            if not resumed:
                self.scheduled_s[request] = now_s

    def preempted(self, request: Request) -> None:
        """One more."""
        self.preemptions += 1

    def ended(self, request: Request, now_s: float) -> None:
        """Nothing to note."""

    def step(self, plan: StepPlan, start_s: float, end_s: float, gpu_s: float, host_s: float) -> None:
        """The tokens that come next are from a step that ended at `end_s`."""
        self.now_s = end_s
        self._meters.step(plan.num_tokens)

    def gave(self, request: Request, count: int) -> None:
        """Nothing to note."""

    def verified(
        self,
        requests: Sequence[Request | None],
        num_drafts: npt.NDArray[np.int64],
        num_accepted: npt.NDArray[np.int64],
    ) -> None:
        """Count drafts."""
        self.drafts.count(num_drafts, num_accepted)

    def settle(self) -> None:
        """Nothing to note."""


@dataclass(slots=True, eq=False)
class _Submission:
    """One request's answers on their way from the engine."""

    mailbox: Mailbox
    arrival_s: float
    prompt_tokens: int
    requests: list[Request] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    first_s: dict[int, float] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)


class EngineBackend:
    """`realengine`'s engine, serving clients. `max_waiting` requests may queue beyond those that have a seat."""

    def __init__(
        self,
        engine: Engine,
        codec: Codec,
        *,
        model: str,
        root: str,
        max_waiting: int = 10_000,
        stream_interval: int = 1,
        stream_slice_s: float = 0.0,
        buffer_tokens: int = 1 << 14,
    ) -> None:
        self.engine = engine
        self.codec = codec
        self.model = model
        self.root = root
        self.max_model_len = engine.config.max_model_len
        self._interval = stream_interval
        self._slices = Slices(stream_slice_s, self._call_at) if stream_slice_s else None
        self._buffer_tokens = buffer_tokens
        self._max_unfinished = engine.config.max_num_seqs + max_waiting
        self._unfinished = 0
        self._outbox: deque[tuple[Take, Output, float]] = deque()

    async def start(self, meters: Meters) -> None:
        """Start the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self._meters = meters
        self._boundaries = _Boundaries(self.engine.scheduler, meters)
        self.engine.recorder = self._boundaries
        self.engine.start()

    async def stop(self) -> None:
        """End the engine's thread."""
        await asyncio.to_thread(self.engine.stop)
        self._deliver()

    @property
    def failure(self) -> str | None:
        """Why the engine broke; None while it is well."""
        return None if self.engine.fault is None else repr(self.engine.fault)

    @property
    def unfinished(self) -> int:
        """Answers that are queued or running."""
        return self._unfinished

    def stats(self) -> Stats:
        """As the scheduler has it; read from another thread, so that figures may be a step apart."""
        scheduler = self.engine.scheduler
        running = scheduler.num_running
        return Stats(
            running=running,
            waiting=max(0, self._unfinished - running),
            kv_usage=scheduler.used_pages / scheduler.config.num_pages,
            prefix_queries_tokens=scheduler.prefix_queries_tokens,
            prefix_hits_tokens=scheduler.prefix_hit_tokens,
            preemptions=self._boundaries.preemptions,
            drafts=self.engine.recorder.drafts if scheduler.config.num_speculative_tokens else None,
        )

    # ---- requests ------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> Generation:
        """Hand a request to the engine."""
        if request.best_of is not None:
            return BestOf(self.submit(candidates(request, logprobs=True)), request.sampling)
        if (failure := self.failure) is not None:
            raise Failed(failure)
        if request.extras:
            name = min(request.extras)
            raise Refused(f"the engine does not know {name}; leave it out", param=name)
        sampling = request.fitted(self.max_model_len)
        config = self.engine.config
        if request.priority and config.queue_order != "priority":
            raise Refused("priority has an effect only under --scheduling-policy priority", param="priority")
        scheduler = self.engine.scheduler
        probe = Request("probe", len(request.prompt), sampling.max_tokens)
        if reason := scheduler.refusal(probe):
            raise Refused(reason, param="prompt", code="context_length_exceeded")
        if self._unfinished + sampling.n > self._max_unfinished:
            raise Busy(f"{self._unfinished} requests are in the server; its queue is full")
        if request.beams is not None:
            return self._search(
                request, replace(sampling, max_tokens=scheduler.finish_at(probe) - len(request.prompt))
            )
        submission = _Submission(
            Mailbox(self._interval, self._buffer_tokens, self._slices),
            self.engine.now_s(),
            len(request.prompt),
        )
        try:
            submission.requests = self.engine.add(
                request.prompt,
                sampling,
                self._listener(lambda output, now_s: self._take(submission, output, now_s)),
                priority=request.priority,
            )
        except TokenTwinError as error:
            raise Refused(str(error)) from None
        submission.open = set(range(sampling.n))
        self._unfinished += sampling.n

        def abort(index: int, reason: str) -> Timing | None:
            self.engine.abort(submission.requests[index])
            return None

        return MailGeneration(submission.mailbox, sampling.n, abort)

    def _search(self, request: GenerationRequest, sampling: Sampling) -> WholeGeneration:
        """A beam search: each hypothesis of a step is a request of one token."""
        under_way: dict[int, Request] = {}
        one = one_token(sampling.n, sampling.logprobs)
        page_keys: list[TokenKeys | None] = [None]

        def send(hypotheses: Sequence[Hypothesis]) -> None:
            page_keys[:] = [self._page_keys(request.prompt, page_keys, each) for each in hypotheses]
            try:
                for place, (hypothesis, keys) in enumerate(zip(hypotheses, page_keys, strict=True)):
                    take = self._listener(partial(took, place))
                    prompt = [*request.prompt, *hypothesis.token_ids]
                    own = None if keys is None else keys.copy()  # the engine goes on with it
                    (under_way[place],) = self.engine.add(
                        prompt, one, take, priority=request.priority, keys=own
                    )
            except TokenTwinError as error:
                search.fail(str(error))

        def took(place: int, output: Output, now_s: float) -> None:
            scheduled_s = self._boundaries.scheduled_s.pop(under_way.pop(place), math.nan)
            if not search.beams.num_steps:
                search.scheduled_s, search.cached_tokens = scheduled_s, output.cached_tokens
            if output.finish_reason == "length":
                search.took(place, output.logprobs[0].top, now_s)
            else:
                search.fail(output.message or f"a hypothesis ended by {output.finish_reason}")

        def release() -> None:
            for hypothesis in under_way.values():
                self.engine.abort(hypothesis)

        def close() -> None:
            self._unfinished -= sampling.n

        search = BeamSearch(
            request,
            sampling,
            self.codec,
            self._meters,
            self.engine.now_s(),
            send,
            release,
            close,
            ends=self._ends(sampling),
            show_logprob=lambda token, logprob, top: self._logprob(TokenLogprob(token, logprob, tuple(top))),
        )
        self._unfinished += sampling.n
        search.begin()
        return search.generation

    def _page_keys(
        self, prompt: Sequence[int], before: Sequence[TokenKeys | None], hypothesis: Hypothesis
    ) -> TokenKeys | None:
        """A hypothesis' page keys, from those of the step before, so that a prompt is hashed once; None for the first."""
        if not hypothesis.token_ids:
            return None
        parent = before[hypothesis.parents[-1]]
        if parent is None:
            return TokenKeys(self.engine.config.page_tokens, [*prompt, *hypothesis.token_ids])
        keys = parent.copy()
        keys.extend(hypothesis.token_ids[-1:])
        return keys

    def _ends(self, sampling: Sampling) -> frozenset[int]:
        own = frozenset[int]() if sampling.ignore_eos else self.engine.eos_token_ids
        return own | frozenset(sampling.stop_token_ids)

    def _listener(self, take: Take) -> Listener:
        """Called in the engine's thread; the loop is woken once for all that waits."""

        def listen(output: Output) -> None:
            self._outbox.append((take, output, self._boundaries.now_s))
            # Asked afterwards, so that what the loop empties meanwhile leaves nothing behind that nobody fetches.
            if len(self._outbox) == 1:
                self._call(self._deliver)

        return listen

    def _call(self, action: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # the loop has ended, and nobody listens any more
            self._outbox.clear()

    def _call_at(self, time_s: float, action: Callable[[], None]) -> Callable[[], None]:
        """Do something at a time of the engine's clock; returns what calls it off."""
        return self._loop.call_later(time_s - self.engine.now_s(), action).cancel

    def _deliver(self) -> None:
        """On the loop: outputs into their mailboxes."""
        try:
            while self._outbox:
                take, output, now_s = self._outbox.popleft()
                take(output, now_s)
        finally:
            if self._outbox:  # one that could not be delivered holds up nobody else
                self._call(self._deliver)

    def _take(self, submission: _Submission, output: Output, now_s: float) -> None:
        index, count = output.index, len(output.token_ids)
        if index not in submission.open:
            return
        if count:
            if index in submission.last_s:
                self._meters.tokens(count, now_s - submission.last_s[index])
            else:
                submission.first_s[index] = now_s
                self._meters.first_token(now_s - submission.arrival_s)
            submission.last_s[index] = now_s
            submission.tokens[index] = submission.tokens.get(index, 0) + count
        delta = Delta(
            index,
            list(output.token_ids),
            output.text,
            output.finish_reason,
            output.stop_reason,
            logprobs=[self._logprob(entry) for entry in output.logprobs],
        )
        if output.finish_reason is not None:
            delta.timing = self._end(submission, output)
        if output.finish_reason in ("error", "rejected"):
            submission.mailbox.fail(Failed(output.message))
        elif not submission.mailbox.put(delta, now_s) and output.finish_reason is None:
            self.engine.abort(submission.requests[index])

    def _end(self, submission: _Submission, output: Output) -> Timing:
        index = output.index
        request = submission.requests[index]
        timing = Timing(
            submission.arrival_s,
            self._boundaries.scheduled_s.pop(request, math.nan),
            submission.first_s.get(index, math.nan),
            submission.last_s.get(index, math.nan),
            submission.prompt_tokens,
            submission.tokens.get(index, 0),
            output.cached_tokens,
        )
        submission.open.discard(index)
        self._unfinished -= 1
        self._meters.ended(timing, output.finish_reason or "")
        return timing

    def _logprob(self, entry: TokenLogprob) -> dict[str, object]:
        return {
            **self._token(entry.token, entry.logprob),
            "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top],
        }

    def _token(self, token: int, logprob: float) -> dict[str, object]:
        text = self.codec.decode([token], skip_special_tokens=False)
        return {
            "token": text,
            "logprob": max(logprob, -9999.0),
            "bytes": list(text.encode("utf-8", "replace")),
        }
