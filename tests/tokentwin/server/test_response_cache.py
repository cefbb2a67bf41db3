"""The cache of answers: what is found again, what never is, and what a failing Redis does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realengine.generation import Sampling
from serving.errors import UsageError
from tests.tokentwin.server.harness import serving, twin
from tokentwin.commands.serve import with_cache
from tokentwin.server.backend import GenerationRequest
from tokentwin.server.response_cache import (
    CachingBackend,
    MemoryStore,
    RedisStore,
    is_repeatable,
    key_of,
    open_store,
    weights_version,
)

GREEDY = {"model": "llama-3.1-8b", "prompt": "the quick brown fox", "max_tokens": 8, "temperature": 0}


def ask(client: Any, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json=GREEDY | body)
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def test_the_same_request_is_answered_once() -> None:
    backend = CachingBackend(twin(), MemoryStore(10), "v1")
    with serving(backend) as running, running.client() as client:
        first, second = ask(client), ask(client)
        assert first["choices"] == second["choices"]
        assert first["usage"]["completion_tokens"] == second["usage"]["completion_tokens"] == 8
        assert (backend.lookups, backend.hits) == (2, 1)
        with client.stream("POST", "/v1/completions", json=GREEDY | {"stream": True}) as stream:
            lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        text = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
        assert text == first["choices"][0]["text"]
        assert backend.hits == 2


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "the quick brown fix"},
        {"max_tokens": 9},
        {"temperature": 0.5, "seed": 1},
        {"stop": ["x"]},
        {"n": 2},
    ],
)
def test_another_request_is_another_answer(other: dict[str, Any]) -> None:
    backend = CachingBackend(twin(), MemoryStore(10), "v1")
    with serving(backend) as running, running.client() as client:
        ask(client)
        ask(client, **other)
        assert backend.hits == 0


def test_a_sampled_answer_without_a_seed_is_never_kept() -> None:
    backend = CachingBackend(twin(), MemoryStore(10), "v1")
    with serving(backend) as running, running.client() as client:
        for _ in range(2):
            ask(client, temperature=0.7)
        assert (backend.lookups, backend.hits) == (0, 0)
    assert is_repeatable(Sampling(temperature=0.7, seed=3))


def test_other_weights_find_nothing_of_these() -> None:
    store = MemoryStore(10)
    for version in ("v1", "v2"):
        backend = CachingBackend(twin(), store, version)
        with serving(backend) as running, running.client() as client:
            ask(client)
            assert backend.hits == 0


def test_the_version_is_of_every_byte(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(100_000))
    before = weights_version(str(tmp_path))
    assert weights_version(str(tmp_path)) == before
    changed = bytearray(100_000)
    changed[54_321] = 1
    weights.write_bytes(changed)
    assert weights_version(str(tmp_path)) != before
    assert weights_version(str(tmp_path), "dummy") != weights_version(str(tmp_path))
    assert weights_version(str(tmp_path), computed=["int8"]) != weights_version(
        str(tmp_path), computed=["int4"]
    )


def test_servers_that_compute_differently_share_no_answers() -> None:
    def version(**given: Any) -> str:
        found = with_cache(twin(), {"model": "tiny", "response_cache": "memory"} | given)
        assert isinstance(found, CachingBackend)
        return found.version

    assert version() == version()
    assert (
        len(
            {
                version(),
                version(quantization="int8_wo"),
                version(kv_cache_dtype="int4"),
                version(engine="twin"),
            }
        )
        == 4
    )


def test_the_least_recently_used_goes_first() -> None:
    store = MemoryStore(2)
    store.put("a", b"1")
    store.put("b", b"2")
    store.get("a")
    store.put("c", b"3")
    assert [store.get(key) for key in "abc"] == [b"1", None, b"3"]


@given(st.lists(st.integers(0, 99), max_size=5), st.lists(st.integers(0, 99), max_size=5))
def test_keys_are_equal_exactly_where_prompts_are(one: list[int], other: list[int]) -> None:
    sampling = Sampling(temperature=0.0)
    keys = [key_of("v", GenerationRequest(name, ids, sampling)) for name, ids in (("a", one), ("b", other))]
    assert (keys[0] == keys[1]) == (one == other)


class FakeRedis:
    """A dictionary with Redis's two calls, which can be made to fail."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.ttl_s: int | None = None
        self.broken = False

    def get(self, key: str) -> bytes | None:
        if self.broken:
            raise ConnectionError("connection refused")
        return self.entries.get(key)

    def set(self, key: str, value: bytes, ex: int) -> None:
        if self.broken:
            raise ConnectionError("connection refused")
        self.entries[key], self.ttl_s = value, ex


def test_two_servers_share_a_redis_and_survive_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    redis = FakeRedis()
    for hits in (0, 1):
        backend = CachingBackend(twin(), RedisStore(redis, 60), "v1")
        with serving(backend) as running, running.client() as client:
            ask(client)
            assert backend.hits == hits
    assert redis.ttl_s == 60
    redis.broken = True
    with serving(CachingBackend(twin(), RedisStore(redis, 60), "v1")) as running, running.client() as client:
        ask(client)
        ask(client)
    assert capsys.readouterr().err.count("does not answer") == 1


def test_a_real_redis_client() -> None:
    """The library itself, where it is installed, against an address where nobody listens."""
    pytest.importorskip("redis", reason="the package redis is not installed")
    store = open_store("redis://127.0.0.1:1/0", 10, 60)
    store.put("a", b"1")
    assert store.get("a") is None


def test_errors() -> None:
    with pytest.raises(UsageError, match="use memory, or redis"):
        open_store("memcached", 10, 60)
