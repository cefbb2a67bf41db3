"""Step prices: exact agreement of the scalar and the vector path, monotony, physical bounds, the chapter's
claims."""

from __future__ import annotations

import heapq
import subprocess
import sys
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.datasheet import datasheet_profile, device_facts
from costmodel.model import load_model
from costmodel.pricer import StepPricer, graph_sizes
from costmodel.profile import list_profiles, load_profile
from serving.errors import UsageError

MODELS = ("llama-3.1-8b", "qwen3-0.6b", "qwen3-30b-a3b")


@lru_cache
def pricer(gpu: str = "h200", model: str = "llama-3.1-8b", **rest: object) -> StepPricer:
    return StepPricer(load_model(model), load_profile(gpu), **rest)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    gpu=st.sampled_from(("h200", "rtx4090")),
    batch=st.integers(1, 600),
    mean=st.integers(1, 3000),
    extra=st.integers(0, 100_000),
    steps=st.integers(1, 40),
)
def test_a_run_of_decodes_costs_exactly_its_steps(
    gpu: str, batch: int, mean: int, extra: int, steps: int
) -> None:
    context_sum, context_max = batch * mean + extra % batch, mean + extra
    p = pricer(gpu)
    run = p.decode_run_s(batch, context_sum, context_max, steps)
    alone = [
        p.step_s(batch, batch, (), batch, context_sum + j * batch, context_max + j) for j in range(steps)
    ]
    assert run.dtype == np.float64
    assert run.tolist() == alone


@pytest.mark.parametrize("gpu", list_profiles())
@pytest.mark.parametrize("model", MODELS)
def test_no_step_beats_peak_arithmetic_or_bandwidth(gpu: str, model: str) -> None:
    """A roofline bound with weights, KV and FLOPs only; activations may stay in cache."""
    p = pricer(gpu, model)
    shape = p.model
    per_token = shape.kv_bytes_per_token()
    weights = (
        shape.active_params - (0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size)
    ) * 2
    for batch in (1, 3, 8, 64, 200, 256, 500):
        for context in (1, 16, 700, 5000, 100_000):
            flops, _ = p.step_work(batch, batch, 0.0, 0, batch * context)
            seconds = p.step_s(batch, batch, (), batch, batch * context, context)
            read = (weights + batch * context * per_token) / p.peak_bytes_per_s
            assert seconds >= max(float(flops) / p.peak_flops, read) * (1 - 1e-9)
    for chunk in (16, 300, 2048, 8192):
        for before in (0, 1000, 30_000):
            area = chunk * before + chunk * (chunk + 1) / 2
            flops, _ = p.step_work(chunk, 1, area, before + chunk, 0)
            assert p.step_s(chunk, 1, [(chunk, before)], 0, 0, 0) >= float(flops) / p.peak_flops * (1 - 1e-9)


@pytest.mark.parametrize("gpu", list_profiles())
def test_more_work_never_costs_less(gpu: str) -> None:
    p = pricer(gpu)
    tokens = [p.step_s(t, 1, (), 0, 0, 0) for t in range(1, 8193)]
    assert all(b >= a for a, b in pairwise(tokens))
    contexts = [p.step_s(32, 32, (), 32, 32 * c, c) for c in range(1, 20_000, 37)]
    assert all(b >= a for a, b in pairwise(contexts))
    for mean in (20, 900, 8000):
        batches = [p.step_s(b, b, (), b, b * mean, mean) for b in range(1, 1100)]
        assert all(b >= a * (1 - 1e-12) for a, b in pairwise(batches))
    chunks = [p.step_s(c, 1, [(c, 500)], 0, 0, 0) for c in range(1, 8193, 13)]
    assert all(b >= a for a, b in pairwise(chunks))
    befores = [p.step_s(512, 1, [(512, b)], 0, 0, 0) for b in range(0, 30_000, 100)]
    assert all(b >= a for a, b in pairwise(befores))


def test_small_batches_are_padded_to_the_captured_graphs() -> None:
    assert graph_sizes(256, 2048)[:5] == [1, 2, 4, 8, 16]
    assert graph_sizes(256, 2048)[-1] == 512
    assert graph_sizes(64, 2048)[-1] == 128
    p = pricer()
    assert p.step_s(9, 0, (), 0, 0, 0) == p.step_s(16, 0, (), 0, 0, 0)
    eager = pricer("h200", "qwen3-0.6b", cuda_graphs=False)  # the host launches each kernel
    assert eager.step_s(1, 1, (), 0, 0, 0) > pricer("h200", "qwen3-0.6b").step_s(1, 1, (), 0, 0, 0)


def test_uneven_contexts_cost_at_least_as_much_and_equal_ones_nothing() -> None:
    """One long sequence among short ones keeps its thread blocks busy after the others are done."""
    p = pricer("rtx4090")
    even = p.step_s(16, 16, (), 16, 16 * 1000, 1000)
    uneven = p.step_s(16, 16, (), 16, 16 * 1000, 15_000)
    assert uneven > even
    assert even == p.step_s(16, 16, (), 16, 16 * 1000, 1)


def test_the_longest_chunk_gives_every_sequence_of_the_step_its_grid_of_thread_blocks() -> None:
    """FlashAttention 2: a decode beside a chunk of C tokens leaves ceil(C / 64) - 1 query tiles of empty blocks."""
    p = pricer("rtx4090", max_num_batched_tokens=4096, max_num_seqs=256)
    tile_s = p._attention.empty_tile_s
    assert tile_s == pytest.approx(
        32 * 32 * p.profile.decode_mixed["bfloat16"].coefficients["empty_block_s"] / 128
    )

    def rows_s(chunk: int, batch: int) -> float:
        args = [(chunk, 0)], batch, batch * 4000, 4000  # no chunk reaches further: nothing waits for it
        return p.step_s(4000, 200, *args) - p.step_s(4000, 200, [(chunk, 0)], 0, 0, 0)

    # What 128 decodes add to a chunk that fills the device grows with its length by just the empty blocks.
    assert rows_s(3840, 128) - rows_s(1920, 128) == pytest.approx(128 * 30 * tile_s, rel=0.02)
    # So do shorter chunks: 16 tiles less of their own, 16 empty ones.
    even = p.step_s(4000, 4, [(1024, 0), (1024, 0)], 0, 0, 0)
    uneven = p.step_s(4000, 4, [(1024, 0), (1024, 0), (16, 0)], 0, 0, 0)
    assert uneven - even >= 15 * tile_s
    # FlashAttention 3 has no such grid.
    assert pricer("h200")._attention.empty_tile_s == 0.0


def in_order(blocks: list[float], processors: int) -> float:
    """When the last of `blocks` ends, each starting in order on whichever processor is free first."""
    free = [0.0] * processors
    for seconds in blocks:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


@pytest.mark.parametrize("gpu", ["rtx4090", "rtxpro6000"])
@pytest.mark.parametrize("batch", [24, 40, 64, 100])
@pytest.mark.parametrize("longest", ["chunk", "decode"])
def test_a_mixed_step_waits_for_its_longest_sequence_as_list_scheduling_does(
    gpu: str, batch: int, longest: str
) -> None:
    """Blocks of all sequences, one head after the other, on as many multiprocessors as the device has.

    A block takes a start-up and a time per token of its context; both are those of a chunk of 16 tokens by itself,
    which is one block per head. What uneven contexts cost beyond even ones is within a quarter of the schedule's.
    """
    p = pricer(gpu, max_num_batched_tokens=2048, max_num_seqs=256)

    def attention_s(chunk: int, decodes: list[int]) -> float:
        """Of a chunk that ends at context `chunk` beside decodes."""
        n = len(decodes)
        step = p.step_s(16 + n, 0, [(16, chunk - 16)], n, sum(decodes), max(decodes, default=0))
        return step - p.step_s(16 + n, 0, (), 0, 0, 0)

    token_s = (attention_s(8208, []) - attention_s(16, [])) / 8192
    start_s = attention_s(16, []) - 16 * token_s

    def scheduled_s(chunk: int, decodes: list[int]) -> float:
        heads = [start_s + token_s * context for context in (*decodes, chunk)] * 32
        return in_order(heads, p.profile.facts.num_sms)

    decodes = np.random.default_rng(batch).integers(300, 900, batch).tolist()
    if longest == "chunk":
        uneven, even = (6000, decodes), (600, decodes)
    else:
        decodes[batch // 2] = 6000
        uneven, even = (16, decodes), (16, [sum(decodes) // batch] * batch)
    more_s = attention_s(*uneven) - attention_s(*even)
    assert more_s == pytest.approx(scheduled_s(*uneven) - scheduled_s(*even), rel=0.25)


def test_kernels_that_split_or_share_no_grid_do_not_wait() -> None:
    """FlashAttention 3 spreads a long context, and our own engine prefills and decodes in kernels of their own."""
    for p in (pricer("h200"), apart("rtx4090")):
        steps = [p.step_s(144, 128, [(16, 0)], 128, 128 * 1000, longest) for longest in (1000, 2000)]
        assert steps[0] == steps[1]


def test_with_a_window_no_sequence_is_longer_than_it() -> None:
    """Beside decodes that all see a whole window, no block of a chunk walks further, however long the chunk."""
    model = load_model("llama-3.1-8b").model_copy(update={"sliding_window": 1024})
    p, at_once = (StepPricer(model, load_profile("rtx4090")) for _ in range(2))
    at_once._tail_token_s = 0.0
    for chunk, before in ((16, 5000), (1500, 0), (4000, 3000)):
        step = (chunk + 64, 65, [(chunk, before)], 64, 64 * 2000, 3000)
        assert p.step_s(*step) == at_once.step_s(*step)
    short = (64 + 64, 65, [(64, 5000)], 64, 64 * 300, 300)
    assert p.step_s(*short) > at_once.step_s(*short)


def apart(gpu: str) -> StepPricer:
    """A device whose chunks and decodes share no grid."""
    profile = load_profile(gpu)
    fit = profile.decode_mixed["bfloat16"]
    own = fit.model_copy(update={"coefficients": {**fit.coefficients, "empty_block_s": 1e-15}})
    return StepPricer(
        load_model("llama-3.1-8b"), profile.model_copy(update={"decode_mixed": {"bfloat16": own}})
    )


@pytest.mark.parametrize("gpu", ["rtx4090", "rtxpro6000"])
def test_a_long_context_beside_a_chunk_never_makes_a_step_cheaper(gpu: str) -> None:
    p = pricer(gpu, max_num_batched_tokens=2048, max_num_seqs=256)
    for batch in (1, 4, 16, 64, 200):
        for chunk in (16, 300, 1800):
            args = 2000, batch + 1, [(chunk, 512)], batch
            longest = [p.step_s(*args, batch * 700, most) for most in range(700, 700 * batch + 1, 350)]
            assert all(b >= a for a, b in pairwise(longest))
            means = [p.step_s(*args, batch * mean, mean) for mean in range(1, 9000, 400)]
            assert all(b >= a * (1 - 1e-9) for a, b in pairwise(means))
            befores = [
                p.step_s(2000, batch + 1, [(chunk, before)], batch, batch * 700, 700)
                for before in range(0, 16_000, 500)
            ]
            assert all(b >= a * (1 - 1e-9) for a, b in pairwise(befores))


def test_decodes_beside_a_prefill_cost_more_where_the_kernel_cannot_split() -> None:
    """RTX 4090 (FlashAttention 2): measured mixed rows cost about twice the decodes alone."""
    p = pricer("rtx4090", max_num_batched_tokens=2048, max_num_seqs=256)
    both = p.step_s(1024 + 64, 65, [(1024, 0)], 64, 64 * 1024, 1024)
    prefill = p.step_s(1024 + 64, 65, [(1024, 0)], 0, 0, 0)
    linear = p.step_s(64, 64, (), 0, 0, 0)
    decode = p.step_s(64, 64, (), 64, 64 * 1024, 1024) - linear
    assert 1.5 * decode < both - prefill < 2.6 * decode


def test_seventy_billion_parameters_at_two_terabytes_a_second_need_seventy_milliseconds() -> None:
    """140 GB of 16-bit weights a step over 2 TB/s: at least 70 ms, on any profile; int8 weights halve it."""
    facts = device_facts("h200").model_copy(update={"hbm_bytes_per_s": 2e12})
    for profile in (datasheet_profile(facts), load_profile("h200").model_copy(update={"facts": facts})):
        step = StepPricer(load_model("llama-3.1-70b"), profile).step_s(1, 1, (), 1, 100, 100)
        assert step >= 0.0695  # less the embedding, of which a step reads one row
        assert step < 0.12
    int8 = StepPricer(load_model("llama-3.1-70b"), datasheet_profile(facts), quantization="int8")
    sixteen = StepPricer(load_model("llama-3.1-70b"), datasheet_profile(facts))
    assert int8.step_s(1, 1, (), 1, 100, 100) < 0.56 * sixteen.step_s(1, 1, (), 1, 100, 100)


def test_a_datasheet_profile_prices_within_a_third_of_the_fitted_one_and_says_what_it_is() -> None:
    model = load_model("llama-3.1-8b")
    plain = StepPricer(model, datasheet_profile(device_facts("h200")))
    for args in ((1, 1, (), 1, 500, 500), (64, 64, (), 64, 64 * 1000, 1000), (2048, 1, [(2048, 0)], 0, 0, 0)):
        assert plain.step_s(*args) == pytest.approx(pricer().step_s(*args), rel=0.33)  # type: ignore[arg-type]
    assert any("datasheet" in line for line in plain.extrapolations())


def test_tensor_parallelism_divides_time_but_not_evenly() -> None:
    one = pricer("h200", "llama-3.1-70b").step_s(32, 32, (), 32, 32_000, 1000)
    four = pricer("h200", "llama-3.1-70b", tensor_parallel_size=4).step_s(32, 32, (), 32, 32_000, 1000)
    assert one / 4 < four < one / 2


def test_quantised_weights_and_cache_pay_in_decode() -> None:
    args = (16, 16, (), 16, 16 * 2000, 2000)
    plain = pricer("h200", "llama-3.1-70b").step_s(*args)
    assert pricer("h200", "llama-3.1-70b", quantization="fp8").step_s(*args) < 0.7 * plain
    assert pricer("h200", "llama-3.1-70b", quantization="int4").step_s(*args) < 0.7 * plain
    deep = (64, 64, (), 64, 64 * 8000, 8000)
    assert pricer("h200", kv_cache_dtype="fp8").step_s(*deep) < 0.8 * pricer("h200").step_s(*deep)


def test_unknown_formats_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="did you mean 'awq'"):
        pricer(quantization="awk")
    with pytest.raises(UsageError, match="--kv-cache-dtype"):
        pricer(kv_cache_dtype="fp7")
    with pytest.raises(UsageError, match="--dtype"):
        pricer(dtype="float64")


def test_work_of_a_step_is_two_flops_a_parameter_and_all_weights_once() -> None:
    p = pricer()
    shape = p.model
    matrices = shape.num_layers * shape.linear_params_per_layer()
    flops, moved = p.step_work(np.array([1, 2]), np.array([0, 0]), 0.0, np.array([0, 0]), np.array([0, 0]))
    assert flops.tolist() == [2.0 * matrices, 4.0 * matrices]
    assert moved[0] == pytest.approx(2.0 * matrices, rel=1e-3)


def test_host_time_is_affine() -> None:
    p = pricer()
    assert p.host_s(2, 10) - p.host_s(1, 10) == pytest.approx(p.profile.host.per_seq_s)
    assert p.host_s(0, 0) == p.profile.host.step_s


def test_what_was_not_measured_is_named() -> None:
    lines = pricer("h200", "qwen2.5-0.5b", max_num_seqs=256).extrapolations()
    assert any("head_dim 64" in line for line in lines)
    assert any("lm_head" in line for line in lines)
    assert any("int4" in line for line in pricer("rtxpro6000", quantization="awq").extrapolations())


def test_pricing_does_not_import_scipy() -> None:
    code = (
        "import sys; from costmodel.pricer import StepPricer; from costmodel.model import load_model; "
        "from costmodel.profile import load_profile; "
        "StepPricer(load_model('llama-3.1-8b'), load_profile('h200')).step_s(1, 1, (), 1, 5, 5); "
        "sys.exit('scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
