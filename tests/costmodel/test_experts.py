"""Expert routing against draws of it, and what it does to the price of a step."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.experts import Routing, expected_largest
from costmodel.model import load_model
from costmodel.pricer import StepPricer
from costmodel.profile import load_profile
from serving.errors import UsageError

MIXTRAL, QWEN = load_model("mixtral-8x7b"), load_model("qwen3-30b-a3b")


def drawn(routing: Routing, tokens: int, repeats: int = 400) -> tuple[float, float, float]:
    """(distinct experts, rows and distinct experts of the fullest rank) in the mean, each token choosing without
    replacement by systematic sampling, which hits each expert with the probability asked for."""
    rng = np.random.default_rng(11)
    distinct, rows, mine = [], [], []
    for _ in range(repeats):
        taken = np.zeros(routing.num_experts, np.int64)
        for _ in range(tokens):
            order = rng.permutation(routing.num_experts)
            ends = np.cumsum(routing.chosen[order])
            at = rng.random() + np.arange(routing.experts_per_token)
            taken[
                order[np.searchsorted(ends, at * (ends[-1] / routing.experts_per_token), side="right")]
            ] += 1
        ranks = np.arange(routing.num_experts) % routing.num_ranks
        distinct.append(np.count_nonzero(taken))
        rows.append(np.bincount(ranks, taken).max())
        mine.append(np.bincount(ranks, taken > 0).max())
    return float(np.mean(distinct)), float(np.mean(rows)), float(np.mean(mine))


def test_uniform_routing_touches_what_the_formula_says() -> None:
    tokens = np.array([1.0, 2.0, 16.0, 500.0])
    assert Routing(128, 8).touched(tokens) == pytest.approx(128 * (1 - (1 - 8 / 128) ** tokens))
    assert Routing(128, 8).touched(np.array([1.0]))[0] == pytest.approx(8)


@pytest.mark.parametrize("imbalance", [1.0, 1.7, 3.0, 4.0])
def test_the_busiest_expert_has_what_was_asked_for(imbalance: float) -> None:
    chosen = Routing(8, 2, imbalance).chosen
    assert chosen.sum() == pytest.approx(2)
    assert chosen[0] / chosen.mean() == pytest.approx(imbalance)
    assert (np.diff(chosen) <= 1e-15).all()
    assert chosen.max() <= 1 + 1e-12


@pytest.mark.parametrize("imbalance", [1.0, 4.0])
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_expected_loads_are_those_of_draws(imbalance: float, tokens: int) -> None:
    routing = Routing(128, 8, imbalance, 4)
    distinct, rows, mine = drawn(routing, tokens)
    # Loads of ranks are near to normal, not normal: of a single token 8 experts over 4 ranks, 10%.
    near = 0.12 if tokens == 1 else 0.05
    many = np.array([float(tokens)])
    assert routing.touched(many)[0] == pytest.approx(distinct, rel=0.02)
    assert routing.on_busiest_rank(many)[0][0] == pytest.approx(rows, rel=near)
    assert routing.on_busiest_rank(many)[1][0] == pytest.approx(mine, rel=near)


def test_expected_largest_of_normals() -> None:
    # Two: 1/sqrt(pi). Three: 3/(2 sqrt(pi)).
    assert expected_largest(1) == pytest.approx(0, abs=1e-9)
    assert expected_largest(2) == pytest.approx(1 / np.sqrt(np.pi), rel=1e-5)
    assert expected_largest(3) == pytest.approx(1.5 / np.sqrt(np.pi), rel=1e-5)


def step_s(tokens: int, model: object = QWEN, **options: object) -> float:
    pricer = StepPricer(model, load_profile("h200"), cuda_graphs=False, **options)  # type: ignore[arg-type]
    return pricer.step_s(tokens, tokens, (), tokens, tokens * 100, 100)


def test_imbalance_of_one_is_the_price_without_it() -> None:
    for tokens in (1, 64, 4096):
        assert step_s(tokens, expert_load_imbalance=1.0) == step_s(tokens)


def test_skew_touches_fewer_experts_and_reads_fewer_weights() -> None:
    # Without expert parallelism every rank has a slice of each expert: skew costs nothing and saves reading.
    assert step_s(32, expert_load_imbalance=8.0) < step_s(32)
    assert step_s(4096, expert_load_imbalance=2.0) == pytest.approx(step_s(4096), rel=0.02)


def test_under_expert_parallelism_skew_costs() -> None:
    def ranks(tokens: int, imbalance: float, model: object = QWEN) -> float:
        options = {"tensor_parallel_size": 4, "enable_expert_parallel": True}
        return step_s(tokens, model, **options, expert_load_imbalance=imbalance)

    # Of 8 experts on 4 ranks the fullest rank then has 2.2 times its share of the tokens, of 128 1.1 times.
    for model, most, factor in ((MIXTRAL, 4.0, 1.4), (QWEN, 8.0, 1.02)):
        prices = [ranks(4096, 1 + (most - 1) * part / 3, model) for part in range(4)]
        assert prices == sorted(prices)
        assert prices[-1] > factor * prices[0]
    # Whole experts on ranks even out in large batches, and the sum is what slices cost.
    assert ranks(8192, 1.0) == pytest.approx(step_s(8192, tensor_parallel_size=4), rel=0.25)
    # A single token's experts do not spread evenly: the fullest rank has more than its share to read.
    assert ranks(1, 1.0) > step_s(1, tensor_parallel_size=4)


def test_overlap_hides_a_share_of_the_collectives() -> None:
    profile, model = load_profile("h200"), load_model("llama-3.1-70b")

    def price(overlap: float) -> float:
        pricer = StepPricer(model, profile, tensor_parallel_size=4, collective_overlap=overlap)
        return pricer.step_s(2048, 1, [(2048, 0)], 0, 0, 0)

    none, half, all_of_it = price(0.0), price(0.5), price(1.0)
    assert none - half == pytest.approx(half - all_of_it, rel=0.05)
    assert none == StepPricer(model, profile, tensor_parallel_size=4).step_s(2048, 1, [(2048, 0)], 0, 0, 0)
    from costmodel.formats import hardware
    from costmodel.predict import Kernel

    reduce = Kernel("all_reduce", profile.all_reduce, hardware(profile.facts))
    hidden_s = 2 * 80 * float(reduce.seconds((4,), 2048 * 8192 * 2.0))
    assert none - all_of_it == pytest.approx(hidden_s, rel=0.05)


def test_more_than_all_tokens_cannot_take_one_expert() -> None:
    with pytest.raises(UsageError, match="can have 1 to 4 times"):
        Routing(8, 2, 4.5)
    with pytest.raises(UsageError, match="do not go around"):
        Routing(8, 2, 1.0, 16)
