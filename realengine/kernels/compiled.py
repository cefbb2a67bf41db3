"""What the compiler makes of every kernel, without a GPU: registers, spills, shared memory, width of loads, products.

`python -m realengine.kernels.compiled` compiles all cases for Ampere and Hopper and writes `docs/kernels.md` and
`docs/kernels.json`. It must not run under Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from realengine.kernels import (
    activation,
    decode_attention,
    kv_quant,
    norm,
    page_copy,
    prefill_attention,
    quant_gemm,
    recent,
    rotary,
    sampling,
    verification,
)
from realengine.kernels.launch import INTERPRETING, Device, Launch, assume
from realengine.kernels.recent_ref import Recent

DEVICES = {
    80: Device("sm_80", 80, 108),
    90: Device("sm_90", 90, 132),
    100: Device("sm_100", 100, 148),
}
SHARED_LIMIT = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that a program can have. Tiles for 8.0 serve 8.6, 8.9 and 12.x too, which have less than 8.0."""
BF16, F32, I32, I64, I8, U8 = (
    torch.bfloat16,
    torch.float32,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
)


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture."""

    case: str
    kernel: str
    arch: int
    warps: int
    stages: int
    registers: int
    spilled: int
    """Bytes of stack per thread."""
    shared: int
    """Bytes of shared memory per program."""
    async_copies: int
    """16-byte copies from global to shared memory (LDGSTS), or bulk ones (UTMALDG)."""
    wide_loads: int
    """16-byte loads into registers."""
    narrow_loads: int
    """Loads of one 16-bit number."""
    wgmma: int
    mma: int


@dataclass(frozen=True)
class Case:
    """A name, its launches, and what their machine code must show beside no spill and no 16-bit load."""

    name: str
    launches: Callable[[], list[Launch]]
    streams: bool = False
    """Has 16-byte asynchronous copies, or 16-byte loads where nothing is staged."""
    products: bool = False
    """Uses wgmma on Hopper."""
    narrow_loads: int = 0
    """16-bit loads that are right: one scale per channel and step."""
    spilled: int = 0
    """Bytes of stack that cost nothing: stored once before the loop, read once after it."""
    least_arch: int = 80


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def cases(*, quick: bool = False) -> Iterator[Case]:
    """Every kernel at the shapes that matter: Llama-3.1-8B's, and the odd head sizes and groups."""
    attention = [(32, 8, 128, 16), (32, 8, 128, 8), (32, 8, 128, 4), (32, 8, 128, FP8)]
    if not quick:
        attention += [(9, 3, 64, 16), (32, 32, 80, 16), (32, 32, 96, 16), (64, 8, 128, 16)]
        attention += [(9, 3, 64, 8), (32, 32, 96, 4)]
    for heads, kv_heads, dim, bits in attention:
        shape = f"{heads}/{kv_heads} heads of {dim}, {KV_NAMES[bits]}"
        arch = 90 if bits == FP8 else 80
        build = partial(_decode, heads, kv_heads, dim, bits)
        yield Case(f"decode, {shape}", build, streams=True, least_arch=arch)
        build = partial(_prefill, heads, kv_heads, dim, bits)
        yield Case(f"prefill, {shape}", build, streams=True, products=True, least_arch=arch)
    mixed = [(32, 8, 128, 8), (32, 8, 128, 4)]
    if not quick:
        mixed += [(32, 8, 128, FP8), (9, 3, 64, 4), (32, 32, 80, 8), (32, 32, 96, 4), (64, 8, 128, 8)]
    for heads, kv_heads, dim, bits in mixed:
        shape = f"{heads}/{kv_heads} heads of {dim}, {KV_NAMES[bits]}, last {WINDOW} as they were"
        arch = 90 if bits == FP8 else 80
        build = partial(_decode, heads, kv_heads, dim, bits, rings=True)
        spilled = 8 if (dim, bits) == (96, 4) else 0
        yield Case(f"decode, {shape}", build, streams=True, spilled=spilled, least_arch=arch)
        build = partial(_prefill, heads, kv_heads, dim, bits, rings=True)
        yield Case(f"prefill, {shape}", build, streams=True, products=True, least_arch=arch)
    if not quick:
        yield Case("decode, 32/8 heads of 128, float32", partial(_decode, 32, 8, 128, 32), streams=True)
        yield Case("prefill, 32/8 heads of 128, float32", partial(_prefill, 32, 8, 128, 32), streams=True)
    for tokens in (1, 64, 4096):
        for bits in (8, 4):
            build = partial(_gemm, tokens, bits)
            narrow = 2 if bits == 4 else 0
            yield Case(
                f"GEMM int{bits}, {tokens} tokens", build, streams=True, products=True, narrow_loads=narrow
            )
    yield Case("RMSNorm", partial(_norm, residual=False), streams=True)
    yield Case("RMSNorm + residual", partial(_norm, residual=True), streams=True)
    yield Case("SiLU·mul", lambda: [activation.silu_mul_launch(meta(64, 28672))[0]], streams=True)
    for bits in (16, 8, 4, FP8):
        build = partial(_rotary, bits, norm=False)
        arch = 90 if bits == FP8 else 80
        yield Case(f"rotary + KV write, {KV_NAMES[bits]}", build, streams=True, least_arch=arch)
    yield Case("rotary + KV write, qk-norm", partial(_rotary, 16, norm=True), streams=True)
    for bits in (8, 4):
        name = f"rotary + KV write, {KV_NAMES[bits]} and rings"
        yield Case(name, partial(_rotary, bits, norm=True, rings=True), streams=True)
    yield Case("write to rings", _write_recent, streams=True)
    for bits in (8, 4):
        yield Case(f"quantise KV, {KV_NAMES[bits]}", partial(_quantize, bits), streams=True)
        yield Case(f"dequantise KV, {KV_NAMES[bits]}", partial(_dequantize, bits), streams=True)
    yield Case("page copy", _page_copy, streams=True)
    yield Case("sample", partial(_sampling, probs=False), streams=True)
    yield Case("sampling probabilities", partial(_sampling, probs=True), streams=True)
    yield Case("verify, draft probabilities", partial(_verify, given=True), streams=True)
    yield Case("verify, n-gram", partial(_verify, given=False), streams=True)


FP8 = -8
"""e4m3: as many bits as int8, and no scales."""
WINDOW = 128
KV_NAMES = {16: "bf16", 8: "int8", 4: "int4", FP8: "fp8"}


def _cache(kv_heads: int, dim: int, bits: int) -> tuple[Tensor, Tensor | None]:
    kinds = {32: F32, 16: BF16, 8: I8, 4: U8, FP8: torch.float8_e4m3fn}
    width, kind = dim // 2 if bits == 4 else dim, kinds[bits]
    scale = None if bits not in (8, 4) else meta(1024, 16, kv_heads, dtype=F32)
    return meta(1024, 16, kv_heads, width, dtype=kind), scale


def _recent(sequences: int, kv_heads: int, dim: int) -> Recent:
    ring = meta(64 * WINDOW, kv_heads, dim)
    whose = meta(sequences, dtype=I64)
    return Recent(ring, ring, whose, whose, WINDOW)


def _decode(heads: int, kv_heads: int, dim: int, bits: int, *, rings: bool = False) -> list[Launch]:
    cache, scale = _cache(kv_heads, dim, bits)
    table, lengths = meta(64, 256, dtype=I32), meta(64, dtype=I32)
    return decode_attention.decode_launches(
        meta(64, heads, dim, dtype=F32 if bits == 32 else BF16),
        cache,
        cache,
        table,
        lengths,
        dim**-0.5,
        None,
        scale,
        scale,
        recent=_recent(64, kv_heads, dim) if rings else None,
    )[0]


def _prefill(heads: int, kv_heads: int, dim: int, bits: int, *, rings: bool = False) -> list[Launch]:
    cache, scale = _cache(kv_heads, dim, bits)
    table, starts, lengths = meta(4, 256, dtype=I32), meta(5, dtype=I32), meta(4, dtype=I32)
    q = meta(4096, heads, dim, dtype=F32 if bits == 32 else BF16)
    qkv = meta(4096, heads + 2 * kv_heads, dim)
    launch, _ = prefill_attention.prefill_launch(
        *(q, cache, cache, table, starts, lengths, dim**-0.5, 1024, None, scale, scale),
        recent=_recent(4, kv_heads, dim) if rings else None,
        new=(meta(4096, kv_heads, dim), qkv[:, -kv_heads:]) if rings else None,
    )
    return [launch]


def _gemm(tokens: int, bits: int, n: int = 4096, k: int = 4096) -> list[Launch]:
    x = meta(tokens, k)
    if bits == 8:
        return quant_gemm.gemm_int8_launches(x, meta(n, k, dtype=I8), meta(n, dtype=F32))[0]
    scales, zeros = meta(k // 128, n, dtype=torch.float16), meta(k // 128, n, dtype=U8)
    return quant_gemm.gemm_int4_launches(x, meta(n, k // 2, dtype=U8), scales, zeros, 128)[0]


def _norm(*, residual: bool) -> list[Launch]:
    rows = meta(64, 4096)
    return [norm.rms_norm_launch(rows, meta(4096), 1e-5, rows if residual else None)[0]]


def _rotary(bits: int, *, norm: bool, rings: bool = False) -> list[Launch]:
    cache, scale = _cache(8, 128, bits)
    table = meta(8192, 64, dtype=F32)
    q, k = meta(64, 32, 128), meta(64, 8, 128)
    weight = meta(128) if norm else None
    where = meta(64, dtype=I64)
    launch, _ = rotary.rotary_write_kv_launch(
        *(q, k, k, table, table, where, cache, cache, where, weight, weight, 1e-6, scale, scale),
        k_out=k if rings else None,
        recent=(meta(4096, 8, 128), meta(4096, 8, 128), where) if rings else None,
    )
    return [launch]


def _write_recent() -> list[Launch]:
    new, ring, where = meta(4096, 8, 128), meta(4096, 8, 128), meta(512, dtype=I64)
    return [recent.write_recent_launch(new, new, where, where, ring, ring)]


def _quantize(bits: int) -> list[Launch]:
    return [kv_quant.quantize_kv_launch(meta(4096, 8, 128), bits)[0]]


def _dequantize(bits: int) -> list[Launch]:
    width, kind = (128, I8) if bits == 8 else (64, U8)
    quantised, scale = meta(4096, 8, width, dtype=kind), meta(4096, 8, dtype=F32)
    return [kv_quant.dequantize_kv_launch(quantised, scale, bits, BF16)[0]]


def _page_copy() -> list[Launch]:
    pages = meta(16, dtype=I32)
    return page_copy.copy_pages_launches([meta(1024, 16, 8, 128)] * 64, pages, pages)


def _sampling(*, probs: bool) -> list[Launch]:
    logits, seeds = meta(64, 128256, dtype=F32), meta(64, dtype=I64)
    temperature, top_k, ratio = meta(64, dtype=F32), meta(64, dtype=I32), meta(64, dtype=F32)
    if probs:
        return [sampling.sampling_probs_launch(logits, temperature, top_k, ratio, ratio)[0]]
    return [sampling.sample_launch(logits, temperature, top_k, ratio, ratio, seeds, seeds)[0]]


def _verify(*, given: bool) -> list[Launch]:
    drafts, target = meta(64, 4, dtype=I64), meta(64, 5, 128256, dtype=F32)
    probs = meta(64, 4, 128256, dtype=F32) if given else None
    counts, seeds = meta(64, dtype=I32), meta(64, dtype=I64)
    return [
        verification.verify_launch(drafts, probs, target, counts, seeds, seeds, meta(64, dtype=torch.bool))[0]
    ]


def compile_all(archs: list[int], *, quick: bool = False) -> list[Compiled]:
    """Every case on every architecture."""
    if INTERPRETING:
        raise RuntimeError(
            "kernels cannot be compiled under TRITON_INTERPRET=1: run this in a process without it"
        )
    results = []
    for arch in archs:
        with assume(DEVICES[arch]):
            for case in cases(quick=quick):
                if arch >= case.least_arch:
                    results += [examine(case.name, launch, arch) for launch in case.launches()]
    return results


def examine(case: str, launch: Launch, arch: int) -> Compiled:
    """Compile one launch and read its machine code."""
    binary = launch.compile(arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        code = _cuobjdump("--dump-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no registers for {case}:\n{usage}")

    def count(pattern: str) -> int:
        return len(re.findall(pattern, code))

    return Compiled(
        case,
        launch.kernel.__name__,
        arch,
        launch.warps,
        launch.stages,
        registers=int(found[1]),
        spilled=int(found[2]),
        shared=int(binary.metadata.shared),
        async_copies=count(r"LDGSTS\S*\.128|UTMALDG"),
        wide_loads=count(r"LDG\.E\S*\.128"),
        narrow_loads=count(r"LDG\.E\.[US]16|LDG\.E\.(?:EF|EL)\S*\.[US]16"),
        wgmma=count(r"HGMMA|UTCHMMA|UTCMMA"),
        mma=count(r"\bHMMA|\bIMMA"),
    )


def _cuobjdump(option: str, path: str) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def faults(results: list[Compiled]) -> list[str]:
    """What in the machine code would cost speed, in words; empty if nothing does."""
    wanted = {case.name: case for case in cases()}
    found = []
    for result in results:
        where = f"{result.case} ({result.kernel}, sm_{result.arch})"
        case = wanted[result.case]
        helper = result.kernel.startswith(("join_parts", "sum_splits"))
        if result.spilled > case.spilled:
            found.append(f"{where}: {result.spilled} bytes of registers spilled")
        if result.narrow_loads > case.narrow_loads:
            found.append(f"{where}: {result.narrow_loads} loads of a single 16-bit number")
        if result.shared > SHARED_LIMIT[result.arch]:
            found.append(f"{where}: {result.shared} bytes of shared memory are more than a program can have")
        if case.streams and not result.async_copies + result.wide_loads:
            found.append(f"{where}: no 16-byte copies or loads")
        if case.products and result.arch == 90 and not helper and not result.wgmma:
            found.append(f"{where}: no warpgroup products")
    return found


COLUMNS = ("registers", "spilled", "shared", "async_copies", "wide_loads", "narrow_loads", "wgmma", "mma")
HEADINGS = ("registers", "spill B", "shared B", "16 B async", "16 B loads", "16-bit loads", "wgmma", "mma")


def figures(results: list[Compiled], version: str = triton.__version__) -> str:
    """The contents of `docs/kernels.json`."""
    return json.dumps({"triton": version, "kernels": [asdict(result) for result in results]}, indent=1) + "\n"


def read_figures(path: Path) -> tuple[list[Compiled], str]:
    """What `figures` wrote: the results, and Triton's version."""
    contents = json.loads(path.read_text())
    return [Compiled(**entry) for entry in contents["kernels"]], contents["triton"]


def markdown(results: list[Compiled], version: str = triton.__version__) -> str:
    """The table of `docs/kernels.md`."""
    lines = [
        "# What the compiler makes of the kernels",
        "",
        "Written by `python -m realengine.kernels.compiled` with Triton "
        f"{version}; no GPU is needed. Loads and products are counts of instructions in the machine code, "
        "not of their executions. Tests assert: no spill in a loop, no load of a single 16-bit number, 16-byte copies "
        "or loads in every kernel that streams, and warpgroup products (wgmma) on sm_90 in prefill and GEMM kernels. "
        "The 16-bit loads of the int4 GEMM are its scales, one per channel and group. The 8 bytes that decode over int4 "
        "pages of heads of 96 and rings spills on sm_80 hold one register, stored before the loop and read after it. "
        "fp8 caches need sm_89.",
    ]
    for arch in sorted({result.arch for result in results}):
        lines += [
            "",
            f"## sm_{arch}",
            "",
            "| case | kernel | warps × stages | " + " | ".join(HEADINGS) + " |",
        ]
        lines.append("|---|---|---|" + "---:|" * len(HEADINGS))
        for result in results:
            if result.arch == arch:
                cells = [result.case, f"`{result.kernel}`", f"{result.warps} × {result.stages}"]
                cells += [str(getattr(result, column)) for column in COLUMNS]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], choices=sorted(DEVICES))
    parser.add_argument("--quick", action="store_true", help="leave out the odd head sizes and groups")
    parser.add_argument("--json", type=Path, help="write the figures here, and nothing to docs/")
    options = parser.parse_args()
    results = compile_all(options.arch, quick=options.quick)
    if options.json:
        options.json.write_text(figures(results))
    else:
        docs = Path(__file__).resolve().parents[2] / "docs"
        (docs / "kernels.json").write_text(figures(results))
        (docs / "kernels.md").write_text(markdown(results))
    for fault in faults(results):
        print(fault)  # noqa: T201


if __name__ == "__main__":
    main()
