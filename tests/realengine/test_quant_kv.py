"""The quantised KV cache in the engine: what is written is what is read, pages move with their scales, plans stay the
twin's, and a real model's logits stay near."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from realengine.batch import LayerCache
from realengine.complete import complete
from realengine.generation import Sampling
from realengine.kernels import operators
from realengine.kernels.kv_quant_ref import dequantize_kv, quantize_kv
from realengine.load import load
from realengine.models import Model
from realengine.ops import KernelOps, rotary_tables
from realengine.quant import to_fp8
from realengine.quant_kv import QuantisedCache, Scratch, cache_layout
from realengine.runner import allocate_caches
from serving.errors import UsageError
from serving.policies import Chunked
from tests.realengine.engines import CPU, running, smollm2, tiny_source
from tests.realengine.test_models import one_sequence
from tests.realengine.test_parity import TINY_CACHE, Load, assert_same_plans, record_and_replay

FORMATS = ("int8", "int4", "fp8")


def tiny(kv: str, quantization: str | None = None, dtype: torch.dtype = torch.float32) -> Model:
    return load(
        tiny_source(),
        device=CPU,
        dtype=dtype,
        max_positions=256,
        kv_cache_dtype=kv,
        quantization=quantization,
    )


def rounded(x: Tensor, kv: str) -> Tensor:
    """What a cache of this format makes of K or V."""
    if kv == "fp8":
        return to_fp8(x).float()
    bits = 8 if kv == "int8" else 4
    return dequantize_kv(*quantize_kv(x, bits), bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kv", FORMATS)
def test_what_is_read_is_what_was_written_rounded(kv: str, dtype: torch.dtype) -> None:
    cache = allocate_caches(tiny(kv, dtype=dtype), 5, 8, device=CPU, dtype=dtype)[0]
    torch.manual_seed(1)
    k, v = torch.randn(2, 6, 2, 16).to(dtype)
    store, slots = QuantisedCache(cache, 16, Scratch()), torch.tensor([39, 8, 9, 17, 30, 1])
    store.write(slots, k, v)
    for got, x in zip(store.read(slots, dtype), (k, v), strict=True):
        torch.testing.assert_close(
            got.float(), rounded(x, kv), rtol=1e-2 if dtype != torch.float32 else 1e-6, atol=1e-6
        )


def logits(model: Model, chunks: Sequence[int], ids: Tensor, poison: bool = True) -> Tensor:
    """Logits of every token, computed in chunks of these sizes, from a cache that holds rubbish."""
    caches = allocate_caches(model, 9, 4, device=CPU, dtype=torch.float32)
    for cache in caches:
        for tensor in cache.tensors if poison else ():
            if tensor.dtype == torch.float32:
                tensor.fill_(torch.nan)
            else:
                tensor.view(torch.uint8).fill_(0x7F)
    pages = torch.tensor([[7, 2, 5, 1, 8, 3]], dtype=torch.int32)
    out, done = [], 0
    for count in chunks:
        out.append(model.forward(one_sequence(ids, pages, done, count), caches))
        done += count
    return torch.cat(out)


@pytest.mark.parametrize("kv", FORMATS)
def test_logits_do_not_depend_on_how_a_prompt_is_cut(kv: str) -> None:
    """A token is rounded as it is written, whatever else is in its step: no schedule can show in the text."""
    model, ids = tiny(kv), torch.arange(22) * 2 + 1
    whole = logits(model, (22,), ids)
    for chunks in ((8, 14), (5, 2, 6, 9), (1,) * 22):
        torch.testing.assert_close(logits(model, chunks, ids), whole, rtol=1e-4, atol=1e-5)
    plain = logits(tiny("auto"), (22,), ids, poison=False)
    difference = (whole - plain).abs().max() / plain.abs().max()
    assert 1e-5 < difference < 0.3, "rounding must show, and must stay small"


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_the_kernels_path_gives_the_same_logits(kv: str) -> None:
    model, ids = tiny(kv), torch.arange(22) * 2 + 1
    shape = model.architecture.shape
    cos, sin = rotary_tables(model.architecture.rope, shape.head_dim, 64, CPU)
    by_kernels = Model(
        model.architecture, model.weights, KernelOps(cos, sin, operators("cpu")), kv_cache_dtype=kv
    )
    for chunks in ((22,), (9, 13), (21, 1)):
        expected = logits(model, chunks, ids)
        torch.testing.assert_close(
            logits(by_kernels, chunks, ids, poison=False), expected, rtol=2e-3, atol=2e-4
        )


@pytest.mark.parametrize("limits", [{}, {"swap_pages": 12}], ids=["recomputed", "swapped"])
@pytest.mark.parametrize(("kv", "quantization"), [("int8", "int8_wo"), ("int4", None), ("fp8", "fp8")])
def test_the_twin_repeats_every_plan_of_a_quantised_engine(
    kv: str, quantization: str | None, limits: dict[str, Any]
) -> None:
    load_ = Load(seed=3, count=16)
    _, decided, twin = record_and_replay(
        tiny(kv, quantization), load_, Chunked, 0.003, **{**TINY_CACHE, **limits}
    )
    assert_same_plans(decided, twin.decisions)
    assert any(decision["preempted"] for decision in decided)


@pytest.mark.parametrize("kv", FORMATS)
def test_text_is_the_same_preempted_swapped_forked_and_alone(kv: str) -> None:
    """Scales move with their pages: a page without its scales would give other tokens."""
    model = tiny(kv)
    prompts = [[(7 * i + j * j) % 60 + 1 for j in range(20 + i)] for i in range(6)]
    sampling = Sampling(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)
    with running(model) as engine:
        expected = [answer.token_ids for (answer,) in complete(engine, prompts, sampling)]
    few = {"num_pages": 13, "page_tokens": 8, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    for limits in (few, {**few, "swap_pages": 40}):
        with running(model, **limits) as engine:
            found = [answer.token_ids for (answer,) in complete(engine, prompts, sampling)]
        assert sum(row.preemptions for row in engine.recorder.requests) > 0
        assert found == expected
    with running(model) as engine:
        both = complete(
            engine, prompts[:2], Sampling(max_tokens=24, temperature=1.0, seed=5, n=2, ignore_eos=True)
        )
    assert [first.token_ids for first, _ in both] == expected[:2]


@pytest.mark.parametrize(
    ("quantization", "kv", "most"),
    [("int8_wo", "auto", 0.15), ("int4_wo", "auto", 1.2), (None, "int8", 0.07), (None, "fp8", 0.15)],
)
def test_smollm2_stays_near_itself(quantization: str | None, kv: str, most: float) -> None:
    """Root mean square of the change of its logits, over that of the logits about their mean; unrelated ones: 1.4."""
    source, plain = smollm2(torch.float32)
    tokenizer = source.tokenizer
    assert tokenizer is not None
    ids = torch.tensor(tokenizer.encode("The sea was calm that morning, and the boats lay still in the bay."))
    model = load(
        source,
        device=CPU,
        dtype=torch.float32,
        max_positions=64,
        quantization=quantization,
        kv_cache_dtype=kv,
    )

    def of(which: Model) -> Tensor:
        return logits(which, (len(ids) - 4, *[1] * 4), ids[:22], poison=False)

    ids = ids[:18]
    expected, found = of(plain), of(model)
    spread = (expected - expected.mean(dim=1, keepdim=True)).square().mean().sqrt()
    error = float((found - expected).square().mean().sqrt() / spread)
    assert 1e-4 < error < most


@pytest.mark.parametrize(
    ("kv", "words"), [("int9", "int8"), ("fp8_e5m2", "fp8"), ("float16", "leave it at auto")]
)
def test_formats_that_the_engine_lacks_are_named(kv: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cache_layout(kv, 64, torch.bfloat16)


def test_an_odd_head_cannot_be_packed() -> None:
    with pytest.raises(UsageError, match="use int8"):
        cache_layout("int4", 5, torch.bfloat16)


def test_a_plain_cache_has_two_tensors() -> None:
    k = torch.zeros(1)
    assert LayerCache(k, k).tensors == (k, k)


@pytest.mark.parametrize("method", ["ngram", "self"])
def test_drafts_verified_over_a_quantised_cache_change_no_token(method: str) -> None:
    model = tiny("int8", "int8_wo")
    prompts = [[(5 * i + j) % 7 + 1 for j in range(24 + i)] for i in range(4)]
    sampling = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
    drafting: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "self":
        drafting["num_layers"] = 2
    found = []
    for speculative in (None, drafting):
        with running(model, speculative=speculative) as engine:
            found.append([answer.token_ids for (answer,) in complete(engine, prompts, sampling)])
    assert found[0] == found[1]
