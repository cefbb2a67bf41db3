"""The engine behind the same server: tokens of a random model of four layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from serving.config import SchedulerConfig
from tests.realengine.engines import running as running_engine
from tests.realengine.engines import tiny_model
from tests.tokentwin.server.harness import PATIENCE_S, Running, events, serving, until
from tests.tokentwin.server.test_clients import raw_request
from tokentwin.server.engine import EngineBackend
from tokentwin.server.plain_codec import PlainCodec

PROMPT = [5, 6, 7, 8, 9]


@contextmanager
def serving_engine(options: dict[str, Any] | None = None, **limits: Any) -> Iterator[Running]:
    codec = PlainCodec(61)
    limits = {"async_scheduling": True} | limits
    with running_engine(tiny_model(), start=False, tokenizer=codec, **limits) as engine:
        backend = EngineBackend(engine, codec, model="tiny", root="tiny", **(options or {}))  # type: ignore[arg-type]
        with serving(backend) as server:
            yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving_engine() as server:
        yield server


def ask(server: Running, **body: Any) -> Any:
    base = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with server.client() as client:
        answer = client.post("/v1/completions", json=base | body)
    assert answer.status_code == 200, answer.text
    return events(answer.text) if body.get("stream") else answer.json()


def test_greedy_text_is_the_same_streamed_and_whole(server: Running) -> None:
    whole = ask(server)
    chunks = ask(server, stream=True, stream_options={"include_usage": True})
    assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == 12
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole["choices"][0]["text"]
    metrics = chunks[-1]["metrics"]
    assert 0 <= metrics["queue_time_ms"] <= metrics["time_to_first_token_ms"]
    assert metrics["mean_itl_ms"] > 0


def test_a_seed_makes_a_draw_repeatable(server: Running) -> None:
    drawn = [ask(server, temperature=1, seed=7, n=2)["choices"] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0][0]["text"] != drawn[0][1]["text"]


def test_logprobs_in_both_shapes(server: Running) -> None:
    logprobs = ask(server, logprobs=2)["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 12
    assert all(-20 < value <= 0 for value in logprobs["token_logprobs"])
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    with server.client() as client:
        answer = client.post(
            "/v1/chat/completions", json=body | {"temperature": 0, "ignore_eos": True}
        ).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2, 2, 2]
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in entries)


def test_what_the_engine_cannot_do_is_refused(server: Running) -> None:
    with server.client() as client:
        for field, value in (
            ("presence_penalty", 1),
            ("logit_bias", {"5": 1}),
            ("response_format", {"type": "json_object"}),
            ("priority", 1),
            ("max_tokens", 252),
        ):
            body = {"prompt": PROMPT, "max_tokens": 2} | {field: value}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_client_that_leaves_frees_its_pages(asynchronous: bool) -> None:
    with serving_engine(async_scheduling=asynchronous, num_pages=1024, max_model_len=256) as server:
        body = {"prompt": PROMPT, "max_tokens": 250, "ignore_eos": True, "n": 4, "stream": True}
        client = raw_request(server.port, body)
        until(lambda: server.backend.stats().running == 4)
        client.close()
        until(lambda: not server.backend.unfinished)
        scheduler = server.backend.engine.scheduler
        until(lambda: scheduler.num_unfinished == 0)
        assert scheduler.used_pages == 0
        scheduler.check()
        assert ask(server)["usage"]["completion_tokens"] == 12


class Outbox(deque[Any]):
    """The loop empties it just before something is put in."""

    loop: Callable[[], None] = staticmethod(lambda: None)

    def append(self, item: Any) -> None:
        self.loop()
        super().append(item)


def handing_over() -> tuple[EngineBackend, list[Callable[[], None]]]:
    """A backend without an engine, and what the loop was asked to call."""
    backend = EngineBackend(SimpleNamespace(config=SchedulerConfig(8)), None, model="", root="")  # type: ignore[arg-type]
    asked: list[Callable[[], None]] = []
    backend._call, backend._boundaries = asked.append, SimpleNamespace(now_s=0.0)  # type: ignore[assignment,method-assign]
    return backend, asked


def test_an_output_that_comes_while_the_loop_empties_the_outbox_is_fetched() -> None:
    backend, asked = handing_over()
    outbox = backend._outbox = Outbox()
    got: list[Any] = []
    listen = backend._listener(lambda output, now_s: got.append(output))
    listen("a")  # type: ignore[arg-type]
    outbox.loop = asked[0]  # type: ignore[method-assign]
    listen("b")  # type: ignore[arg-type]
    assert got == ["a"]
    asked[1]()
    assert got == ["a", "b"]


def test_an_output_that_cannot_be_delivered_holds_up_nobody_else() -> None:
    backend, asked = handing_over()
    got: list[Any] = []
    backend._listener(lambda output, now_s: got.append(1 / 0))("a")  # type: ignore[arg-type]
    backend._listener(lambda output, now_s: got.append(output))("b")  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        asked[0]()
    asked[1]()
    assert got == ["b"]


def test_a_full_queue_is_429() -> None:
    with serving_engine({"max_waiting": 1}, max_num_seqs=1) as server, server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": PROMPT, "n": 3})
        assert answer.status_code == 429


def test_metrics_count_what_the_engine_did(server: Running) -> None:
    with server.client() as client:
        before = client.get("/metrics").text
        ask(server, max_tokens=9)
        after = client.get("/metrics").text

    def value(text: str, name: str) -> float:
        return float(next(line for line in text.splitlines() if line.startswith(name)).rpartition(" ")[2])

    for name, grown in (("generation_tokens_total", 9), ("inter_token_latency_seconds_count", 8)):
        assert value(after, f"vllm:{name}") - value(before, f"vllm:{name}") == grown
    assert value(after, "vllm:kv_cache_usage_perc") == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_breaks_says_so() -> None:
    with serving_engine() as server, server.client() as client:
        server.backend.engine.scheduler.plan = None  # whatever happens, it is a bug
        answer = client.post("/v1/completions", json={"prompt": PROMPT}, timeout=PATIENCE_S)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        until(lambda: client.get("/health").status_code == 503)
