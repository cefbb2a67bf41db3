"""Beam searches of a twin: which tokens are likely is made up, when they come is simulated.

Hypotheses have tokens of the vocabulary and so pages that are found by them, the prompt's and each other's; the best
one's are found when a client sends it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from realengine.generation import Sampling
from serving.beams import MAX_BEAM_WIDTH, Hypothesis, Likeliest
from serving.request import Request, TokenKeys
from sim.beam import NextTokens
from tokentwin.server.backend import Codec, GenerationRequest, Meters
from tokentwin.server.beams import BeamSearch
from tokentwin.server.live_replica import Answer, LiveReplica
from tokentwin.server.mailbox import Mailbox


class Words:
    """Tokens that a twin finds likely: those of its script first, and others after them."""

    def __init__(self, codec: Codec, script: Sequence[int]) -> None:
        self._script = script
        self._tokens = list(dict.fromkeys(script))
        for token in range(codec.vocab_size):
            if len(self._tokens) >= 2 * MAX_BEAM_WIDTH:
                break
            if token not in self._tokens and codec.decode([token]):
                self._tokens.append(token)

    def at(self, position: int, count: int) -> list[int]:
        """At most `count` different tokens for a position of an answer, the likeliest first."""
        first = self._tokens.index(self._script[position % len(self._script)])
        count = min(count, len(self._tokens))
        return [self._tokens[(first + rank) % len(self._tokens)] for rank in range(count)]


class TwinSearch:
    """The requests of one search. `queue(answer)` sends one, `drop(answer)` takes one out wherever it is."""

    def __init__(
        self,
        request: GenerationRequest,
        sampling: Sampling,
        codec: Codec,
        meters: Meters,
        words: Words,
        number: int,
        arrival_s: float,
        queue: Callable[[Answer], None],
        drop: Callable[[Answer], object],
        next_id: Callable[[], int],
        page_tokens: int | None,
    ) -> None:
        self.home: LiveReplica | None = None
        """Where the search began, for that is where its pages are."""
        self._request, self._page_tokens = request, page_tokens
        self._words, self._rng = words, np.random.Generator(np.random.PCG64([number]))
        self._queue, self._drop, self._next_id = queue, drop, next_id
        self._answers: list[Answer] = []
        self._likeliest: list[Likeliest] = []
        self.search = BeamSearch(
            request,
            sampling,
            codec,
            meters,
            arrival_s,
            self._send,
            self._release,
            stops_itself=request.open_ended and not sampling.ignore_eos,
        )
        self._arrival_s = arrival_s
        self.search.begin()

    def ended(self, answer: Answer) -> None:
        """One hypothesis has its token."""
        if not self.search.beams.num_steps:
            self.home = answer.replica
            self.search.scheduled_s = answer.scheduled_s
            self.search.cached_tokens = max(0, answer.request.cached_tokens)
        self._arrival_s = answer.last_token_s
        self.search.took(answer.index, self._likeliest[answer.index], answer.last_token_s)

    def fail(self, message: str) -> None:
        """The twin broke."""
        self.search.fail(message)

    def _send(self, hypotheses: Sequence[Hypothesis]) -> None:
        count = 2 * self.search.beams.width
        drawn = NextTokens().logprobs(self._rng, len(hypotheses), count).tolist()
        words = self._words.at(self.search.beams.num_steps, count)
        self._likeliest = [list(zip(words, logprobs, strict=False)) for logprobs in drawn]
        self._answers = []
        for place, hypothesis in enumerate(hypotheses):
            prompt = [*self._request.prompt, *hypothesis.token_ids]
            keys = () if self._page_tokens is None else TokenKeys(self._page_tokens, prompt)
            inner = Request(
                self._next_id(), len(prompt), 1, self._arrival_s, self._request.priority, keys=keys
            )
            answer = Answer(inner, Mailbox(), place, words, 0, self._arrival_s, False, search=self)
            self._answers.append(answer)
        for answer in self._answers:
            self._queue(answer)

    def _release(self) -> None:
        for answer in self._answers:
            self._drop(answer)
