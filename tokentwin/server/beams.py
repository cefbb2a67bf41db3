"""A beam search on the event loop: one-token requests beside all other traffic, and nothing is shown before the end.

A backend sends what `send` is given and tells `took` of each answer; whoever reads gets the best hypotheses when the
search is over. The books are those of `serving.beams`, as they are in `realengine.beam`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from realengine.generation import Sampling
from serving.beams import Beams, Hypothesis, Likeliest
from tokentwin.server.backend import Codec, Delta, Failed, GenerationRequest, Meters, Timing
from tokentwin.server.whole import WholeGeneration

Send = Callable[[Sequence[Hypothesis]], None]
"""Asks for one token behind each of these hypotheses, in order of their places."""
ShowLogprob = Callable[[int, float, Likeliest], dict[str, Any]]
"""JSON of a token, its log-probability and the likeliest in its place."""


class BeamSearch:
    """One request's search. `close()` is called once, when the search has ended in whatever way.

    `release()` aborts the requests of the step that is under way. With `stops_itself` the length is the backend's
    choice, so that what has it ends with "stop".
    """

    def __init__(
        self,
        request: GenerationRequest,
        sampling: Sampling,
        codec: Codec,
        meters: Meters,
        arrival_s: float,
        send: Send,
        release: Callable[[], None],
        close: Callable[[], None] = lambda: None,
        *,
        ends: Collection[int] = (),
        stops_itself: bool = False,
        show_logprob: ShowLogprob | None = None,
    ) -> None:
        assert request.beams is not None
        self.beams = Beams(
            sampling.n, sampling.max_tokens, ends=ends, length_penalty=request.beams.length_penalty
        )
        self.generation = WholeGeneration(self._gone)
        self.scheduled_s = math.nan
        self.cached_tokens = 0
        self._request, self._sampling, self._codec, self._meters = request, sampling, codec, meters
        self._arrival_s = arrival_s
        self._send, self._release, self._close = send, release, close
        self._show_logprob = show_logprob
        self._at_the_end = "stop" if stops_itself else "length"
        self._tops: list[Likeliest] = []
        self._missing = 0
        self._said: list[list[Likeliest]] = []
        """What was likeliest in every step, kept where log-probabilities are asked for."""
        self.open = True

    def begin(self) -> None:
        """Send the requests of a step."""
        live = self.beams.live
        self._tops, self._missing = [()] * len(live), len(live)
        self._send(live)

    def took(self, place: int, likeliest: Likeliest, now_s: float) -> None:
        """The token behind one hypothesis has come, with the likeliest in its place."""
        if not self.open:
            return
        self._tops[place] = likeliest
        self._missing -= 1
        if self._missing:
            return
        self.beams.grow(self._tops)
        if self._sampling.logprobs is not None:
            self._said.append(self._tops)
        if self.beams.over:
            self._end()
            self.generation.answer([self._delta(i, h, now_s) for i, h in enumerate(self.beams.best())])
        else:
            self.begin()

    def fail(self, message: str) -> None:
        """A hypothesis could not be grown: the search is lost."""
        if self.open:
            self._end()
            self._release()
            self._meters.ended(self._timing(math.nan, 0), "error")
            self.generation.fail(Failed(message))

    def _gone(self) -> None:
        if self.open:
            self._end()
            self._release()
            for _ in range(self.beams.width):
                self._meters.ended(self._timing(math.nan, 0), "abort")

    def _end(self) -> None:
        self.open = False
        self._close()

    def _timing(self, shown_s: float, num_tokens: int) -> Timing:
        prompt_tokens = len(self._request.prompt)
        return Timing(
            self._arrival_s,
            self.scheduled_s,
            shown_s,
            shown_s,
            prompt_tokens,
            num_tokens,
            min(self.cached_tokens, prompt_tokens),
        )

    def _delta(self, index: int, hypothesis: Hypothesis, now_s: float) -> Delta:
        sampling, tokens = self._sampling, hypothesis.token_ids
        shown = tokens[:-1] if hypothesis.finished and not sampling.include_stop_str_in_output else tokens
        detokenizer = self._codec.detokenizer(
            self._request.prompt, skip_special_tokens=sampling.skip_special_tokens
        )
        timing = self._timing(now_s, len(tokens))
        self._meters.shown_whole(len(tokens), timing.ttft_s)
        reason = "stop" if hypothesis.finished else self._at_the_end
        self._meters.ended(timing, reason)
        stop = tokens[-1] if hypothesis.finished and tokens[-1] in sampling.stop_token_ids else None
        return Delta(
            index,
            list(tokens),
            detokenizer.add(shown) + detokenizer.finish(),
            reason,
            stop,
            timing,
            self._logprobs(hypothesis),
        )

    def _logprobs(self, hypothesis: Hypothesis) -> list[dict[str, Any]]:
        if self._sampling.logprobs is None or self._show_logprob is None:
            return []
        out = []
        for token, place, step in zip(hypothesis.token_ids, hypothesis.parents, self._said, strict=False):
            top = step[place]
            out.append(self._show_logprob(token, dict(top)[token], top[: self._sampling.logprobs]))
        return out
