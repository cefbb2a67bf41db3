"""What lies between the products of a step, compiled by Numba for this CPU: norms, SiLU, rotation, attention of decodes.

A call costs less than a microsecond, where PyTorch takes two for each of some 25 operators a layer. Arguments are
addresses, so that no array is made for a call; numbers are float32 or bfloat16 (`size` is 4 or 2 bytes) and become
float32 inside. Functions run on the calling thread and are kept on disk once they are compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int64, njit, void
from numba.core import cgutils as untyped_cgutils
from numba.core import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_LANES = 16
_PAGE_AHEAD = 2**14
"""Bytes of a page of K up to which fetching the next one early was faster (by a tenth); larger ones got slower."""
cgutils: Any = untyped_cgutils
# Sums may be taken in any order; NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_OPTIONS: dict[str, Any] = {"fastmath": _FAST, "error_model": "numpy"}


# ---- numbers in memory -----------------------------------------------------------------------------------------


def _address(b: Any, base: Any, kind: Any, index: Any) -> Any:
    return b.gep(b.inttoptr(base, kind.as_pointer()), [index])


def _widened(b: Any, bits: Any) -> Any:
    """bfloat16 as int16, one or a vector, to float32."""
    if isinstance(bits.type, ir.VectorType):
        n = bits.type.count
        wide = ir.VectorType(_I32, n)
        return b.bitcast(b.shl(b.zext(bits, wide), ir.Constant(wide, [16] * n)), ir.VectorType(_F32, n))
    return b.bitcast(b.shl(b.zext(bits, _I32), _I32(16)), _F32)


def _rounded(b: Any, number: Any) -> Any:
    """float32 to bfloat16 as int16: to nearest, ties to even; NaN stays NaN."""
    bits = b.bitcast(number, _I32)
    odd = b.and_(b.lshr(bits, _I32(16)), _I32(1))
    nearest = b.add(b.add(bits, _I32(0x7FFF)), odd)
    is_nan = b.icmp_unsigned(">", b.and_(bits, _I32(0x7FFFFFFF)), _I32(0x7F800000))
    return b.trunc(b.lshr(b.select(is_nan, b.or_(bits, _I32(0x400000)), nearest), _I32(16)), _I16)


def _jitted(function: Callable[..., Any]) -> Any:
    return njit(**_OPTIONS)(function)


def _inlined(function: Callable[..., Any]) -> Any:
    return intrinsic(prefer_literal=True)(function)


def _known(value: Any) -> int:
    if not isinstance(value, types.IntegerLiteral):
        raise TypingError("must be known when the function is compiled")
    return int(value.literal_value)


@_inlined
def get(ctx: Any, size: Any, base: Any, index: Any) -> Any:
    """Number at an index, as float32."""
    kind = _I16 if _known(size) == 2 else _F32

    def code(_: Any, b: Any, __: Any, args: Any) -> Any:
        number = b.load(_address(b, args[1], kind, args[2]), align=size.literal_value)
        return _widened(b, number) if kind is _I16 else number

    return float32(size, int64, int64), code


@_inlined
def put(ctx: Any, size: Any, base: Any, index: Any, value: Any) -> Any:
    """Write a float32."""
    kind = _I16 if _known(size) == 2 else _F32

    def code(context: Any, b: Any, _: Any, args: Any) -> Any:
        number = _rounded(b, args[3]) if kind is _I16 else args[3]
        b.store(number, _address(b, args[1], kind, args[2]), align=size.literal_value)
        return context.get_dummy_value()

    return void(size, int64, int64, float32), code


@_inlined
def get_int(ctx: Any, size: Any, base: Any, index: Any) -> Any:
    """int32 or int64 at an index, as int64."""
    kind = _I32 if _known(size) == 4 else _I64

    def code(_: Any, b: Any, __: Any, args: Any) -> Any:
        number = b.load(_address(b, args[1], kind, args[2]))
        return b.sext(number, _I64) if kind is _I32 else number

    return int64(size, int64, int64), code


@_inlined
def _prefetch(ctx: Any, base: Any, count: Any) -> Any:
    """Have `count` bytes brought to the cache."""
    line = 64

    def code(context: Any, b: Any, _: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        fetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        with cgutils.for_range(b, b.udiv(args[1], _I64(line))) as loop:
            place = b.inttoptr(b.add(args[0], b.mul(loop.index, _I64(line))), byte)
            b.call(fetch, [place, _I32(0), _I32(2), _I32(1)])
        return context.get_dummy_value()

    return void(int64, int64), code


@_inlined
def _scaled(ctx: Any, x: Any, exponent: Any) -> Any:
    """x 2**exponent, for results that are neither too large nor too small for float32."""

    def code(_: Any, b: Any, __: Any, args: Any) -> Any:
        return b.bitcast(b.add(b.bitcast(args[0], _I32), b.shl(b.fptosi(args[1], _I32), _I32(23))), _F32)

    return float32(float32, float32), code


@_jitted
def exp(x: Any) -> Any:
    """e**x to 1e-7 for x from -87 to 88, where it is cut off. In vectors, which the C library's is not."""
    x = float32(-87.0) if x < float32(-87.0) else x
    x = float32(88.0) if x > float32(88.0) else x
    n = np.floor(x * float32(1 / math.log(2)) + float32(0.5))
    # log 2 in two parts, of which the first has so few digits that its multiples are exact; |r| <= log(2) / 2.
    r = x - n * float32(0.693359375)
    r = r - n * float32(math.log(2) - 0.693359375)
    p = float32(1 / 5040)
    p = p * r + float32(1 / 720)
    p = p * r + float32(1 / 120)
    p = p * r + float32(1 / 24)
    p = p * r + float32(1 / 6)
    p = p * r + float32(0.5)
    return _scaled(p * (r * r) + r + float32(1), n)


# ---- attention's two inner loops, in vectors that stay in registers -------------------------------------------


def _vector(b: Any, base: Any, offset: Any, size: int, lanes: int) -> Any:
    kind = _I16 if size == 2 else _F32
    pointer = b.bitcast(_address(b, base, kind, offset), ir.VectorType(kind, lanes).as_pointer())
    numbers = b.load(pointer, align=size)
    return _widened(b, numbers) if size == 2 else numbers


def _multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    return b.fadd(b.fmul(x, y, flags=("contract",)), z, flags=("contract",))


@_inlined
def _scores(
    ctx: Any, size: Any, dim: Any, group: Any, q: Any, k: Any, stride: Any, count: Any, out: Any, pitch: Any
) -> Any:
    """out[g, t] = q[g] k[t] for g < group and t < count: q [group, dim] and out float32, k `stride` numbers apart."""
    width, heads, bytes_ = _known(dim), _known(group), _known(size)
    lanes = math.gcd(width, _LANES)
    vector = ir.VectorType(_F32, lanes)

    def code(context: Any, b: Any, _: Any, args: Any) -> Any:
        q, k, stride, count, out, pitch = args[3:]
        name = f"llvm.vector.reduce.fadd.v{lanes}f32"
        total = cgutils.get_or_insert_function(b.module, ir.FunctionType(_F32, [_F32, vector]), name)
        with cgutils.for_range(b, count) as loop:
            start = b.mul(loop.index, stride)
            keys = [_vector(b, k, b.add(start, _I64(d)), bytes_, lanes) for d in range(0, width, lanes)]
            for g in range(heads):
                products = ir.Constant(vector, [0.0] * lanes)
                for i, key in enumerate(keys):
                    products = _multiply_add(
                        b, _vector(b, q, _I64(g * width + i * lanes), 4, lanes), key, products
                    )
                score = b.call(total, [_F32(0.0), products], fastmath=("reassoc", "nsz"))
                b.store(score, _address(b, out, _F32, b.add(loop.index, b.mul(_I64(g), pitch))), align=4)
        return context.get_dummy_value()

    return void(size, dim, group, *[int64] * 6), code


@_inlined
def _mixed(
    ctx: Any, size: Any, dim: Any, group: Any, p: Any, pitch: Any, v: Any, stride: Any, count: Any, out: Any
) -> Any:
    """out[g] += sum over t < count of p[g, t] v[t]: p and out [group, dim] float32, v `stride` numbers apart."""
    width, heads, bytes_ = _known(dim), _known(group), _known(size)
    lanes = math.gcd(width, _LANES)
    vector = ir.VectorType(_F32, lanes)

    def code(context: Any, b: Any, _: Any, args: Any) -> Any:
        p, pitch, v, stride, count, out = args[3:]
        places = [(g, d) for g in range(heads) for d in range(0, width, lanes)]
        sums = {place: cgutils.alloca_once(b, vector) for place in places}
        for (g, d), register in sums.items():
            b.store(_vector(b, out, _I64(g * width + d), 4, lanes), register)
        with cgutils.for_range(b, count) as loop:
            start = b.mul(loop.index, stride)
            weights = []
            for g in range(heads):
                at = b.add(loop.index, b.mul(_I64(g), pitch))
                one = b.insert_element(
                    ir.Constant(vector, ir.Undefined), b.load(_address(b, p, _F32, at), align=4), _I32(0)
                )
                everywhere = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
                weights.append(b.shuffle_vector(one, one, everywhere))
            for d in range(0, width, lanes):
                value = _vector(b, v, b.add(start, _I64(d)), bytes_, lanes)
                for g in range(heads):
                    register = sums[g, d]
                    b.store(_multiply_add(b, weights[g], value, b.load(register)), register)
        for (g, d), register in sums.items():
            pointer = b.bitcast(_address(b, out, _F32, _I64(g * width + d)), vector.as_pointer())
            b.store(b.load(register), pointer, align=4)
        return context.get_dummy_value()

    return void(size, dim, group, *[int64] * 6), code


@njit(error_model="numpy", fastmath=_FAST | {"nnan"})
def _largest(x: int, count: int) -> Any:
    found = get(4, x, 0)
    for i in range(1, count):
        number = get(4, x, i)
        found = number if number > found else found
    return found


@_jitted
def _softmax(x: int, count: int) -> None:
    """In place, of float32."""
    most = _largest(x, count)
    total = float32(0)
    for i in range(count):
        e = exp(get(4, x, i) - most)
        put(4, x, i, e)
        total += e
    share = float32(1) / total
    for i in range(count):
        put(4, x, i, get(4, x, i) * share)


# ---- what a step calls ----------------------------------------------------------------------------------------

STEP = (
    *("rows", "decodes", "heads", "kv_heads", "page_tokens", "pages", "pitch"),
    *("positions", "slots", "page_table", "context_len", "cos", "sin", "q", "scores", "chunk_q"),
)
"""What `attention` reads of a step, int64 each: numbers, then addresses of tensors of `Batch`, of the cosines of position
0 and its sines (float32, rows `dim` apart), of room for q [decodes, heads, dim] and scores [heads, pitch] in float32,
and of where rotated queries of chunks go, [rows - decodes, heads, dim]."""
(_ROWS, _DECODES, _HEADS, _KV_HEADS, _PAGE_TOKENS, _PAGES, _PITCH) = range(7)
(_POSITIONS, _SLOTS, _PAGE_TABLE, _CONTEXT_LEN, _COS, _SIN, _Q, _SCORES, _CHUNK_Q) = range(7, 16)


def _compiled(signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile now, or read what was compiled before from disk where there is a place for it."""

    def compile_(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            made: Callable[..., Any] = njit(signature, cache=True, **_OPTIONS, **options)(function)
        except RuntimeError:  # neither beside this file nor in a user's cache may be written
            made = njit(signature, **_OPTIONS, **options)(function)
        return made

    return compile_


@cache
def add_norm(size: int) -> Callable[..., None]:
    """`f(x, residual, weight, out, total, rows, width, eps)`: total = x + residual, out = RMS norm of total.

    With a residual of 0 (no address) `total` is not written. The sum is rounded before its norm is taken.
    """

    @_compiled(void(*[int64] * 7, float32))
    def run(
        x: int, residual: int, weight: int, out: int, total: int, rows: int, width: int, eps: float
    ) -> None:
        for row in range(rows):
            at = row * width * size
            source = x + at
            if residual != 0:
                for i in range(width):
                    put(size, total + at, i, get(size, x + at, i) + get(size, residual + at, i))
                source = total + at
            squares = float32(0)
            for i in range(width):
                number = get(size, source, i)
                squares += number * number
            factor = float32(1) / np.sqrt(squares / float32(width) + eps)
            for i in range(width):
                put(size, out + at, i, get(size, source, i) * factor * get(size, weight, i))

    return run


@cache
def silu_mul(size: int) -> Callable[..., None]:
    """`f(gate_up, out, rows, width)`: gate_up [rows, 2 width] to silu(gate) * up."""

    @_compiled(void(*[int64] * 4))
    def run(gate_up: int, out: int, rows: int, width: int) -> None:
        for row in range(rows):
            gate = gate_up + row * 2 * width * size
            up, to = gate + width * size, out + row * width * size
            for i in range(width):
                x = get(size, gate, i)
                put(size, to, i, x / (float32(1) + exp(-x)) * get(size, up, i))

    return run


@cache
def attention(size: int, dim: int, group: int) -> Callable[..., None]:
    """`f(step, qkv, k, v, out, q_norm, k_norm, eps)`: rotate and write K and V of all rows, attend those that decode.

    `step` is the address of `STEP`; norms of 0 (no address) are none; `out` is [rows, heads * dim].
    """
    half = dim // 2
    scale = np.float32(dim**-0.5)

    @_compiled(void(*[int64] * 7, float32), nogil=True)
    def run(step: int, qkv: int, k: int, v: int, out: int, q_norm: int, k_norm: int, eps: float) -> None:
        rows, decodes = get_int(8, step, _ROWS), get_int(8, step, _DECODES)
        heads, kv_heads = get_int(8, step, _HEADS), get_int(8, step, _KV_HEADS)
        q, scores = get_int(8, step, _Q), get_int(8, step, _SCORES)
        stride = kv_heads * dim
        for row in range(rows):
            position, slot = (
                get_int(8, get_int(8, step, _POSITIONS), row),
                get_int(8, get_int(8, step, _SLOTS), row),
            )
            cos = get_int(8, step, _COS) + position * dim * 4
            sin = get_int(8, step, _SIN) + position * dim * 4
            x = qkv + row * (heads + 2 * kv_heads) * dim * size
            for head in range(heads + kv_heads):
                norm = q_norm if head < heads else k_norm
                factor = float32(1)
                if norm != 0:
                    squares = float32(0)
                    for i in range(dim):
                        number = get(size, x, i)
                        squares += number * number
                    factor = float32(1) / np.sqrt(squares / float32(dim) + eps)
                    for i in range(dim):
                        put(size, x, i, get(size, x, i) * factor * get(size, norm, i))
                if head < heads and row < decodes:
                    to = q + (row * heads + head) * dim * 4
                    for i in range(half):
                        a, b = get(size, x, i) * scale, get(size, x, i + half) * scale
                        put(4, to, i, a * get(4, cos, i) - b * get(4, sin, i))
                        put(4, to, i + half, b * get(4, cos, i) + a * get(4, sin, i))
                else:
                    if head < heads:
                        to = get_int(8, step, _CHUNK_Q) + ((row - decodes) * heads + head) * dim * size
                    else:
                        to = k + (slot * kv_heads + head - heads) * dim * size
                    for i in range(half):
                        a, b = get(size, x, i), get(size, x, i + half)
                        put(size, to, i, a * get(4, cos, i) - b * get(4, sin, i))
                        put(size, to, i + half, b * get(4, cos, i) + a * get(4, sin, i))
                x += dim * size
            to = v + slot * stride * size
            for i in range(stride):
                put(size, to, i, get(size, x, i))
        # All K and V are written before any row attends: pages may be shared with whom fills them in this very step.
        page_tokens, pitch = get_int(8, step, _PAGE_TOKENS), get_int(8, step, _PITCH)
        page_bytes = page_tokens * stride * size
        ahead = page_bytes <= _PAGE_AHEAD
        for row in range(decodes):
            context = get_int(4, get_int(8, step, _CONTEXT_LEN), row)
            pages = get_int(8, step, _PAGE_TABLE) + row * get_int(8, step, _PAGES) * 4
            mine = q + row * heads * dim * 4
            for start in range(0, context, page_tokens):
                count = min(page_tokens, context - start)
                page = k + get_int(4, pages, start // page_tokens) * page_bytes
                if ahead and start + page_tokens < context:
                    _prefetch(k + get_int(4, pages, start // page_tokens + 1) * page_bytes, page_bytes)
                for head in range(kv_heads):
                    first = head * group
                    _scores(
                        size, dim, group, mine + first * dim * 4, page + head * dim * size, stride, count,
                        scores + (first * pitch + start) * 4, pitch,
                    )  # fmt: skip
            for head in range(heads):
                _softmax(scores + head * pitch * 4, context)
            for i in range(heads * dim):
                put(4, mine, i, float32(0))
            for start in range(0, context, page_tokens):
                count = min(page_tokens, context - start)
                page = v + get_int(4, pages, start // page_tokens) * page_bytes
                if ahead and start + page_tokens < context:
                    _prefetch(v + get_int(4, pages, start // page_tokens + 1) * page_bytes, page_bytes)
                for head in range(kv_heads):
                    first = head * group
                    _mixed(
                        size, dim, group, scores + (first * pitch + start) * 4, pitch,
                        page + head * dim * size, stride, count, mine + first * dim * 4,
                    )  # fmt: skip
            for i in range(heads * dim):
                put(size, out + row * heads * dim * size, i, get(4, mine, i))

    return run
