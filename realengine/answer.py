"""One answer being generated: its tokens, the text that may be shown, and what ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from realengine.generation import Sampling
from realengine.stops import StopStrings
from realengine.tokenizer import Tokenizer
from serving.request import Request


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A drawn token's log-probability, and the likeliest tokens in its place with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """What one step adds to an answer. The last one of an answer has a `finish_reason`."""

    index: int
    """Which of the request's `n` answers."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Text that became certain: whole characters, and never the beginning of a stop string."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    """"stop", "length", "abort", "rejected" or "error"; None while more is to come."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the answer; None when the model's own end did."""
    message: str = ""
    """Why, where the reason is "rejected" or "error"."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


Listener = Callable[[Output], None]
"""Called in the engine's thread: it must hand over and return."""


class Answer:
    """State of one answer, owned by the engine's thread."""

    def __init__(
        self,
        request: Request,
        index: int,
        prompt_ids: list[int],
        sampling: Sampling,
        seed: int,
        eos_token_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        listener: Listener,
        sent_s: float,
    ) -> None:
        self.request = request
        self.index = index
        self.ids = prompt_ids
        """Prompt and generated tokens."""
        self.sampling = sampling
        self.seed = seed
        self.listener = listener
        self.sent_s = sent_s
        self.num_prompt = len(prompt_ids)
        self.over = False
        self._ends = frozenset(sampling.stop_token_ids)
        self._eos = frozenset() if sampling.ignore_eos else eos_token_ids
        self._stops = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
        self._detokenizer = (
            tokenizer.detokenizer(prompt_ids, skip_special_tokens=sampling.skip_special_tokens)
            if tokenizer is not None
            else None
        )
        self._text = ""
        self._stop_reason: str | int | None = None

    def append(self, token: int) -> str | None:
        """Take a drawn token. "stop" when it ends the answer, else None."""
        self.ids.append(token)
        free = len(self.ids) - self.num_prompt >= self.sampling.min_tokens
        if free and (token in self._eos or token in self._ends):
            self._stop_reason = token if token in self._ends else None
            if self.sampling.include_stop_str_in_output:
                self._show(token, free)
            return "stop"
        self._show(token, free)
        if self._stops.found is not None:
            self._stop_reason = self._stops.found
            return "stop"
        return None

    def _show(self, token: int, free: bool) -> None:
        if self._detokenizer is not None and (piece := self._detokenizer.add((token,))):
            self._text += self._stops.add(piece) if free else piece

    def emit(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], finish_reason: str | None
    ) -> None:
        """Tell the listener of the tokens of one step, which `append` took."""
        if finish_reason is not None:
            self._close_text()
        text, self._text = self._text, ""
        self.listener(
            Output(
                self.index,
                tuple(tokens),
                text,
                tuple(logprobs),
                finish_reason,
                self._stop_reason,
                cached_tokens=max(self.request.cached_tokens, 0),
            )
        )
        self.over = finish_reason is not None

    def end(self, finish_reason: str, message: str = "") -> None:
        """End the answer without a token."""
        if self.over:
            return
        self.over = True
        self._close_text()
        cached = max(self.request.cached_tokens, 0)
        self.listener(
            Output(
                self.index,
                text=self._text,
                finish_reason=finish_reason,
                message=message,
                cached_tokens=cached,
            )
        )

    def _close_text(self) -> None:
        if self._detokenizer is not None and self._stops.found is None:
            self._text += self._stops.add(self._detokenizer.finish()) + self._stops.finish()
