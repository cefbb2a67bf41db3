"""OpenAI's own client against the twin."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.tokentwin.server.harness import MODEL, PATIENCE_S, serving, twin
from tokentwin.server.service import Limits


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        serving(twin(max_model_len=1024), Limits(api_keys=("sesame",))) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="sesame", timeout=PATIENCE_S, max_retries=0
        ) as client,
    ):
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="a b c", max_tokens=6)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 6
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="a b c", max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_completion_tokens=6, n=2
    )
    assert [choice.message.role for choice in whole.choices] == ["assistant", "assistant"]
    texts = ["", ""]
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        max_tokens=6,
        n=2,
        stream=True,
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="open").models.list()
