"""A server in a thread of its own, over a twin, on a free port of 127.0.0.1."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sim.deployment import Deployment, build
from tokentwin.server.backend import Backend
from tokentwin.server.plain_codec import PlainCodec
from tokentwin.server.run import Server, bind, make_server
from tokentwin.server.service import Limits, Service
from tokentwin.server.tracing import Tracing
from tokentwin.server.twin import TwinBackend

MODEL = "llama-3.1-8b"
FAST = 200.0
"""A time scale at which nothing is worth waiting for."""
PATIENCE_S = 20.0
"""A test that waits longer than this has failed."""


@dataclass
class Running:
    """A server that runs, and its parts."""

    url: str
    backend: Any
    service: Service
    server: Server
    thread: threading.Thread

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **options)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


def twin(
    *, time_scale: float = FAST, codec: Any = None, options: Any = None, **deployment: Any
) -> TwinBackend:
    """A twin of an 8B model on an H200 unless told otherwise; `options` are the backend's own."""
    built = build(Deployment(**{"model": MODEL, "gpu": "h200"} | deployment))
    return TwinBackend(built, codec or PlainCodec(), time_scale=time_scale, **(options or {}))


@contextmanager
def serving(
    backend: Backend,
    limits: Limits | None = None,
    *,
    drain_timeout_s: float = 10.0,
    tracing: Tracing | None = None,
) -> Iterator[Running]:
    """`backend` behind a real server."""
    service = Service(backend, limits, tracing)
    server = make_server(service, drain_timeout_s=drain_timeout_s)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield Running(f"http://127.0.0.1:{port}", backend, service, server, thread)
    finally:
        server.should_exit = True
        server.config.timeout_graceful_shutdown = 1
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`; fails the test when it does not come true."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, "waited too long"
        time.sleep(0.005)


def word_tokenizer(folder: Path) -> Path:
    """A folder with a tokenizer of 500 words and no chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0} | {f"w{i}": i for i in range(1, 500)}, unk_token="[UNK]"))
    words.add_special_tokens(["[UNK]"])
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def events(text: str) -> list[Any]:
    """The events of a stream, checked for their framing; `[DONE]` must be the last."""
    assert text.endswith("\n\n")
    parts = text[:-2].split("\n\n")
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part[len("data: ") :]) for part in parts[:-1]]


def idle(backend: TwinBackend) -> bool:
    """Whether every page is free and nobody waits, checked by the schedulers themselves.

    The server's thread may be in the middle of giving pages back; what stays wrong keeps this False.
    """
    for replica in backend._replicas:
        scheduler = replica.scheduler
        if scheduler.num_unfinished or scheduler.used_pages:
            return False
        try:
            scheduler.check()
        except AssertionError:
            return False
    return not backend.unfinished
