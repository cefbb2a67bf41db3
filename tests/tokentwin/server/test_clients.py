"""Clients that leave, that do not read, that are too many, that have no key; and a server that is told to go."""

from __future__ import annotations

import json
import signal
import socket
import struct
import threading
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.tokentwin.server.harness import PATIENCE_S, Running, events, idle, serving, twin, until
from tokentwin.server.service import Limits

LONG = {"prompt": [5, 6, 7], "max_tokens": 20_000, "stream": True}
"""At five milliseconds a token, a minute and a half."""


def raw_request(port: int, body: dict[str, Any], *, receive_buffer: int = 0) -> socket.socket:
    """A connection on which a completion was asked for and nothing was read yet."""
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(PATIENCE_S)
    client.connect(("127.0.0.1", port))
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(raw)}\r\n\r\n"
    client.sendall(head.encode() + raw)
    return client


def running_now(server: Running) -> int:
    return int(server.backend.stats().running)


# ---- clients that leave ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_frees_its_pages(streaming: bool, reset: bool) -> None:
    with serving(twin(time_scale=1)) as server:
        client = raw_request(server.port, LONG | {"stream": streaming, "n": 3})
        until(lambda: running_now(server) == 3)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        until(lambda: idle(server.backend))
        with server.client() as other:
            assert 'finished_reason="abort",model_name="llama-3.1-8b"} 3.0' in other.get("/metrics").text


def test_a_client_that_leaves_the_queue_was_never_there() -> None:
    with serving(twin(time_scale=1, max_num_seqs=1)) as server:
        first = raw_request(server.port, LONG)
        until(lambda: running_now(server) == 1)
        second = raw_request(server.port, LONG)
        until(lambda: server.backend.unfinished == 2)
        second.close()
        until(lambda: server.backend.unfinished == 1)
        assert running_now(server) == 1
        first.close()
        until(lambda: idle(server.backend))


# ---- clients that do not read ------------------------------------------------------------------------------

VERBOSE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def test_a_client_that_does_not_read_is_cut_and_no_other() -> None:
    """It would get 12,000 tokens, fewer than may wait for it, within three seconds; it reads none."""
    with serving(twin(time_scale=20), Limits(send_timeout_s=0.3)) as server:
        slow = raw_request(server.port, LONG | VERBOSE | {"max_tokens": 12_000}, receive_buffer=4096)
        until(lambda: running_now(server) == 1)
        with server.client() as other:
            while server.backend.unfinished:
                answer = other.post("/v1/completions", json={"prompt": "a", "max_tokens": 5, "stream": True})
                assert len(events(answer.text)) == 5
            assert 'finished_reason="abort",model_name="llama-3.1-8b"} 1.0' in other.get("/metrics").text
        until(lambda: idle(server.backend))
        assert b"[DONE]" not in _rest(slow)


def test_what_waits_for_a_client_is_bounded() -> None:
    """Its answer is given up when 300 tokens wait, long before the time is out that it has to read."""
    with serving(twin(options={"buffer_tokens": 300}), Limits(send_timeout_s=3600)) as server:
        slow = raw_request(server.port, LONG | VERBOSE | {"max_tokens": 100_000}, receive_buffer=4096)
        until(lambda: server.backend.unfinished == 1)
        until(lambda: idle(server.backend))
        text = _rest(slow, until=b"[DONE]").decode()
        assert "300 tokens waited for a client that does not read" in text


def _rest(client: socket.socket, until: bytes = b"") -> bytes:
    """What a connection still has, up to its end or `until`."""
    out = bytearray()
    try:
        while (piece := client.recv(1 << 20)) and not (until and until in out[-4096:] + piece):
            out += piece
        out += piece
    except ConnectionResetError:
        pass
    client.close()
    return bytes(out)


def test_tokens_are_grouped_by_the_stream_interval() -> None:
    """Ten tokens in groups of four: the first at once, then 4, 4 and the last, or fewer groups where it was late."""
    with serving(twin(time_scale=0.5, options={"stream_interval": 4})) as server, server.client() as client:
        body = {"prompt": "a", "max_tokens": 10, "stream": True} | VERBOSE
        chunks = events(client.post("/v1/completions", json=body).text)[:-1]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts[-1] == 10
        assert len(counts) <= 4
        assert all(later - earlier >= 4 for earlier, later in pairwise(counts[:-1]))


# ---- too many, and those without a key ---------------------------------------------------------------------


def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    with serving(twin(time_scale=1, max_num_seqs=1, options={"max_waiting": 1})) as server:
        held = [raw_request(server.port, LONG)]
        until(lambda: running_now(server) == 1)
        held.append(raw_request(server.port, LONG))
        until(lambda: server.backend.unfinished == 2)
        with server.client() as client:
            answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(answer.headers["retry-after"]) >= 1
            several = client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1})
            assert several.status_code == 429
            assert server.backend.unfinished == 2
            for connection in held:
                connection.close()
            until(lambda: server.backend.unfinished == 0)
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_key_is_asked_for() -> None:
    with serving(twin(), Limits(api_keys=("sesame", "ключ"))) as server, server.client() as client:
        body = {"prompt": "a", "max_tokens": 1}
        wrong = ("", "Bearer", "Bearer open", "sesame", "Basic sesame", "Bearer sesame2")
        for header in wrong:
            answer = client.post("/v1/completions", json=body, headers={"authorization": header})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models").status_code == 401
        assert client.post("/tokenize", json=body).status_code == 401
        for right in (b"Bearer sesame", b"bearer  sesame", "Bearer ключ".encode()):
            answer = client.post("/v1/completions", json=body, headers={"authorization": right})
            assert answer.status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert client.get(path).status_code == 200


# ---- going -------------------------------------------------------------------------------------------------


def test_sigterm_finishes_what_has_begun() -> None:
    with serving(twin(time_scale=1)) as server:
        answers: list[httpx.Response] = []

        def ask() -> None:
            with server.client() as client:
                answers.append(client.post("/v1/completions", json=LONG | {"max_tokens": 100}))

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: running_now(server) == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        with server.client() as client:
            refused = client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert client.get("/health").status_code == 503
        asking.join(PATIENCE_S)
        assert len(events(answers[0].text)) == 100
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()
        assert not server.server.cut


@pytest.mark.parametrize("twice", [False, True])
def test_what_takes_too_long_is_cut_at_the_end_of_the_drain(twice: bool) -> None:
    with serving(twin(time_scale=1), drain_timeout_s=60 if twice else 0.2) as server:
        client = raw_request(server.port, LONG)
        until(lambda: running_now(server) == 1)
        begun_s = time.monotonic()
        for _ in range(1 + twice):
            server.server.handle_exit(signal.SIGTERM, None)
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()
        assert time.monotonic() - begun_s < PATIENCE_S
        assert server.server.cut
        assert b"[DONE]" not in _rest(client)
        assert idle(server.backend)


def test_a_backend_that_breaks_says_so_to_everybody() -> None:
    with serving(twin(time_scale=1)) as server, server.client() as client:
        waiting = raw_request(server.port, LONG)
        until(lambda: running_now(server) == 1)
        server.backend._replicas[0].scheduler.plan = None  # whatever happens, it is a bug
        text = _rest(waiting, until=b"[DONE]").decode()
        assert '"type":"server_error"' in text
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 500
