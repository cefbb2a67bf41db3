"""Quantised weights: what is stored, what it multiplies to, and checkpoints that come quantised."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from costmodel.formats import GEMM_FORMATS
from costmodel.memory import weight_bytes
from costmodel.model import ModelShape
from realengine.architecture import Architecture, Rope
from realengine.checkpoint import DummyCheckpoint
from realengine.kernels import operators
from realengine.load import Source, find_model, load
from realengine.parallel import TensorParallel
from realengine.quant import (
    SCHEMES,
    Fp8Matrix,
    Int4Matrix,
    Int8Matrix,
    Matrix,
    cut_columns,
    cut_rows,
    from_fp8,
    join,
    quantize,
    quantize_int4,
    scheme_of,
)
from realengine.quant_checkpoint import from_awq, from_gptq
from realengine.quant_cpu import INT4_FEW_TOKENS, INT8_FEW_TOKENS, Int4Linear, quantised_linear
from realengine.quant_kernels import kernel_linear
from serving.errors import UsageError
from tests.realengine.engines import CPU
from tests.realengine.quantised import awq_tensors, gptq_tensors, write_quantised

SHAPE = ModelShape(
    name="packed",
    family="llama",
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
    max_position_embeddings=64,
)
SOURCE = Source(Architecture(SHAPE, Rope(), 1e-6), DummyCheckpoint(SHAPE, 3), None)


def random_weight(rows: int, inputs: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=generator) * torch.rand(rows, 1, generator=generator)


def half_a_step(matrix: Matrix, weight: Tensor) -> Tensor:
    """The largest error that rounding to nearest may leave, per weight."""
    rows, inputs = weight.shape
    if isinstance(matrix, Int8Matrix):
        return (matrix.scale / 2).unsqueeze(1).expand(rows, inputs)
    if isinstance(matrix, Int4Matrix):
        # The zero point is rounded too, so that an end of the range may lie another half step away.
        return matrix.scales.repeat_interleave(matrix.group, 1)
    # e4m3 has three bits behind the point; below 2^-6 its steps are 2^-9.
    return matrix.spread_scales() * ((weight / matrix.spread_scales()).abs() * 2**-4).clamp(min=2**-10)


@settings(max_examples=25, deadline=None)
@given(
    scheme=st.sampled_from(SCHEMES),
    rows=st.integers(1, 40),
    groups=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_rounding_to_nearest_leaves_at_most_half_a_step(
    scheme: str, rows: int, groups: int, seed: int
) -> None:
    weight = random_weight(rows, 32 * groups, seed)
    matrix = quantize(weight, scheme)
    assert ((matrix.dense() - weight).abs() <= half_a_step(matrix, weight) * 1.001 + 1e-9).all()


def test_zeros_stay_zeros() -> None:
    weight = torch.zeros(4, 64)
    weight[1, 40] = 2.0
    for scheme in SCHEMES:
        assert (quantize(weight, scheme).dense()[weight == 0] == 0).all(), scheme


def test_symmetric_groups_have_one_zero_point() -> None:
    matrix = quantize_int4(random_weight(6, 128), 64, symmetric=True)
    assert (matrix.zeros == 8).all()
    assert ((matrix.dense() - random_weight(6, 128)).abs() <= matrix.scales.repeat_interleave(64, 1)).all()


def test_every_fp8_number_is_read_as_pytorch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = codes.float()
    real = ~expected.isnan()
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(from_fp8(codes, dtype).float()[real], expected[real])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("rows", "inputs"),
    [(192, 128), (80, 96), (33, 64), (1100, 576)],
    ids=["tiles", "no tiles", "odd", "blocks"],
)
def test_a_quantised_product_is_the_product_with_its_numbers(
    scheme: str, rows: int, inputs: int, dtype: torch.dtype
) -> None:
    """On both sides of each changeover, with a bias, against float64."""
    matrix = quantize(random_weight(rows, inputs), scheme, dtype)
    bias = torch.randn(rows).to(dtype)
    layer = quantised_linear(matrix, bias, dtype)
    exact = matrix.dense().double()
    for tokens in (1, INT8_FEW_TOKENS, INT8_FEW_TOKENS + 1, INT4_FEW_TOKENS, INT4_FEW_TOKENS + 1):
        x = torch.randn(tokens, inputs).to(dtype)
        expected = x.double() @ exact.T + bias.double()
        for laid_out in (x, x.T.contiguous().T):
            error = (layer(laid_out).double() - expected).abs().max() / expected.abs().max()
            assert error < (2e-6 if dtype == torch.float32 else 2e-2), tokens


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_kernels_path_multiplies_the_same(scheme: str) -> None:
    matrix = quantize(random_weight(48, 128), scheme, torch.float16 if scheme == "int4_wo" else torch.float32)
    x, bias = torch.randn(5, 128), torch.randn(48)
    got = kernel_linear(matrix, bias, operators("cpu"))(x)
    torch.testing.assert_close(got, x @ matrix.dense().T + bias, rtol=1e-4, atol=1e-4)


def test_pytorchs_packing_is_read_back_or_not_used() -> None:
    matrix = quantize_int4(random_weight(128, 64), scale_dtype=torch.bfloat16)
    layer = Int4Linear(matrix, None, torch.bfloat16)
    if not layer._readable:
        pytest.skip("this CPU packs otherwise; products never leave PyTorch's own")
    weights = torch.cat([block for _, block in layer.blocks(torch.bfloat16)])
    torch.testing.assert_close(weights.float(), matrix.dense(), rtol=8e-3, atol=1e-3)


# ---- checkpoints -------------------------------------------------------------------------------------------


def levels(rows: int, inputs: int, group: int, seed: int) -> Int4Matrix:
    generator = torch.Generator().manual_seed(seed)
    return Int4Matrix(
        torch.randint(0, 16, (rows, inputs), generator=generator, dtype=torch.uint8),
        torch.rand(rows, inputs // group, generator=generator).to(torch.float16).float(),
        torch.randint(1, 16, (rows, inputs // group), generator=generator, dtype=torch.uint8),
    )


@settings(max_examples=15, deadline=None)
@given(
    rows=st.sampled_from([8, 16, 24]),
    inputs=st.sampled_from([32, 64, 128]),
    group=st.sampled_from([32, 64]),
    seed=st.integers(0, 2**16),
)
def test_awq_and_gptq_words_are_unpacked(rows: int, inputs: int, group: int, seed: int) -> None:
    made = levels(rows, inputs, min(group, inputs), seed)
    t = awq_tensors(made)
    awq = from_awq(t["qweight"], t["qzeros"], t["scales"])
    t = gptq_tensors(made)
    gptq = from_gptq(t["qweight"], t["qzeros"], t["scales"], t["g_idx"], zero_less_1=True)
    for read in (awq, gptq):
        assert torch.equal(read.levels, made.levels)
        assert torch.equal(read.zeros, made.zeros)
        assert torch.equal(read.scales, made.scales)
        assert read.order is None


def test_one_awq_word_by_hand() -> None:
    """0x75316420 has nibbles 0, 2, 4, 6, 1, 3, 5, 7 from the low one up, which are channels 0 to 7."""
    word = torch.tensor([[0x75316420]], dtype=torch.int32)
    matrix = from_awq(word.expand(32, 1), word, torch.ones(1, 8))
    assert matrix.levels[:, 0].tolist() == list(range(8))
    assert (matrix.dense() == 0).all()


def test_one_gptq_word_by_hand() -> None:
    """0x76543210 is inputs 0 to 7; a stored zero point of 7 is 8."""
    word = torch.tensor([[0x76543210]] * 4, dtype=torch.int32)
    zeros = torch.tensor([[0x77777777]], dtype=torch.int32)
    matrix = from_gptq(word.expand(4, 8), zeros, torch.ones(1, 8), None, zero_less_1=True)
    assert matrix.dense()[0].tolist() == [*range(-8, 0)] * 4
    second = from_gptq(word.expand(4, 8), zeros, torch.ones(1, 8), None, zero_less_1=False)
    assert second.dense()[0].tolist() == [*range(-7, 1)] * 4


def test_inputs_out_of_order_multiply_what_belongs_to_them() -> None:
    """desc_act: group of each input from g_idx, against w[n, k] = (q[k] - z[g_idx[k]]) * s[g_idx[k]]."""
    made = levels(16, 64, 32, 5)
    g_idx = torch.tensor([0, 1], dtype=torch.int32).repeat(32)[torch.randperm(64)]
    t = gptq_tensors(made, g_idx=g_idx)
    matrix = from_gptq(t["qweight"], t["qzeros"], t["scales"], g_idx, zero_less_1=True)
    of = g_idx.long()
    expected = (made.levels.float() - made.zeros.float()[:, of]) * made.scales[:, of]
    assert torch.equal(matrix.dense(), expected)
    x = torch.randn(3, 64)
    torch.testing.assert_close(quantised_linear(matrix, None, torch.float32)(x), x @ expected.T)
    torch.testing.assert_close(
        kernel_linear(matrix, None, operators("cpu"))(x), x @ expected.T, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_quantised_folder_gives_the_logits_of_its_numbers(method: str, tmp_path: Path) -> None:
    config = {"quant_method": method, "bits": 4, "group_size": 32, "version": "gemm"}
    write_quantised(SOURCE, tmp_path, config, 32)

    class Dense(DummyCheckpoint):
        def tensor(self, name: str) -> Tensor:
            weight = super().tensor(name)
            if "_proj.weight" not in name:
                return weight
            return quantize_int4(weight, 32, scale_dtype=torch.float16).dense()

    def logits(source: Source) -> Tensor:
        from realengine.runner import allocate_caches
        from tests.realengine.test_models import one_sequence

        model = load(source, device=CPU, dtype=torch.float32, max_positions=64)
        caches = allocate_caches(model, 9, 4, device=CPU, dtype=torch.float32)
        pages = torch.tensor([[7, 2, 5, 1, 8, 3]], dtype=torch.int32)
        return model.forward(one_sequence(torch.arange(20) * 5, pages, 0, 20), caches)

    found = find_model(tmp_path)
    assert found.packing is not None
    dense = replace(SOURCE, checkpoint=Dense(SHAPE, 3))
    torch.testing.assert_close(logits(found), logits(dense), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "layout 'gemv'"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "8 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "groups of -1"),
        ({"quant_method": "bitsandbytes", "bits": 4}, "'bitsandbytes'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "blocks of"),
        ("4 bits", "no object"),
    ],
)
def test_what_cannot_be_read_is_said(config: Any, words: str, tmp_path: Path) -> None:
    write_quantised(SOURCE, tmp_path, {"quant_method": "awq"}, 32)
    whole = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(UsageError, match=words):
        find_model(tmp_path)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_groups_that_are_not_the_stated_ones_are_an_error(method: str, tmp_path: Path) -> None:
    config = {"quant_method": method, "bits": 4, "group_size": 64, "version": "gemm"}
    write_quantised(SOURCE, tmp_path, config, 32)
    with pytest.raises(UsageError, match=r"layers\.0\.self_attn\.q_proj: scales .* in groups of 64"):
        load(find_model(tmp_path), device=CPU, dtype=torch.float32, max_positions=64)


def test_names_of_formats_are_the_twins() -> None:
    assert scheme_of(None) is None
    assert scheme_of("int8") == "int8_wo"
    assert scheme_of("awq_marlin", "awq") is None
    for name, packed, words in (
        ("awq", None, "no awq weights"),
        ("int8_wo", "gptq", "quantised by gptq"),
        ("sq", None, "did you mean|known"),
        ("smoothquant", None, "the engine has"),
        ("int8_w", None, "int8_wo"),
    ):
        with pytest.raises(UsageError, match=words):
            scheme_of(name, packed)


def test_a_width_without_groups_is_an_error() -> None:
    with pytest.raises(UsageError, match="use int8_wo"):
        quantize(torch.randn(4, 48), "int4_wo")


# ---- ranks and memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_cut_a_matrix_as_they_cut_its_numbers(scheme: str) -> None:
    weight = random_weight(256, 256)
    matrix, dense = quantize(weight, scheme), quantize(weight, scheme).dense()
    for rank in (0, 1):
        ranks = TensorParallel(rank, 2)
        assert torch.equal(cut_rows(matrix, ranks.rows).dense(), ranks.rows(dense))
        assert torch.equal(cut_columns(matrix, ranks.columns, 2).dense(), ranks.columns(dense))
    joined = join([matrix, matrix])
    assert joined is not None
    assert torch.equal(joined.dense(), torch.cat((dense, dense)))


def test_matrices_of_another_order_are_not_joined() -> None:
    made = levels(8, 64, 32, 1)
    turned = replace(made, order=torch.randperm(64))
    assert join([made, turned]) is None
    assert join([turned, replace(turned)]) is not None
    with pytest.raises(UsageError, match="do not divide"):
        cut_columns(turned, TensorParallel(0, 2).columns, 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_twin_counts_the_bytes_that_the_kernels_hold(scheme: str) -> None:
    """All weights of a model: quantised matrices as laid out for the kernels, the others in 16 bit."""
    fmt = GEMM_FORMATS[scheme]
    total = 0
    for name, size in {n: SOURCE.checkpoint.tensor(n).shape for n in _names()}.items():
        total += 0 if "_proj.weight" in name else 2 * size.numel()
    for gemm in (*SHAPE.attention_gemms(), *SHAPE.mlp_gemms()):
        kept = torch.float16 if scheme == "int4_wo" else torch.float32
        layer = kernel_linear(quantize(random_weight(gemm.n, gemm.k), scheme, kept), None, operators("cpu"))
        assert layer.nbytes == fmt.matrix_bytes(gemm.n, gemm.k)
        total += SHAPE.num_layers * layer.nbytes
    assert weight_bytes(SHAPE, fmt) == total


def _names() -> list[str]:
    from realengine.checkpoint import tensor_shapes

    return list(tensor_shapes(SHAPE))


def test_fp8_folders_are_read(tmp_path: Path) -> None:
    from realengine.quant_checkpoint import Packing

    weight = random_weight(256, 128)
    blocks, channels = quantize(weight, "fp8_block"), quantize(weight, "fp8")
    assert isinstance(blocks, Fp8Matrix)
    assert isinstance(channels, Fp8Matrix)

    class Held:
        def __init__(self, tensors: dict[str, Tensor]) -> None:
            self.tensors = tensors

        def has(self, name: str) -> bool:
            return name in self.tensors

        def tensor(self, name: str) -> Tensor:
            return self.tensors[name]

    packing = Packing("fp8", "here")
    for held, dense in (
        (Held({"a.weight": blocks.values, "a.weight_scale_inv": blocks.scales}), blocks.dense()),
        (Held({"a.weight": channels.values, "a.weight_scale": channels.scales}), channels.dense()),
        (
            Held({"a.weight": channels.values, "a.weight_scale": torch.tensor(0.5)}),
            channels.values.float() / 2,
        ),
    ):
        assert packing.holds(held, "a.weight")
        assert torch.equal(packing.matrix(held, "a.weight").dense(), dense)
    assert not packing.holds(Held({"a.weight": weight}), "a.weight")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_two_ranks_of_a_quantised_folder_add_up(method: str, tmp_path: Path) -> None:
    """Column-cut products of both ranks sum to the whole; row-cut ones are its parts."""
    config = {"quant_method": method, "bits": 4, "group_size": 32, "version": "gemm"}
    write_quantised(SOURCE, tmp_path, config, 32)
    found = find_model(tmp_path)

    def layer(ranks: TensorParallel) -> Any:
        model = load(found, device=CPU, dtype=torch.float32, max_positions=64, ranks=ranks)
        return model.weights.layers[1]

    whole, halves = layer(TensorParallel()), [layer(TensorParallel(rank, 2)) for rank in (0, 1)]
    x = torch.randn(3, SHAPE.intermediate_size)
    cut = x.chunk(2, dim=1)
    torch.testing.assert_close(sum(half.down(c) for half, c in zip(halves, cut, strict=True)), whole.down(x))
    x = torch.randn(3, SHAPE.hidden_size)
    gate, up = whole.gate_up(x).chunk(2, dim=1)
    for rank, half in enumerate(halves):
        expected = torch.cat((gate.chunk(2, dim=1)[rank], up.chunk(2, dim=1)[rank]), dim=1)
        torch.testing.assert_close(half.gate_up(x), expected)
