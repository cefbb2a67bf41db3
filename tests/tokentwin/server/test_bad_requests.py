"""Whatever a client sends, it gets an error in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tokentwin.server.harness import Running, idle, serving, twin, until
from tokentwin.server.service import Limits


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(twin(max_model_len=512), Limits(max_body_bytes=1 << 20)) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, whose shape is checked."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert "Traceback" not in error["message"]
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "warm"),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 1.5),
        ("max_tokens", 10**30),
        ("min_tokens", 9),
        ("n", 0),
        ("n", 1000),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("seed", 1 << 63),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop_token_ids", ["a"]),
        ("logprobs", 3),
        ("logprobs", -1),
        ("echo", True),
        ("suffix", "end"),
        ("priority", 1),
        ("stream_options", 3),
        ("prompt", None),
        ("prompt", []),
        ("prompt", 7),
        ("prompt", [[]]),
        ("prompt", [1, "a"]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", [-1]),
        ("prompt", [10**9]),
        ("prompt", [10**40]),
        ("prompt", [["a"]]),
        ("prompt", {}),
        ("prompt", ""),
    ],
)
def test_a_field_at_fault_is_named(client: httpx.Client, field: str, value: Any) -> None:
    body = {"prompt": "a", "max_tokens": 8} | {field: value}
    answer = client.post("/v1/completions", content=json.dumps(body))
    assert field in str(refused(answer, 400)["param"])


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        [1],
        [{}],
        [{"role": 1, "content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
def test_messages_at_fault_are_named(client: httpx.Client, messages: Any) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": messages})
    assert "messages" in refused(answer, 400)["param"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"3", b"null", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": "a",}', b"\x00" * 9],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object(client: httpx.Client, path: str, raw: bytes) -> None:
    refused(client.post(path, content=raw), 400)


def test_half_of_a_surrogate_pair_is_a_replacement_character(client: httpx.Client) -> None:
    answer = client.post("/tokenize", content=b'{"prompt": "a\\ud800b"}')
    ids = answer.json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "a\ufffdb"
    body = b'{"prompt": "a", "max_tokens": 2, "stop": "\\udc00", "model": "\\ud800"}'
    assert refused(client.post("/v1/completions", content=body), 404)["param"] == "model"


def test_an_unknown_model_is_404(client: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "model": "gpt-9"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "model": "gpt-9"}),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}),
    ):
        assert refused(client.post(path, json=body), 404)["code"] == "model_not_found"
    assert refused(client.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"


def test_a_prompt_that_is_too_long(client: httpx.Client) -> None:
    """512 positions: 512 prompt tokens leave no room, 500 leave 12."""
    for length, tokens, param in ((512, 1, "prompt"), (600, 1, "prompt"), (500, 13, "max_tokens")):
        answer = client.post("/v1/completions", json={"prompt": [5] * length, "max_tokens": tokens})
        error = refused(answer, 400)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == param
        assert "512" in error["message"]
    assert client.post("/v1/completions", json={"prompt": [5] * 500, "max_tokens": 12}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_ten_megabytes(client: httpx.Client, chunked: bool) -> None:
    raw = json.dumps({"prompt": "a" * 10_000_000}).encode()
    content: Any = (raw[at : at + 65536] for at in range(0, len(raw), 65536)) if chunked else raw
    error = refused(client.post("/v1/completions", content=content), 413)
    assert error["code"] == "request_too_large"
    assert client.get("/health").status_code == 200


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    refused(client.get("/v2/models"), 404)
    refused(client.get("/v1/completions"), 405)
    refused(client.delete("/health"), 405)


# ---- anything at all ---------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([0, 1, -1, 10**25]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
FIELDS = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
    "echo",
    "suffix",
    "priority",
    "tools",
    "response_format",
    "logit_bias",
    "chat_template_kwargs",
    "add_special_tokens",
    "add_generation_prompt",
    "tokens",
    "user",
    "skip_special_tokens",
]
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(PATHS),
    body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    base=st.sampled_from(
        [
            {},
            {"prompt": "a", "max_tokens": 2},
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
            {"tokens": [1]},
        ]
    ),
)
def test_no_body_breaks_the_server(
    running: Running, client: httpx.Client, path: str, body: dict[str, Any], base: dict[str, Any]
) -> None:
    answer = client.post(path, content=json.dumps(base | body))
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        refused(answer, answer.status_code)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), raw=st.binary(max_size=40))
def test_no_bytes_break_the_server(client: httpx.Client, path: str, raw: bytes) -> None:
    assert client.post(path, content=raw).status_code < 500


def test_after_all_that_nothing_is_left(running: Running) -> None:
    until(lambda: idle(running.backend))
    assert running.backend.failure is None
