"""Requests as OpenTelemetry spans, of twin and engine alike: `llm_request` with queue, prefill, decode and stream in it.

Names and attributes of the request are those of vLLM's span and of the GenAI semantic conventions (version 1.41), so
that what reads a production service's traces reads these. Latencies in `gen_ai.latency.*` are seen from the server, as
vLLM's are: they begin when the request has arrived there, before it is tokenised.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from sim.meta import meta_value
from sim.record import RunRecord, Status

REQUEST = "llm_request"
STAGES = ("queue", "prefill", "decode", "stream")
NETWORK_COLUMNS = ("blocked_s", "network_s", "gateway_s", "detokenize_s", "reader_s")
INTERNAL, SERVER = 1, 2
"""Values of OTLP's SpanKind."""

TIMES = (
    "sent_s",
    "queued_s",
    "scheduled_s",
    "prefill_done_s",
    "engine_done_s",
    "first_token_s",
    "last_token_s",
)
Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """One span; ids in hexadecimal, times in nanoseconds of Unix time."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty where there is none."""
    kind: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[tuple[str, int], ...] = ()
    error: str = ""
    """Why it failed; empty when it did not."""


@dataclass(frozen=True, slots=True)
class Moments:
    """When things happened to a request, in seconds of one clock; NaN where they did not."""

    sent_s: float
    """By the client; of a server, when the request came in."""
    arrived_s: float
    """At the server, before tokenising."""
    queued_s: float
    scheduled_s: float
    first_token_s: float
    """Out of the engine."""
    done_s: float
    """Last token out of the engine."""
    received_first_s: float
    received_last_s: float
    end_s: float
    """The end of the request's span, whatever became of it."""
    off_s: float = math.nan
    """When it went off, where the client's network was followed."""

    def stages(self) -> dict[str, tuple[float, float]]:
        """Start and end of each stage that was entered; one that was not left lasts until `end_s`.

        `stream` is what the client sees, from its first token to its last, so that it lies beside decode. Over a network
        there are also `blocked` (before it goes off), `send` (until it is queued) and `deliver` (after the engine).
        """
        found = {
            "queue": (self.queued_s, self.scheduled_s),
            "prefill": (self.scheduled_s, self.first_token_s),
            "decode": (self.first_token_s, self.done_s),
            "stream": (self.received_first_s, self.received_last_s),
        }
        if not math.isnan(self.off_s):
            network = {
                "blocked": (self.sent_s, self.off_s),
                "send": (self.off_s, self.queued_s),
                "deliver": (self.done_s, self.received_last_s),
            }
            found |= {
                name: (start_s, stop_s) for name, (start_s, stop_s) in network.items() if stop_s > start_s
            }
        return {
            name: (start_s, self.end_s if math.isnan(stop_s) else stop_s)
            for name, (start_s, stop_s) in found.items()
            if not math.isnan(start_s)
        }

    def latencies(self) -> dict[str, float]:
        """vLLM's `gen_ai.latency.*` in seconds; those that are not known are left out."""
        values = {
            "time_in_queue": self.scheduled_s - self.queued_s,
            "time_to_first_token": self.first_token_s - self.arrived_s,
            "e2e": self.done_s - self.arrived_s,
            "time_in_model_prefill": self.first_token_s - self.scheduled_s,
            "time_in_model_decode": self.done_s - self.first_token_s,
            "time_in_model_inference": self.done_s - self.scheduled_s,
        }
        return {f"gen_ai.latency.{name}": value for name, value in values.items() if not math.isnan(value)}


def make_spans(
    moments: Moments,
    trace_id: str,
    origin_ns: int,
    attributes: Mapping[str, Value],
    *,
    parent_id: str = "",
    error: str = "",
    salt: str = "",
) -> list[Span]:
    """The request's span, then its stages. `origin_ns` is the Unix time at which the moments' clock was 0.

    `salt` keeps the ids of several requests in one trace apart.
    """

    def at(time_s: float) -> int:
        return origin_ns + round(time_s * 1e9)

    root = digest(trace_id, REQUEST, parent_id, salt)
    events = (
        (("first_token", at(moments.received_first_s)),) if not math.isnan(moments.received_first_s) else ()
    )
    spans = [
        Span(
            REQUEST,
            trace_id,
            root,
            parent_id,
            SERVER,
            at(moments.sent_s),
            at(max(moments.end_s, moments.sent_s)),
            {**attributes, **moments.latencies()},
            events,
            error,
        )
    ]
    for name, (start_s, end_s) in moments.stages().items():
        span_id = digest(trace_id, name, parent_id, salt)
        spans.append(Span(name, trace_id, span_id, root, INTERNAL, at(start_s), at(max(start_s, end_s))))
    return spans


def digest(*parts: object, size: int = 8) -> str:
    """An id of `size` bytes in hexadecimal that follows from its parts, never all zeros."""
    text = "/".join(map(str, parts))
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def is_sampled(seed: object, request_id: int, ratio: float) -> bool:
    """Whether a request is in a sample of `ratio`; it follows from seed and number, so that twin and engine agree."""
    return int(digest("sample", seed, request_id), 16) < ratio * 2**64


def run_spans(record: RunRecord, origin_ns: int, *, sample_ratio: float = 1.0) -> Iterator[list[Span]]:
    """The spans of each sampled request of a run, in order of sending; the run's clock is 0 at `origin_ns`."""
    columns = {name: column.tolist() for name, column in record.requests.columns().items()}
    seed = meta_value(record, "seed", 0)
    model = str(meta_value(record, "model_id", "unknown"))
    backend = str(meta_value(record, "backend", "sim"))
    for i, number in enumerate(columns["request_id"]):
        if sample_ratio < 1 and not is_sampled(seed, number, sample_ratio):
            continue
        row = {name: column[i] for name, column in columns.items()}
        status = Status(row["status"])
        attributes: dict[str, Value] = {
            **common_attributes(model, str(number), row["prompt_tokens"], row["output_tokens"]),
            "gen_ai.request.max_tokens": row["max_output_tokens"],
            "gen_ai.usage.cache_read.input_tokens": row["cached_tokens"],
            "tokentwin.preemptions": row["preemptions"],
            "tokentwin.tenant": record.tenants[row["tenant"]].name,
        }
        if record.deliveries is not None:
            attributes |= {f"tokentwin.{name}": row[name] for name in NETWORK_COLUMNS}
        if row["replica"] >= 0:
            attributes["tokentwin.replica"] = row["replica"]
        if status is Status.FINISHED:
            attributes["gen_ai.response.finish_reasons"] = (row["reason"],)
        error = {Status.REJECTED: row["reason"] or "rejected", Status.UNFINISHED: "unfinished"}.get(
            status, ""
        )
        if error:
            attributes["error.type"] = status.name.lower()
        trace_id = digest(backend, origin_ns, seed, number, size=16)
        moments = _moments(row, record.end_s)
        if record.deliveries is not None:
            moments = replace(moments, off_s=row["sent_s"] + row["held_s"])
        yield make_spans(moments, trace_id, origin_ns, attributes, error=error)


def common_attributes(
    model: str, request_id: str, prompt_tokens: int, output_tokens: int
) -> dict[str, Value]:
    """What every request's span says: token counts under vLLM's names and under those of the conventions."""
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tokentwin",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.id": request_id,
        "gen_ai.request.n": 1,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": prompt_tokens,
        "gen_ai.usage.completion_tokens": output_tokens,
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": output_tokens,
    }


def _moments(row: Mapping[str, float], run_end_s: float) -> Moments:
    """Of a row of the request table. A request that nothing became of ends where it was refused, or with the run."""
    status = Status(int(row["status"]))
    queued_s = row["queued_s"]
    if status is Status.FINISHED:
        end_s = max(row["last_token_s"], row["engine_done_s"])
    elif status is Status.REJECTED:
        end_s = row["sent_s"] if math.isnan(queued_s) else queued_s
    else:
        seen = [row[name] for name in TIMES]
        end_s = max([run_end_s, *(time_s for time_s in seen if not math.isnan(time_s))])
    refused = status is Status.REJECTED
    return Moments(
        row["sent_s"],
        queued_s - (0.0 if math.isnan(row["tokenize_s"]) else row["tokenize_s"]),
        math.nan if refused else queued_s,
        row["scheduled_s"],
        row["prefill_done_s"],
        row["engine_done_s"],
        row["first_token_s"],
        row["last_token_s"],
        end_s,
    )
