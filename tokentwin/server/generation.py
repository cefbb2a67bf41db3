"""The answers to one request, read from a mailbox. `TextGeneration` adds the text where a backend makes tokens only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from realengine.stops import StopStrings
from tokentwin.server.backend import Codec, Delta, GenerationRequest, Timing
from tokentwin.server.mailbox import Mailbox

Abort = Callable[[int, str], Timing | None]
"""`abort(index, reason)` takes an answer out of the backend; it returns when things happened to it, where known."""


class MailGeneration:
    """Deltas as the mailbox has them, until each of `num_answers` has ended."""

    def __init__(self, mailbox: Mailbox, num_answers: int, abort: Abort) -> None:
        self._mailbox = mailbox
        self._abort = abort
        self._open = set(range(num_answers))
        self._deltas: deque[Delta] = deque()

    def __aiter__(self) -> MailGeneration:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if not self._open:
                raise StopAsyncIteration
            for delta in await self._mailbox.get():
                if delta.index in self._open:
                    self._deltas.append(self._shown(delta))
                    if delta.finish_reason is not None:
                        self._open.discard(delta.index)
        return self._deltas.popleft()

    def abort(self) -> None:
        """Nobody wants the rest."""
        for index in self._open:
            self._abort(index, "abort")
        self._open.clear()
        self._mailbox.close()

    def _shown(self, delta: Delta) -> Delta:
        return delta


class TextGeneration(MailGeneration):
    """Deltas that come without text: detokenised here, and cut at stop strings."""

    def __init__(self, codec: Codec, request: GenerationRequest, mailbox: Mailbox, abort: Abort) -> None:
        super().__init__(mailbox, request.sampling.n, abort)
        self._texts = [_Text(codec, request) for _ in range(request.sampling.n)]
        if mailbox.gathers and request.sampling.stop:
            self._ahead = [_Text(codec, request) for _ in range(request.sampling.n)]
            mailbox.is_last = self._stops

    def _stops(self, delta: Delta) -> bool:
        """Whether a stop string ends the answer, looked for before the text is shown, so that the end need not wait."""
        text = self._ahead[delta.index]
        if text.stopped_by is None:
            text.add(delta.token_ids)
            text.take()
        return text.stopped_by is not None

    def _shown(self, delta: Delta) -> Delta:
        text = self._texts[delta.index]
        used = text.add(delta.token_ids)
        if text.stopped_by is None and delta.finish_reason is not None:
            text.finish()
        if text.stopped_by is not None:
            del delta.token_ids[used:]
            delta.timing = self._abort(delta.index, "stop") or delta.timing
            delta.finish_reason, delta.stop_reason = "stop", text.stopped_by
        delta.text = text.take()
        return delta


class _Text:
    """The text of one answer as it grows."""

    def __init__(self, codec: Codec, request: GenerationRequest) -> None:
        sampling = request.sampling
        self._detokenizer = codec.detokenizer(
            request.prompt, skip_special_tokens=sampling.skip_special_tokens
        )
        self._stops = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
        self._min_tokens = sampling.min_tokens
        self._tokens = 0
        self._text = ""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def add(self, ids: list[int]) -> int:
        """Append tokens up to a stop string; returns how many were taken."""
        for used, token in enumerate(ids, 1):
            self._tokens += 1
            self._show(self._detokenizer.add((token,)))
            if self._stops.found is not None:
                return used
        return len(ids)

    def finish(self) -> None:
        """Show what was held back."""
        self._show(self._detokenizer.finish())
        if self._stops.found is None:
            self._text += self._stops.finish()

    def take(self) -> str:
        """What can be shown now and was not yet."""
        text, self._text = self._text, ""
        return text

    def _show(self, piece: str) -> None:
        self._text += self._stops.add(piece) if self._tokens >= self._min_tokens else piece
