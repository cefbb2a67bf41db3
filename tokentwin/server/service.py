"""What the routes share: the backend, the limits, who may ask, and how an answer is made from a body."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from realengine.generation import Sampling
from tokentwin.server.backend import Backend, Busy, Failed, Generation, GenerationRequest, Refused
from tokentwin.server.chunks import DONE, Answers, event
from tokentwin.server.errors import ApiError, json_response
from tokentwin.server.meters import PrometheusMeters
from tokentwin.server.schemas import OPEN_ENDED, GenerationBody
from tokentwin.server.streams import EventStream, read_body, together, unless_gone

if TYPE_CHECKING:
    from tokentwin.server.tracing import Tracing

_LONG_TEXT = 1 << 15
"""Characters from which tokenising would hold up everybody else, so that it gets a thread."""
GONE = 499


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server allows its clients."""

    names: tuple[str, ...] = ()
    """Names of the model that clients may use; the backend's own without any."""
    api_keys: tuple[str, ...] = ()
    send_timeout_s: float = 30.0
    """A client that does not read for this long is cut."""
    body_timeout_s: float = 60.0
    max_body_bytes: int = 8 << 20


class Service:
    """One backend and its clients."""

    def __init__(
        self, backend: Backend, limits: Limits | None = None, tracing: Tracing | None = None
    ) -> None:
        self.backend = backend
        self.tracing = tracing
        self.limits = limits or Limits()
        self.names = self.limits.names or (backend.model,)
        self.meters = PrometheusMeters(backend, self.names[0])
        self.started_s = int(time.time())
        self.draining = False
        """No new work; what has begun is finished."""
        self._keys = [hashlib.sha256(key.encode()).digest() for key in self.limits.api_keys]

    def allows(self, authorization: bytes) -> bool:
        """Whether an Authorization header holds one of the keys."""
        if not self._keys:
            return True
        scheme, _, key = authorization.partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        fits = [secrets.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(fits)

    async def body(self, request: Request) -> bytes:
        """The raw body of a request."""
        return await read_body(request, self.limits.max_body_bytes, self.limits.body_timeout_s)

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` for a model that is not served here. No name means the one that is."""
        if name is not None and name not in self.names:
            raise ApiError(
                f"the model {name[:200]!r} does not exist here; this server has {self.names[0]!r}",
                404,
                param="model",
                code="model_not_found",
            )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        encode = self.backend.codec.encode
        if len(text) < _LONG_TEXT:
            return encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)

    async def answer(
        self,
        request: Request,
        body: GenerationBody,
        sampling: Sampling,
        prompts: Sequence[list[int]],
        *,
        chat: bool,
    ) -> Response:
        """Generate for every prompt and answer in one piece or as a stream."""
        if self.draining:
            raise ApiError("the server is shutting down", 503, headers={"retry-after": "5"})
        name = body.model or self.names[0]
        request_id = f"{'chatcmpl' if chat else 'cmpl'}-{request.scope['state']['request_id']}"
        submitted_ns = time.time_ns()
        generations = self._submit(request_id, body, sampling, prompts)
        if self.tracing is not None and (parent := self.tracing.parent(request.headers)) is not None:
            from tokentwin.server.tracing import TracedGeneration

            generations = [
                TracedGeneration(
                    generation,
                    self.tracing,
                    parent,
                    request_id,
                    len(prompt),
                    sampling,
                    chat=chat,
                    came_ns=request.scope["state"]["came_ns"],
                    submitted_ns=submitted_ns,
                )
                for generation, prompt in zip(generations, prompts, strict=True)
            ]
        answers = Answers(request_id, name, int(time.time()), chat, prompt_tokens=sum(map(len, prompts)))

        def close() -> None:
            for generation in generations:
                generation.abort()

        if body.stream:
            events = _events(generations, answers, body, sampling.n)
            return EventStream(events, close, send_timeout_s=self.limits.send_timeout_s)
        try:
            whole = await unless_gone(request, _whole(generations, answers, sampling.n))
        except Failed as error:
            raise ApiError(str(error), 500) from None
        finally:
            close()
        return Response(status_code=GONE) if whole is None else json_response(whole.whole())

    def _submit(
        self, request_id: str, body: GenerationBody, sampling: Sampling, prompts: Sequence[list[int]]
    ) -> list[Generation]:
        generations: list[Generation] = []
        try:
            for place, prompt in enumerate(prompts):
                one = f"{request_id}-{place}" if len(prompts) > 1 else request_id
                submitted = self.backend.submit(
                    GenerationRequest(
                        one,
                        prompt,
                        sampling,
                        open_ended=sampling.max_tokens == OPEN_ENDED,
                        priority=body.priority or 0,
                        extras=body.extras(),
                        beams=body.beams,
                        best_of=body.candidates,
                    )
                )
                generations.append(submitted)
        except (Refused, Busy, Failed) as error:
            for generation in generations:
                generation.abort()
            raise _as_api_error(error) from None
        return generations


def new_request_id(given: bytes | None) -> str:
    """The client's own id where it is one that a header can carry back, otherwise a new one."""
    if given is not None and 0 < len(given) <= 256 and all(0x21 <= byte <= 0x7E for byte in given):
        return given.decode("ascii")
    return uuid.uuid4().hex


def _as_api_error(error: Refused | Busy | Failed) -> ApiError:
    if isinstance(error, Refused):
        return ApiError(str(error), param=error.param, code=error.code)
    if isinstance(error, Busy):
        headers = {"retry-after": str(error.retry_after_s)}
        return ApiError(str(error), 429, code="rate_limit_exceeded", headers=headers)
    return ApiError(str(error), 500)


async def _whole(generations: Sequence[Generation], answers: Answers, n: int) -> Answers:
    async for place, delta in together(generations):
        answers.keep(place * n + delta.index, delta)
    return answers


async def _events(
    generations: Sequence[Generation], answers: Answers, body: GenerationBody, n: int
) -> AsyncIterator[bytes]:
    opened: set[int] = set()
    try:
        async for place, delta in together(generations):
            index = place * n + delta.index
            answers.count(delta)
            piece = answers.chunk(index, delta, usage=body.usage_in_each)
            if answers.chat and index not in opened:
                opened.add(index)
                piece = answers.opening(index) + piece
            yield piece
        yield answers.closing() + DONE if body.include_usage else DONE
    except Failed as error:
        yield event(ApiError(str(error), 500).body()) + DONE
