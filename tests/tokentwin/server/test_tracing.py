"""Spans of a live server: each answer one, in its caller's trace, with the times that the backend gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.spans import REQUEST, STAGES
from tests.otlp_collector import collector, spans_in
from tests.tokentwin.server.harness import MODEL, events, serving, twin, until
from tests.tokentwin.shell import Command
from tokentwin.server.tracing import Tracing

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"model": MODEL, "prompt": "hello there", "max_tokens": 20}


def spans_of(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        span | {"attributes": {a["key"]: a["value"] for a in span.get("attributes", ())}}
        for line in lines
        for resource in line["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "traces.jsonl"


def test_an_answer_is_a_trace_with_its_stages(file: Path) -> None:
    with (
        serving(twin(), tracing=Tracing(MODEL, file=file, time_scale=200.0)) as server,
        server.client() as client,
    ):
        client.post("/v1/completions", json=BODY).raise_for_status()
        until(lambda: bool(file.read_text()))
    spans = spans_of(file)
    assert [span["name"] for span in spans] == [REQUEST, *STAGES]
    root, queue, prefill, decode, stream = spans
    said = root["attributes"]
    assert said["gen_ai.usage.completion_tokens"]["intValue"] == "20"
    assert said["gen_ai.response.finish_reasons"]["arrayValue"]["values"] == [{"stringValue": "length"}]
    assert queue["endTimeUnixNano"] == prefill["startTimeUnixNano"]
    assert prefill["endTimeUnixNano"] == decode["startTimeUnixNano"]
    for child in (queue, prefill, decode, stream):
        assert child["parentSpanId"] == root["spanId"]
        assert int(root["startTimeUnixNano"]) <= int(child["startTimeUnixNano"])
        assert int(child["endTimeUnixNano"]) <= int(root["endTimeUnixNano"])
    lasted_s = (int(decode["endTimeUnixNano"]) - int(decode["startTimeUnixNano"])) / 1e9
    assert said["gen_ai.latency.time_in_model_decode"]["doubleValue"] == pytest.approx(lasted_s, abs=1e-6)
    assert lasted_s == pytest.approx(
        19 * 0.005, rel=0.5
    )  # simulated seconds: an 8B model decodes in 5 ms on an H200


def test_a_caller_who_is_traced_finds_the_answers_below_its_own_span(file: Path) -> None:
    with (
        serving(twin(), tracing=Tracing(MODEL, file=file, sample_ratio=1e-9)) as server,
        server.client() as client,
    ):
        for flags in ("01", "00"):
            header = {"traceparent": f"00-{TRACE}-{CALLER}-{flags}"}
            client.post("/v1/completions", json={**BODY, "n": 2}, headers=header).raise_for_status()
        client.post("/v1/completions", json=BODY, headers={"traceparent": "nonsense"}).raise_for_status()
        until(lambda: file.read_text().count(REQUEST) >= 2)
    roots = [span for span in spans_of(file) if span["name"] == REQUEST]
    assert len(roots) == 2  # of the caller who is traced, one for each answer
    assert {(span["traceId"], span["parentSpanId"]) for span in roots} == {(TRACE, CALLER)}
    assert len({span["spanId"] for span in spans_of(file)}) == len(spans_of(file))


def test_streams_and_chats_are_traced_and_a_client_that_leaves_is_an_abort(file: Path) -> None:
    slow = twin(time_scale=0.02)
    with (
        serving(slow, tracing=Tracing(MODEL, file=file, time_scale=0.02)) as server,
        server.client() as client,
    ):
        chat = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 2,
            "stream": True,
        }
        assert events(client.post("/v1/chat/completions", json=chat).text)
        with client.stream(
            "POST", "/v1/completions", json={**BODY, "stream": True, "max_tokens": 5000}
        ) as answer:
            next(answer.iter_lines())
        until(lambda: file.read_text().count(REQUEST) == 2)
    finished, left = (span for span in spans_of(file) if span["name"] == REQUEST)
    assert finished["attributes"]["gen_ai.operation.name"] == {"stringValue": "chat"}
    assert left["attributes"]["gen_ai.response.finish_reasons"]["arrayValue"]["values"] == [
        {"stringValue": "abort"}
    ]


def test_a_collector_gets_the_spans_of_answers_as_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with collector() as (url, got), serving(twin(), tracing=Tracing(MODEL, endpoint=url)) as server:
        with server.client() as client:
            client.post("/v1/completions", json=BODY).raise_for_status()
        until(lambda: bool(got))
        with server.client() as client:
            client.post("/v1/completions", json={**BODY, "n": 3}).raise_for_status()
        until(lambda: len(spans_in(got)) == 4 * (1 + len(STAGES)))
    names = [span.name for span in spans_in(got)]
    assert names.count(REQUEST) == 4
    service = {a.key: a.value.string_value for a in got[0].resource_spans[0].resource.attributes}[
        "service.name"
    ]
    assert service == "tokentwin"


def test_without_tracing_nothing_is_wrapped() -> None:
    with serving(twin()) as server, server.client() as client:
        assert server.service.tracing is None
        client.post("/v1/completions", json=BODY).raise_for_status()


def test_serve_refuses_what_cannot_be_traced(tokentwin: Command, tmp_path: Path) -> None:
    command = ("serve", "--engine", "twin", "--model", MODEL)
    for flags, why in (
        (("--otlp-traces-sample-ratio", "0.1"), "has no effect without --otlp-file"),
        (("--otlp-traces-endpoint", "collector:4317"), "write a URL"),
        (("--otlp-file", tmp_path), "cannot be written"),
    ):
        answer = tokentwin(*command, *flags)
        assert (answer.code, why in answer.error) == (2, True)


def test_answers_of_the_engine_have_the_same_spans(file: Path) -> None:
    pytest.importorskip("torch")
    from tests.realengine.engines import running, tiny_model
    from tokentwin.server.engine import EngineBackend
    from tokentwin.server.plain_codec import PlainCodec

    codec = PlainCodec(61)
    with running(tiny_model(), start=False, tokenizer=codec, async_scheduling=True) as engine:
        backend = EngineBackend(engine, codec, model="tiny", root="tiny")  # type: ignore[arg-type]
        with serving(backend, tracing=Tracing("tiny", file=file)) as server, server.client() as client:
            body = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True}
            client.post("/v1/completions", json=body).raise_for_status()
            until(lambda: bool(file.read_text()))
    root, *children = spans_of(file)
    assert [span["name"] for span in children] == list(STAGES)
    assert root["attributes"]["gen_ai.usage.completion_tokens"]["intValue"] == "12"
    times = [int(span[end]) for span in children[:3] for end in ("startTimeUnixNano", "endTimeUnixNano")]
    assert times == sorted(times)
    assert int(root["startTimeUnixNano"]) <= times[0]
    assert times[-1] <= int(root["endTimeUnixNano"])
