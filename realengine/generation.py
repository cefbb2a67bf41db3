"""What a request asks of generation: how tokens are drawn and what ends the text."""

from __future__ import annotations

import math
from dataclasses import dataclass

from serving.beams import MAX_BEAM_WIDTH
from serving.errors import UsageError

MAX_LOGPROBS = 2 * MAX_BEAM_WIDTH
"""A beam looks at twice as many tokens behind each hypothesis as it keeps."""
MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of one request, with OpenAI's and vLLM's names and meanings.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. Without `seed` the engine draws one. Raises
    `UsageError` naming the field when a value cannot work.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    """Until so many tokens are out, nothing but `max_tokens` ends the text."""
    logprobs: int | None = None
    """Log-probabilities of each token, and of this many of the likeliest beside it."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def check(name: str, good: bool, allowed: str) -> None:
            if not good:
                raise UsageError(f"{name} is {getattr(self, name)}; {allowed}")

        check("max_tokens", self.max_tokens >= 1, "at least 1 is needed")
        check("temperature", 0.0 <= self.temperature < math.inf, "use 0 (greedy) or more")
        check("top_k", self.top_k >= 0, "use 0 (off) or more")
        check("top_p", 0.0 < self.top_p <= 1.0, "use more than 0, at most 1")
        check("min_p", 0.0 <= self.min_p <= 1.0, "use 0 (off) to 1")
        check("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "use a 64-bit integer")
        check("n", self.n >= 1, "at least 1 is needed")
        check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "use 0 to max_tokens")
        check(
            "logprobs",
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            f"use 0 to {MAX_LOGPROBS}",
        )
        check("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings")
        if any(not text for text in self.stop):
            raise UsageError("stop holds an empty string, which would end every text before it begins")


def one_token(width: int, logprobs: int | None = None) -> Sampling:
    """What a beam of that width asks of every hypothesis: one token, and the likeliest in its place."""
    return Sampling(max_tokens=1, temperature=0.0, logprobs=max(2 * width, logprobs or 0), ignore_eos=True)
