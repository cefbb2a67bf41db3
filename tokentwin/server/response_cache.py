"""Answers given before, given again: exact match on weights, prompt and sampling, in front of any backend.

Kept are whole answers that ended by themselves. Only requests whose answer is a function of the request are looked up:
greedy ones, and sampled ones with a seed. An entry belongs to one version of the weights; with other weights it is not
found. In this process by default, least recently used first out; in Redis when told, for several servers.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from realengine.generation import Sampling
from serving.errors import UsageError
from tokentwin.server.backend import (
    Backend,
    Delta,
    Generation,
    GenerationRequest,
    Meters,
    Stats,
    Timing,
)

PREFIX = "tokentwin:answer:"
REDIS_TIMEOUT_S = 0.1
"""A Redis that does not answer within this is passed by."""


class Store(Protocol):
    """Where answers are kept: bytes by key."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, value: bytes) -> None: ...


class MemoryStore:
    """At most `max_entries` answers, the least recently used first out."""

    def __init__(self, max_entries: int) -> None:
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self._most = max_entries

    def get(self, key: str) -> bytes | None:
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: str, value: bytes) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._most:
            self._entries.popitem(last=False)


class RedisStore:
    """A Redis server; one that fails is passed by, and said so once."""

    def __init__(self, client: Any, ttl_s: int) -> None:
        self._client, self._ttl_s = client, ttl_s
        self._told = False

    def get(self, key: str) -> bytes | None:
        try:
            found: bytes | None = self._client.get(PREFIX + key)
        except Exception as error:
            self._failed(error)
            return None
        return found

    def put(self, key: str, value: bytes) -> None:
        try:
            self._client.set(PREFIX + key, value, ex=self._ttl_s)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            sys.stderr.write(
                f"warning: the response cache in Redis does not answer ({error}); going on without\n"
            )


def open_store(where: str, max_entries: int, ttl_s: int) -> Store:
    """`memory`, or a `redis://` address. Raises `UsageError` for another, and where redis is not installed."""
    if where == "memory":
        return MemoryStore(max_entries)
    if not where.startswith(("redis://", "rediss://")):
        raise UsageError(f"--response-cache {where!r}; use memory, or redis://HOST:PORT/0")
    try:
        redis: Any = import_module("redis")
    except ModuleNotFoundError:
        raise UsageError("--response-cache redis://… needs the package redis: pip install redis") from None
    try:
        client = redis.Redis.from_url(
            where, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
        )
    except ValueError as error:
        raise UsageError(f"--response-cache {where!r}: {error}") from None
    return RedisStore(client, ttl_s)


def weights_version(model: str, load_format: str = "auto", computed: Sequence[object] = ()) -> str:
    """A digest of every byte that decides what a model answers: weights, configuration, tokenizer.

    Of a name without files (random weights of a known shape) the name itself. `computed` says how it is computed:
    formats and the longest context, which change answers as well.
    """
    path = Path(model).expanduser()
    digest = hashlib.sha256(f"{load_format}\n{json.dumps(list(computed))}\n".encode())
    if not path.exists():
        digest.update(model.encode())
        return digest.hexdigest()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def is_repeatable(sampling: Sampling) -> bool:
    """The same request gives the same answer."""
    return sampling.temperature == 0 or sampling.seed is not None


def key_of(version: str, request: GenerationRequest) -> str:
    """Name of the answer to a request under a version of the weights."""
    sampling = {name: _plain(value) for name, value in asdict(request.sampling).items()}
    asked = [version, [int(t) for t in request.prompt], sampling, request.open_ended, sorted(request.extras)]
    if request.beams is not None or request.best_of is not None:
        asked.append([request.best_of, None if request.beams is None else asdict(request.beams)])
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


class CachingBackend:
    """A backend that answers from the cache what it can. `hits` and `lookups` count since the start."""

    def __init__(self, inner: Backend, store: Store, version: str) -> None:
        self.inner, self._store, self.version = inner, store, version
        self.model, self.root, self.codec = inner.model, inner.root, inner.codec
        self.max_model_len = inner.max_model_len
        self.hits = self.lookups = 0

    @property
    def failure(self) -> str | None:
        return self.inner.failure

    @property
    def unfinished(self) -> int:
        return self.inner.unfinished

    async def start(self, meters: Meters) -> None:
        await self.inner.start(meters)

    async def stop(self) -> None:
        await self.inner.stop()

    def stats(self) -> Stats:
        return self.inner.stats()

    def submit(self, request: GenerationRequest) -> Generation:
        """From the cache, or from the backend and then into the cache. Raises as the backend does."""
        if not is_repeatable(request.sampling):
            return self.inner.submit(request)
        self.lookups += 1
        key = key_of(self.version, request)
        kept = self._store.get(key)
        if kept is not None:
            self.hits += 1
            return _Kept(_deltas(kept), len(request.prompt))
        return _Keeping(self.inner.submit(request), self._store, key, request.sampling.n)


class _Keeping:
    """Passes an answer on and keeps it once all of it has come."""

    def __init__(self, inner: Generation, store: Store, key: str, n: int) -> None:
        self._inner, self._store, self._key = inner, store, key
        self._whole = [Delta(index) for index in range(n)]
        self._open = n

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        delta = await anext(self._inner)
        whole = self._whole[delta.index]
        whole.grow(delta)
        if delta.finish_reason is not None:
            self._open -= 1
            if not self._open and all(d.finish_reason in ("stop", "length") for d in self._whole):
                self._store.put(self._key, _bytes(self._whole))
        return delta

    def abort(self) -> None:
        self._inner.abort()


class _Kept:
    """An answer out of the cache: all of it at once."""

    def __init__(self, deltas: Sequence[Delta], prompt_tokens: int) -> None:
        now_s = time.monotonic()
        for delta in deltas:
            delta.timing = Timing(
                now_s, now_s, now_s, now_s, prompt_tokens, len(delta.token_ids), prompt_tokens
            )
        self._deltas = iter(deltas)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        try:
            return next(self._deltas)
        except StopIteration:
            raise StopAsyncIteration from None

    def abort(self) -> None:
        """Nothing is running."""


def _bytes(deltas: Sequence[Delta]) -> bytes:
    fields = ("index", "token_ids", "text", "finish_reason", "stop_reason", "logprobs")
    return json.dumps([{name: getattr(delta, name) for name in fields} for delta in deltas]).encode()


def _deltas(kept: bytes) -> list[Delta]:
    return [Delta(**fields) for fields in json.loads(kept)]
