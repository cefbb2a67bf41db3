"""An OTLP/HTTP receiver in a thread, for what sends spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class _Receiver(BaseHTTPRequestHandler):
    """What of a receiver an exporter needs."""

    got: list[Any]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.got.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its URL, and the requests that it got."""
    got: list[Any] = []
    server = HTTPServer(("127.0.0.1", 0), type("Receiver", (_Receiver,), {"got": got}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def spans_in(requests: list[Any]) -> list[Any]:
    """The spans of requests, in order."""
    return [
        span for r in requests for rs in r.resource_spans for scope in rs.scope_spans for span in scope.spans
    ]
