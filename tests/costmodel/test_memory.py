"""KV capacity from first principles, against a real engine's count and the chapter's formula."""

from __future__ import annotations

import pytest

from costmodel.memory import activation_bytes, default_limits, kv_cache_bytes, plan_memory
from costmodel.model import load_model
from costmodel.profile import load_profile
from serving.errors import InfeasibleError, UsageError


def test_an_rtx_4090_holds_the_blocks_that_vllm_counted() -> None:
    """vLLM 0.19.0 reported 2,588 blocks of 16 tokens for Llama-3.1-8B; graphs were outside the budget
    before 0.21."""
    plan = plan_memory(
        load_model("llama-3.1-8b"),
        load_profile("rtx4090"),
        gpu_memory_utilization=0.9,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        max_model_len=32768,
        graphs_in_budget=False,
    )
    assert plan.total_bytes == 25_250_627_584
    assert plan.num_blocks == pytest.approx(2588, rel=0.03)


def test_the_chapters_kv_formula() -> None:
    """2 x 80 layers x 64 heads x 128 x 4,096 tokens x 2 bytes = 10.7 GB; 8 KV heads instead of 64: an
    eighth."""
    assert kv_cache_bytes(80, 64, 128, 4096) == 10_737_418_240
    assert load_model("llama-3.1-70b").kv_bytes_per_token() * 4096 == 10_737_418_240 / 8


def test_a_model_that_does_not_fit_says_by_how_much_and_what_helps() -> None:
    with pytest.raises(
        InfeasibleError, match=r"GB too little; try --tensor-parallel-size 4, or --quantization fp8"
    ) as error:
        plan_memory(load_model("llama-3.1-70b"), load_profile("h100"))
    assert error.value.exit_code == 2
    plan_memory(load_model("llama-3.1-70b"), load_profile("h100"), tensor_parallel_size=4)
    plan_memory(load_model("llama-3.1-70b"), load_profile("h100"), quantization="int4")


def test_ranks_share_weights_and_cache() -> None:
    args = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}
    one = plan_memory(load_model("llama-3.1-70b"), load_profile("b200"), **args)  # type: ignore[arg-type]
    eight = plan_memory(load_model("llama-3.1-70b"), load_profile("b200"), tensor_parallel_size=8, **args)  # type: ignore[arg-type]
    assert eight.weight_bytes == pytest.approx(one.weight_bytes / 8, rel=0.01)
    assert eight.kv_bytes_per_token == one.kv_bytes_per_token / 8
    staged = plan_memory(load_model("llama-3.1-70b"), load_profile("b200"), pipeline_parallel_size=2, **args)  # type: ignore[arg-type]
    assert staged.weight_bytes == pytest.approx(one.weight_bytes / 2, rel=0.02)


def test_budget_is_spent_exactly() -> None:
    plan = plan_memory(load_model("llama-3.1-8b"), load_profile("h200"))
    spent = (
        plan.weight_bytes
        + plan.activation_bytes
        + plan.non_torch_bytes
        + plan.graph_bytes
        + plan.kv_cache_bytes
    )
    assert 0 <= plan.budget_bytes - spent < plan.block_size * plan.kv_bytes_per_token


def test_pages_beat_reservation_of_the_longest_context() -> None:
    plan = plan_memory(load_model("llama-3.1-8b"), load_profile("h200"))
    assert plan.paged_sequences(4096) > 20 * plan.contiguous_sequences()
    text = "\n".join(plan.arithmetic())
    assert f"{plan.num_blocks:,} of 16 tokens" in text
    assert "2 x 32 layers x 8 KV heads x 128 x 2 B = 131,072 B" in text


def test_cache_precision_multiplies_pages() -> None:
    base = plan_memory(load_model("llama-3.1-8b"), load_profile("h200"))
    half = plan_memory(load_model("llama-3.1-8b"), load_profile("h200"), kv_cache_dtype="fp8")
    assert half.num_blocks == pytest.approx(2 * base.num_blocks, abs=2)


def test_sampling_many_sequences_outweighs_a_short_prefill() -> None:
    """256 rows of 128,256 logits are 0.9 GB while sampling, more than 2,048 tokens need in the MLP."""
    model = load_model("llama-3.1-8b")
    small = activation_bytes(model, tensor_parallel_size=1, max_num_batched_tokens=2048, max_num_seqs=8)
    large = activation_bytes(model, tensor_parallel_size=1, max_num_batched_tokens=2048, max_num_seqs=256)
    assert large > 2 * small


def test_defaults_follow_the_device_class() -> None:
    assert default_limits(load_profile("h200")) == (8192, 1024)
    assert default_limits(load_profile("b200")) == (16384, 1024)
    assert default_limits(load_profile("a100")) == (2048, 256)
    assert default_limits(load_profile("rtx4090")) == (2048, 256)


@pytest.mark.parametrize(
    "wrong", [{"gpu_memory_utilization": 1.2}, {"block_size": 0}, {"pipeline_parallel_size": 0}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        plan_memory(load_model("llama-3.1-8b"), load_profile("h200"), **wrong)  # type: ignore[arg-type]
