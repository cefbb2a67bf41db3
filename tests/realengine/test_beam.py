"""Beam search against every continuation there is, and against transformers; best-of against its candidates."""

from __future__ import annotations

import pytest
import torch

from realengine.batch import Batch
from realengine.beam import beam_search, best_of
from realengine.complete import complete
from realengine.generation import Sampling
from realengine.models import Model
from realengine.runner import allocate_caches
from serving.beams import Hypothesis
from serving.errors import UsageError
from tests.realengine.engines import CPU, running, tiny_model

PROMPT = [5, 9, 13, 40, 22]


def logprobs_of(model: Model, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token after every position, [tokens, vocabulary], computed in one piece."""
    caches = allocate_caches(model, 4, 64, device=CPU, dtype=torch.float32)
    count = len(ids)
    batch = Batch(
        torch.tensor(ids),
        torch.arange(count),
        torch.arange(count) + 64,
        torch.ones(1, 1, dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        torch.tensor([0, count], dtype=torch.int32),
        0,
        count,
        count,
        None,
    )
    return model.forward(batch, caches).float().log_softmax(dim=-1)


def test_a_wide_beam_finds_the_best_pair_of_tokens() -> None:
    """With two tokens to draw, a beam of ten that holds the best first tokens must find the best pair among them."""
    model = tiny_model()
    first = logprobs_of(model, PROMPT)[-1]
    starts = first.topk(10).indices.tolist()
    pairs = {}
    for a in starts:
        second = logprobs_of(model, [*PROMPT, a])[-1]
        for b, value in zip(second.topk(10).indices.tolist(), second.topk(10).values.tolist(), strict=True):
            pairs[a, b] = float(first[a]) + value
    best = sorted(pairs, key=lambda pair: -pairs[pair])[:10]
    with running(model) as engine:
        found = beam_search(engine, PROMPT, width=10, max_tokens=2)
    assert [h.token_ids for h in found] == best
    for hypothesis in found:
        assert hypothesis.logprob == pytest.approx(pairs[hypothesis.token_ids], abs=1e-3)


def test_a_beam_of_one_is_greedy() -> None:
    model = tiny_model()
    with running(model) as engine:
        (found,) = beam_search(engine, PROMPT, width=1, max_tokens=12)
        ((greedy,),) = complete(engine, [PROMPT], Sampling(max_tokens=12, temperature=0.0, ignore_eos=True))
    assert list(found.token_ids) == greedy.token_ids


def test_hypotheses_share_the_pages_of_their_prefix() -> None:
    with running(tiny_model(), page_tokens=8) as engine:
        prompt = list(range(3, 43))
        beam_search(engine, prompt, width=4, max_tokens=10)
        scheduler = engine.scheduler
        assert scheduler.prefix_hit_tokens > 0.7 * scheduler.prefix_queries_tokens
        scheduler.check()
        assert scheduler.pool.num_free == engine.config.num_pages


def test_an_end_leaves_its_place_and_keeps_its_score() -> None:
    """Ends that are among the best are kept as finished, nothing grows behind them, and the best of all come first."""
    model = tiny_model()
    ends = frozenset(logprobs_of(model, PROMPT)[-1].topk(3).indices.tolist())
    with running(model) as engine:
        found = beam_search(engine, PROMPT, width=4, max_tokens=6, eos_token_ids=ends)
    assert any(h.finished for h in found)
    for hypothesis in found:
        assert not set(hypothesis.token_ids[:-1]) & ends
        assert hypothesis.finished == (hypothesis.token_ids[-1] in ends)
    assert [h.score(1.0) for h in found] == sorted((h.score(1.0) for h in found), reverse=True)


def test_length_penalty_by_hand() -> None:
    assert Hypothesis((1, 2, 3, 4), -8.0).score(1.0) == -2.0
    assert Hypothesis((1, 2, 3, 4), -8.0).score(0.0) == -8.0
    assert Hypothesis((1, 2, 3), -8.0, finished=True).score(1.0) == -4.0


def test_the_same_beams_as_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    transformers = pytest.importorskip("transformers")
    from realengine.export import write_folder
    from realengine.load import find_model, load
    from tests.realengine.engines import tiny_source

    folder = tmp_path_factory.mktemp("model")
    write_folder(tiny_source(), folder, torch.float32)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    theirs = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        length_penalty=1.0,
        pad_token_id=0,
    )
    model = load(find_model(folder), device=CPU, dtype=torch.float32, max_positions=128)
    with running(model) as engine:
        ours = beam_search(engine, PROMPT, width=4, max_tokens=8)
    assert [list(h.token_ids) for h in ours] == theirs[:, len(PROMPT) :].tolist()


def test_best_of_is_the_likeliest_of_its_candidates() -> None:
    sampling = Sampling(max_tokens=6, temperature=1.0, seed=5, ignore_eos=True, logprobs=0)
    with running(tiny_model()) as engine:
        best = best_of(engine, PROMPT, sampling, 5)
        one_by_one = [
            complete(engine, [PROMPT], Sampling(6, 1.0, seed=5 + i, ignore_eos=True, logprobs=0))[0][0]
            for i in range(5)
        ]
    means = [sum(t.logprob for t in answer.logprobs) / 6 for answer in one_by_one]
    assert best.token_ids == one_by_one[means.index(max(means))].token_ids


def test_errors() -> None:
    with running(tiny_model()) as engine:
        for options in (
            {"width": 0, "max_tokens": 1},
            {"width": 11, "max_tokens": 1},
            {"width": 1, "max_tokens": 0},
        ):
            with pytest.raises(UsageError):
                beam_search(engine, PROMPT, **options)
        with pytest.raises(UsageError, match="best_of"):
            best_of(engine, PROMPT, Sampling(), 0)
