"""Batches bounded by what requests will need: caps by size class, by estimated tokens, and on prompts beside decodes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from serving.classed import Classed, ClassedFair, make_classed
from serving.errors import UsageError
from serving.policies.base import BatchPolicy
from serving.queues import Queue, make_queue
from serving.request import Request

if TYPE_CHECKING:
    from serving.config import SchedulerConfig
    from serving.scheduler import Scheduler
    from serving.step import Step


def estimated_tokens(request: Request) -> int:
    """Tokens that a request will hold at its end: prompt and predicted answer (`max_tokens` where none is)."""
    answer = request.predicted_tokens if request.predicted_tokens is not None else request.max_tokens
    return request.prompt_tokens + min(answer, request.max_tokens)


class Adaptive(BatchPolicy):
    """vLLM's chunked steps with three more limits.

    `size_classes`: (tokens, sequences) pairs; of requests whose estimated tokens are at most `tokens` (and more than
    the class before) at most `sequences` run at once, so that long ones leave seats to short ones. A request whose
    class is full is passed over. `max_running_tokens`: nobody is admitted who would bring the estimated tokens of all
    that run above it, unless nothing runs. `prefill_share`: while sequences decode, prompts get at most this share of a
    step's token budget (1 is vLLM's own behaviour; less makes steps shorter and prompts slower).
    """

    name = "adaptive"
    steady = True

    def __init__(
        self,
        size_classes: Sequence[tuple[float, int]] = (),
        max_running_tokens: int | None = None,
        prefill_share: float = 1.0,
    ) -> None:
        bounds = [tokens for tokens, _ in size_classes]
        if bounds != sorted(set(bounds)) or any(not tokens > 0 for tokens in bounds):
            raise UsageError("size_classes must have growing bounds above 0, such as 256:64,inf:8")
        if any(seqs < 1 for _, seqs in size_classes):
            raise UsageError("size_classes: each needs room for at least 1 sequence, such as 256:64,inf:8")
        if max_running_tokens is not None and max_running_tokens < 1:
            raise UsageError(f"max_running_tokens is {max_running_tokens}; use at least 1")
        if not 0 < prefill_share <= 1:
            raise UsageError(f"prefill_share is {prefill_share}; use more than 0 and at most 1")
        self.size_classes = tuple(size_classes)
        self.max_running_tokens = max_running_tokens
        self.prefill_share = prefill_share

    def schedule(self, step: Step) -> None:
        if self.prefill_share < 1 and step.num_decoding:
            step.prefill_budget = max(1, int(self.prefill_share * step.config.max_num_batched_tokens))
        step.continue_running()
        if step.preempted:
            return
        for request in self._candidates(step.scheduler):
            if step.seats < 1 or step.token_budget < 1 or not step.admit(request):
                break

    def may_admit(self, scheduler: Scheduler) -> bool:
        if not super().may_admit(scheduler):
            return False
        if self.max_running_tokens is not None and scheduler.fair is not None:
            return True  # every token served may bring another to the head, and that one may fit
        return next(self._candidates(scheduler), None) is not None

    def make_queue(self, order: str) -> Queue:
        return make_classed(order, self._class_of) if self.size_classes else make_queue(order)

    def _candidates(self, scheduler: Scheduler) -> Iterator[Request]:
        """Waiting requests that the caps let in; each must be admitted before the next is asked for."""
        running = list(scheduler.running())
        count = len(running)
        room: dict[int | None, float] = dict(enumerate(seqs for _, seqs in self.size_classes))
        room[None] = math.inf
        for each in running:
            room[self._class_of(each)] -= 1
        held = sum(map(estimated_tokens, running)) if self.max_running_tokens is not None else 0
        while (request := self._first(scheduler.waiting, room)) is not None:
            if self.max_running_tokens is not None:
                held += estimated_tokens(request)
                if held > self.max_running_tokens and count:
                    return
            room[self._class_of(request)] -= 1
            count += 1
            yield request

    def _first(self, waiting: Queue, room: Mapping[int | None, float]) -> Request | None:
        """The first waiting request whose class has room."""
        if not self.size_classes:
            return waiting.peek() if waiting else None
        if isinstance(waiting, (Classed, ClassedFair)):
            return waiting.first([name for name, seqs in room.items() if seqs >= 1])
        return next((request for request in waiting if room[self._class_of(request)] >= 1), None)

    def _class_of(self, request: Request) -> int | None:
        """Index of the request's size class; None where no class bounds it."""
        if not self.size_classes:
            return None
        tokens = estimated_tokens(request)
        return next((i for i, (most, _) in enumerate(self.size_classes) if tokens <= most), None)

    def refuses(self, request: Request, config: SchedulerConfig) -> str | None:
        from serving.policies.chunked import Chunked

        return Chunked().refuses(request, config)


def parse_size_classes(text: str) -> tuple[tuple[float, int], ...]:
    """`256:64,inf:8`: up to 256 tokens 64 sequences, of all others 8. Raises `UsageError`."""
    classes = []
    for part in text.split(","):
        tokens, colon, seqs = part.partition(":")
        try:
            classes.append((float(tokens), int(seqs)))
        except ValueError:
            raise UsageError(
                f"--size-classes: {part!r} is not TOKENS:SEQUENCES, such as 256:64,inf:8"
            ) from None
        if not colon or math.isnan(classes[-1][0]):
            raise UsageError(f"--size-classes: {part!r} is not TOKENS:SEQUENCES, such as 256:64,inf:8")
    return tuple(classes)
