"""Where tokens wait between the step that made them and the client that reads them. Its size is bounded."""

from __future__ import annotations

import asyncio

from tokentwin.server.backend import Delta, Failed


class Mailbox:
    """Deltas of the answers to one request; those of one answer are joined while they wait.

    A reader is woken by an answer's first token, then by every `interval` tokens and by the end. More than `limit`
    tokens that nobody reads close the box: the reader gets `Failed`, and no more is kept.
    """

    def __init__(self, interval: int = 1, limit: int = 1 << 14) -> None:
        self._interval = interval
        self._limit = limit
        self._deltas: dict[int, Delta] = {}
        self._begun: set[int] = set()
        self._waiting_tokens = 0
        self._ready = asyncio.Event()
        self._failure: Failed | None = None

    def put(self, delta: Delta) -> bool:
        """Add to an answer. False when nobody will read it: the box is closed, now or before."""
        if self._failure is not None:
            return False
        waiting = self._deltas.get(delta.index)
        if waiting is None:
            waiting = self._deltas[delta.index] = delta
        else:
            waiting.grow(delta)
        self._waiting_tokens += len(delta.token_ids)
        if self._waiting_tokens > self._limit:
            self.fail(Failed(f"more than {self._limit} tokens waited for a client that does not read them"))
            return False
        if self._due(waiting):
            self._ready.set()
        return True

    def fail(self, error: Failed) -> None:
        """Close the box and wake the reader with an error."""
        self._failure = error
        self._deltas.clear()
        self._ready.set()

    async def get(self) -> list[Delta]:
        """The deltas that are due, at least one. Raises `Failed` once the box is closed."""
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure
        due = [delta for delta in self._deltas.values() if self._due(delta)]
        for delta in due:
            del self._deltas[delta.index]
            self._begun.add(delta.index)
            self._waiting_tokens -= len(delta.token_ids)
        self._ready.clear()
        return due

    def _due(self, delta: Delta) -> bool:
        return (
            delta.finish_reason is not None
            or len(delta.token_ids) >= self._interval
            or (delta.index not in self._begun and bool(delta.token_ids))
        )
