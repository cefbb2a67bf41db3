"""Products with quantised weights: kernels against references; quantisation against its error bound."""

from __future__ import annotations

import pytest
import torch

from realengine.kernels import quant_gemm, quant_gemm_ref
from realengine.kernels.launch import Device
from tests.realengine.kernels.paged import DEVICE, close

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [
    # tokens, channels, inputs: one token split along K; tails of every side; several tiles of tokens
    (1, 40, 1024),
    (3, 33, 200),
    (20, 64, 256),
    (70, 50, 128),
]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("tokens", "channels", "inputs"), SHAPES)
def test_int8(tokens: int, channels: int, inputs: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, inputs).to(dtype).to(DEVICE)
    weight = torch.randn(channels, inputs, device=DEVICE)
    quantised, scale = quant_gemm_ref.quantize_int8(weight)
    error = quantised.float() * scale.unsqueeze(1) - weight
    assert bool((error.abs() <= scale.unsqueeze(1) * 0.5001).all())
    expected = quant_gemm_ref.quant_gemm_int8(x, quantised, scale)
    exact = x.double() @ (quantised.double() * scale.double().unsqueeze(1)).T
    assert close(expected, exact.to(dtype))
    assert close(quant_gemm.quant_gemm_int8(x, quantised, scale), expected, 2e-2 if dtype == BF16 else 1e-5)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("tokens", "channels", "inputs"), [(1, 40, 1024), (3, 33, 256), (70, 50, 128)])
def test_int4(tokens: int, channels: int, inputs: int, group: int) -> None:
    for dtype in (F32, BF16):
        x = torch.randn(tokens, inputs).to(dtype).to(DEVICE)
        weight = torch.randn(channels, inputs, device=DEVICE) + 0.5
        packed, scales, zeros = quant_gemm_ref.quantize_int4(weight, group)
        assert packed.shape == (channels, inputs // 2)
        back = quant_gemm_ref.dequantize_int4(packed, scales, zeros, group)
        # Half a step, and half a step more where the rounded zero point moves the ends of the range.
        steps = scales.T.repeat_interleave(group, dim=1)
        assert bool(((back - weight).abs() <= steps * 1.0001).all())
        expected = quant_gemm_ref.quant_gemm_int4(x, packed, scales, zeros, group)
        assert close(expected, (x.double() @ back.double().T).to(dtype), 2e-2 if dtype == BF16 else 1e-5)
        got = quant_gemm.quant_gemm_int4(x, packed, scales, zeros, group)
        assert close(got, expected, 2e-2 if dtype == BF16 else 1e-5)


def test_int4_packs_every_pattern_of_nibbles_and_back() -> None:
    levels = torch.arange(256, dtype=torch.uint8).view(1, -1) % 16
    for group in (32, 128):
        assert torch.equal(quant_gemm_ref.unpack_int4(quant_gemm_ref.pack_int4(levels, group), group), levels)


def test_no_tokens_give_no_rows() -> None:
    quantised, scale = quant_gemm_ref.quantize_int8(torch.randn(8, 128, device=DEVICE))
    assert quant_gemm.quant_gemm_int8(torch.empty(0, 128, device=DEVICE), quantised, scale).shape == (0, 8)


def test_a_product_of_few_tokens_is_split_until_it_fills_the_device() -> None:
    h200 = Device("H200", 90, 132)
    assert quant_gemm.num_splits(h200, 4096 // 64, 1, 32) == 4
    assert quant_gemm.num_splits(h200, 128256 // 64, 1, 32) == 1
    assert quant_gemm.num_splits(h200, 64, 65, 32) == 1
