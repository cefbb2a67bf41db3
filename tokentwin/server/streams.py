"""Sending answers while watching the client: one that leaves or stops reading is let go, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokentwin.server.backend import Delta, Generation
from tokentwin.server.errors import ApiError

Result = TypeVar("Result")
_CUT = "tokentwin.cut"
_DISCARD = 8
"""A body that is too long is read and thrown away up to this many times the limit, so that the client reads the error."""


class Connection(HttpToolsProtocol):
    """Uvicorn's protocol, whose requests carry a way to cut the connection without waiting for its buffers."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][_CUT] = self.transport.abort


class SlowClient(Exception):
    """The client did not read in time."""


class EventStream(Response):
    """Server-sent events. `close()` is called when the stream ends, however it does."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], *, send_timeout_s: float
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((writer, watcher), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        except (SlowClient, asyncio.CancelledError):  # the second when the server leaves without waiting
            if (cut := scope.get("state", {}).get(_CUT)) is not None:
                cut()
        finally:
            self._close()
            writer.cancel()
            watcher.cancel()
            await asyncio.gather(writer, watcher, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for piece in self._events:
                async with asyncio.timeout(self._timeout_s):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            async with asyncio.timeout(self._timeout_s):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            raise SlowClient from None


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`; None when the client left before, and then `work` is cancelled."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        return worker.result() if worker.done() else None
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limit_bytes: int, timeout_s: float) -> bytes:
    """The body of a request. Raises `ApiError` for one that is too long or too slow in coming."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size <= limit_bytes:
                    parts.append(part)
                elif size > _DISCARD * limit_bytes:
                    break
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {timeout_s:g} s", 408) from None
    except ClientDisconnect:
        raise ApiError("the client left", 499) from None
    if size > limit_bytes:
        raise ApiError(
            f"the body is longer than the {limit_bytes} bytes that are read here",
            413,
            code="request_too_large",
            headers={"connection": "close"},
        )
    return b"".join(parts)


async def together(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of several generations as they come, each with the position of its generation."""
    if len(generations) == 1:
        async for delta in generations[0]:
            yield 0, delta
        return
    tasks = {asyncio.ensure_future(anext(one)): place for place, one in enumerate(map(aiter, generations))}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = tasks.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                tasks[asyncio.ensure_future(anext(generations[place]))] = place
                yield place, delta
    finally:
        for task in tasks:
            task.cancel()
