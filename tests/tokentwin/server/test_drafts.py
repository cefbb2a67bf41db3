"""Servers that speculate: the same text, several tokens to an event, vLLM's counters."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from tests.realengine.engines import tiny_model
from tests.realengine.test_drafts import speculation
from tests.tokentwin.server.harness import Running, events, serving, twin
from tests.tokentwin.server.test_engine_backend import serving_engine

BODY: dict[str, Any] = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 30, "temperature": 0, "ignore_eos": True}


def stream(server: Running, **more: Any) -> list[dict[str, Any]]:
    with server.client() as client:
        answer = client.post("/v1/completions", json=BODY | {"stream": True} | more)
    assert answer.status_code == 200, answer.text
    return [chunk for chunk in events(answer.text) if chunk["choices"]]


def counter(server: Running, name: str) -> float:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:spec_decode_{name}_total")
    )


def text(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_an_engine_that_drafts_serves_the_same_text_in_fewer_events() -> None:
    with serving_engine() as plain:
        expected = stream(plain)
        assert "spec_decode" not in plain.client().get("/metrics").text
    draft = speculation("draft_model", 4)
    with serving_engine(async_scheduling=False, speculative=draft, draft=tiny_model()) as server:
        found = stream(server)
        assert text(found) == text(expected)
        assert len(found) < 30 / 3  # of steps that gave five tokens; a slow reader makes fewer still
        assert counter(server, "num_accepted_tokens") > 0.9 * counter(server, "num_draft_tokens") > 0
        assert counter(server, "num_accepted_tokens_per_pos") == counter(server, "num_accepted_tokens")
        whole = stream(server, logprobs=1)
        assert sum(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in whole) == 30


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_twin_that_drafts_gives_every_token_in_fewer_events(method: str, caching: bool) -> None:
    config = {"method": method, "num_speculative_tokens": 4, "acceptance": 0.9}
    if method == "draft_model":
        config["model"] = "llama-3.2-1b"
    with serving(twin(speculative_config=config, enable_prefix_caching=caching)) as server:
        found = stream(server, stream_options={"include_usage": True, "continuous_usage_stats": True})
        assert found[-1]["usage"]["completion_tokens"] == 30
        assert len(found) < 20
        assert counter(server, "num_drafts") > 0
        assert counter(server, "num_accepted_tokens") > 0.5 * counter(server, "num_draft_tokens")
