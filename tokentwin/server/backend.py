"""The protocol between HTTP and what generates: submit a request, read its deltas, abort it, ask how things stand.

Times are seconds of the backend's own clock: real ones for the engine, simulated ones for the twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from realengine.detokenize import Detokenizer
from realengine.generation import Sampling
from serving.draft_counts import DraftCounts


class Refused(Exception):
    """The request can never be served; the client is told why. `param` names the field at fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Busy(Exception):
    """The queue is full; worth another try in `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Failed(Exception):
    """The backend broke, or gave up on this request; nothing more comes."""


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Of a beam search; its width is `Sampling.n`."""

    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, `sampling.n` answers."""

    id: str
    prompt: Sequence[int]
    sampling: Sampling
    open_ended: bool = False
    """The client set no length; `sampling.max_tokens` means nothing."""
    priority: int = 0
    extras: frozenset[str] = frozenset()
    """Fields given that change what is generated and that not every backend can honour."""
    beams: BeamOptions | None = None
    """Search with beams instead of sampling."""
    best_of: int | None = None
    """Sample so many answers and show the `sampling.n` likeliest."""

    def fitted(self, max_model_len: int, open_tokens: int | None = None) -> Sampling:
        """`sampling` with a length that fits the context; `open_tokens` is that of an open-ended answer.

        Raises `Refused` when prompt and answer are longer than `max_model_len`.
        """
        sampling, room = self.sampling, max_model_len - len(self.prompt)
        if self.open_ended:
            wanted = room if open_tokens is None else max(open_tokens, sampling.min_tokens)
            length = max(1, min(wanted, room))
            return replace(sampling, max_tokens=length, min_tokens=min(sampling.min_tokens, length))
        if sampling.max_tokens > room:
            raise Refused(
                f"{len(self.prompt)} prompt tokens and max_tokens {sampling.max_tokens} make "
                f"{len(self.prompt) + sampling.max_tokens}; the longest sequence here has {max_model_len}",
                param="max_tokens" if room > 0 else "prompt",
                code="context_length_exceeded",
            )
        return sampling


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happened to one answer."""

    arrival_s: float
    scheduled_s: float
    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0

    @property
    def queue_s(self) -> float:
        """Arrival to first scheduled."""
        return self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def decode_s(self) -> float:
        """First token to last."""
        return self.last_token_s - self.first_token_s

    @property
    def mean_itl_s(self) -> float:
        """Mean gap between tokens, which is TPOT; 0 where there is one token."""
        return self.decode_s / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(slots=True)
class Delta:
    """What one answer of a request grew by."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    """length, stop or abort; None while it goes on."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""
    timing: Timing | None = None
    """With the finish."""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def grow(self, later: Delta) -> None:
        """Append what came after."""
        self.token_ids += later.token_ids
        self.text += later.text
        self.logprobs += later.logprobs
        if later.finish_reason is not None:
            self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
            self.timing = later.timing


@dataclass(frozen=True, slots=True)
class Stats:
    """How things stand now; counters count since the start."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the KV pages that are in use, 0 to 1."""
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    lag_s: float = 0.0
    """Real seconds by which a twin is behind its own clock."""
    drafts: DraftCounts | None = None
    """What became of drafts; None where none are made."""


class Codec(Protocol):
    """Text to tokens and back; `realengine.tokenizer.Tokenizer` is one."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def detokenizer(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer: ...
    def render(self, messages: Sequence[dict[str, Any]], **variables: Any) -> str: ...


class Meters(Protocol):
    """Who is told what happens, for `/metrics`."""

    def step(self, num_tokens: int) -> None: ...
    def first_token(self, ttft_s: float) -> None: ...
    def tokens(self, count: int, gap_s: float) -> None: ...
    def shown_whole(self, count: int, ttft_s: float) -> None: ...
    def ended(self, timing: Timing, reason: str) -> None: ...


class Generation(Protocol):
    """The answers to one request, as they come."""

    def __aiter__(self) -> Generation: ...
    async def __anext__(self) -> Delta: ...

    def abort(self) -> None:
        """Nobody wants the rest: stop at the next step and free the pages. Does nothing once all have ended."""


class Backend(Protocol):
    """What generates. Every method runs on the event loop."""

    model: str
    """Name of the model, for clients."""
    root: str
    """Where the tokenizer is: a folder where there is one."""
    codec: Codec
    max_model_len: int

    async def start(self, meters: Meters) -> None:
        """Begin to serve."""

    async def stop(self) -> None:
        """Stop for good; whatever still runs is aborted."""

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request. Raises `Refused`, `Busy` or `Failed`, and then nothing was queued."""

    def stats(self) -> Stats:
        """Queue, KV cache and counters now."""

    @property
    def failure(self) -> str | None:
        """Why the backend broke; None while it is well."""

    @property
    def unfinished(self) -> int:
        """Answers that are queued or running."""
