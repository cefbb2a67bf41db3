"""Whole answers, for scripts and tests: add prompts, wait until all are done."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from realengine.answer import Output, TokenLogprob
from realengine.engine import Engine
from realengine.generation import Sampling


@dataclass(slots=True)
class Completion:
    """One finished answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    message: str = ""
    cached_tokens: int = 0

    def take(self, output: Output) -> None:
        """Append what a step added."""
        self.token_ids.extend(output.token_ids)
        self.text += output.text
        self.logprobs.extend(output.logprobs)
        self.cached_tokens = output.cached_tokens
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
            self.message = output.message


def complete(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
) -> list[list[Completion]]:
    """All answers to `prompts` (token ids), `sampling.n` of them each, from an engine that was started."""
    each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    left = threading.Semaphore(0)
    results = [[Completion() for _ in range(s.n)] for s in each]

    for prompt, parameters, answers in zip(prompts, each, results, strict=True):

        def listen(output: Output, answers: list[Completion] = answers) -> None:
            answers[output.index].take(output)
            if output.finish_reason is not None:
                left.release()

        engine.add(prompt, parameters, listen)
    for answers in results:
        for _ in answers:
            left.acquire()
    return results
