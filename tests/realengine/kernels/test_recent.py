"""Recent tokens as they were beside quantised pages: kernels against references, references against the formula.

Rings and pages are poisoned wherever a query must not look.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from realengine.architecture import Architecture, Rope
from realengine.checkpoint import DummyCheckpoint
from realengine.complete import complete
from realengine.generation import Sampling
from realengine.kernels import (
    Operators,
    decode_attention,
    decode_attention_ref,
    prefill_attention,
    prefill_attention_ref,
    recent,
    recent_ref,
    rotary,
    rotary_ref,
)
from realengine.kernels.launch import INTERPRETING
from realengine.kernels.recent_ref import Recent
from realengine.load import Source
from tests.realengine.engines import TINY
from tests.realengine.kernels.paged import DEVICE, TOLERANCE, Paged, close, paged, plain_attention
from tests.realengine.recent_engine import running_twice

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
WINDOW = 20
SHAPES = [
    # heads, KV heads (group), head_dim, page, type, bits of the cache
    (3, 3, 64, 16, F32, 8),
    (4, 1, 80, 16, F32, 4),
    (8, 1, 96, 32, F16, 8),
    (8, 2, 128, 16, BF16, 4),
    (9, 3, 64, 16, F32, 4),
    (2, 2, 128, 48, BF16, 8),
]


@dataclass
class Mixed:
    """Sequences with rings of their own, and their tokens as they were (of other numbers than pages hold)."""

    pages: Paged
    recent: Recent
    keys: list[Tensor]
    values: list[Tensor]

    def expected(self, row: int, q: Tensor, scale: float) -> Tensor:
        """Queries q [n, H, D] at the end of sequence `row`, one by one."""
        context, n = int(self.pages.context_len[row]), self.recent.tokens
        out = []
        for i, p in enumerate(range(context - len(q), context)):
            edge = max(p - n + 1, int(self.recent.first[row]))
            k, v = (
                torch.cat((old[row][:edge], as_were[row][edge : p + 1]))
                for old, as_were in ((self.pages.keys, self.keys), (self.pages.values, self.values))
            )
            out.append(plain_attention(q[i : i + 1], k, v, scale))
        return torch.cat(out)

    def arguments(self, scale: float) -> tuple[list[Any], dict[str, Any]]:
        p = self.pages
        named = {"k_scale": p.k_scale, "v_scale": p.v_scale, "recent": self.recent}
        return [p.k_cache, p.v_cache, p.page_table, p.context_len, scale], named


def mixed(
    contexts: list[int], firsts: list[int], chunks: list[int], shape: tuple[Any, ...], window: int = WINDOW
) -> Mixed:
    """Rings know all but the last `chunks[i]` tokens."""
    _, kv_heads, dim, page, dtype, bits = shape
    pages = paged(contexts, kv_heads, dim, page, dtype, bits)
    assert pages.k_scale is not None
    assert pages.v_scale is not None
    seats = torch.randperm(len(contexts) + 2)[: len(contexts)].to(DEVICE)
    first = torch.tensor(firsts, device=DEVICE)
    rings = torch.full((2, (len(contexts) + 2) * window, kv_heads, dim), torch.nan, device=DEVICE).to(dtype)
    own: list[list[Tensor]] = [[], []]
    for row, (context, chunk) in enumerate(zip(contexts, chunks, strict=True)):
        for which in range(2):
            own[which].append(torch.randn(context, kv_heads, dim).to(dtype).to(DEVICE))
        end = context - chunk
        held = torch.arange(max(firsts[row], end - window, 0), end, device=DEVICE)
        for ring, values in zip(rings, own, strict=True):
            ring[seats[row] * window + held % window] = values[row][held]
        # Nobody reads pages from the last query's edge on.
        beyond = torch.arange(max(context - window, firsts[row]), context, device=DEVICE)
        slots = pages.page_table[row, beyond // page].long() * page + beyond % page
        for scales in (pages.k_scale, pages.v_scale):
            scales.flatten(0, 1)[slots] = torch.nan
    return Mixed(pages, Recent(rings[0], rings[1], seats, first, window), *own)


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_equals_the_reference_and_the_formula(shape: tuple[Any, ...]) -> None:
    heads, _, dim, page, dtype, _ = shape
    # Shorter than the window; equal; one more; padding; pages that end at the edge; a ring that begins in between.
    contexts = [1, 7, WINDOW, WINDOW + 1, 0, page + WINDOW, 3 * page + 5, 2 * page + 7, 2 * page]
    firsts = [0, 0, 0, 0, 0, 0, 0, 2 * page + 7 - 9, 2 * page - 1]
    batch = mixed(contexts, firsts, [0] * len(contexts), shape)
    q = torch.randn(len(contexts), heads, dim).to(dtype).to(DEVICE)
    args, named = batch.arguments(dim**-0.5)
    expected = decode_attention_ref.paged_decode_attention(q, *args, **named)
    for row, context in enumerate(contexts):
        wanted = batch.expected(row, q[row : row + 1], dim**-0.5) if context else torch.zeros_like(q[:1])
        assert close(expected[row : row + 1], wanted), context
    assert close(decode_attention.paged_decode_attention(q, *args, **named), expected)


@pytest.mark.parametrize(("context", "window"), [(400, 1), (400, 64), (129, 128), (400, 300), (300, 400)])
def test_decode_of_one_sequence_is_the_same_in_one_part_and_in_many(context: int, window: int) -> None:
    batch = mixed([context], [3], [0], (4, 2, 64, 16, F32, 8), window)
    q = torch.randn(1, 4, 64, device=DEVICE)
    args, named = batch.arguments(0.125)
    expected = batch.expected(0, q, 0.125)
    assert close(decode_attention.paged_decode_attention(q, *args, **named), expected)
    many = torch.nn.functional.pad(args[2], (0, 64 - args[2].shape[1]))  # a wider table allows more parts
    launches, out = decode_attention.decode_launches(
        q, *args[:2], many, *args[3:], None, named["k_scale"], named["v_scale"], recent=named["recent"]
    )
    assert len(launches) == 2
    for launch in launches:
        launch.run()
    assert close(out, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_equals_the_reference_and_the_formula(shape: tuple[Any, ...]) -> None:
    heads, kv_heads, dim, page, dtype, _ = shape
    # A whole prompt of one token, and ones as long as the window and longer; an empty chunk; chunks after others, in
    # whose ring nothing, little or all of the window is; a chunk behind a cached prefix.
    chunks = [1, WINDOW, WINDOW + page + 1, 0, 20, 7, 2, 9]
    contexts = [1, WINDOW, WINDOW + page + 1, 5, page + 23, 3 * page, WINDOW + 3, 2 * page + 9]
    firsts = [0, 0, 0, 0, page, 0, WINDOW - 3, 2 * page]
    batch = mixed(contexts, firsts, chunks, shape)
    starts = [0, *torch.tensor(chunks).cumsum(0).tolist()]
    q = torch.randn(starts[-1], heads, dim).to(dtype).to(DEVICE)
    new = [
        torch.cat([x[len(x) - chunk :] for x, chunk in zip(of, chunks, strict=True)])
        for of in (batch.keys, batch.values)
    ]
    # Values as they come out of a fused projection: only their rows are strided.
    new[1] = torch.cat((new[1], new[1]), dim=1)[:, :kv_heads]
    query_start = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    args, named = batch.arguments(dim**-0.5)
    args = [*args[:3], query_start, *args[3:], max(chunks)]
    expected = prefill_attention_ref.paged_prefill_attention(q, *args, **named, new=new)
    for row, (start, end) in enumerate(pairwise(starts)):
        if end > start:
            assert close(expected[start:end], batch.expected(row, q[start:end], dim**-0.5)), row
    assert close(prefill_attention.paged_prefill_attention(q, *args, **named, new=new), expected)


@pytest.mark.parametrize("window", [1, 15, 16, 33, 200])
def test_windows_shorter_than_a_tile_and_longer_than_the_context(window: int) -> None:
    contexts, firsts, chunks = [70, 40], [0, 11], [37, 3]
    batch = mixed(contexts, firsts, chunks, (4, 1, 64, 16, F32, 8), window)
    q = torch.randn(40, 4, 64, device=DEVICE)
    new = [torch.cat((of[0][33:], of[1][37:])) for of in (batch.keys, batch.values)]
    query_start = torch.tensor([0, 37, 40], dtype=torch.int32, device=DEVICE)
    args, named = batch.arguments(0.125)
    args = [*args[:3], query_start, *args[3:], 37]
    got = prefill_attention.paged_prefill_attention(q, *args, **named, new=new)
    assert close(got[:37], batch.expected(0, q[:37], 0.125))
    assert close(got[37:], batch.expected(1, q[37:], 0.125))


@pytest.mark.parametrize(("dtype", "bits"), [(F32, 8), (BF16, 4)])
def test_the_write_of_kv_reaches_rings_and_leaves_the_rest(dtype: torch.dtype, bits: int) -> None:
    tokens, heads, kv_heads, dim = 6, 9, 3, 64
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype).to(DEVICE)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    angle = torch.rand(100, dim // 2, device=DEVICE) * 6
    positions = torch.tensor([0, 1, 15, 16, 17, 99], device=DEVICE)
    width, kind = (dim, torch.int8) if bits == 8 else (dim // 2, torch.uint8)
    slots = torch.tensor([16, 31, 32, 0, 63, 17], device=DEVICE)
    ring_slots = torch.tensor([3, -1, 0, -1, -1, 7], device=DEVICE)
    results = []
    for module in (rotary_ref, rotary):
        caches = [torch.zeros(4, 16, kv_heads, width, dtype=kind, device=DEVICE) for _ in range(2)]
        scales = {name: torch.zeros(4, 16, kv_heads, device=DEVICE) for name in ("k_scale", "v_scale")}
        rings = [torch.full((8, kv_heads, dim), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)]
        k_out = torch.empty(tokens, kv_heads, dim, dtype=dtype, device=DEVICE)
        out = module.rotary_write_kv(
            *(q, k, v, angle.cos(), angle.sin(), positions, *caches, slots),
            **scales,
            k_out=k_out,
            recent=(*rings, ring_slots),
        )
        results.append((out, k_out, *rings, *scales.values()))
    for got, expected in zip(*reversed(results), strict=True):
        assert close(got, expected, TOLERANCE[dtype])
    # Rings have what the page was made of: K rotated, V as it came.
    _, k_out, k_ring, v_ring, *_ = results[1]
    assert close(k_ring[[3, 0, 7]], k_out[[0, 2, 5]], 0.0)
    assert close(v_ring[[3, 0, 7]], v[[0, 2, 5]], 0.0)
    plain = rotary_ref._rotate(k, *(f(angle)[positions].unsqueeze(1) for f in (torch.cos, torch.sin)))
    assert close(k_out, plain)
    untouched = torch.tensor([1, 2, 4, 5, 6], device=DEVICE)
    assert bool((k_ring[untouched] == 7).all())
    assert bool((v_ring[untouched] == 7).all())


@pytest.mark.parametrize(("kv_heads", "dim", "dtype"), [(3, 64, BF16), (1, 80, F32)])
def test_late_rows_go_to_their_slots_and_nowhere_else(kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    k = torch.randn(9, kv_heads, dim).to(dtype).to(DEVICE)
    v = torch.randn(9, 2 * kv_heads, dim).to(dtype).to(DEVICE)[:, kv_heads:]
    rows, slots = (torch.tensor(x, device=DEVICE) for x in ([1, 2, 8], [5, 6, 0]))
    rings = [torch.zeros(12, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2)]
    copies = [ring.clone() for ring in rings]
    recent.write_recent(k, v, rows, slots, *rings)
    recent_ref.write_recent(k, v, rows, slots, *copies)
    for ring, copy, new in zip(rings, copies, (k, v), strict=True):
        assert torch.equal(ring, copy)
        assert torch.equal(ring[slots], new[rows])
    recent.write_recent(k, v, rows[:0], slots[:0], *rings)


class AttentionByTriton(Operators):
    """The kernels that know of rings, and references of the others, which are slow to interpret."""

    def __getattr__(self, name: str) -> Any:
        self.triton = "attention" in name or name in ("rotary_write_kv", "write_recent")
        return super().__getattr__(name)


@pytest.mark.skipif(not INTERPRETING, reason="the engine beside it is on the CPU")
def test_an_engine_of_these_kernels_gives_the_logits_of_the_cpu() -> None:
    """Chunks, decodes padded as for a graph, a prefix found in the cache, copies of a page."""
    source = Source(
        Architecture(TINY.model_copy(update={"num_layers": 1}), Rope(), 1e-6), DummyCheckpoint(TINY), None
    )
    prompts = [[3 * i % 59 + 1 for i in range(10)] + [7 * i + 2 for i in range(n)] for n in (2, 3)]
    limits = {"page_tokens": 8, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    sampling = Sampling(max_tokens=4, temperature=1.0, seed=5, n=2, ignore_eos=True)
    operators = AttentionByTriton(triton=True)
    with running_twice(operators, 5, "int4", source=source, sizes=(3,), **limits) as (engine, twice):
        complete(engine, prompts, sampling)
    assert min(twice.replayed, twice.computed, twice.copied, twice.behind_prefixes) > 0
    assert twice.worst < 5e-3
