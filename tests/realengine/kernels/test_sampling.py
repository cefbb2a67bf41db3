"""Sampling: filters against their definition, draws against their distribution, kernels against references."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from realengine.kernels import philox_ref, sampling, sampling_ref
from tests.realengine.kernels.paged import DEVICE


def settings(rows: int, **given: float) -> dict[str, Tensor]:
    """Sampling parameters for all rows; what is not given is off."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
    return {
        name: torch.full(
            (rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32, device=DEVICE
        )
        for name, value in values.items()
    }


MIXED = {
    "temperature": [0.0, 1.0, 0.7, 1.3, 1.0, 1.0, 1.0, 1.0, 2.0, 0.5, 1.0, 0.0],
    "top_k": [0, 0, 5, 0, 50, 5000, 1, 40, 0, 0, 0, 3],
    "top_p": [1.0, 1.0, 1.0, 0.9, 0.8, 0.5, 1.0, 1.0, 0.0, 1.0, 0.95, 0.5],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.05, 0.0, 0.2, 0.0, 0.0],
}


def mixed_batch(vocabulary: int) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    """A row of every kind, with masked tokens and ties among the logits."""
    rows = len(MIXED["temperature"])
    logits = torch.randn(rows, vocabulary, device=DEVICE) * 3
    logits[3, ::2] = -torch.inf
    logits[7] = logits[7].round()
    parameters = {
        name: torch.tensor(values, dtype=torch.int32 if name == "top_k" else torch.float32, device=DEVICE)
        for name, values in MIXED.items()
    }
    seeds = torch.randint(-(2**62), 2**62, (rows,), device=DEVICE)
    return logits, parameters, seeds, torch.arange(rows, device=DEVICE) * 7


def test_philox_gives_the_published_words() -> None:
    """Known answers of Random123: counter and key of zeros, and of ones."""
    words = philox_ref.philox(torch.tensor([0]), torch.tensor([0]), 0)
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_uniform_numbers_are_uniform_and_fine() -> None:
    u = philox_ref.uniform(torch.arange(1000).unsqueeze(1), torch.arange(100), 0).flatten()
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    assert len(u.unique()) == len(u)
    other = philox_ref.uniform(torch.arange(1000).unsqueeze(1), torch.arange(100), 1).flatten()
    assert abs(float(torch.corrcoef(torch.stack((u, other)))[0, 1])) < 0.02


def test_filters_keep_what_their_definition_says() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]]))
    cases = {
        ("top_k", 2): [4, 3, 0, 0, 0],
        ("top_p", 0.7): [4, 3, 0, 0, 0],
        ("top_p", 0.71): [4, 3, 1.5, 0, 0],
        ("top_p", 0.0): [4, 0, 0, 0, 0],
        ("min_p", 0.3): [4, 3, 1.5, 0, 0],
    }
    for (name, value), kept in cases.items():
        parameters = {k: v.cpu() for k, v in settings(1, **{name: value}).items()}
        expected = torch.tensor([kept]) / sum(kept)
        assert torch.allclose(sampling_ref.sampling_probs(logits, **parameters), expected, atol=1e-6)
    # top-p is of what top-k left: 4/7 is enough for a half.
    parameters = {k: v.cpu() for k, v in settings(1, top_k=2, top_p=0.5).items()}
    assert sampling_ref.sampling_probs(logits, **parameters).tolist() == [[1, 0, 0, 0, 0]]


def test_tied_tokens_stand_or_fall_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    parameters = {k: v.cpu() for k, v in settings(1, top_k=2).items()}
    assert (sampling_ref.sampling_probs(logits, **parameters) > 0).tolist() == [
        [True, True, True, True, False]
    ]


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.5}]
)
def test_draws_have_the_distribution(given: dict[str, float]) -> None:
    draws, vocabulary = 50_000, 16
    logits = torch.randn(1, vocabulary, device=DEVICE)
    probs = sampling_ref.sampling_probs(logits, **settings(1, **given))[0].double()
    seeds = torch.randint(0, 2**62, (draws,), device=DEVICE)
    tokens = sampling_ref.sample(
        logits.expand(draws, -1), **settings(draws, **given), seeds=seeds, positions=torch.zeros_like(seeds)
    )
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert not counts[probs == 0].any()
    kept = probs > 0
    assert stats.chisquare(counts[kept].cpu(), (probs[kept] * draws).cpu()).pvalue > 1e-3


def test_the_kernels_give_the_reference_tokens_and_probabilities() -> None:
    for vocabulary in (2500, 70):  # several blocks, and less than one
        logits, parameters, seeds, positions = mixed_batch(vocabulary)
        expected = sampling_ref.sampling_probs(logits, **parameters)
        got = sampling.sampling_probs(logits, **parameters)
        assert torch.equal(got > 0, expected > 0)
        assert torch.allclose(got, expected, atol=1e-6)
        args = {**parameters, "seeds": seeds, "positions": positions}
        assert torch.equal(sampling.sample(logits, **args), sampling_ref.sample(logits, **args))


def test_bfloat16_logits() -> None:
    logits, parameters, seeds, positions = mixed_batch(300)
    args = {**parameters, "seeds": seeds, "positions": positions}
    logits = logits.bfloat16()
    assert torch.equal(sampling.sample(logits, **args), sampling_ref.sample(logits, **args))


def test_a_token_depends_on_its_own_row_alone() -> None:
    logits, parameters, seeds, positions = mixed_batch(300)
    args = {**parameters, "seeds": seeds, "positions": positions}
    together = sampling_ref.sample(logits, **args)
    order = torch.randperm(len(logits), device=DEVICE)
    shuffled = sampling_ref.sample(logits[order], **{name: x[order] for name, x in args.items()})
    assert torch.equal(shuffled, together[order])
    for row in range(0, len(logits), 4):
        alone = {name: x[row : row + 1] for name, x in args.items()}
        assert sampling.sample(logits[row : row + 1], **alone).item() == together[row].item()
    later = sampling_ref.sample(logits, **{**args, "positions": positions + 1})
    assert not torch.equal(later, together)
