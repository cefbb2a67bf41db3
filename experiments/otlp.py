"""Spans on their way out: OTLP as JSON lines, which a collector's `otlpjsonfile` receiver reads, or to an endpoint.

The file needs nothing. An endpoint needs the extra `otel`: OpenTelemetry's own exporters, with its environment variables
(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is grpc, the default as in vLLM, or http/protobuf; headers, timeout, compression).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from experiments.source_date import source_date_s
from experiments.spans import Span, Value
from serving.errors import TokenTwinError, UsageError

SCOPE = "tokentwin"
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
LINE_SPANS = 500
"""Spans a line at most: a collector's file receiver takes lines of up to a MiB."""
BATCH_SPANS = 512
"""Spans sent at a time, as OpenTelemetry's batch processor does."""
_ERROR = 2
"""Value of OTLP's StatusCode."""


def resource_attributes(version: str, **facts: Value) -> dict[str, Value]:
    """What made the spans; OTEL_SERVICE_NAME renames the service."""
    name = os.environ.get("OTEL_SERVICE_NAME") or "tokentwin"
    return {"service.name": name, "service.version": version, **facts}


def origin_ns(end_s: float) -> int:
    """Unix time at which a run's clock is taken to be 0: SOURCE_DATE_EPOCH, or so that the run has just ended.

    Spans in the future are refused by many stores. Raises UsageError as `source_date_s`.
    """
    epoch_s = source_date_s()
    return time.time_ns() - round(end_s * 1e9) if epoch_s is None else epoch_s * 10**9


# ---- a file ------------------------------------------------------------------------------------------------


def write_otlp_file(
    traces: Iterable[Sequence[Span]], path: Path, resource: Mapping[str, Value], version: str
) -> int:
    """Write traces as OTLP JSON lines and return how many there were. Raises UsageError when it cannot be written."""
    count = 0
    with _said(path), path.open("w", encoding="utf-8", newline="\n") as out:
        spans: list[Span] = []
        for trace in traces:
            count += 1
            spans += trace
            if len(spans) >= LINE_SPANS - 8:
                out.write(otlp_line(spans, resource, version))
                spans = []
        if spans:
            out.write(otlp_line(spans, resource, version))
    return count


def check_otlp_file(path: Path) -> None:
    """Make the file where there is none yet. Raises UsageError where that cannot be."""
    with _said(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()


@contextmanager
def _said(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--otlp-file {path}: cannot be written ({error.strerror or error}); choose another"
        ) from None


def otlp_line(spans: Iterable[Span], resource: Mapping[str, Value], version: str) -> str:
    """One line: a TracesData message in OTLP's JSON encoding (ids in hexadecimal, 64-bit numbers as text)."""
    data = {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [
                    {"scope": {"name": SCOPE, "version": version}, "spans": [_span(span) for span in spans]}
                ],
            }
        ]
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"


def _span(span: Span) -> dict[str, Any]:
    out: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "parentSpanId": span.parent_id,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
        "events": [{"timeUnixNano": str(at_ns), "name": name} for name, at_ns in span.events],
        "status": {"code": _ERROR, "message": span.error} if span.error else {},
    }
    return {name: value for name, value in out.items() if value not in ("", [], {})}


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, tuple):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


# ---- an endpoint -------------------------------------------------------------------------------------------


def make_exporter(endpoint: str) -> Any:
    """An OpenTelemetry span exporter for `endpoint`. Raises `UsageError` as `check_endpoint`."""
    exporter, protocol = check_endpoint(endpoint)
    how = {"insecure": endpoint.startswith("http://")} if protocol == "grpc" else {}
    return exporter(endpoint=endpoint, **how)


def check_endpoint(endpoint: str) -> tuple[Any, str]:
    """The class of its exporters, and the protocol; nothing is opened, so that a process may still be forked.

    Raises `UsageError` without the extra `otel`, for a protocol that OTLP does not have, or for what is no URL.
    """
    protocol = os.environ.get(PROTOCOL, "grpc")
    modules = {"grpc": "grpc", "http/protobuf": "http"}
    if protocol not in modules:
        raise UsageError(f"{PROTOCOL}={protocol!r}: known are {', '.join(modules)}")
    if not endpoint.startswith(("http://", "https://")) or not urlsplit(endpoint).netloc:
        raise UsageError(f"--otlp-traces-endpoint {endpoint!r}: write a URL such as http://localhost:4317")
    try:
        exporters = import_module(f"opentelemetry.exporter.otlp.proto.{modules[protocol]}.trace_exporter")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--otlp-traces-endpoint needs {error.name}, which is not installed: pip install 'tokentwin[otel]' "
            "(--otlp-file needs nothing)"
        ) from None
    return exporters.OTLPSpanExporter, protocol


def send(traces: Iterable[Sequence[Span]], endpoint: str, resource: Mapping[str, Value], version: str) -> int:
    """Send traces to an endpoint and return how many there were. Raises TokenTwinError when it does not take them."""
    exporter, count = make_exporter(endpoint), 0
    logging: Any = import_module("logging")
    logger = logging.getLogger("opentelemetry")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)  # one line of ours says what failed
    readable = Readable(resource, version)
    try:
        for batch in _batched(traces):
            count += len(batch)
            spans = [readable(span) for trace in batch for span in trace]
            if exporter.export(spans).name != "SUCCESS":
                raise TokenTwinError(
                    f"--otlp-traces-endpoint {endpoint}: does not take the spans; is a collector listening there for "
                    f"{os.environ.get(PROTOCOL, 'grpc')}? (http/protobuf by {PROTOCOL}=http/protobuf and a URL that "
                    "ends in /v1/traces)"
                )
    finally:
        with suppress(Exception):
            exporter.shutdown()
        logger.setLevel(level)
    return count


def _batched(traces: Iterable[Sequence[Span]]) -> Iterator[list[Sequence[Span]]]:
    rest = iter(traces)
    while batch := list(islice(rest, BATCH_SPANS // 8)):
        yield batch


class Readable:
    """Our spans as those of the OpenTelemetry SDK, which its exporters and processors take."""

    def __init__(self, resource: Mapping[str, Value], version: str) -> None:
        sdk: Any = import_module("opentelemetry.sdk.trace")
        self._api: Any = import_module("opentelemetry.trace")
        self._span, self._event = sdk.ReadableSpan, sdk.Event
        self._resource = import_module("opentelemetry.sdk.resources").Resource.create(dict(resource))
        scope: Any = import_module("opentelemetry.sdk.util.instrumentation").InstrumentationScope
        self._scope = scope(SCOPE, version)

    def __call__(self, span: Span) -> Any:
        api = self._api
        parent = self._context(span.trace_id, span.parent_id) if span.parent_id else None
        status = api.Status(api.StatusCode.ERROR, span.error) if span.error else api.Status()
        return self._span(
            span.name,
            context=self._context(span.trace_id, span.span_id),
            parent=parent,
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[self._event(name, timestamp=at_ns) for name, at_ns in span.events],
            kind=api.SpanKind(span.kind - 1),
            status=status,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )

    def _context(self, trace_id: str, span_id: str) -> Any:
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        return self._api.SpanContext(int(trace_id, 16), int(span_id, 16), False, flags)
