"""Prices and memory of data-parallel ranks that share their experts, against formulas."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.formats import gemm_format, hardware
from costmodel.lockstep import LockstepPricer
from costmodel.memory import plan_memory
from costmodel.model import load_model
from costmodel.predict import Kernel
from costmodel.pricer import StepPricer
from costmodel.prices import Step
from costmodel.profile import load_profile
from costmodel.uncertainty import Factors, PerturbedPricer
from serving.errors import UsageError

QWEN = load_model("qwen3-30b-a3b")
GPU = load_profile("rtxpro6000")
LIMITS = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}


def decodes(num: int, context: int = 500) -> Step:
    return (num, num, (), num, num * context, context)  # type: ignore[return-value]


def prompt(num: int) -> Step:
    return (num, 1, [(num, 0)], 0, 0, 0)  # type: ignore[return-value]


def pricer(ranks: int, **options: object) -> LockstepPricer:
    return LockstepPricer(QWEN, GPU, data_parallel_size=ranks, **LIMITS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("whole", [False, True])
def test_equal_loads_cost_what_the_parts_do(whole: bool) -> None:
    step, tokens, ranks = decodes(64), 64, 2
    hw = hardware(GPU.facts, gemm_format("bfloat16", None))
    moe = Kernel("moe", GPU.moe.get("bfloat16"), hw)
    hidden, width, chosen = QWEN.hidden_size, QWEN.intermediate_size, QWEN.experts_per_token

    def touched(n: float) -> float:
        return float(QWEN.num_experts * (1 - (1 - chosen / QWEN.num_experts) ** n))

    alone = moe.seconds((hidden, width), np.array(64.0 * chosen), np.array(touched(64)))
    rows, seen = ranks * tokens * chosen, touched(ranks * tokens)
    if whole:
        # Half of the rows and of the experts, each of full width; the busier of two has a little more.
        together = moe.seconds((hidden, width), np.array(rows / 2), np.array(seen / 2))
    else:
        together = moe.seconds((hidden, width / 2), np.array(float(rows)), np.array(seen))
    # Gathered are hidden states and router logits, hidden states come back; the pair's bytes are those of one way.
    moved = ranks * tokens * (2 * hidden + QWEN.num_experts)
    exchange = Kernel("all_reduce", GPU.expert_exchange, hardware(GPU.facts)).seconds(
        (2,), np.array(float(moved))
    )
    plain = StepPricer(QWEN, GPU, **LIMITS).step_s(*step)  # type: ignore[arg-type]
    expected = plain + QWEN.num_layers * float(together + exchange - alone)
    found = pricer(ranks, enable_expert_parallel=whole).lockstep_s([step, step])
    assert found == pytest.approx([expected] * 2, rel=0.04 if whole else 0.005)


def test_one_rank_is_the_plain_price() -> None:
    plain = StepPricer(QWEN, GPU, **LIMITS)  # type: ignore[arg-type]
    for options in ({}, {"cuda_graphs": False}):
        one = pricer(1, **options)
        plain = StepPricer(QWEN, GPU, **LIMITS, **options)  # type: ignore[arg-type]
        for step in (decodes(1), decodes(100), prompt(260), prompt(2000)):
            assert one.lockstep_s([step]) == [plain.step_s(*step)]


def test_within_cuda_graphs_all_are_padded_to_the_most() -> None:
    two = pricer(2)
    small, large = decodes(8), decodes(128)
    assert two.lockstep_s([large, None])[0] == two.step_s(*large)
    padded, whole = two.lockstep_s([small, large])
    assert whole == two.step_s(*large)
    assert two.step_s(*small) < padded < whole


def test_beyond_them_experts_have_the_tokens_that_there_are() -> None:
    two = pricer(2)
    prices = [two.lockstep_s([prompt(2048), other])[0] for other in (None, prompt(600), prompt(1500))]
    equal = two.lockstep_s([prompt(2048), prompt(2048)])
    assert prices == sorted(prices)
    assert prices[-1] < equal[0] == two.step_s(*prompt(2048))
    # The dummy step is no longer than the exchange and the experts that it takes part in.
    assert two.lockstep_s([prompt(2048), None])[1] < prices[0]


def test_calibration_errors_scale_what_is_shared_like_the_linear_layers() -> None:
    two = pricer(2)
    steps = [prompt(2048), decodes(64)]
    assert PerturbedPricer(two, Factors()).lockstep_s(steps) == pytest.approx(two.lockstep_s(steps))
    doubled = PerturbedPricer(two, Factors(engine=2.0)).lockstep_s(steps)
    assert doubled == pytest.approx([2 * each for each in two.lockstep_s(steps)])


def test_experts_are_divided_and_the_rest_is_whole() -> None:
    each = 3 * QWEN.hidden_size * QWEN.intermediate_size * 2 * QWEN.num_layers

    def weights(ranks: int, *, whole: bool = False, tp: int = 1) -> int:
        return plan_memory(
            QWEN, GPU, tensor_parallel_size=tp, data_parallel_size=ranks, enable_expert_parallel=whole
        ).weight_bytes

    rest = weights(1) - 128 * each
    assert weights(2) == weights(2, whole=True) == rest + 64 * each
    assert weights(3, whole=True) == rest + 43 * each  # 128 = 43 + 43 + 42
    assert weights(2, tp=2) == weights(1, tp=2) - 32 * each
    # What is free of weights holds KV: 98,304 bytes a token.
    one, two = (plan_memory(QWEN, GPU, data_parallel_size=ranks) for ranks in (1, 2))
    freed = 64 * each - (two.activation_bytes - one.activation_bytes) - int(0.6 * 1024**3)
    assert two.kv_tokens - one.kv_tokens == pytest.approx(freed / 98_304, abs=16)


def test_the_exchange_is_the_sum_of_what_was_measured() -> None:
    """NCCL 2.29 on two GPUs over PCIe: 1 MiB gathered in 31.23 us, and scattered in 31.24."""
    pair = Kernel("all_reduce", GPU.expert_exchange, hardware(GPU.facts))
    assert float(pair.seconds((2,), np.array(2.0**20))) * 1e6 == pytest.approx(31.23 + 31.24, rel=0.01)
    unmeasured = GPU.model_copy(update={"expert_exchange": None})
    notes = LockstepPricer(QWEN, unmeasured, data_parallel_size=2, **LIMITS).extrapolations()  # type: ignore[arg-type]
    assert "expert_exchange: not measured on rtxpro6000; priced as an all-reduce" in notes
    assert not any("expert_exchange" in note for note in pricer(2).extrapolations())


def test_a_width_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="width 768 do not divide among 5 ranks"):
        pricer(5)
    pricer(5, enable_expert_parallel=True)
