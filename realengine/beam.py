"""Beam search and best-of over the engine's own scheduler: hypotheses are requests that share pages by prefix.

Every step asks for one token, with the likeliest beside it, of each live hypothesis; what they have in common is found
in the prefix cache, page for page, so that a hypothesis computes its last, partly filled page and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from realengine.complete import Completion, complete
from realengine.engine import Engine
from realengine.generation import MAX_LOGPROBS, Sampling
from serving.errors import UsageError


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A generated sequence and the log-probability of all of it."""

    token_ids: tuple[int, ...]
    logprob: float
    finished: bool = False
    """It ended with the model's own end, which is its last token."""

    def score(self, length_penalty: float) -> float:
        """Log-probability over length to the power of `length_penalty`; the end token counts as none."""
        length = len(self.token_ids) - self.finished
        return float(self.logprob / max(length, 1) ** length_penalty)


def beam_search(
    engine: Engine,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    eos_token_ids: frozenset[int] = frozenset(),
) -> list[Hypothesis]:
    """The best `width` continuations that a beam of that width finds, best first.

    A hypothesis that ends keeps its score and leaves its place in the beam to the next best; at most `width` are kept.
    Raises `UsageError` for a width that the engine's log-probabilities do not cover.
    """
    if not 1 <= width <= MAX_LOGPROBS // 2:
        raise UsageError(f"beam width is {width}; use 1 to {MAX_LOGPROBS // 2}")
    if max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}; use at least 1")
    one = Sampling(max_tokens=1, temperature=0.0, logprobs=2 * width, ignore_eos=True)
    live, done = [Hypothesis((), 0.0)], list[Hypothesis]()
    for _ in range(max_tokens):
        prompts = [[*prompt, *hypothesis.token_ids] for hypothesis in live]
        grown: list[Hypothesis] = []
        for hypothesis, (answer,) in zip(live, complete(engine, prompts, one), strict=True):
            if answer.finish_reason != "length":
                raise UsageError(f"beam search: {answer.message or answer.finish_reason}")
            for token, logprob in answer.logprobs[0].top:
                grown.append(
                    Hypothesis(
                        (*hypothesis.token_ids, token), hypothesis.logprob + logprob, token in eos_token_ids
                    )
                )
        grown.sort(key=lambda h: -h.logprob)
        # An end counts only if it is among the best of this step, as every other token.
        done += [h for h in grown[: 2 * width] if h.finished]
        live = [h for h in grown if not h.finished][:width]
        if not live:
            break
    best = sorted([*done, *live], key=lambda h: -h.score(length_penalty))
    return best[:width]


def best_of(engine: Engine, prompt: Sequence[int], sampling: Sampling, candidates: int) -> Completion:
    """The likeliest (by mean log-probability of a token) of so many sampled answers, which share the prompt's pages."""
    if candidates < 1:
        raise UsageError(f"best_of is {candidates}; use at least 1")
    asked = replace(sampling, n=candidates, logprobs=sampling.logprobs or 0)
    (answers,) = complete(engine, [prompt], asked)
    return max(answers, key=lambda a: sum(t.logprob for t in a.logprobs) / max(len(a.logprobs), 1))
