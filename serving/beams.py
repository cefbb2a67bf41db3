"""The books of a beam search: which hypotheses live, which have ended, which are best.

Knows no engine and no model: it is told the likeliest next tokens of every hypothesis that lives, and says what comes
of them. The engine, its server and the twin keep their searches with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from serving.errors import UsageError

MAX_BEAM_WIDTH = 10
"""Hypotheses of a search at most, in engine, twin and server: half of the log-probabilities that the engine gives."""
Likeliest = Sequence[tuple[int, float]]
"""(token, log-probability) of the likeliest tokens behind one hypothesis, best first."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A generated sequence and the log-probability of all of it."""

    token_ids: tuple[int, ...]
    logprob: float
    finished: bool = False
    """It ended with the model's own end, which is its last token."""
    parents: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """For each token the place in the beam of the hypothesis that it was put behind."""

    def score(self, length_penalty: float) -> float:
        """Log-probability over length to the power of `length_penalty`; the end token counts as none."""
        length = len(self.token_ids) - self.finished
        return float(self.logprob / max(length, 1) ** length_penalty)


class Beams:
    """One search. While it is not `over`, `grow` it by what is likeliest behind each of the `live` hypotheses.

    A hypothesis that ends (with one of `ends`) keeps its score and leaves its place to the next best. Raises
    `UsageError` for numbers that make no search.
    """

    def __init__(
        self, width: int, max_tokens: int, *, ends: Collection[int] = (), length_penalty: float = 1.0
    ) -> None:
        if width < 1:
            raise UsageError(f"beam width is {width}; use at least 1")
        if max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}; use at least 1")
        if not math.isfinite(length_penalty):
            raise UsageError(f"length_penalty is {length_penalty}; use a finite number")
        self.width = width
        self.max_tokens = max_tokens
        self.live: list[Hypothesis] = [Hypothesis((), 0.0)]
        """Best first: their order is their place in the beam."""
        self.ended: list[Hypothesis] = []
        self.num_steps = 0
        self._ends = ends
        self._length_penalty = length_penalty

    @property
    def over(self) -> bool:
        """Nothing is left to grow."""
        return not self.live or self.num_steps >= self.max_tokens

    def grow(self, likeliest: Sequence[Likeliest]) -> None:
        """One step: the likeliest tokens behind each of `live`, at least 2 × `width` of each where there are as many."""
        grown = [
            (hypothesis.logprob + logprob, place, token)
            for place, (hypothesis, top) in enumerate(zip(self.live, likeliest, strict=True))
            for token, logprob in top
        ]
        grown.sort(key=lambda one: -one[0])
        live: list[Hypothesis] = []
        for rank, (logprob, place, token) in enumerate(grown):
            finished = token in self._ends
            # An end counts only if it is among the best of this step, as every other token.
            if (len(live) == self.width and not finished) or (finished and rank >= 2 * self.width):
                continue
            parent = self.live[place]
            child = Hypothesis((*parent.token_ids, token), logprob, finished, (*parent.parents, place))
            (self.ended if finished else live).append(child)
        self.live = live
        self.num_steps += 1

    def best(self) -> list[Hypothesis]:
        """At most `width` hypotheses, ended or not, best first by `Hypothesis.score`."""
        found = sorted([*self.ended, *self.live], key=lambda h: -h.score(self._length_penalty))
        return found[: self.width]


@dataclass(slots=True)
class BeamCounts:
    """What the searches of a run took."""

    searches: int = 0
    """That came to their end."""
    requests: int = 0
    """Requests of one token that they made, those of unfinished searches included."""
    computed_tokens: int = 0
    """Tokens computed for them, whatever was computed again after a preemption left out."""
    cached_tokens: int = 0
    """Tokens that they found in the prefix cache, or that were sent by where the prompt was computed."""
    shown_tokens: int = 0
    """Tokens of the answers, one (the best) of each search."""

    @property
    def hit_rate(self) -> float:
        """Tokens found in the prefix cache / tokens looked for, 0 to 1."""
        asked = self.computed_tokens + self.cached_tokens
        return self.cached_tokens / asked if asked else 0.0


@dataclass(slots=True)
class CandidateCounts:
    """What best-of took in a run."""

    requests: int = 0
    """Of which an answer was shown."""
    answers: int = 0
    """That were sampled to their end."""
    generated_tokens: int = 0
    """Of all those answers."""
    shown_tokens: int = 0


def mean_logprob(logprobs: Sequence[float]) -> float:
    """What best-of ranks answers by."""
    return sum(logprobs) / max(len(logprobs), 1)
