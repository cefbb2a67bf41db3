"""A real model's greedy text does not depend on how its tokens were scheduled, and is the model's own.

The expected tokens come from the engine itself with everybody in one batch; the oracle (`transformers`, one plain forward
over prompt and answer, no cache) then says that each of them is the likeliest after those before it. By induction that
is what recomputing the whole text for each token would give.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from realengine.complete import Completion, complete
from realengine.generation import Sampling
from tests.realengine.engines import running, smollm2, smollm2_folder

CHATS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
]
TEXTS = [
    "Once upon a time, in a small village,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are as follows. First,",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
]
TOKENS = 64
TOO_FEW_PAGES = 17
"""A third of what eight answers of 32 tokens fill, so that some are preempted."""


def prompts() -> list[list[int]]:
    tokenizer = smollm2()[0].tokenizer
    assert tokenizer is not None
    chats = [tokenizer.chat([{"role": "user", "content": text}]) for text in CHATS]
    return chats + [tokenizer.encode(text) for text in TEXTS]


def generate(ids: list[list[int]], num_tokens: int = TOKENS, **limits: Any) -> list[Completion]:
    """Greedy answers, all prompts sent at once, from a cache that starts out as NaN."""
    source, model = smollm2()
    sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    with running(model, tokenizer=source.tokenizer, poison=True, **limits) as engine:
        answers = [answer for (answer,) in complete(engine, ids, sampling)]
    engine.scheduler.check()
    assert engine.scheduler.pool.num_free == engine.config.num_pages
    if engine.config.num_pages == TOO_FEW_PAGES:
        assert sum(row.preemptions for row in engine.recorder.requests) > 0
    return answers


def tokens(answers: list[Completion]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    return generate(prompts())


def test_each_token_is_the_likeliest_after_all_before_it(expected: list[Completion]) -> None:
    import transformers

    oracle = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).eval()
    for prompt, answer in zip(prompts(), expected, strict=True):
        assert len(answer.token_ids) == TOKENS
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + answer.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(dim=-1).tolist() == answer.token_ids


def test_text_is_what_the_tokens_say_at_once(expected: list[Completion]) -> None:
    tokenizer = smollm2()[0].tokenizer
    assert tokenizer is not None
    for prompt, answer in zip(prompts(), expected, strict=True):
        assert tokenizer.decode(prompt + answer.token_ids) == tokenizer.decode(prompt) + answer.text
    assert "Paris" in expected[0].text


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"max_num_batched_tokens": 24}, id="chunked, not at page boundaries"),
        pytest.param({"async_scheduling": True, "max_num_seqs": 3}, id="asynchronous, three at a time"),
        pytest.param(
            {"num_pages": TOO_FEW_PAGES, "enable_prefix_caching": False}, id="preempted and recomputed"
        ),
        pytest.param({"num_pages": TOO_FEW_PAGES, "async_scheduling": True}, id="preempted, asynchronous"),
        pytest.param({"page_tokens": 8, "num_pages": 128, "max_num_batched_tokens": 17}, id="small pages"),
    ],
)
def test_greedy_text_does_not_depend_on_the_schedule(
    expected: list[Completion], limits: dict[str, Any]
) -> None:
    few = TOKENS // 2
    answers = generate(prompts(), few, **limits)
    assert tokens(answers) == [answer.token_ids[:few] for answer in expected]


def test_one_by_one_gives_the_same_text(expected: list[Completion]) -> None:
    for prompt, answer in list(zip(prompts(), expected, strict=True))[:2]:
        assert tokens(generate([prompt], 16)) == [answer.token_ids[:16]]


@pytest.mark.slow
def test_one_by_one_gives_the_same_text_to_the_last_token(expected: list[Completion]) -> None:
    assert tokens(generate(prompts(), max_num_seqs=1)) == tokens(expected)


def test_a_cached_prefix_gives_the_same_text(expected: list[Completion]) -> None:
    source, model = smollm2()
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    with running(model, tokenizer=source.tokenizer, poison=True) as engine:
        first = complete(engine, prompts(), sampling)
        again = complete(engine, prompts(), sampling)
    for (answer,), (repeat,), prompt, whole in zip(first, again, prompts(), expected, strict=True):
        assert answer.token_ids == repeat.token_ids == whole.token_ids[:12]
        # The last token is always left to compute, and only whole pages are found.
        assert repeat.cached_tokens == (len(prompt) - 1) // 16 * 16
