"""Beam search and best-of over the engine's own scheduler: hypotheses are requests that share pages by prefix.

Every step asks for one token, with the likeliest beside it, of each live hypothesis; what they have in common is found
in the prefix cache, page for page, so that a hypothesis computes its last, partly filled page and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from realengine.complete import Completion, complete
from realengine.engine import Engine
from realengine.generation import Sampling, one_token
from serving.beams import MAX_BEAM_WIDTH, Beams, Hypothesis, mean_logprob
from serving.errors import UsageError


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
    if not 1 <= width <= MAX_BEAM_WIDTH:
        raise UsageError(f"beam width is {width}; use 1 to {MAX_BEAM_WIDTH}")
    beams = Beams(width, max_tokens, ends=eos_token_ids, length_penalty=length_penalty)
    one = one_token(width)
    while not beams.over:
        prompts = [[*prompt, *hypothesis.token_ids] for hypothesis in beams.live]
        answers = [answer for (answer,) in complete(engine, prompts, one)]
        for answer in answers:
            if answer.finish_reason != "length":
                raise UsageError(f"beam search: {answer.message or answer.finish_reason}")
        beams.grow([answer.logprobs[0].top for answer in answers])
    return beams.best()


def best_of(engine: Engine, prompt: Sequence[int], sampling: Sampling, candidates: int) -> Completion:
    """The likeliest (by mean log-probability of a token) of so many sampled answers, which share the prompt's pages."""
    if candidates < 1:
        raise UsageError(f"best_of is {candidates}; use at least 1")
    asked = replace(sampling, n=candidates, logprobs=sampling.logprobs or 0)
    (answers,) = complete(engine, [prompt], asked)
    return max(answers, key=lambda answer: mean_logprob([entry.logprob for entry in answer.logprobs]))
