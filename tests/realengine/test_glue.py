"""The compiled operators against PyTorch's in float32, over the same numbers."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from realengine import glue, glue_kernels
from realengine.batch import Batch, LayerCache
from realengine.glue import CompiledAttention, CompiledOps, cpu_ops
from realengine.models import HeadNorms
from realengine.ops_torch import TorchAttention, TorchOps

PAGE = 16
POSITIONS = 64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
"""bfloat16 has 8 bits: rounding to nearest moves a number by at most 2**-8 of itself, and the result is rounded once."""
SHAPES = [(64, 3, torch.float32), (64, 3, torch.bfloat16), (80, 2, torch.float32), (96, 1, torch.bfloat16),
          (128, 4, torch.bfloat16)]  # fmt: skip
CONTEXTS = [1, PAGE - 1, PAGE, PAGE + 1, 37, 3 * PAGE]
KV_HEADS = 2


def tables(dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(POSITIONS).unsqueeze(1) * 10_000 ** (-torch.arange(dim // 2) / (dim // 2))
    return angles.cos(), angles.sin()


def step(decodes: list[int], chunks: list[tuple[int, int]]) -> Batch:
    """Decodes by context and chunks by (tokens, context), with pages from anywhere."""
    contexts = decodes + [context for _, context in chunks]
    news = [1] * len(decodes) + [tokens for tokens, _ in chunks]
    width = POSITIONS // PAGE
    random = torch.Generator().manual_seed(len(contexts))
    table = torch.randperm(len(contexts) * width, generator=random).view(-1, width).int() + 1
    positions = [torch.arange(c - n, c) for c, n in zip(contexts, news, strict=True)]
    slots = [row[p // PAGE].long() * PAGE + p % PAGE for row, p in zip(table, positions, strict=True)]
    starts = torch.tensor([0, *news[len(decodes) :]]).cumsum(0).int()
    nothing = torch.zeros(sum(news), dtype=torch.int64)
    return Batch(
        *(nothing, torch.cat(positions), torch.cat(slots), table, torch.tensor(contexts).int(), starts),
        *(len(decodes), max(news), max(contexts), None),
    )


def filled(batch: Batch, dim: int, dtype: torch.dtype) -> LayerCache:
    """A cache that holds what came before the step, and NaN everywhere else."""
    shape = (batch.page_table.numel() + 1, PAGE, KV_HEADS, dim)
    before = torch.zeros(shape[0] * PAGE, dtype=torch.bool)
    for row, end in zip(batch.page_table.long(), batch.context_len.tolist(), strict=True):
        at = torch.arange(end)
        before[row[at // PAGE] * PAGE + at % PAGE] = True
    before[batch.slots] = False
    random = torch.Generator().manual_seed(7)
    k, v = (
        torch.where(before.view(*shape[:2], 1, 1), torch.randn(shape, generator=random), torch.nan).to(dtype)
        for _ in range(2)
    )
    return LayerCache(k, v)


def head_norms(dim: int, dtype: torch.dtype) -> HeadNorms:
    random = torch.Generator().manual_seed(9)
    q, k = (1 + torch.rand(2, dim, generator=random)).to(dtype)
    return HeadNorms(q, k, 1e-6)


def new_tokens(batch: Batch, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(8)
    return torch.randn(len(batch.slots), (heads + 2 * KV_HEADS) * dim, generator=random).to(dtype)


def by_pytorch(
    batch: Batch, qkv: Tensor, cache: LayerCache, norms: HeadNorms | None, dim: int, dtype: torch.dtype
) -> tuple[Tensor, LayerCache]:
    """What PyTorch's operators of `dtype` make of the same numbers, in float32, and the cache afterwards."""
    own = LayerCache(cache.k.to(dtype, copy=True), cache.v.to(dtype, copy=True))
    if norms is not None:
        norms = replace(norms, q=norms.q.to(dtype), k=norms.k.to(dtype))
    heads = qkv.shape[1] // dim - 2 * KV_HEADS
    attend = TorchOps(*tables(dim), dtype).attention(batch, heads, KV_HEADS)
    return attend(qkv.to(dtype, copy=True), own, norms).float(), own


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("chunks", [[], [(5, 5), (20, 33)]])
@pytest.mark.parametrize(("dim", "group", "dtype"), SHAPES)
def test_attention_equals_pytorch(
    dim: int, group: int, dtype: torch.dtype, chunks: list[tuple[int, int]], normed: bool
) -> None:
    batch, heads = step(CONTEXTS, chunks), group * KV_HEADS
    cache, qkv = filled(batch, dim, dtype), new_tokens(batch, heads, dim, dtype)
    norms = head_norms(dim, dtype) if normed else None
    expected, exact = by_pytorch(batch, qkv, cache, norms, dim, torch.float32)
    rounded, _ = by_pytorch(batch, qkv, cache, norms, dim, dtype)
    attend = cpu_ops(*tables(dim), dtype).attention(batch, heads, KV_HEADS)
    assert isinstance(attend, CompiledAttention)
    out = attend(qkv, cache, norms).float()
    if dtype == torch.float32:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
    else:
        if not normed:  # K of the new token is rounded before it is read
            decodes = slice(len(CONTEXTS))
            torch.testing.assert_close(out[decodes], expected[decodes], rtol=2**-8, atol=2**-7)
        assert rms(out - expected) <= 1.05 * rms(rounded - expected)
    for mine, theirs in ((cache.k, exact.k), (cache.v, exact.v)):
        # With norms K is rounded twice, at sizes up to those of the two numbers that are rotated.
        torch.testing.assert_close(
            mine.float(), theirs, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype], equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    dim, group = 64, 3
    ops, batch = cpu_ops(*tables(dim), dtype), step(CONTEXTS, [])
    cache, qkv = filled(batch, dim, dtype), new_tokens(batch, 6, dim, dtype)
    together = ops.attention(batch, group * KV_HEADS, KV_HEADS)(qkv, cache, None)
    for row in range(len(CONTEXTS)):
        one = slice(row, row + 1)
        alone = replace(
            batch,
            positions=batch.positions[one],
            slots=batch.slots[one],
            page_table=batch.page_table[one],
            context_len=batch.context_len[one],
            num_decodes=1,
        )
        by_itself = ops.attention(alone, group * KV_HEADS, KV_HEADS)(qkv[one], cache, None)
        assert torch.equal(by_itself, together[one])
    x, residual, weight = qkv[:, :48].contiguous(), qkv[:, 48:96].contiguous(), 1 + qkv[0, :48].abs()
    normed, summed = ops.add_norm(x, residual, weight, 1e-5)
    gated = ops.silu_mul(x)
    for row in range(len(CONTEXTS)):
        one = slice(row, row + 1)
        for mine, among in zip(
            ops.add_norm(x[one], residual[one], weight, 1e-5), (normed, summed), strict=True
        ):
            assert torch.equal(mine, among[one])
        assert torch.equal(ops.silu_mul(x[one]), gated[one])


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("width", [1, 48, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_a_sum(rows: int, width: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(rows)
    x, residual = torch.randn(2, rows, width, generator=random).to(dtype)
    weight = (1 + torch.rand(width, generator=random)).to(dtype)
    ops = cpu_ops(*tables(64), dtype)
    for added in (residual, None):
        out, total = ops.add_norm(x, added, weight, 1e-5)
        assert torch.equal(total, x if added is None else x + residual)
        exact = total.double()
        exact = exact / (exact.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
        torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_of_the_gate_times_up(dtype: torch.dtype) -> None:
    gate = torch.linspace(-80, 80, 3001).to(dtype).repeat(2, 1)
    up = torch.linspace(-3, 5, 3001).to(dtype).expand(2, -1)
    out = cpu_ops(*tables(64), dtype).silu_mul(torch.cat((gate, up), dim=1))
    exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=1e-35)


def test_numbers_that_are_none_stay_none_and_far_gates_are_shut() -> None:
    ops = cpu_ops(*tables(64), torch.bfloat16)
    row = torch.tensor([[torch.nan, -1e30, 1e30, 1, 1, 1]], dtype=torch.bfloat16)
    assert ops.silu_mul(row).isnan().tolist() == [[True, False, False]]
    assert ops.silu_mul(row)[0, 2] == row[0, 2]
    assert abs(float(ops.silu_mul(row)[0, 1])) < 1e-7
    normed, total = ops.add_norm(row, row, torch.ones(6, dtype=torch.bfloat16), 1e-5)
    assert normed.isnan().all()
    assert total.isnan().tolist() == [[True, False, False, False, False, False]]


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("slots", -1, "slot"),
        ("slots", 10_000, "slot"),
        ("positions", POSITIONS, "position"),
        ("page_table", 1000, "page"),
        ("context_len", POSITIONS + 1, "context length"),
    ],
)
def test_what_is_outside_of_the_cache_is_an_error(field: str, value: int, what: str) -> None:
    batch = step([3], [])
    getattr(batch, field)[:] = value
    attend = cpu_ops(*tables(64), torch.float32).attention(batch, 6, KV_HEADS)
    cache = LayerCache(*(torch.zeros(5, PAGE, KV_HEADS, 64) for _ in range(2)))
    with pytest.raises(IndexError, match=what):
        attend(torch.zeros(1, 10 * 64), cache, None)


def test_pytorch_does_what_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(cpu_ops(*tables(64), torch.float16)) is TorchOps
    ops = cpu_ops(*tables(64), torch.float32)
    assert isinstance(ops, CompiledOps)
    many = step([POSITIONS] * 40, [])
    assert type(ops.attention(many, 6, KV_HEADS)) is CompiledAttention
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    assert type(ops.attention(many, 6, KV_HEADS)) is TorchAttention
    monkeypatch.setitem(sys.modules, "realengine.glue_kernels", None)
    monkeypatch.delattr("realengine.glue_kernels")
    assert type(glue.cpu_ops(*tables(64), torch.float32)) is TorchOps


def test_compiled_without_a_place_to_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = glue_kernels.njit

    def nowhere(*args: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile_(*args, **options)

    monkeypatch.setattr(glue_kernels, "njit", nowhere)
    run = glue_kernels.silu_mul.__wrapped__(4)
    gate_up, out = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1)
    run(gate_up.data_ptr(), out.data_ptr(), 1, 1)
    assert float(out) == pytest.approx(2 * torch.sigmoid(torch.tensor(1.0)).item(), rel=1e-6)
