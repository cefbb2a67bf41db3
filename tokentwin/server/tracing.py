"""Spans of a server's answers as they end: to a collector, into a file, as children of the client's own trace.

A request that carries W3C's `traceparent` is traced when its caller is, as a child of the caller's span; of the others a
share is, each as a trace of its own. Times are the backend's, laid at the moment the request was submitted: of a twin
that is paced faster than real time they are simulated seconds all the same.
"""

from __future__ import annotations

import math
import random
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from experiments.otlp import Readable, make_exporter, otlp_line, resource_attributes
from experiments.spans import Moments, Span, Value, common_attributes, make_spans
from realengine.generation import Sampling
from tokentwin.provenance import VERSION
from tokentwin.server.backend import Delta, Generation, Timing

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class Tracing:
    """Where spans go. `emit` does not wait: an endpoint is served by a thread of OpenTelemetry's own."""

    def __init__(
        self,
        model: str,
        *,
        file: Path | None = None,
        endpoint: str | None = None,
        sample_ratio: float = 1.0,
        time_scale: float = 1.0,
    ) -> None:
        """Raises `UsageError` as `experiments.otlp.make_exporter` does, OSError for a file that cannot be written."""
        self.model = model
        self.time_scale = time_scale
        self._ratio = sample_ratio
        self._resource: dict[str, Value] = resource_attributes(VERSION)
        self._out: IO[str] | None = None
        self._processor: Any = None
        if endpoint is not None:
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            self._processor = BatchSpanProcessor(make_exporter(endpoint))
            self._readable = Readable(self._resource, VERSION)
        if file is not None:
            self._out = file.open("a", encoding="utf-8", newline="\n")

    def parent(self, headers: Mapping[str, str]) -> tuple[str, str] | None:
        """(trace, parent span) of a request that is to be traced; None for one that is not."""
        match = _TRACEPARENT.fullmatch(headers.get("traceparent", "").strip())
        if match is not None and int(match[1], 16) and int(match[2], 16):
            return (match[1], match[2]) if int(match[3], 16) & 1 else None
        return (secrets.token_hex(16), "") if random.random() < self._ratio else None

    def emit(self, spans: Sequence[Span]) -> None:
        """Hand the spans of one answer over."""
        if self._out is not None:
            self._out.write(otlp_line(spans, self._resource, VERSION))
            self._out.flush()
        if self._processor is not None:
            for span in spans:
                self._processor.on_end(self._readable(span))

    def close(self) -> None:
        """Send what is left."""
        if self._processor is not None:
            self._processor.shutdown()
        if self._out is not None:
            self._out.close()


class TracedGeneration:
    """A generation whose answers are emitted as spans when they end, are aborted or fail.

    `came_ns` and `submitted_ns` are when the request came in and when it was handed to the backend, in Unix time.
    """

    def __init__(
        self,
        inner: Generation,
        tracing: Tracing,
        parent: tuple[str, str],
        request_id: str,
        prompt_tokens: int,
        sampling: Sampling,
        *,
        chat: bool,
        came_ns: int,
        submitted_ns: int,
    ) -> None:
        self._inner, self._tracing = inner, tracing
        self._trace_id, self._parent_id = parent
        self._came_ns, self._submitted_ns = came_ns, submitted_ns
        self._open = {index: _Reading() for index in range(sampling.n)}
        self._attributes: dict[str, Value] = {
            **common_attributes(tracing.model, request_id, prompt_tokens, 0),
            "gen_ai.operation.name": "chat" if chat else "text_completion",
            "gen_ai.response.id": request_id,
            "gen_ai.request.n": sampling.n,
            "gen_ai.request.temperature": float(sampling.temperature),
            "gen_ai.request.top_p": float(sampling.top_p),
        }
        self._limit = sampling.max_tokens

    def __aiter__(self) -> TracedGeneration:
        return self

    async def __anext__(self) -> Delta:
        try:
            delta = await self._inner.__anext__()
        except StopAsyncIteration:
            raise
        except Exception as error:
            for index in list(self._open):
                self._end(index, None, "", error=str(error) or type(error).__name__)
            raise
        reading = self._open.get(delta.index)
        if reading is not None:
            reading.add(len(delta.token_ids))
            if delta.finish_reason is not None:
                self._end(delta.index, delta.timing, delta.finish_reason)
        return delta

    def abort(self) -> None:
        """As the inner one; what had not ended is emitted as aborted."""
        self._inner.abort()
        for index in list(self._open):
            self._end(index, None, "abort")

    def _end(self, index: int, timing: Timing | None, reason: str, *, error: str = "") -> None:
        reading = self._open.pop(index)
        moments, origin_ns = self._moments(reading, timing)
        tokens = timing.output_tokens if timing is not None else reading.tokens
        attributes = {
            **self._attributes,
            "gen_ai.usage.completion_tokens": tokens,
            "gen_ai.usage.output_tokens": tokens,
        }
        if timing is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = timing.cached_tokens
        if self._limit < 1 << 30:
            attributes["gen_ai.request.max_tokens"] = self._limit
        if reason:
            attributes["gen_ai.response.finish_reasons"] = (reason,)
        if error:
            attributes["error.type"] = "failed"
        spans = make_spans(
            moments,
            self._trace_id,
            origin_ns,
            attributes,
            parent_id=self._parent_id,
            error=error,
            salt=secrets.token_hex(8),
        )
        self._tracing.emit(spans)

    def _moments(self, reading: _Reading, timing: Timing | None) -> tuple[Moments, int]:
        """On the backend's clock, and the Unix time of its 0; without a timing the clock begins with the request."""
        arrival_s = 0.0 if timing is None else timing.arrival_s

        def at(unix_ns: float) -> float:
            return arrival_s + (unix_ns - self._submitted_ns) / 1e9 * self._tracing.time_scale

        came_s, first_s, last_s = at(self._came_ns), at(reading.first_ns), at(reading.last_ns)
        now_s = at(time.time_ns())
        if timing is None:
            nan = math.nan
            moments = Moments(came_s, came_s, nan, nan, nan, nan, first_s, last_s, now_s)
        else:
            ends = [time_s for time_s in (last_s, timing.last_token_s) if not math.isnan(time_s)]
            moments = Moments(
                came_s,
                came_s,
                arrival_s,
                timing.scheduled_s,
                timing.first_token_s,
                timing.last_token_s,
                # The reader's clock is another one: it cannot have read what was not there.
                max(first_s, timing.first_token_s),
                max(last_s, timing.last_token_s),
                max(ends, default=now_s),
            )
        return moments, self._submitted_ns - round(arrival_s * 1e9)


class _Reading:
    """When an answer's tokens were handed to the client, in nanoseconds of Unix time."""

    def __init__(self) -> None:
        self.first_ns = self.last_ns = math.nan
        self.tokens = 0

    def add(self, count: int) -> None:
        """The client gets `count` tokens now."""
        if not count:
            return
        self.last_ns = float(time.time_ns())
        if not self.tokens:
            self.first_ns = self.last_ns
        self.tokens += count
