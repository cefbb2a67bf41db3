"""Answers that are shown whole, when all is known: the base of beam search, and the likeliest of several samples."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from realengine.generation import Sampling
from serving.beams import mean_logprob
from tokentwin.server.backend import Delta, Generation, GenerationRequest

Abort = Callable[[], None]


class WholeGeneration:
    """One delta per answer, all at once. `abort()` is called when the client leaves before they have come."""

    def __init__(self, abort: Abort) -> None:
        self._coming: asyncio.Future[Sequence[Delta]] = asyncio.get_running_loop().create_future()
        self._left: deque[Delta] | None = None
        self._abort = abort

    def answer(self, deltas: Sequence[Delta]) -> None:
        """The answers are there."""
        if not self._coming.done():
            self._coming.set_result(deltas)

    def fail(self, error: Exception) -> None:
        """There will be none."""
        if not self._coming.done():
            self._coming.set_exception(error)
            self._coming.exception()  # retrieved: nobody need read it

    def __aiter__(self) -> WholeGeneration:
        return self

    async def __anext__(self) -> Delta:
        if self._left is None:
            self._left = deque(await asyncio.shield(self._coming))
        if not self._left:
            raise StopAsyncIteration
        return self._left.popleft()

    def abort(self) -> None:
        """Nobody wants the answers."""
        if not self._coming.done():
            self._coming.cancel()
            self._abort()


def candidates(request: GenerationRequest, *, logprobs: bool) -> GenerationRequest:
    """The request for all candidates of a best-of; `logprobs` says whether there is a model that judges them."""
    assert request.best_of is not None
    judged = (request.sampling.logprobs or 0) if logprobs else None
    return replace(
        request, best_of=None, sampling=replace(request.sampling, n=request.best_of, logprobs=judged)
    )


class BestOf:
    """The `n` likeliest, by mean log-probability of a token, of the answers that `inner` makes, best first.

    Where nothing is known of probabilities (a twin) they are the first ones. All have ended before the first is shown.
    """

    def __init__(self, inner: Generation, sampling: Sampling) -> None:
        self._inner = inner
        self._n = sampling.n
        self._shows_logprobs = sampling.logprobs is not None
        self._left: deque[Delta] | None = None

    def __aiter__(self) -> BestOf:
        return self

    async def __anext__(self) -> Delta:
        if self._left is None:
            self._left = deque(await self._best())
        if not self._left:
            raise StopAsyncIteration
        return self._left.popleft()

    def abort(self) -> None:
        """As the inner one."""
        self._inner.abort()

    async def _best(self) -> list[Delta]:
        answers: dict[int, Delta] = {}
        async for delta in self._inner:
            answers.setdefault(delta.index, Delta(delta.index)).grow(delta)
        ranked = sorted(
            (answers[index] for index in sorted(answers)),
            key=lambda answer: -mean_logprob([float(entry["logprob"]) for entry in answer.logprobs]),
        )[: self._n]
        for index, answer in enumerate(ranked):
            answer.index = index
            if not self._shows_logprobs:
                answer.logprobs = []
            if answer.timing is not None:
                # The client sees nothing before its end.
                shown_s = max(a.timing.last_token_s for a in answers.values() if a.timing is not None)
                answer.timing = replace(answer.timing, first_token_s=shown_s, last_token_s=shown_s)
        return ranked
