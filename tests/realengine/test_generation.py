"""What a request may ask of its answer: how tokens are drawn, what ends it, what is told beside it."""

from __future__ import annotations

import math
import queue
import time
from typing import Any

import pytest
import torch

from realengine.answer import Output
from realengine.complete import Completion, complete
from realengine.engine import EngineError
from realengine.generation import Sampling
from realengine.models import Model
from serving.errors import UsageError
from tests.realengine.engines import CPU, EOS, running, smollm2, tiny_model

PROMPT = [5, 9, 13, 40, 22]


def answer(sampling: Sampling, prompt: list[int] | None = None, **limits: Any) -> Completion:
    with running(tiny_model(), **limits) as engine:
        return complete(engine, [prompt or PROMPT], sampling)[0][0]


def next_logits(model: Model, ids: list[int]) -> torch.Tensor:
    """Logits after `ids`, by one forward of its own."""
    from realengine.batch import Batch
    from realengine.runner import allocate_caches

    caches = allocate_caches(model, 9, 8, device=CPU, dtype=torch.float32)
    positions = torch.arange(len(ids))
    batch = Batch(
        torch.tensor(ids),
        positions,
        positions + 8,
        torch.arange(1, 9, dtype=torch.int32).unsqueeze(0),
        torch.tensor([len(ids)], dtype=torch.int32),
        torch.tensor([0, len(ids)], dtype=torch.int32),
        0,
        len(ids),
        len(ids),
        torch.tensor([len(ids) - 1]),
    )
    return model.forward(batch, caches)[0]


def test_top_k_of_one_is_greedy() -> None:
    greedy = answer(Sampling(max_tokens=20, temperature=0.0, ignore_eos=True))
    assert answer(Sampling(max_tokens=20, top_k=1, seed=1, ignore_eos=True)).token_ids == greedy.token_ids
    assert answer(Sampling(max_tokens=20, top_p=1e-6, seed=1, ignore_eos=True)).token_ids == greedy.token_ids
    assert answer(Sampling(max_tokens=20, min_p=1.0, seed=1, ignore_eos=True)).token_ids == greedy.token_ids


def test_a_seed_decides_the_answer_whoever_runs_beside_it() -> None:
    wanted = answer(Sampling(max_tokens=20, seed=11, ignore_eos=True))
    with running(tiny_model(), max_num_batched_tokens=7) as engine:
        samplings = [Sampling(max_tokens=20, seed=seed, ignore_eos=True) for seed in (10, 11, 12)]
        together = [a.token_ids for (a,) in complete(engine, [PROMPT] * 3, samplings)]
    assert together[1] == wanted.token_ids
    assert together[0] != together[1] != together[2]


def test_draws_follow_the_models_distribution() -> None:
    model = tiny_model()
    expected = next_logits(model, PROMPT).softmax(dim=-1)
    draws = 3000
    with running(model, max_num_seqs=500, num_pages=4000) as engine:
        (answers,) = complete(engine, [PROMPT], Sampling(max_tokens=1, n=draws, seed=1))
    counts = torch.bincount(torch.tensor([a.token_ids[0] for a in answers]), minlength=len(expected))
    likely = expected * draws >= 5
    seen = torch.cat((counts[likely], counts[~likely].sum().unsqueeze(0)))
    wanted = torch.cat((expected[likely], expected[~likely].sum().unsqueeze(0))) * draws
    chi2 = float(((seen - wanted) ** 2 / wanted.clamp(min=1)).sum())
    freedom = len(wanted) - 1
    # Mean `freedom`, variance 2 × freedom: five standard deviations.
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


def test_logprobs_are_the_models_own() -> None:
    got = answer(Sampling(max_tokens=3, temperature=2.0, seed=4, logprobs=4, ignore_eos=True))
    assert len(got.logprobs) == 3
    ids = list(PROMPT)
    for told, token in zip(got.logprobs, got.token_ids, strict=True):
        logprobs = next_logits(tiny_model(), ids).log_softmax(dim=-1)
        assert told.token == token
        assert told.logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
        top = logprobs.topk(4)
        assert [t for t, _ in told.top] == top.indices.tolist()
        assert [p for _, p in told.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        ids.append(token)
    assert not answer(Sampling(max_tokens=1)).logprobs


def test_eos_stop_tokens_and_min_tokens() -> None:
    with running(tiny_model()) as engine:
        seeds = range(40)
        samplings = [Sampling(max_tokens=40, seed=seed) for seed in seeds]
        ended = [a for (a,) in complete(engine, [PROMPT] * len(seeds), samplings)]
    by_eos = next(i for i, a in enumerate(ended) if a.finish_reason == "stop" and 4 < len(a.token_ids) < 30)
    eos_at = len(ended[by_eos].token_ids)
    assert ended[by_eos].token_ids[-1] == EOS
    assert EOS not in ended[by_eos].token_ids[:-1]
    free = answer(Sampling(max_tokens=40, seed=by_eos, ignore_eos=True))
    assert len(free.token_ids) == 40
    assert free.finish_reason == "length"
    assert free.token_ids[:eos_at] == ended[by_eos].token_ids
    token = free.token_ids[3]
    first = free.token_ids.index(token)
    stopped = answer(Sampling(max_tokens=40, seed=by_eos, stop_token_ids=(token,)))
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: first + 1], "stop")
    assert stopped.stop_reason == token
    later = answer(Sampling(max_tokens=40, seed=by_eos, min_tokens=eos_at + 1))
    assert len(later.token_ids) > eos_at


def test_stop_strings_end_the_text_before_them() -> None:
    source, model = smollm2()
    tokenizer = source.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode("The days of the week are Monday, Tuesday,")
    with running(model, tokenizer=tokenizer) as engine:
        free, cut, kept = (
            complete(engine, [prompt], Sampling(max_tokens=12, temperature=0.0, stop=stop, **more))[0][0]
            for stop, more in (
                ((), {}),
                (("ursday, Fr", "never"), {}),
                (("ursday, Fr",), {"include_stop_str_in_output": True}),
            )
        )
    assert "Thursday, Friday" in free.text
    assert cut.text == free.text[: free.text.index("ursday, Fr")]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "ursday, Fr")
    assert kept.text == cut.text + "ursday, Fr"
    assert len(cut.token_ids) < len(free.token_ids)


def test_answers_beyond_what_can_run_are_rejected_and_the_rest_served() -> None:
    with running(tiny_model(), num_pages=4, page_tokens=4) as engine:
        prompts = [[7] * 17, PROMPT]
        too_long, fine = (a for (a,) in complete(engine, prompts, Sampling(max_tokens=4, ignore_eos=True)))
    assert too_long.finish_reason == "rejected"
    assert "KV cache" in too_long.message
    assert len(fine.token_ids) == 4


def test_a_lone_answer_that_outgrows_the_cache_ends_with_length() -> None:
    grown = answer(Sampling(max_tokens=100, ignore_eos=True), num_pages=4, page_tokens=4)
    assert grown.finish_reason == "length"
    assert len(PROMPT) + len(grown.token_ids) == 17  # 16 tokens in the cache, and the one that they gave


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_aborted_answer_frees_its_pages_and_its_prefix_stays_right(asynchronous: bool) -> None:
    prompt = list(range(3, 43))
    greedy = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    wanted = answer(greedy, prompt)
    with running(
        tiny_model(), max_num_batched_tokens=6, page_tokens=4, async_scheduling=asynchronous, poison=True
    ) as engine:
        for _ in range(12):  # at whatever chunk it happens to be
            told: queue.SimpleQueue[Output] = queue.SimpleQueue()
            (request,) = engine.add(prompt, Sampling(max_tokens=100), told.put)
            time.sleep(0.004)
            engine.abort(request)
            while told.get(timeout=10).finish_reason is None:
                pass
            got = complete(engine, [prompt], greedy)[0][0]
            assert got.token_ids == wanted.token_ids
    assert engine.scheduler.pool.num_free == engine.config.num_pages
    engine.scheduler.check()


def test_stopping_ends_what_is_unfinished() -> None:
    told: queue.SimpleQueue[Output] = queue.SimpleQueue()
    with running(tiny_model(), start=False) as engine:
        engine.add(PROMPT, Sampling(max_tokens=200, ignore_eos=True), told.put)
        engine.start()
    outputs = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs.append(told.get(timeout=10))
    assert outputs[-1].finish_reason == "abort"
    with pytest.raises(EngineError, match="has ended"):
        engine.add(PROMPT, Sampling(), told.put)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_is_told_to_everybody_who_waits() -> None:
    with running(tiny_model(), start=False) as engine:

        def fail(*_: object) -> Any:
            raise RuntimeError("the device is gone")

        engine.runner.launch = fail  # type: ignore[method-assign]
        engine.start()
        lost = complete(engine, [PROMPT], Sampling())[0][0]
        assert lost.finish_reason == "error"
        assert "the device is gone" in lost.message
        with pytest.raises(EngineError, match="the device is gone"):
            engine.add(PROMPT, Sampling(), lambda output: None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("seed", 2**63),
        ("n", 0),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("stop", ("",)),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=field):
        Sampling(**{field: value})  # type: ignore[arg-type]


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    with running(tiny_model()) as engine, pytest.raises(UsageError, match="outside 0 to 60"):
        engine.add([61], Sampling(), lambda output: None)
