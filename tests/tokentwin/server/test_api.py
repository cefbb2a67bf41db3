"""What a client gets that asks properly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.tokentwin.server.harness import MODEL, Running, events, idle, serving, twin, until
from tokentwin.provenance import VERSION


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(twin()) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


def completion(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": "once upon a time", "max_tokens": 4} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def stream(client: httpx.Client, path: str = "/v1/completions", **body: Any) -> list[Any]:
    base = {"prompt": "once upon a time"} if path == "/v1/completions" else {"messages": CHAT}
    answer = client.post(path, json=base | {"max_tokens": 4, "stream": True} | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def test_status_pages(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    assert client.get("/version").json() == {"version": VERSION}
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == model["root"] == MODEL
    assert model["max_model_len"] == 131072
    assert client.get(f"/v1/models/{MODEL}").json() == model


def test_a_completion_has_the_length_asked_for(client: httpx.Client) -> None:
    answer = completion(client, max_tokens=7)
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    prompt = len(client.post("/tokenize", json={"prompt": "once upon a time"}).json()["tokens"])
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["usage"]["prompt_tokens"] == prompt
    assert answer["usage"]["total_tokens"] == prompt + 7


def test_a_completion_without_length_has_sixteen_tokens_as_openai_has(client: httpx.Client) -> None:
    assert completion(client, max_tokens=None)["usage"]["completion_tokens"] == 16


def test_token_ids_and_several_prompts(client: httpx.Client) -> None:
    assert completion(client, prompt=[5, 6, 7])["usage"]["prompt_tokens"] == 3
    answer = completion(client, prompt=[[5, 6, 7], [8]], n=2)
    assert answer["usage"]["prompt_tokens"] == 4
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(completion(client, prompt=["a", "b", "c"])["choices"]) == 3


def test_a_stream_is_the_answer_in_pieces(client: httpx.Client) -> None:
    whole = completion(client, max_tokens=9)["choices"][0]["text"]
    chunks = stream(client, max_tokens=9)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 8 + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_comes_last_and_without_choices(client: httpx.Client) -> None:
    last = stream(client, max_tokens=5, stream_options={"include_usage": True})[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    metrics = last["metrics"]
    assert set(metrics) == {
        "queue_time_ms",
        "time_to_first_token_ms",
        "generation_time_ms",
        "mean_itl_ms",
        "tokens_per_second",
    }
    # Four gaps between five tokens.
    assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 4)
    assert metrics["tokens_per_second"] == pytest.approx(1000 / metrics["mean_itl_ms"])


def test_continuous_usage_counts_up(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(client, max_tokens=3, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


def test_chat_opens_with_the_role(client: httpx.Client) -> None:
    chunks = stream(client, "/v1/chat/completions", max_tokens=3)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    whole = client.post("/v1/chat/completions", json={"messages": CHAT, "max_completion_tokens": 3}).json()
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert whole["usage"]["completion_tokens"] == 3


def test_parts_of_a_message_are_its_text(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    def tokens(content: Any) -> int:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return int(client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"])

    assert tokens(parts) == tokens("one\ntwo")


def test_a_chat_without_length_ends_by_itself(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": CHAT}).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 256


def test_a_stop_string_across_tokens_ends_the_text_before_it(client: httpx.Client) -> None:
    text = completion(client, max_tokens=12)["choices"][0]["text"]
    stop = text[7:11]
    choice = completion(client, max_tokens=12, stop=["never", stop])["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    kept = completion(client, max_tokens=12, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == text[: text.index(stop) + len(stop)]
    chunks = stream(client, max_tokens=12, stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[: text.index(stop)]
    late = completion(client, max_tokens=12, min_tokens=12, stop=stop)
    assert late["usage"]["completion_tokens"] == 12


def test_unknown_fields_and_nulls_are_ignored(client: httpx.Client) -> None:
    nulls = dict.fromkeys(("temperature", "n", "stop", "seed", "logprobs", "stream_options", "top_p", "user"))
    assert completion(client, wombat=1, ignore_eos=True, repetition_penalty=1.0, **nulls)


def test_the_request_id_is_the_clients(client: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    answer = client.post("/v1/completions", json=body, headers={"x-request-id": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7"
    assert answer.json()["id"] == "cmpl-mine-7"
    assert client.get("/health").headers["x-request-id"]


@pytest.mark.parametrize("text", ["", "héllo wörld", "日本語 テキスト", "🙂👩‍👩‍👧 e\u0301", "a\x00b\n\t"])
def test_text_survives_tokens(client: httpx.Client, text: str) -> None:
    ids = client.post("/tokenize", json={"prompt": text, "model": MODEL}).json()
    assert ids["count"] == len(ids["tokens"])
    assert client.post("/detokenize", json={"tokens": ids["tokens"]}).json() == {"prompt": text}


def test_a_stream_shows_whole_characters_in_utf8() -> None:
    """Each token is one byte of a character; a chunk has none or all of it."""
    text = "日本🙂é ü\u0301\n"
    backend = twin()
    backend._script = list(text.encode())
    with serving(backend) as server, server.client() as client:
        body = {"prompt": "a", "max_tokens": len(text.encode()), "stream": True}
        answer = client.post("/v1/completions", json=body)
        pieces = [chunk["choices"][0]["text"] for chunk in events(answer.content.decode())]
        cut = client.post("/v1/completions", json=body | {"max_tokens": 5, "stream": False}).json()
    assert "".join(pieces) == text
    assert all(set(piece) <= set(text) for piece in pieces)
    # The two bytes that are left of a character of three are one replacement character.
    assert cut["choices"][0]["text"] == "日\ufffd"


def test_metrics_have_vllms_names_and_add_up(running: Running, client: httpx.Client) -> None:
    before = _metrics(client)
    completion(client, max_tokens=5)
    until(lambda: idle(running.backend))
    after = _metrics(client)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["vllm:generation_tokens_total"] == 5
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert grown["vllm:inter_token_latency_seconds_count"] == 4
    assert grown["vllm:request_time_per_output_token_seconds_count"] == 1
    assert grown["vllm:request_success_total/length"] == 1
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert grown[f"vllm:{name}_seconds_count"] == 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"vllm:{name}"] == 0
    for name in ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens"):
        assert f"vllm:{name}_total" in after
    assert "vllm:iteration_tokens_total_count" in after
    assert client.head("/metrics").status_code == 200


def _metrics(client: httpx.Client) -> dict[str, float]:
    """Samples by name, with the reason where there is one."""
    from prometheus_client.parser import text_string_to_metric_families

    out: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            reason = sample.labels.get("finished_reason")
            if "le" not in sample.labels:
                out[sample.name + (f"/{reason}" if reason else "")] = sample.value
    return out


def test_an_answer_sent_back_is_found_in_the_prefix_cache(running: Running, client: httpx.Client) -> None:
    """128 prompt tokens and 64 of the answer: a conversation's next turn finds all full pages of both but the last."""
    prompt = list(range(1000, 1128))
    text = completion(client, prompt=prompt, max_tokens=64)["choices"][0]["text"]
    answer = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert len(answer) == 64
    again = completion(client, prompt=[*prompt, *answer, 7], max_tokens=1)
    # The last token of the answer was never computed, so that its page of 16 is not full: 11 of 12 pages.
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 176}
