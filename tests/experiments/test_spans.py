"""Spans: OpenTelemetry's own schema reads the file, children lie where the record says, and a collector gets them."""

from __future__ import annotations

import base64
import json
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.otlp import make_exporter, origin_ns, send, write_otlp_file
from experiments.spans import REQUEST, STAGES, is_sampled, run_spans
from serving.errors import TokenTwinError, UsageError
from sim.record import RunRecord
from tests.otlp_collector import collector, spans_in
from tests.sim.toy_runs import OUT_S, TOKENIZE_S, toy_run

trace_pb2 = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
service_pb2 = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
json_format = pytest.importorskip("google.protobuf.json_format")

T0 = 1_700_000_000_000_000_000
RESOURCE = {"service.name": "tokentwin", "tokentwin.clock": "simulated"}


@pytest.fixture(scope="module")
def run() -> RunRecord:
    rng = np.random.default_rng(0)
    n = 300
    sent, prompts = np.cumsum(rng.exponential(0.2, n)), rng.integers(1, 900, n)
    return toy_run(sent, prompts, rng.integers(1, 60, n), rejected=(7,), until_s=50.0)


def parsed(path: Path) -> list[Any]:
    """The spans of a file, read line by line by the schema itself; strict, so that an unknown field fails."""
    spans = []
    for line in path.read_text().splitlines():
        assert len(line) < 1 << 20  # what a collector's file receiver takes
        document = json.loads(line)
        for resource in document["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    for name in ("traceId", "spanId", "parentSpanId"):
                        if name in span:  # OTLP's JSON has hexadecimal where protobuf's has base64
                            span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
        data = json_format.ParseDict(document, trace_pb2.TracesData())
        for resource in data.resource_spans:
            assert {a.key: a.value.string_value for a in resource.resource.attributes} == RESOURCE
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    return spans


def values(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.fixture(scope="module")
def spans(run: RunRecord, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    path = tmp_path_factory.mktemp("otlp") / "traces.jsonl"
    assert write_otlp_file(run_spans(run, T0), path, RESOURCE, "1.0") == len(run.requests)
    return parsed(path)


def test_every_request_is_a_trace_of_its_own(run: RunRecord, spans: list[Any]) -> None:
    roots = [span for span in spans if span.name == REQUEST]
    assert len(roots) == len(run.requests) == len({span.trace_id for span in roots})
    assert len({span.span_id for span in spans}) == len(spans)
    assert {len(span.trace_id) for span in spans} == {16}
    assert {len(span.span_id) for span in spans} == {8}
    assert {span.name for span in spans} == {REQUEST, *STAGES}


def test_children_lie_within_their_request_and_follow_one_another(run: RunRecord, spans: list[Any]) -> None:
    by_trace: dict[bytes, dict[str, Any]] = {}
    for span in spans:
        by_trace.setdefault(span.trace_id, {})[span.name] = span
    finished = 0
    for of in by_trace.values():
        root = of[REQUEST]
        assert root.kind == trace_pb2.Span.SPAN_KIND_SERVER
        for name, child in of.items():
            if name != REQUEST:
                assert child.parent_span_id == root.span_id
                assert root.start_time_unix_nano <= child.start_time_unix_nano
                assert child.start_time_unix_nano <= child.end_time_unix_nano <= root.end_time_unix_nano
        if set(of) == {REQUEST, *STAGES}:
            finished += 1
            assert of["queue"].end_time_unix_nano == of["prefill"].start_time_unix_nano
            assert of["prefill"].end_time_unix_nano == of["decode"].start_time_unix_nano
    assert finished >= (run.requests.status == 1).sum()


def test_times_are_those_of_the_record(run: RunRecord, spans: list[Any]) -> None:
    """To the nanosecond; vLLM's latencies are seen from the server, ours of the toy begin a network's way later."""
    r = run.requests
    roots = {int(values(span)["gen_ai.request.id"]): span for span in spans if span.name == REQUEST}
    done = np.flatnonzero(r.status == 1)
    for i in done.tolist():
        span, said = roots[i], values(roots[i])
        assert span.start_time_unix_nano == T0 + round(r.sent_s[i] * 1e9)
        assert span.end_time_unix_nano == T0 + round(r.last_token_s[i] * 1e9)
        assert said["gen_ai.usage.prompt_tokens"] == said["gen_ai.usage.input_tokens"] == r.prompt_tokens[i]
        assert said["gen_ai.usage.completion_tokens"] == r.output_tokens[i]
        assert said["gen_ai.latency.time_in_queue"] == pytest.approx(r.scheduled_s[i] - r.queued_s[i])
        arrived = r.queued_s[i] - TOKENIZE_S
        assert said["gen_ai.latency.time_to_first_token"] == pytest.approx(r.prefill_done_s[i] - arrived)
        inference = said["gen_ai.latency.time_in_model_prefill"] + said["gen_ai.latency.time_in_model_decode"]
        assert said["gen_ai.latency.time_in_model_inference"] == pytest.approx(inference)
        assert said["gen_ai.latency.e2e"] == pytest.approx(r.last_token_s[i] - OUT_S - arrived)
        assert [event.name for event in span.events] == ["first_token"]


def test_what_was_refused_or_not_finished_is_an_error(run: RunRecord, spans: list[Any]) -> None:
    roots = {int(values(span)["gen_ai.request.id"]): span for span in spans if span.name == REQUEST}
    errors = {i for i, span in roots.items() if span.status.code == trace_pb2.Status.STATUS_CODE_ERROR}
    assert errors == set(np.flatnonzero(run.requests.status != 1).tolist())
    assert values(roots[7])["error.type"] == "rejected"
    assert roots[7].status.message == "prompt is longer than max_model_len"
    waiting = np.flatnonzero(run.requests.status == 0)
    assert len(waiting)
    assert values(roots[int(waiting[0])])["error.type"] == "unfinished"


def test_the_same_run_gives_the_same_bytes(run: RunRecord, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_otlp_file(run_spans(run, T0), tmp_path / name, RESOURCE, "1.0")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_sample_has_its_share_and_is_part_of_a_larger_one(run: RunRecord) -> None:
    """Binomial: 10,000 requests at 0.2 stay within five standard deviations of 2,000."""
    few = {i for i in range(10_000) if is_sampled(3, i, 0.2)}
    more = {i for i in range(10_000) if is_sampled(3, i, 0.5)}
    assert abs(len(few) - 2000) < 5 * np.sqrt(10_000 * 0.2 * 0.8)
    assert few < more
    assert few != {i for i in range(10_000) if is_sampled(4, i, 0.2)}
    assert not list(run_spans(run, T0, sample_ratio=0.0))
    assert len(list(run_spans(run, T0, sample_ratio=0.5))) == sum(is_sampled(0, i, 0.5) for i in range(300))


def test_a_run_ends_now_or_begins_at_the_given_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert origin_ns(50.0) == T0


# ---- an endpoint -------------------------------------------------------------------------------------------


def same(sent: list[Any], got: list[Any]) -> None:
    """The file and the wire say the same."""
    assert len(sent) == len(got)
    for a, b in zip(sent, got, strict=True):
        for name in ("trace_id", "span_id", "parent_span_id", "name", "kind", "start_time_unix_nano"):
            assert getattr(a, name) == getattr(b, name)
        assert (a.end_time_unix_nano, a.status.code) == (b.end_time_unix_nano, b.status.code)
        assert values(a).keys() == values(b).keys()


def test_an_http_collector_gets_what_the_file_has(
    run: RunRecord, spans: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with collector() as (url, got):
        assert send(run_spans(run, T0), url, RESOURCE, "1.0") == len(run.requests)
    assert len(got) > 1
    same(spans, spans_in(got))


def test_a_grpc_collector_gets_what_the_file_has(run: RunRecord, spans: list[Any]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    grpc = pytest.importorskip("grpc")
    rpc = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
    got: list[Any] = []

    class Service(rpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            got.append(request)
            return service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    rpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        send(run_spans(run, T0), f"http://127.0.0.1:{port}", RESOURCE, "1.0")
    finally:
        server.stop(None)
    same(spans, spans_in(got))


def test_nobody_there_is_one_error(run: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with pytest.raises(TokenTwinError, match="does not take the spans"):
        send(run_spans(run, T0), "http://127.0.0.1:9/v1/traces", RESOURCE, "1.0")


def test_wrong_endpoints_and_protocols_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="write a URL"):
        make_exporter("localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(UsageError, match="known are grpc, http/protobuf"):
        make_exporter("http://localhost:4317")
