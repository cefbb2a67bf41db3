"""A scheduler with an imaginary model behind it: scenarios say who arrives, `step()` says what was decided.

Every request is a list of token ids (or just a length, whose ids are then its own), and its answers are a function of
its id, so that an answer can be compared between runs. Nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

from serving.config import SchedulerConfig
from serving.plan import StepOutcome, StepPlan
from serving.policies import BatchPolicy
from serving.request import Request, State, TokenKeys
from serving.scheduler import Scheduler


def answer_token(request_id: Any, position: int) -> int:
    """Token `position` of the answer that the imaginary model gives to a request."""
    return crc32(f"{request_id}:{position}".encode()) % 50_000


def own_tokens(request_id: Any, count: int) -> list[int]:
    """A prompt that shares no page with anybody else's."""
    return [100_000 + crc32(f"prompt {request_id}:{i}".encode()) % 1_000_000 for i in range(count)]


@dataclass
class Decisions:
    """What one call of `plan` decided, by request id. `finished` is filled when outputs were committed in this step."""

    sched: dict[Any, int] = field(default_factory=dict)
    hits: dict[Any, int] = field(default_factory=dict)
    resumed: list[Any] = field(default_factory=list)
    preempted: list[Any] = field(default_factory=list)
    truncated: list[Any] = field(default_factory=list)
    drafts: dict[Any, int] = field(default_factory=dict)
    starved: list[Any] = field(default_factory=list)
    running: list[Any] = field(default_factory=list)
    waiting: list[Any] = field(default_factory=list)
    free: int = 0
    finished: list[Any] = field(default_factory=list)


class Engine:
    """`Engine(num_pages=10, max_num_batched_tokens=32)`: any field of `SchedulerConfig`, small defaults."""

    def __init__(self, policy: BatchPolicy | None = None, **config: Any) -> None:
        config = {"num_pages": 1000, "max_num_seqs": 8, "max_num_batched_tokens": 256} | config
        self.config = SchedulerConfig(**config)
        self.scheduler = Scheduler(self.config, policy)
        self.requests: dict[Any, Request] = {}
        self.answers: dict[Any, list[int]] = {}
        self.ends_with: dict[Any, int] = {}
        """Position in its answer at which a request meets a stop token."""
        self.accept: Callable[[Any, int], int] = lambda request_id, drafts: drafts
        """How many of the drafts of a step the target accepts."""
        self.propose = 0
        """Draft tokens proposed to every decoding request after each committed step."""
        self.in_flight: list[tuple[StepPlan, list[Request]]] = []
        self.num_steps = 0
        self.tokens_scheduled = 0
        self.check = True

    def add(
        self,
        request_id: Any,
        prompt: int | Sequence[int],
        max_tokens: int = 8,
        *,
        stop_at: int | None = None,
        **fields: Any,
    ) -> Request:
        """A request arrives; later ones have a later `arrival_s` unless told otherwise."""
        ids = own_tokens(request_id, prompt) if isinstance(prompt, int) else list(prompt)
        fields.setdefault("arrival_s", float(len(self.requests)))
        if "keys" not in fields and self.config.enable_prefix_caching:
            fields["keys"] = TokenKeys(self.config.page_tokens, ids)
        request = Request(request_id, len(ids), max_tokens, **fields)
        self.requests[request_id] = request
        self.answers[request_id] = []
        if stop_at is not None:
            self.ends_with[request_id] = stop_at
        self.scheduler.add(request)
        return request

    def step(self) -> Decisions:
        """Plan a step; commit its outputs, or those of the oldest in flight when as many are as the engine allows."""
        decided = self.plan()
        scheduled = bool(decided.sched)
        depth = 2 if self.config.async_scheduling else self.config.pipeline_parallel_size
        if len(self.in_flight) >= depth or (self.in_flight and not scheduled):
            decided.finished = self.commit()
        return decided

    def run(self, limit: int = 10_000) -> list[Decisions]:
        """Step until nobody is left."""
        history = []
        while self.scheduler.num_unfinished:
            history.append(self.step())
            assert len(history) < limit, f"not done after {limit} steps"
        while self.in_flight:
            history[-1].finished += self.commit()
        return history

    def plan(self) -> Decisions:
        """Plan a step and leave it in flight."""
        scheduler = self.scheduler
        plan = scheduler.plan(float(self.num_steps))
        self.num_steps += 1
        if self.check:
            scheduler.check()
            for slot in scheduler.seqs.order:
                computed, target = int(scheduler.seqs.computed[slot]), int(scheduler.seqs.target[slot])
                assert computed <= target + self.config.num_speculative_tokens, "more is computed than exists"
        decided = Decisions(
            running=[r.id for r in scheduler.running()],
            waiting=[r.id for r in scheduler.waiting],
            free=scheduler.pool.num_free,
        )
        if plan is None:
            return decided
        owners = [scheduler.seqs.request(slot) for slot in plan.slots.tolist()]
        ids = [request.id for request in owners]
        decided.sched = dict(zip(ids, plan.num_new.tolist(), strict=True))
        decided.hits = {a.request.id: a.cached_tokens for a in plan.admitted}
        decided.resumed = [a.request.id for a in plan.admitted if a.resumed]
        decided.preempted = [r.id for r in plan.preempted]
        decided.truncated = [r.id for r in plan.truncated]
        # One that was preempted after it was passed over has no seat any more, and its stream ends anyway.
        starved = (scheduler.seqs.requests[slot] for slot in plan.starved)
        decided.starved = [request.id for request in starved if request is not None]
        if plan.drafts is not None:
            decided.drafts = {i: d for i, d in zip(ids, plan.drafts.tolist(), strict=True) if d}
        assert plan.num_tokens == sum(decided.sched.values())
        self.tokens_scheduled += plan.num_tokens
        if owners:
            self.in_flight.append((plan, owners))
        return decided

    def commit(self) -> list[Any]:
        """Deliver the outputs of the oldest step in flight; returns the ids that finished."""
        plan, owners = self.in_flight.pop(0)
        samples = [True] * len(owners) if plan.samples is None else plan.samples.tolist()
        admitted = {a.request.id for a in plan.admitted}
        outputs: list[list[int]] = []
        stopped = np.zeros(len(owners), np.bool_)
        for row, request in enumerate(owners):
            answer = self.answers[request.id]
            produced: list[int] = []
            if samples[row] and not request.done:
                drafts = int(plan.drafts[row]) if plan.drafts is not None else 0
                # The drafts of a request that has just been admitted are padding, which is never accepted.
                padding = request.id in admitted
                accepted = 0 if padding or not drafts else min(self.accept(request.id, drafts), drafts)
                produced = [answer_token(request.id, len(answer) + i) for i in range(1 + accepted)]
                stop_at = self.ends_with.get(request.id)
                if stop_at is not None and stop_at < len(answer) + len(produced):
                    produced = produced[: stop_at - len(answer) + 1]
                    stopped[row] = True
                answer += produced[: self.scheduler.finish_at(request) - request.prompt_tokens - len(answer)]
            outputs.append(produced)
        finished = self.scheduler.commit(plan, StepOutcome(tokens=outputs, stopped=stopped))
        if self.propose:
            for row, request in enumerate(owners):
                if samples[row] and not request.done and not self.config.async_scheduling:
                    self.scheduler.propose(request, self.propose)
        if self.check:
            self.scheduler.check()
            for request in owners:
                assert self.known(request) == request.prompt_tokens + len(self.answers[request.id])
        return [request.id for request in finished]

    def known(self, request: Request) -> int:
        """Tokens of a request, prompt and answer, that the scheduler was told of."""
        return int(self.scheduler.seqs.known[request.slot]) if request.slot >= 0 else request.num_tokens

    def pages(self, request_id: Any) -> list[int]:
        """Page table of a running request."""
        slot = self.requests[request_id].slot
        assert slot >= 0, f"{request_id} is not running"
        return self.scheduler.seqs.pages_of(slot).tolist()

    def computed(self, request_id: Any) -> int:
        """Tokens of a running request that are computed or scheduled."""
        return int(self.scheduler.seqs.computed[self.requests[request_id].slot])

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self.scheduler.pool.num_free

    @property
    def idle(self) -> bool:
        """Nobody runs or waits, nothing is in flight, and every page is free."""
        return (
            not self.scheduler.num_unfinished
            and not self.in_flight
            and self.free == self.config.num_pages
            and all(r.state >= State.FINISHED for r in self.requests.values())
        )
