"""Norms, gates, rotary embedding, quantised KV and page copies: kernels against references and formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from realengine.kernels import (
    activation,
    activation_ref,
    kv_quant,
    kv_quant_ref,
    norm,
    norm_ref,
    page_copy,
    page_copy_ref,
    rotary,
    rotary_ref,
)
from tests.realengine.kernels.paged import DEVICE, close

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("width", [64, 576, 1000])
def test_rms_norm_with_and_without_a_residual(width: int, dtype: torch.dtype) -> None:
    wide = torch.randn(5, 2 * width).to(dtype).to(DEVICE)
    x, residual = wide[:, :width], torch.randn(5, width).to(dtype).to(DEVICE)  # x has strided rows
    weight = torch.randn(width).to(dtype).to(DEVICE)
    formula = x.double() / (x.double() ** 2).mean(-1, keepdim=True).add(1e-5).sqrt() * weight.double()
    expected = norm_ref.rms_norm(x, weight, 1e-5)
    assert isinstance(expected, Tensor)
    assert close(expected, formula.to(dtype))
    assert close(norm.rms_norm(x, weight, 1e-5), expected)  # type: ignore[arg-type]
    for got, wanted in zip(
        norm.rms_norm(x, weight, 1e-5, residual), norm_ref.rms_norm(x, weight, 1e-5, residual), strict=True
    ):
        assert close(got, wanted)


def test_rms_norm_of_no_rows() -> None:
    out = norm.rms_norm(torch.empty(0, 64, device=DEVICE), torch.ones(64, device=DEVICE), 1e-5)
    assert isinstance(out, Tensor)
    assert out.shape == (0, 64)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", [48, 3000])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(4, 2 * width)).to(dtype).to(DEVICE)
    gate_up[0, 0] = -100  # exp overflows float32 here, and the gate is 0
    expected = activation_ref.silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert close(expected, (gate / (1 + torch.exp(-gate)) * up).to(dtype))
    assert close(activation.silu_mul(gate_up), expected)


def rotary_inputs(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, bits: int
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Arguments before the caches, caches and slots, and scales; q, k and v are views of one projection."""
    tokens, page = 6, 16
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = qkv.to(DEVICE).split([heads, kv_heads, kv_heads], dim=1)
    angle = torch.rand(100, dim // 2, device=DEVICE) * 6
    positions = torch.tensor([0, 1, 15, 16, 17, 99], device=DEVICE)
    width, kind = {16: (dim, dtype), 8: (dim, torch.int8), 4: (dim // 2, torch.uint8)}[bits]
    caches = [torch.zeros(4, page, kv_heads, width, dtype=kind, device=DEVICE) for _ in range(2)]
    scales = {}
    if bits != 16:
        scales = {name: torch.zeros(4, page, kv_heads, device=DEVICE) for name in ("k_scale", "v_scale")}
    slots = torch.tensor([16, 31, 32, -1, 63, 17], device=DEVICE)  # -1: a token of padding
    return [q, k, v, angle.cos(), angle.sin(), positions], [*caches, slots], scales


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "bits"),
    [
        (9, 3, 64, F32, 16),
        (8, 8, 80, BF16, 16),
        (16, 2, 96, F16, 16),
        (4, 1, 128, F32, 8),
        (12, 12, 64, F32, 4),
    ],
)
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_and_the_write_of_kv(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, bits: int, normed: bool
) -> None:
    inputs, (k_cache, v_cache, slots), scales = rotary_inputs(heads, kv_heads, dim, dtype, bits)
    named = dict(scales)
    if normed:
        named |= {name: torch.rand(dim).add(0.5).to(dtype).to(DEVICE) for name in ("q_norm", "k_norm")}
    reference = {name: x.clone() for name, x in named.items()}
    k_expected, v_expected = k_cache.clone(), v_cache.clone()
    expected = rotary_ref.rotary_write_kv(*inputs, k_expected, v_expected, slots, **reference)
    got = rotary.rotary_write_kv(*inputs, k_cache, v_cache, slots, **named)
    assert close(got, expected)
    if bits == 16:
        assert close(k_cache, k_expected)
        assert close(v_cache, v_expected)
        return
    for cache, scale, wanted, step in (
        (k_cache, named["k_scale"], k_expected, reference["k_scale"]),
        (v_cache, named["v_scale"], v_expected, reference["v_scale"]),
    ):
        assert close(scale, step)
        numbers = (kv_quant_ref.dequantize_kv(c, step, bits) for c in (cache, wanted))
        # One level apart at most, where rounding fell on either side of a half.
        assert bool(((next(numbers) - next(numbers)).abs() <= step.unsqueeze(-1) * 1.01).all())


def test_rotation_is_by_the_angle_between_the_halves_of_a_head() -> None:
    inputs, caches, _ = rotary_inputs(2, 1, 64, F32, 16)
    q, _, v, cos, sin, positions = inputs
    plane = torch.complex(q[..., :32], q[..., 32:]) * torch.complex(cos, sin)[positions].unsqueeze(1)
    out = rotary_ref.rotary_write_kv(*inputs, *caches)
    assert close(out, torch.cat((plane.real, plane.imag), dim=-1))
    kept = caches[2] >= 0
    assert torch.equal(caches[1].flatten(0, 1)[caches[2][kept]], v[kept])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_quantised_kv_is_within_half_a_step(dim: int, bits: int) -> None:
    x = torch.randn(5, 3, dim, device=DEVICE) * torch.tensor([1e-3, 1, 100], device=DEVICE).view(3, 1)
    x[1, 1] = 0
    expected, scale = kv_quant_ref.quantize_kv(x, bits)
    assert expected.shape[-1] * 8 == dim * bits
    error = (kv_quant_ref.dequantize_kv(expected, scale, bits) - x).abs()
    assert bool((error <= scale.unsqueeze(-1) * 0.5001).all())
    got, steps = kv_quant.quantize_kv(x, bits)
    assert close(steps, scale)
    back = kv_quant.dequantize_kv(got, steps, bits)
    assert bool(((back - x).abs() <= scale.unsqueeze(-1) * 0.5001).all())
    assert close(
        kv_quant.dequantize_kv(expected, scale, bits), kv_quant_ref.dequantize_kv(expected, scale, bits)
    )
    halves = kv_quant.dequantize_kv(expected, scale, bits, BF16)
    assert close(halves, kv_quant_ref.dequantize_kv(expected, scale, bits, BF16))


def test_pages_are_copied_in_every_cache_and_no_other_page_changes() -> None:
    shapes = [(9, 16, 3, 64), (9, 16, 3, 64), (9, 16, 3)]
    caches = [torch.randn(shape, device=DEVICE) for shape in shapes]
    caches.append(torch.randint(0, 255, (9, 16, 3, 32), dtype=torch.uint8, device=DEVICE))
    copies = [cache.clone() for cache in caches]
    src, dst = (torch.tensor(pages, dtype=torch.int32, device=DEVICE) for pages in ([1, 1, 5], [2, 3, 8]))
    page_copy.copy_pages(caches, src, dst)
    page_copy_ref.copy_pages(copies, src, dst)
    for cache, copy in zip(caches, copies, strict=True):
        assert torch.equal(cache, copy)
    page_copy.copy_pages(caches, src[:0], dst[:0])
