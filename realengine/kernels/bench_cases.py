"""What `bench` measures: each kernel at serving shapes, the bytes and operations it cannot avoid, and its peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from realengine.kernels import operators
from realengine.kernels.bench_peers import decode_peer, prefill_peer
from realengine.kernels.kv_quant_ref import quantize_kv
from realengine.kernels.quant_gemm_ref import quantize_int4, quantize_int8
from realengine.kernels.recent_ref import Recent

if TYPE_CHECKING:
    from realengine.kernels.launch import Device, Tile


@dataclass(frozen=True)
class Tunable:
    """How to run a case with a given tile."""

    kernel: str
    case: str
    device: Device
    tiles: list[Tile]
    run: Callable[[Tile], object]


@dataclass(frozen=True)
class Case:
    """A call, and the least that any implementation of it must read, write and compute."""

    name: str
    run: Callable[[], object]
    bytes: float
    operations: float = 0.0
    peer_name: str | None = None
    peer: Callable[[], object] | None = None
    tunable: Tunable | None = None
    library: Callable[[], object] | None = None
    """The same work by FlashInfer."""


@dataclass(frozen=True)
class Shape:
    """The model whose layers are measured."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    hidden: int = 4096
    ffn: int = 14336
    vocabulary: int = 128256
    page: int = 16


LLAMA_8B = Shape()
WINDOW = 128
"""Recent tokens kept as they were, where there are any."""
TINY = Shape(heads=4, kv_heads=2, dim=64, hidden=256, ffn=512, vocabulary=1000)


def cases(device: torch.device, *, quick: bool = False) -> Iterator[Case]:
    """One after another, so that only one case's tensors exist at a time."""
    small = device.type != "cuda"
    shape = TINY if small else LLAMA_8B
    for sequences, context in [(4, 128)] if small else [(64, 4096), (8, 32768), (1, 8192), (256, 1024)]:
        for bits in (16, 8, 4):
            if bits == 16 or not quick or sequences == 64:
                yield decode_case(shape, device, sequences, context, bits)
            if bits != 16 and (small or sequences in (1, 64)):
                yield decode_case(shape, device, sequences, context, bits, 16 if small else WINDOW)
    for sequences, chunk, context in (
        [(2, 64, 96)] if small else [(1, 4096, 4096), (4, 1024, 1024), (1, 2048, 16384), (16, 512, 2048)]
    ):
        yield prefill_case(shape, device, sequences, chunk, context, 16)
    for sequences, chunk, context in [(2, 64, 96)] if small else [(1, 4096, 4096), (1, 2048, 16384)]:
        if not small and chunk == context:
            yield prefill_case(shape, device, sequences, chunk, context, 8)
        for bits in (8, 4):
            yield prefill_case(shape, device, sequences, chunk, context, bits, 16 if small else WINDOW)
    for tokens in (1, 8) if small else (1, 16, 64, 4096):
        for bits in (8, 4):
            yield gemm_case(shape, device, tokens, 2 * shape.ffn, shape.hidden, bits)
    for tokens in (8,) if small else (64, 8192):
        yield from layer_cases(shape, device, tokens)
    rows = 4 if small else 64
    yield from sampling_cases(shape, device, rows)
    yield page_copy_case(shape, device, 4 if small else 32, 16 if small else 256)


def paged_cache(
    shape: Shape, device: torch.device, sequences: int, context: int, bits: int
) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """K and V of all sequences in pages in random order; the table; scales."""
    per_sequence = -(-context // shape.page)
    pages = sequences * per_sequence
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    caches, scales = [], {}
    for name in ("k_scale", "v_scale"):
        cache = torch.randn(pages + 1, shape.page, shape.kv_heads, shape.dim, device=device, dtype=kind)
        if bits != 16:
            cache, scales[name] = quantize_kv(cache, bits)
        caches.append(cache)
    table = 1 + torch.randperm(pages, device=device).to(torch.int32).view(sequences, per_sequence)
    return caches, table, scales


def rings(shape: Shape, sequences: int, window: int, like: Tensor) -> Recent | None:
    """Rings of sequences that sit in random seats, in the type and on the device of `like`."""
    if not window:
        return None
    k, v = (
        torch.randn(sequences * window, shape.kv_heads, shape.dim, device=like.device, dtype=like.dtype)
        for _ in range(2)
    )
    seats = torch.randperm(sequences, device=like.device)
    return Recent(k, v, seats, torch.zeros_like(seats), window)


def token_bytes(shape: Shape, bits: int, kind: torch.dtype) -> float:
    """Bytes of K and V of one token in one layer."""
    if bits == 16:
        return 2 * shape.kv_heads * shape.dim * kind.itemsize
    return 2 * shape.kv_heads * (shape.dim * bits / 8 + 4)


def cache_bytes(shape: Shape, old: int, recent: int, bits: int, kind: torch.dtype) -> float:
    """Bytes of K and V in one layer of `old` tokens in pages and `recent` ones as they were."""
    return old * token_bytes(shape, bits, kind) + recent * token_bytes(shape, 16, kind)


def decode_case(
    shape: Shape, device: torch.device, sequences: int, context: int, bits: int, window: int = 0
) -> Case:
    """One token of each sequence; the last `window` tokens as they were."""
    (k, v), table, scales = paged_cache(shape, device, sequences, context, bits)
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    q = torch.randn(sequences, shape.heads, shape.dim, device=device, dtype=kind)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=device)
    scale = shape.dim**-0.5
    decode = operators(device).paged_decode_attention
    recent = rings(shape, sequences, window, q)
    peer = tunable = None
    if bits == 16:
        dense = [
            x[1:].reshape(sequences, -1, shape.kv_heads, shape.dim).transpose(1, 2).contiguous()
            for x in (k, v)
        ]
        rows = q.unsqueeze(2)
        peer = lambda: scaled_dot_product_attention(rows, dense[0], dense[1], enable_gqa=True)  # noqa: E731
    if device.type == "cuda" and (sequences, context) == (64, 4096):
        from realengine.kernels import decode_attention as module
        from realengine.kernels.launch import device_of
        from realengine.kernels.tune import candidates

        tiles = module.INT4_TILES if bits == 4 else module.TILES

        def with_tile(tile: Tile) -> None:
            args = (q, k, v, table, lengths, scale, None, scales.get("k_scale"), scales.get("v_scale"), tile)
            for launch in module.decode_launches(*args, recent=recent)[0]:
                launch.run()

        found = device_of(q)
        key = f"d{shape.dim}b{bits}" + "r" * bool(window)
        tunable = Tunable("decode_attention", key, found, candidates(tiles, found), with_tile)
    return Case(
        f"decode attention {sequences}×{context}, {bits}-bit KV"
        + f", last {window} as they were" * bool(window),
        lambda: decode(q, k, v, table, lengths, scale, **scales, recent=recent),
        sequences * cache_bytes(shape, context - window, window, bits, kind) + 2 * q.nbytes,
        4.0 * sequences * context * shape.heads * shape.dim,
        "SDPA" if peer else None,
        peer,
        tunable,
        decode_peer(q, k, v, table, context) if bits == 16 else None,
    )


def prefill_case(
    shape: Shape,
    device: torch.device,
    sequences: int,
    chunk: int,
    context: int,
    bits: int,
    window: int = 0,
) -> Case:
    """The last `chunk` tokens of each sequence; of each query the last `window` tokens as they were."""
    (k, v), table, scales = paged_cache(shape, device, sequences, context, bits)
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    q = torch.randn(sequences * chunk, shape.heads, shape.dim, device=device, dtype=kind)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device) * chunk
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=device)
    scale = shape.dim**-0.5
    prefill = operators(device).paged_prefill_attention
    recent = rings(shape, sequences, window, q)
    new = [torch.randn_like(q[:, : shape.kv_heads]) for _ in range(2)] if window else None
    peer = tunable = None
    if bits == 16 and chunk == context:
        dense = [
            x[1:].reshape(sequences, -1, shape.kv_heads, shape.dim).transpose(1, 2).contiguous()
            for x in (k, v)
        ]
        rows = q.view(sequences, chunk, shape.heads, shape.dim).transpose(1, 2).contiguous()
        peer = lambda: scaled_dot_product_attention(rows, dense[0], dense[1], is_causal=True, enable_gqa=True)  # noqa: E731
    if device.type == "cuda" and (sequences, chunk) == (1, 4096):
        from realengine.kernels import prefill_attention as module
        from realengine.kernels.launch import device_of
        from realengine.kernels.tune import candidates

        tiles = module.TILES if bits == 16 else module.QUANTISED_TILES

        def with_tile(tile: Tile) -> None:
            args = (q, k, v, table, starts, lengths, scale, chunk, None)
            quantised = (scales.get("k_scale"), scales.get("v_scale"))
            module.prefill_launch(*args, *quantised, tile, recent, new)[0].run()

        found = device_of(q)
        key = f"d{shape.dim}b{bits}" + "r" * bool(window)
        tunable = Tunable("prefill_attention", key, found, candidates(tiles, found), with_tile)
    seen = chunk * (context - chunk) + chunk * (chunk + 1) / 2
    return Case(
        f"prefill attention {sequences}×{chunk} of {context}, {bits}-bit KV"
        + f", last {window} as they were" * bool(window),
        lambda: prefill(q, k, v, table, starts, lengths, scale, chunk, **scales, recent=recent, new=new),
        # Most of a chunk is read twice: by queries to which it is recent, and by later ones.
        sequences
        * cache_bytes(shape, context - window, min(window + chunk, context) if window else 0, bits, kind)
        + 2 * q.nbytes,
        4.0 * sequences * seen * shape.heads * shape.dim,
        "SDPA" if peer else None,
        peer,
        tunable,
        prefill_peer(q, k, v, table, starts, context) if bits == 16 else None,
    )


def gemm_case(shape: Shape, device: torch.device, tokens: int, channels: int, inputs: int, bits: int) -> Case:
    """A product with quantised weights, against the bfloat16 product."""
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    x = torch.randn(tokens, inputs, device=device, dtype=kind)
    weight = torch.randn(channels, inputs, device=device) / inputs**0.5
    kernels = operators(device)
    weights: tuple[Tensor, ...]
    if bits == 8:
        weights, product = quantize_int8(weight), kernels.quant_gemm_int8
    else:
        weights, product = quantize_int4(weight), kernels.quant_gemm_int4
    dense = weight.to(kind)
    tunable = None
    if device.type == "cuda":
        from realengine.kernels import quant_gemm as module
        from realengine.kernels.launch import device_of

        found = device_of(x)
        key, tiles = module.tuning_candidates(found, tokens)

        def with_tile(tile: Tile) -> None:
            build: Any = module.gemm_int8_launches if bits == 8 else module.gemm_int4_launches
            more = () if bits == 8 else (128,)
            for launch in build(x, *weights, *more, tile=tile)[0]:
                launch.run()

        if tokens in (16, 4096):
            tunable = Tunable("quant_gemm", f"{key} b{bits}", found, tiles, with_tile)
    return Case(
        f"GEMM int{bits} {tokens}×{inputs}×{channels}",
        lambda: product(x, *weights),
        sum(w.nbytes for w in weights) + x.nbytes + tokens * channels * kind.itemsize,
        2.0 * tokens * channels * inputs,
        "cuBLAS 16-bit" if device.type == "cuda" else "float32",
        lambda: torch.nn.functional.linear(x, dense),
        tunable,
    )


def layer_cases(shape: Shape, device: torch.device, tokens: int) -> Iterator[Case]:
    """What surrounds the products of a layer."""
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    kernels = operators(device)
    x, residual = (torch.randn(tokens, shape.hidden, device=device, dtype=kind) for _ in range(2))
    weight = torch.rand(shape.hidden, device=device, dtype=kind)
    yield Case(
        f"RMSNorm + residual {tokens}×{shape.hidden}",
        lambda: kernels.rms_norm(x, weight, 1e-5, residual),
        4.0 * x.nbytes,
        peer_name="rms_norm(x + r)",
        peer=lambda: torch.nn.functional.rms_norm(x + residual, (shape.hidden,), weight, 1e-5),
    )
    gate_up = torch.randn(tokens, 2 * shape.ffn, device=device, dtype=kind)
    yield Case(f"SiLU·mul {tokens}×{shape.ffn}", lambda: kernels.silu_mul(gate_up), 1.5 * gate_up.nbytes)
    (k_cache, v_cache), _, _ = paged_cache(shape, device, 1, tokens, 16)
    qkv = torch.randn(tokens, shape.heads + 2 * shape.kv_heads, shape.dim, device=device, dtype=kind)
    q, k, v = qkv.tensor_split((shape.heads, shape.heads + shape.kv_heads), dim=1)
    angle = torch.rand(tokens, shape.dim // 2, device=device)
    cos, sin, where = angle.cos(), angle.sin(), torch.arange(tokens, device=device)
    yield Case(
        f"rotary + KV write {tokens} tokens",
        lambda: kernels.rotary_write_kv(q, k, v, cos, sin, where, k_cache, v_cache, where),
        2.0 * qkv.nbytes,
    )
    (k_cache, v_cache), _, scales = paged_cache(shape, device, 1, tokens, 8)
    ring = (torch.empty_like(k), torch.empty_like(v), where)
    yield Case(
        f"rotary + KV write {tokens} tokens, 8-bit KV and rings",
        lambda: kernels.rotary_write_kv(
            q, k, v, cos, sin, where, k_cache, v_cache, where, **scales, recent=ring
        ),
        2.0 * qkv.nbytes + tokens * token_bytes(shape, 8, kind),
    )
    yield Case(
        f"write to rings {tokens} tokens",
        lambda: kernels.write_recent(k, v, where, where, *ring[:2]),
        2.0 * tokens * token_bytes(shape, 16, kind),
    )


def sampling_cases(shape: Shape, device: torch.device, rows: int) -> Iterator[Case]:
    """One step's tokens."""
    kernels = operators(device)
    logits = torch.randn(rows, shape.vocabulary, device=device) * 3
    seeds = torch.arange(rows, device=device)

    def settings(temperature: float, top_k: int, top_p: float) -> list[Tensor]:
        top_ks = torch.full((rows,), top_k, dtype=torch.int32, device=device)
        return [
            torch.full((rows,), temperature, device=device),
            top_ks,
            torch.full((rows,), top_p, device=device),
            torch.zeros(rows, device=device),
        ]

    for name, parameters in {
        "greedy": settings(0.0, 0, 1.0),
        "temperature": settings(0.8, 0, 1.0),
        "top-k 50, top-p 0.9": settings(0.8, 50, 0.9),
    }.items():
        peer = None
        if name == "temperature":
            peer = lambda: (logits / 0.8).softmax(dim=-1).multinomial(1)  # noqa: E731
        yield Case(
            f"sample {rows}×{shape.vocabulary}, {name}",
            lambda p=parameters: kernels.sample(logits, *p, seeds, seeds),  # type: ignore[misc]
            logits.nbytes,
            peer_name=None if peer is None else "multinomial",
            peer=peer,
        )
    drafts = 4
    target = torch.randn(rows, drafts + 1, shape.vocabulary, device=device).softmax(dim=-1)
    tokens = target[:, :drafts].argmax(dim=-1)
    counts = torch.full((rows,), drafts, dtype=torch.int32, device=device)
    yield Case(
        f"verify {rows}×{drafts}, n-gram",
        lambda: kernels.verify(tokens, None, target, counts, seeds, seeds),
        target[:, 0].nbytes,
    )


def page_copy_case(shape: Shape, device: torch.device, layers: int, pages: int) -> Case:
    """Copy on write of pages in every layer."""
    kind = torch.bfloat16
    caches = [
        torch.randn(2 * pages + 1, shape.page, shape.kv_heads, shape.dim, device=device, dtype=kind)
        for _ in range(2 * layers)
    ]
    ids = 1 + torch.randperm(2 * pages, device=device).to(torch.int32)
    copy = operators(device).copy_pages
    moved = 2.0 * pages * caches[0][0].nbytes * len(caches)
    return Case(
        f"copy {pages} pages in {layers} layers", lambda: copy(caches, ids[:pages], ids[pages:]), moved
    )
