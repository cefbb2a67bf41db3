"""Which drafts stand: rates, distributions over requests, replays, and what a source says of its own presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta, kstest

from serving.errors import UsageError
from sim.acceptance import BetaRates, Rates, Replayed, make_acceptance, uniforms
from sim.acceptance_presets import PRESETS

N = 40_000
REQUESTS = np.arange(N, dtype=np.int64)


def column(value: int) -> np.ndarray[Any, Any]:
    return np.full(N, value, np.int64)


def test_uniforms_are_uniform_and_independent_of_each_other() -> None:
    a = uniforms(3, 1, REQUESTS, column(5))
    assert kstest(a, "uniform").pvalue > 1e-3
    for other in (
        uniforms(3, 1, REQUESTS, column(6)),
        uniforms(4, 1, REQUESTS, column(5)),
        uniforms(3, 2, REQUESTS, column(5)),
        uniforms(3, 1, REQUESTS + 1, column(5)),
    ):
        # The correlation of N independent pairs has standard deviation 1 / sqrt(N).
        assert abs(np.corrcoef(a, other)[0, 1]) < 5 / np.sqrt(N)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.75, 1.0])
def test_a_constant_rate_gives_the_geometric_law(rate: float) -> None:
    k = 4
    accepted = make_acceptance(rate, k, seed=1).accepted(REQUESTS, column(7), column(k))
    share = np.bincount(accepted, minlength=k + 1) / N
    law = [rate**n * (1 - rate) for n in range(k)] + [rate**k]
    assert np.abs(share - law).max() < 5 * np.sqrt(0.25 / N)


def test_rates_by_position_are_conditional() -> None:
    rates = [0.9, 0.5, 0.2]
    accepted = make_acceptance(rates, 3).accepted(REQUESTS, column(0), column(3))
    for position, rate in enumerate(rates):
        reached = accepted >= position
        assert np.mean(accepted[reached] > position) == pytest.approx(rate, abs=0.02)


def test_a_shorter_draft_stands_as_far_as_the_longer_one_would() -> None:
    model = make_acceptance([0.8, 0.7, 0.6], 3, seed=2)
    whole = model.accepted(REQUESTS, column(3), column(3))
    for drafts in (0, 1, 2):
        assert (model.accepted(REQUESTS, column(3), column(drafts)) == np.minimum(whole, drafts)).all()


def test_requests_under_beta_keep_their_own_rate() -> None:
    model = make_acceptance({"beta": [4, 2]}, 3, seed=5)
    assert isinstance(model, BetaRates)
    rates = model.rate(REQUESTS)
    assert kstest(rates, beta(4, 2).cdf).pvalue > 1e-3
    assert (model.rate(REQUESTS[::-1].copy())[::-1] == rates).all()
    accepted = np.stack([model.accepted(REQUESTS, column(p), column(1)) for p in range(30)])
    for low, high in ((0.2, 0.4), (0.6, 0.8)):
        here = (rates > low) & (rates < high)
        assert accepted[:, here].mean() == pytest.approx(rates[here].mean(), abs=0.01)


def test_one_seed_gives_one_outcome_whoever_is_asked_about_beside_it() -> None:
    for given in (0.7, [0.9, 0.5], {"beta": [2, 2]}):
        together = make_acceptance(given, 2, seed=9).accepted(REQUESTS, column(4), column(2))
        alone = make_acceptance(given, 2, seed=9)
        some = np.array([17, 3, 999], np.int64)
        few = alone.accepted(some, np.full(3, 4), np.full(3, 2))
        assert few.tolist() == together[some].tolist()
        other = make_acceptance(given, 2, seed=10).accepted(REQUESTS, column(4), column(2))
        assert (other != together).any()


def test_lookups_that_find_nothing_draft_nothing() -> None:
    model = Rates([1.0, 1.0], 0, draft_rate=0.25)
    drafted = model.drafted(REQUESTS, column(1), column(2))
    assert set(np.unique(drafted)) == {0, 2}
    assert np.mean(drafted == 2) == pytest.approx(0.25, abs=0.01)


def test_a_replay_repeats_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.json"
    path.write_text(json.dumps({"outcomes": [[[3, 1], [0, 0], [2, 2]], [[3, 3]]]}))
    model = make_acceptance({"replay": str(path)}, 3)
    assert isinstance(model, Replayed)
    both = np.array([0, 1], np.int64)

    def step(most: int = 3) -> tuple[list[int], list[int]]:
        drafts = model.drafted(both, both, np.full(2, most))
        return drafts.tolist(), model.accepted(both, both, drafts).tolist()

    assert step() == ([3, 3], [1, 3])
    assert step() == ([0, 3], [0, 3])
    assert step() == ([2, 3], [2, 3])
    assert step(2) == ([2, 2], [1, 2])  # from the beginning again, cut to what is asked for


@pytest.mark.parametrize(
    ("name", "length"),
    [("ngram-code-edit", 4.59), ("ngram-mixed", 2.16), ("eagle-llama-3.1-8b", 2.47), ("eagle3-llama-3.1-8b", 3.54),
     ("eagle3-kimi-k2.5", 3.51), ("mtp-qwen3.5", 4.73), ("mtp-glm-5.2", 4.06)],
)  # fmt: skip
def test_presets_give_the_mean_length_that_their_source_says(name: str, length: float) -> None:
    shares = PRESETS[name].shares
    model = make_acceptance(name, len(shares))
    accepted = model.accepted(REQUESTS, column(2), column(len(shares)))
    assert 1 + accepted.mean() == pytest.approx(length, abs=0.04)
    assert set(PRESETS) == {
        "ngram-code-edit", "ngram-mixed", "eagle-llama-3.1-8b", "eagle3-llama-3.1-8b",
        "eagle3-kimi-k2.5", "mtp-qwen3.5", "mtp-glm-5.2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, '"acceptance" is missing'),
        (1.5, "from 0 to 1"),
        (True, "from 0 to 1"),
        ([0.5], "1 positions and num_speculative_tokens is 3"),
        ([0.5, "x", 0.1], "from 0 to 1"),
        ("eagle3-llama", "did you mean 'eagle3-llama-3.1-8b'"),
        ({"beta": [1]}, "two positive numbers"),
        ({"alpha": 0.5}, '"beta", "replay"'),
        ({"replay": "nowhere.json"}, "cannot read nowhere.json"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        make_acceptance(given, 3)
    assert "\n" not in str(error.value)
