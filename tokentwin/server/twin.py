"""The twin behind the API: the scheduler and the prices of a `Deployment`, in real time, and words that mean nothing.

Time in here is the deployment's. `scale` simulated seconds pass in a real one. What a step computes is decided at its
simulated start and told at its simulated end, so that a server that wakes late shifts no later step.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from realengine.generation import Sampling
from serving.draft_counts import total
from serving.errors import UsageError
from serving.policies import load_policy
from serving.request import Request, TokenKeys
from serving.scheduler import Scheduler
from sim.clock import LATE, Clock
from sim.deployment import Built
from sim.jitter import step_noise
from sim.router import Central, RouterOptions, make_router
from tokentwin.server.backend import (
    Busy,
    Codec,
    Failed,
    Generation,
    GenerationRequest,
    Meters,
    Refused,
    Stats,
    Timing,
)
from tokentwin.server.generation import TextGeneration
from tokentwin.server.live_replica import Answer, LiveReplica
from tokentwin.server.mailbox import Mailbox, Slices
from tokentwin.server.twin_beams import TwinSearch, Words
from tokentwin.server.whole import BestOf, WholeGeneration, candidates

_TEXT = (
    " this is the text of a twin and not of a model: it has the length and the pace of an answer, and every word of it "
    "says the same. you may read it as often as you like; there is no more to it than the time it takes."
)
_FEW_TOKENS = 8


class TwinBackend:
    """A deployment that exists in the cost model alone, serving real clients.

    `answer_tokens` is the length of an answer to a request that sets none. `max_waiting` requests may queue beyond
    those that have a seat.
    """

    def __init__(
        self,
        built: Built,
        codec: Codec,
        *,
        root: str | None = None,
        policy_options: dict[str, Any] | None = None,
        time_scale: float = 1.0,
        answer_tokens: int = 256,
        max_waiting: int = 10_000,
        stream_interval: int = 1,
        stream_slice_s: float = 0.0,
        buffer_tokens: int = 1 << 14,
    ) -> None:
        if not 0 < time_scale < math.inf:
            raise UsageError(f"--time-scale must be a positive number, got {time_scale:g}")
        if built.in_lockstep:
            raise UsageError(
                f"--data-parallel-size {built.deployment.data_parallel_size}: replicas of {built.model.name} share their "
                "experts and step together, which simulate does and a served twin does not; use 1"
            )
        self.built = built
        self.codec = codec
        self.model = built.model.name
        self.root = root if root is not None else built.model.name
        self.max_model_len = built.limits.max_model_len
        self._scale = time_scale
        self._answer_tokens = answer_tokens
        self._interval = stream_interval
        self._slices = Slices(stream_slice_s, self._call_late) if stream_slice_s else None
        self._buffer_tokens = buffer_tokens
        self._policy_options = policy_options or {}
        self._script = script(codec)
        self._words = Words(codec, self._script)
        replicas = built.deployment.data_parallel_size
        self._max_unfinished = built.limits.max_num_seqs * replicas + max_waiting
        self._answers: dict[Request, Answer] = {}
        self._count = 0
        self._failure: str | None = None
        self._driver: asyncio.Task[None] | None = None
        self._woken: asyncio.Event = asyncio.Event()
        self._clock = Clock()
        self._replicas: list[LiveReplica] = []

    async def start(self, meters: Meters) -> None:
        """Begin simulated time at 0."""
        d, limits = self.built.deployment, self.built.limits
        self._meters = meters
        noise = step_noise(self.built, None, 0)
        for index in range(d.data_parallel_size):
            scheduler = Scheduler(limits, load_policy(d.policy, **self._policy_options))
            self._replicas.append(
                LiveReplica(
                    self._clock,
                    index,
                    scheduler,
                    self.built.pricer,
                    meters,
                    self._answers,
                    ended=self._ended,
                    unread=self._abort,
                    speculation=self.built.speculation,
                    noise=None if noise is None else noise.stream(index),
                )
            )
        options = RouterOptions(prefix_tokens=d.router_prefix_tokens, load_factor=d.router_load_factor)
        self._router = make_router(d.router, self._replicas, options)
        self.built.pricer.step_s(2, 2, [(1, 0)], 1, 1, 1)  # makes its tables now and not in the first request
        self._origin_s = time.monotonic()
        self._driver = asyncio.create_task(self._drive())

    async def stop(self) -> None:
        """Stop simulated time."""
        for answer in list(self._answers.values()):
            self._abort(answer)
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)

    @property
    def failure(self) -> str | None:
        """Why the twin broke; None while it is well."""
        return self._failure

    @property
    def unfinished(self) -> int:
        """Answers that are queued or running."""
        return len(self._answers)

    def now_s(self) -> float:
        """Simulated time now, by the real clock."""
        return (time.monotonic() - self._origin_s) * self._scale

    def stats(self) -> Stats:
        """Of all replicas together."""
        schedulers = [replica.scheduler for replica in self._replicas]
        running = sum(scheduler.num_running for scheduler in schedulers)
        pages = sum(scheduler.config.num_pages for scheduler in schedulers)
        late_s = self.now_s() - self._clock.peek()
        return Stats(
            running=running,
            waiting=len(self._answers) - running,
            kv_usage=sum(scheduler.used_pages for scheduler in schedulers) / max(1, pages),
            prefix_queries_tokens=sum(scheduler.prefix_queries_tokens for scheduler in schedulers),
            prefix_hits_tokens=sum(scheduler.prefix_hit_tokens for scheduler in schedulers),
            preemptions=sum(replica.preemptions for replica in self._replicas),
            lag_s=max(0.0, late_s) / self._scale,
            drafts=total(replica.drafts for replica in self._replicas),
        )

    # ---- time ----------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        try:
            while True:
                next_s = self._clock.peek()
                ahead_s = next_s - self.now_s()
                if ahead_s <= 0:
                    self._clock.step()
                    await asyncio.sleep(0)  # readers send what the step made before the next one is made
                else:
                    await self._sleep(ahead_s / self._scale)
        except Exception as error:  # whatever it is, clients must not wait for ever
            self._failure = f"{type(error).__name__}: {error}"
            for answer in list(self._answers.values()):
                if answer.search is not None:
                    answer.search.fail(self._failure)
                else:
                    answer.mailbox.fail(Failed(self._failure))
            self._answers.clear()
            raise

    async def _sleep(self, real_s: float) -> None:
        """Until `real_s` seconds have passed or somebody arrives."""
        self._woken.clear()
        if real_s == math.inf:
            await self._woken.wait()
            return
        timer = asyncio.get_running_loop().call_later(real_s, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()

    def _call_late(self, time_s: float, action: Callable[[], None]) -> Callable[[], None]:
        """Do something when all steps that end by a simulated time have told their tokens; returns what calls it off."""
        event = self._clock.at(time_s, LATE)
        assert event.callbacks is not None
        event.callbacks.append(lambda _: action())
        return lambda: self._clock.drop(event)

    # ---- requests ------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request on the replica that the router chooses."""
        if self._failure is not None:
            raise Failed(self._failure)
        sampling = request.fitted(self.max_model_len, self._answer_tokens)
        if request.priority and self.built.limits.queue_order != "priority":
            raise Refused("priority has an effect only under --scheduling-policy priority", param="priority")
        if sampling.logprobs is not None:
            raise Refused("a twin has no model and so no logprobs; leave them out", param="logprobs")
        if request.best_of is not None:
            return BestOf(self.submit(candidates(request, logprobs=False)), request.sampling)
        if len(self._answers) + sampling.n > self._max_unfinished:
            raise Busy(f"{len(self._answers)} requests are in the server; its queue is full")
        if request.beams is not None:
            return self._search(request, sampling)
        prompt_tokens, length = len(request.prompt), sampling.max_tokens
        now_s = max(self.now_s(), self._clock.now)
        mailbox = Mailbox(self._interval, self._buffer_tokens, self._slices)
        answers: list[Answer] = []
        for index in range(sampling.n):
            keys = (
                TokenKeys(self.built.limits.page_tokens, request.prompt)
                if self.built.limits.enable_prefix_caching
                else ()
            )
            inner = Request(self._count + index, prompt_tokens, length, now_s, request.priority, keys=keys)
            if reason := self._replicas[0].scheduler.refusal(inner):
                raise Refused(reason, param="prompt", code="context_length_exceeded")
            if answers and len(self._replicas) == 1:
                # As the engine has it: the prompt's pages are shared by copy on write.
                inner.sibling = answers[0].request
            stops_itself = request.open_ended and not sampling.ignore_eos
            offset = (sampling.seed or 0) + index
            answers.append(Answer(inner, mailbox, index, self._script, offset, now_s, stops_itself))
        self._count += sampling.n
        at_s = now_s + self.built.deployment.frontend_overhead_ms / 1e3
        for answer in answers:
            self._answers[answer.request] = answer
            self._clock.call_at(at_s, lambda answer=answer: self._arrive(answer))  # type: ignore[misc]
        self._woken.set()

        def abort(index: int, reason: str) -> Timing:
            return self._abort(answers[index], reason)

        return TextGeneration(self.codec, request, mailbox, abort)

    def _search(self, request: GenerationRequest, sampling: Sampling) -> WholeGeneration:
        """A beam search: every hypothesis of a step is a request of one token."""
        limits, scheduler = self.built.limits, self._replicas[0].scheduler
        whole = Request("whole", len(request.prompt), sampling.max_tokens)
        if reason := scheduler.refusal(whole):
            raise Refused(reason, param="prompt", code="context_length_exceeded")
        now_s = max(self.now_s(), self._clock.now)
        overhead_s = self.built.deployment.frontend_overhead_ms / 1e3

        def queue(answer: Answer) -> None:
            first = answer.request.prompt_tokens == len(request.prompt)
            self._answers[answer.request] = answer
            # Later steps are sent at the boundary at which the one before became known, and miss the plan made there.
            at_s = now_s + overhead_s if first else self._clock.now
            self._clock.call_at(at_s, lambda: self._arrive(answer))
            self._woken.set()

        def next_id() -> int:
            self._count += 1
            return self._count - 1

        return TwinSearch(
            request,
            replace(sampling, max_tokens=scheduler.finish_at(whole) - len(request.prompt)),
            self.codec,
            self._meters,
            self._words,
            self._count,
            now_s,
            queue,
            self._abort,
            next_id,
            limits.page_tokens if limits.enable_prefix_caching else None,
        ).search.generation

    def _arrive(self, answer: Answer) -> None:
        if answer.request not in self._answers:
            return
        if answer.search is None or answer.search.home is None or isinstance(self._router, Central):
            self._router.submit(answer.request)
        else:
            answer.search.home.submit(answer.request)

    def _ended(self, answer: Answer, reason: str) -> None:
        del self._answers[answer.request]
        self._router.finished()
        if answer.search is not None:
            answer.search.ended(answer)
        else:
            self._meters.ended(answer.timing(), reason)

    def _abort(self, answer: Answer, reason: str = "abort") -> Timing:
        """Take an answer out wherever it is, unless it has ended; returns when things happened to it."""
        timing = answer.timing()
        if self._answers.pop(answer.request, None) is None:
            return timing
        if answer.replica is not None:
            answer.replica.scheduler.abort(answer.request)  # its pages are free now
            self._router.finished()
        if answer.search is None:
            self._meters.ended(timing, reason)
        return timing


def script(codec: Codec) -> list[int]:
    """Tokens of a harmless text; of any words that the tokenizer has where it does not have those."""
    ids = [token for token in codec.encode(_TEXT, add_special_tokens=False) if codec.decode([token])]
    if len(set(ids)) >= _FEW_TOKENS:
        return ids
    return [token for token in range(min(codec.vocab_size, 512)) if codec.decode([token])] or [0]
