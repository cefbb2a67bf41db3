"""The process: bind, serve, and on SIGTERM or Ctrl-C finish what has begun before leaving."""

from __future__ import annotations

import signal
import socket
import time
from types import FrameType

import uvicorn

from serving.errors import UsageError
from tokentwin.server.app import make_app
from tokentwin.server.service import Service
from tokentwin.server.streams import Connection

_SEND_BUFFER_BYTES = 1 << 17
"""Kernel buffer per connection. What a client that does not read can hold up is this, and uvicorn's 64 KiB."""
_KEEP_ALIVE_S = 65
"""Longer than the minute for which clients and proxies like to keep an idle connection."""


class Server(uvicorn.Server):
    """Uvicorn, which drains first: new requests get 503, and it leaves when the last one has ended.

    `drain_timeout_s` bounds the wait, a second signal ends it. `cut` says that a request was lost by that.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_timeout_s: float) -> None:
        super().__init__(config)
        self.service = service
        self.cut = False
        self._drain_timeout_s = drain_timeout_s
        self._leave_by_s: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second does not wait."""
        if self._leave_by_s is None:
            self.drain()
        else:
            self._leave_by_s = time.monotonic()
            self.force_exit = self.should_exit and sig == signal.SIGINT

    def drain(self) -> None:
        """Take no new work and leave when nothing is left to do."""
        self.service.draining = True
        self._leave_by_s = time.monotonic() + self._drain_timeout_s

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if self._leave_by_s is not None and not self.should_exit:
            unfinished = self.service.backend.unfinished
            if not unfinished:
                self.should_exit = True
            elif time.monotonic() >= self._leave_by_s:
                self.should_exit = self.cut = True
                self.config.timeout_graceful_shutdown = 1
        return await super().on_tick(counter)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `UsageError` when host and port cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        words = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UsageError(
            f"--host {host} --port {port}: {words}; choose another, or --port 0 for any"
        ) from None
    # Connections inherit both. Without the first a token waits for the client's acknowledgement of the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return listener


def make_server(
    service: Service,
    *,
    log_level: str = "warning",
    access_log: bool = False,
    drain_timeout_s: float = 60.0,
) -> Server:
    """A server for `service` that has not started; `await server.serve(sockets=[bind(…)])` runs it."""
    config = uvicorn.Config(
        make_app(service),
        http=Connection,
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_S,
        lifespan="on",
        log_level=log_level,
        access_log=access_log,
        timeout_graceful_shutdown=int(drain_timeout_s) + 1,
        server_header=False,
    )
    return Server(config, service, drain_timeout_s)
