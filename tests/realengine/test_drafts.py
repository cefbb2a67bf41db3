"""Drafts change no text: every drafter under every schedule gives the very tokens that plain decoding gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from realengine.complete import Completion, complete
from realengine.draft_lookahead import LookaheadDrafter
from realengine.draft_model import first_layers
from realengine.draft_ngram import find
from realengine.generation import Sampling
from realengine.kernels import operators
from realengine.models import Model
from realengine.ops import KernelOps, rotary_tables
from serving.errors import UsageError
from serving.policies import Chunked, Continuous
from tests.realengine.engines import CPU, EOS, running, smollm2, tiny_model
from tests.realengine.test_parity import TINY_CACHE, Load, assert_same_plans, record_and_replay
from tests.realengine.test_smollm2 import prompts
from tokentwin.server.plain_codec import PlainCodec

DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "lookahead": {},
    "self": {"num_layers": 3},
    "draft_model": {"model": "given"},
}
each_drafter = pytest.mark.parametrize("method", list(DRAFTERS))


def speculation(method: str, k: int = 3, **more: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": k, **DRAFTERS[method], **more}


def tiny_draft() -> Model:
    """Agrees with the tiny model often, not always: its weights, one layer less."""
    return first_layers(tiny_model(), 3)


def tiny_prompts(count: int = 10) -> list[list[int]]:
    rng = np.random.default_rng(3)
    shared = rng.integers(3, 61, 24).tolist()
    return [
        (shared[:20] if i % 2 else []) + rng.integers(3, 61, int(rng.integers(1, 30))).tolist()
        for i in range(count)
    ]


def answers(
    sampling: Any, method: str | None = None, k: int = 3, **limits: Any
) -> tuple[list[Completion], Any]:
    ids = tiny_prompts()
    more = limits.pop("more", {})
    given = None if method is None else speculation(method, k, **more)
    draft = limits.pop("draft", tiny_draft()) if method == "draft_model" else None
    with running(tiny_model(), speculative=given, draft=draft, poison=True, **limits) as engine:
        each = sampling if isinstance(sampling, list) else [sampling] * len(ids)
        found = [answer for (answer,) in complete(engine, ids, each)]
    engine.scheduler.check()
    assert engine.scheduler.pool.num_free == engine.config.num_pages
    return found, engine


GREEDY = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
SCHEDULES = [
    pytest.param({}, id="together"),
    pytest.param(
        {"max_num_batched_tokens": 17, "page_tokens": 8, "num_pages": 128}, id="chunked, small pages"
    ),
    pytest.param({"num_pages": 14, "page_tokens": 8, "enable_prefix_caching": False}, id="preempted"),
    pytest.param({"num_pages": 14, "page_tokens": 8, "swap_pages": 14}, id="swapped"),
    pytest.param({"max_num_seqs": 3, "long_prefill_token_threshold": 6}, id="three at a time"),
    pytest.param({"policy": Continuous()}, id="continuous"),
]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [answer.token_ids for answer in answers(GREEDY)[0]]


@each_drafter
@pytest.mark.parametrize("limits", SCHEDULES)
def test_greedy_text_is_that_of_plain_decoding(
    plain: list[list[int]], method: str, limits: dict[str, Any]
) -> None:
    found, engine = answers(GREEDY, method, **limits)
    assert [answer.token_ids for answer in found] == plain
    drafts = engine.recorder.drafts
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
    assert len(engine.recorder.steps) < sum(map(len, plain))
    if limits.get("num_pages") == 14:
        assert sum(row.preemptions for row in engine.recorder.requests) > 0


@pytest.mark.parametrize("method", ["ngram", "lookahead"])
def test_drafts_of_certain_tokens_leave_every_draw_as_it_was(method: str) -> None:
    """Also at temperature 1, and for the seed of each request: finish reasons, stops and log-probabilities too."""
    how = [
        Sampling(max_tokens=30, temperature=0.4 + 0.2 * i, top_p=0.9, seed=i, min_tokens=i, logprobs=2)
        for i in range(10)
    ]
    expected, _ = answers(how)
    found, _ = answers(how, method, max_num_batched_tokens=40)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        assert [e.token for e in ours.logprobs] == ours.token_ids
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


def test_one_seed_gives_one_text_and_another_seed_another() -> None:
    def text(seed: int) -> list[list[int]]:
        how = [Sampling(max_tokens=20, seed=seed + i, ignore_eos=True) for i in range(10)]
        return [a.token_ids for a in answers(how, "draft_model")[0]]

    assert text(5) == text(5) != text(6)


def test_a_draft_that_is_the_target_itself_is_always_right() -> None:
    for temperature in (0.0, 1.0):
        how = Sampling(max_tokens=40, temperature=temperature, seed=1, ignore_eos=True)
        _, engine = answers(how, "draft_model", draft=tiny_model(), k=4)
        assert engine.recorder.drafts.acceptance_rate > 0.995


def test_draft_sample_method_greedy_gives_the_text_of_plain_decoding_at_any_temperature() -> None:
    how = [Sampling(max_tokens=20, temperature=0.8, seed=i, ignore_eos=True) for i in range(10)]
    expected, _ = answers(how)
    found, _ = answers(how, "draft_model", more={"draft_sample_method": "greedy"})
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]


@pytest.mark.parametrize("stop_at", [1, 3, 6])
def test_a_stop_token_among_accepted_drafts_ends_the_text_there(plain: list[list[int]], stop_at: int) -> None:
    how = [
        Sampling(max_tokens=40, temperature=0.0, ignore_eos=True, stop_token_ids=(text[stop_at],))
        for text in plain
    ]
    found, engine = answers(how, "draft_model", draft=tiny_model(), k=5)
    for answer, text in zip(found, plain, strict=True):
        assert answer.token_ids == text[: text.index(text[stop_at]) + 1]
        assert answer.finish_reason == "stop"
    assert engine.recorder.drafts.acceptance_rate > 0.9


def test_a_stop_string_among_accepted_drafts_ends_the_text_there() -> None:
    codec = PlainCodec(61)
    whole = answers(GREEDY, tokenizer=codec)[0][0]
    how = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True, stop=(whole.text[7:10],))
    expected, _ = answers(how, tokenizer=codec)
    found, _ = answers(how, "draft_model", k=5, draft=tiny_model(), tokenizer=codec)
    assert [(a.text, a.finish_reason, a.stop_reason) for a in found] == [
        (a.text, a.finish_reason, a.stop_reason) for a in expected
    ]
    assert found[0].finish_reason == "stop"
    assert found[0].text == whole.text[: whole.text.index(whole.text[7:10])]


@pytest.mark.parametrize("longest", [23, 40, 41, 64])
def test_no_token_past_the_limits(longest: int) -> None:
    prompt = tiny_prompts()[3][:22]
    how = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    for method in (None, "draft_model", "self", "ngram", "lookahead"):
        given = None if method is None else speculation(method, 5)
        draft = tiny_model() if method == "draft_model" else None
        with running(
            tiny_model(), speculative=given, draft=draft, max_model_len=longest, page_tokens=8
        ) as engine:
            answer = complete(engine, [prompt], how)[0][0]
        assert len(answer.token_ids) == min(60, longest - len(prompt)), method
        assert answer.finish_reason == "length"


@each_drafter
def test_several_answers_share_a_prompt(method: str) -> None:
    how = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, n=3)
    draft = tiny_draft() if method == "draft_model" else None
    with running(tiny_model(), speculative=speculation(method), draft=draft, poison=True) as engine:
        (found,) = complete(engine, [tiny_prompts()[5]], how)
        (again,) = complete(engine, [tiny_prompts()[5]], how)
    assert len({tuple(a.token_ids) for a in (*found, *again)}) == 1
    assert again[0].cached_tokens > 0


def test_a_busy_engine_drafts_less(plain: list[list[int]]) -> None:
    def drafted(**more: Any) -> Any:
        found, engine = answers(GREEDY, "draft_model", k=4, more=more)
        assert [a.token_ids for a in found] == plain
        return engine.recorder.drafts

    always = drafted()
    assert drafted(disable_by_batch_size=1).num_draft_tokens < always.num_draft_tokens / 3
    short = drafted(num_speculative_tokens_per_batch_size=[[1, 100, 2]])
    assert short.num_draft_tokens <= 2 * short.num_drafts
    careful = drafted(min_draft_acceptance=0.5)
    assert careful.num_draft_tokens < always.num_draft_tokens
    assert careful.acceptance_rate > always.acceptance_rate


@pytest.mark.parametrize(
    ("method", "limits"),
    [
        *((method, {}) for method in DRAFTERS),
        ("ngram", {"queue_order": "priority"}),
        ("draft_model", {"swap_pages": 12}),
        ("self", {"policy": Continuous, "max_num_batched_tokens": 96}),
        ("draft_model", {"more": {"min_draft_acceptance": 0.4, "disable_by_batch_size": 5}}),
    ],
)  # fmt: skip
def test_the_twin_repeats_every_plan_of_a_run_with_drafts(method: str, limits: dict[str, Any]) -> None:
    limits = {**TINY_CACHE, **limits}
    policy = limits.pop("policy", Chunked)
    load = Load(seed=len(limits) + len(method))
    given = speculation(method, **limits.pop("more", {}))
    draft = tiny_draft() if method == "draft_model" else None
    engine, decided, twin = record_and_replay(
        tiny_model(), load, policy, 0.003, speculative=given, draft=draft, **limits
    )
    assert_same_plans(decided, twin.decisions)
    drafts = engine.recorder.drafts
    assert drafts.num_drafts > 0
    assert drafts.num_accepted_tokens > 0 or method == "ngram"  # random text seldom repeats itself
    ranges = [(row.output_tokens, row.ranges, row.per_step) for row in engine.recorder.requests]
    for tokens, steps, several in ranges:
        assert tokens == sum(count * n for (_, count), n in zip(steps, several, strict=True))


@each_drafter
def test_the_operators_of_a_gpu_give_the_same_text(plain: list[list[int]], method: str) -> None:
    """The layout of batches that the CUDA kernels take, through their references."""

    def on_kernels(model: Model) -> Model:
        shape, rope = model.architecture.shape, model.architecture.rope
        ops = KernelOps(*rotary_tables(rope, shape.head_dim, 256, CPU), operators("cpu"))
        return Model(model.architecture, model.weights, ops)

    draft = on_kernels(tiny_draft()) if method == "draft_model" else None
    given = speculation(method)
    with running(
        on_kernels(tiny_model()), speculative=given, draft=draft, max_num_batched_tokens=40
    ) as engine:
        found = [answer for (answer,) in complete(engine, tiny_prompts(), GREEDY)]
    assert [answer.token_ids for answer in found] == plain


# ---- SmolLM2 ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written() -> list[list[int]]:
    return smollm2_answers(None)


def smollm2_answers(method: str | None, **limits: Any) -> list[list[int]]:
    source, model = smollm2()
    given = None if method is None else speculation(method, 3)
    if method == "self":
        assert given is not None
        given["num_layers"] = 24
    draft = first_layers(model, 28) if method == "draft_model" else None
    how = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    with running(
        model, tokenizer=source.tokenizer, speculative=given, draft=draft, poison=True, **limits
    ) as engine:
        found = [answer.token_ids for (answer,) in complete(engine, prompts()[4:], how)]
    if "num_pages" in limits:
        assert sum(row.preemptions for row in engine.recorder.requests) > 0
    return found


@each_drafter
def test_greedy_text_of_smollm2(written: list[list[int]], method: str) -> None:
    assert smollm2_answers(method) == written


def test_greedy_text_of_smollm2_preempted_and_chunked(written: list[list[int]]) -> None:
    limits = {"num_pages": 8, "page_tokens": 8, "max_num_batched_tokens": 30}
    assert smollm2_answers("draft_model", **limits) == written


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_the_longest_suffix_found_first_is_followed() -> None:
    rng = np.random.default_rng(1)
    for _ in range(400):
        text = rng.integers(0, 3, int(rng.integers(1, 40))).astype(np.int32)
        least = int(rng.integers(1, 4))
        most = least + int(rng.integers(0, 4))
        wanted: list[int] = []
        for size in range(min(most, len(text) - 1), least - 1, -1):
            suffix = text[-size:]
            begins = [i for i in range(len(text) - size) if (text[i : i + size] == suffix).all()]
            if begins:
                wanted = text[begins[0] + size :].tolist()
                break
        assert find(text, least, most).tolist() == wanted


def test_lookahead_remembers_what_was_drawn_after_a_wrong_guess() -> None:
    drafter = LookaheadDrafter(3, 1)
    drafter.take(0)
    text = np.array([5, 6, 7], np.int32)
    guess = drafter.propose(0, text, np.array([7]), 1, 3)
    # Nothing is known of 7: the guess is that it goes on, and is corrected by what the target drew in its place.
    assert guess.tolist() == [7, 7, 7]
    text = np.append(text, np.int32(8))
    assert drafter.propose(0, text, np.array([8, 9, 4, 1]), 1, 3).tolist() == [9, 4, 1]
    # 6 is followed by 7 8 in the text now.
    text = np.append(text, np.int32(6))
    assert drafter.propose(0, text, np.array([6, 0, 0, 0]), 1, 2).tolist() == [7, 8]


def test_an_engine_refuses_what_it_cannot_do() -> None:
    with (
        pytest.raises(UsageError, match="no-async-scheduling"),
        running(tiny_model(), speculative=speculation("ngram"), async_scheduling=True),
    ):
        pass
    assert EOS == 2
    assert torch.get_num_threads() == 1
