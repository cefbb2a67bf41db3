"""Beam search and best-of over HTTP, in front of the engine: the beams of `realengine.beam`, beside other traffic."""

from __future__ import annotations

import json
import math
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from realengine.beam import beam_search, best_of
from realengine.generation import Sampling
from tests.realengine.engines import EOS, tiny_model
from tests.realengine.engines import running as running_engine
from tests.tokentwin.server.harness import Running, until
from tests.tokentwin.server.test_clients import raw_request
from tests.tokentwin.server.test_engine_backend import PROMPT, serving_engine
from tokentwin.server.plain_codec import PlainCodec

SMALL = {"num_pages": 24, "page_tokens": 8, "max_num_seqs": 6, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving_engine() as server:
        yield server


def ask(server: Running, path: str = "/v1/completions", **body: Any) -> Any:
    with server.client() as client:
        answer = client.post(path, json={"prompt": PROMPT} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(ids: tuple[int, ...]) -> str:
    detokenizer = PlainCodec(61).detokenizer(PROMPT)
    return detokenizer.add(ids) + detokenizer.finish()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (4, 1.0), (4, 0.0), (3, 2.0)])
def test_the_beams_are_those_of_the_blocking_search(width: int, penalty: float, asynchronous: bool) -> None:
    with running_engine(tiny_model()) as engine:
        expected = beam_search(
            engine, PROMPT, width=width, max_tokens=9, length_penalty=penalty, eos_token_ids=frozenset({EOS})
        )
    with serving_engine(async_scheduling=asynchronous) as server:
        answer = ask(server, use_beam_search=True, n=width, length_penalty=penalty, max_tokens=9)
    assert [choice["text"] for choice in answer["choices"]] == [
        text(h.token_ids[:-1] if h.finished else h.token_ids) for h in expected
    ]
    assert [choice["finish_reason"] for choice in answer["choices"]] == [
        "stop" if h.finished else "length" for h in expected
    ]
    assert answer["usage"]["completion_tokens"] == sum(len(h.token_ids) for h in expected)


def test_hypotheses_find_all_full_pages_before_their_last_token() -> None:
    prompt, output, width, size = list(range(3, 43)), 30, 4, 8
    with serving_engine(page_tokens=size, num_pages=128) as server:
        body = {"use_beam_search": True, "n": width, "max_tokens": output, "ignore_eos": True}
        ask(server, prompt=prompt, **body)
        lengths = range(len(prompt) + 1, len(prompt) + output)
        expected = width * sum((length - 1) // size * size for length in lengths)
        assert server.backend.stats().prefix_hits_tokens == expected


def test_ends_of_the_clients_own_and_log_probabilities() -> None:
    with serving_engine() as server, running_engine(tiny_model()) as engine:
        plain = beam_search(engine, PROMPT, width=3, max_tokens=6)
        end = plain[0].token_ids[2]
        expected = beam_search(
            engine, PROMPT, width=3, max_tokens=6, length_penalty=0.0, eos_token_ids=frozenset({end})
        )
        body = {"use_beam_search": True, "n": 3, "max_tokens": 6, "length_penalty": 0.0}
        body |= {"ignore_eos": True, "stop_token_ids": [end]}
        choices = ask(server, **body, logprobs=8)["choices"]
    assert any(h.finished for h in expected)
    for choice, hypothesis in zip(choices, expected, strict=True):
        said = choice["logprobs"]
        assert math.isclose(sum(said["token_logprobs"]), hypothesis.logprob, abs_tol=1e-3)
        assert len(said["top_logprobs"]) == len(hypothesis.token_ids)
        for value, top in zip(said["token_logprobs"], said["top_logprobs"], strict=True):
            assert value <= max(top.values()) + 1e-6
        assert choice["stop_reason"] == (end if hypothesis.finished else None)


def test_chat() -> None:
    with serving_engine() as server:
        answer = ask(
            server,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "a"}],
            use_beam_search=True,
            n=2,
            max_tokens=4,
            temperature=0,
        )
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert all(choice["message"]["role"] == "assistant" for choice in answer["choices"])


def test_best_of_is_the_likeliest_of_its_candidates() -> None:
    with running_engine(tiny_model()) as engine:
        sampling = Sampling(max_tokens=6, temperature=1.0, seed=5, ignore_eos=True)
        expected = best_of(engine, PROMPT, sampling, 5)
    with serving_engine() as server:
        body = {"temperature": 1, "seed": 5, "max_tokens": 6, "ignore_eos": True}
        (best,) = ask(server, best_of=5, **body)["choices"]
        shown = ask(server, best_of=5, n=3, logprobs=0, **body)["choices"]
    assert best["text"] == text(tuple(expected.token_ids))
    assert best["logprobs"] is None
    assert shown[0]["text"] == best["text"]
    means = [sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in shown]
    assert means == sorted(means, reverse=True)
    assert len(shown) == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "n": 11}, "n"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "top_k": 4}, "top_k"),
        ({"use_beam_search": True, "min_p": 0.1}, "min_p"),
        ({"use_beam_search": True, "seed": 3}, "seed"),
        ({"use_beam_search": True, "stop": ["a"]}, "stop"),
        ({"use_beam_search": True, "min_tokens": 2}, "min_tokens"),
        ({"use_beam_search": True, "best_of": 4}, "best_of"),
        ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty"),
        ({"use_beam_search": "perhaps"}, "use_beam_search"),
        ({"use_beam_search": True, "max_tokens": 252}, "max_tokens"),
        ({"use_beam_search": True, "logprobs": 21}, "logprobs"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 3, "stream": True}, "stream"),
        ({"best_of": 3, "temperature": 0}, "best_of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_search_is_refused(server: Running, body: dict[str, Any], param: str) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2} | body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert server.backend.unfinished == 0


def test_others_are_served_meanwhile() -> None:
    """A search of 200 steps; short requests come and go in the meantime."""
    with serving_engine(max_num_seqs=8, num_pages=256, page_tokens=8) as server:
        found: list[Any] = []
        body = {"use_beam_search": True, "n": 4, "max_tokens": 200, "ignore_eos": True}
        searching = threading.Thread(target=lambda: found.append(ask(server, **body)))
        searching.start()
        until(lambda: server.backend.unfinished >= 4)
        served = 0
        while searching.is_alive():
            assert ask(server, max_tokens=3, temperature=0)["choices"]
            served += 1
        assert served > 3
        assert found[0]["usage"]["completion_tokens"] == 800


def test_a_client_that_leaves_frees_the_hypotheses() -> None:
    with serving_engine(max_num_seqs=8, num_pages=256, page_tokens=8) as server:
        raw = json.dumps(
            {"prompt": PROMPT, "use_beam_search": True, "n": 4, "max_tokens": 240, "ignore_eos": True}
        ).encode()
        client = socket.create_connection(("127.0.0.1", server.port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(raw)}\r\n\r\n"
        client.sendall(head.encode() + raw)
        scheduler = server.backend.engine.scheduler
        until(lambda: scheduler.num_unfinished > 1)
        assert server.backend.unfinished == 4
        client.close()
        until(lambda: not server.backend.unfinished)
        until(lambda: scheduler.num_unfinished == 0 and scheduler.used_pages == 0)
        planned = scheduler.num_planned
        time.sleep(0.05)
        assert scheduler.num_planned == planned, "the search goes on although nobody waits for it"
        scheduler.check()
        assert len(server.backend._boundaries.scheduled_s) == 0
        with server.client() as other:
            lines = other.get("/metrics").text.splitlines()
        (aborted,) = [line for line in lines if 'finished_reason="abort"' in line and "_total{" in line]
        assert aborted.endswith(" 4.0")


def test_a_search_with_a_cache_that_preempts_finds_the_same() -> None:
    body = {"use_beam_search": True, "n": 4, "max_tokens": 40, "ignore_eos": True}
    with serving_engine() as server:
        roomy = ask(server, **body)["choices"]
    with serving_engine(**SMALL, async_scheduling=False) as server:
        others = [
            threading.Thread(
                target=ask, args=(server,), kwargs={"max_tokens": 90, "ignore_eos": True, "seed": i}
            )
            for i in range(3)
        ]
        for other in others:
            other.start()
        tight = ask(server, **body)["choices"]
        for other in others:
            other.join()
        assert server.backend.stats().preemptions > 0
    assert [c["text"] for c in tight] == [c["text"] for c in roomy]


def test_the_metrics_count_a_search_as_its_answers() -> None:
    with serving_engine() as server:
        answer = ask(server, use_beam_search=True, n=3, max_tokens=7, ignore_eos=True)
        assert answer["metrics"]["time_to_first_token_ms"] > 0
        assert answer["metrics"]["generation_time_ms"] == 0
        with server.client() as client:
            text = client.get("/metrics").text

    def value(name: str) -> float:
        return float(next(line for line in text.splitlines() if line.startswith(name)).rpartition(" ")[2])

    assert value("vllm:generation_tokens_total") == 21
    assert value("vllm:time_to_first_token_seconds_count") == 3
    assert value("vllm:inter_token_latency_seconds_count") == 0


def test_a_full_queue_is_429() -> None:
    with serving_engine({"max_waiting": 1}, max_num_seqs=1) as server, server.client() as client:
        body = {"prompt": PROMPT, "use_beam_search": True, "n": 3}
        assert client.post("/v1/completions", json=body).status_code == 429


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_clients_that_come_and_go_leave_nothing_behind(asynchronous: bool) -> None:
    """Searches, best-of and plain answers in a cache that is too small for them; a third of the clients leave early."""
    rng = random.Random(7)
    with serving_engine(**SMALL, async_scheduling=asynchronous) as server:
        kinds = [
            {"use_beam_search": True, "n": 3},
            {"best_of": 3, "seed": 1},
            {"n": 2, "seed": 2},
            {"use_beam_search": True, "n": 2, "logprobs": 1},
        ]
        clients = []
        for number in range(24):
            prompt = [3 + number % 5] * (5 + number % 3)
            body = {"prompt": prompt, "max_tokens": rng.randint(1, 40), "ignore_eos": True} | kinds[
                number % 4
            ]
            clients.append(raw_request(server.port, body))
            if number % 3 == 0:
                time.sleep(0.01)
                clients.pop(rng.randrange(len(clients))).close()
        for client in clients:
            assert client.recv(1 << 20).startswith(b"HTTP/1.1 200")
            client.close()
        until(lambda: not server.backend.unfinished)
        scheduler = server.backend.engine.scheduler
        until(lambda: not scheduler.num_unfinished)
        assert scheduler.used_pages == 0
        scheduler.check()
        assert not server.backend._boundaries.scheduled_s
        assert ask(server, max_tokens=2)["choices"]
