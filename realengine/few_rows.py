"""Products of one or two tokens with a small bfloat16 matrix, compiled by Numba, on PyTorch's own threads.

oneDNN takes 9 µs for a call whatever its size, half of what reading a small matrix takes. This reads the plain matrix row
after row, and costs a microsecond to call. It is kept beside the packed one that more tokens need, so that only small
matrices, of which that much memory is made, are taken at all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import cfunc, float32, int64, void
from torch import Tensor

from realengine.glue_kernels import (
    _F32,
    _I32,
    _I64,
    _LANES,
    _OPTIONS,
    _address,
    _compiled,
    _inlined,
    _known,
    _multiply_add,
    cgutils,
    get,
    get_int,
    put,
)

MOST_ROWS = 2
"""Of more rows, and of two on one thread, which then computes longer than it reads, oneDNN's products were as fast."""
MOST_BYTES = 2**23
"""Of larger matrices reading takes so long that a call of oneDNN is a few percent of it."""
MOST_WIDTH = 4096
"""The rows lie on the stack in float32."""
_STEP = 2 * _LANES
_AHEAD = 4096
"""Bytes that are fetched early: a page, across which processors do not fetch by themselves."""
_JOB = 8
(_NEXT, _SHARE, _X, _WEIGHT, _BIAS, _OUT, _OUTPUTS, _WIDTH) = range(_JOB)
_BYTE = ir.IntType(8).as_pointer()


# ---- what Numba has no word for --------------------------------------------------------------------------------


@_inlined
def _room(ctx: Any, size: Any) -> Any:
    """Address of that many bytes on the stack."""
    count = _known(size)

    def code(_: Any, b: Any, __: Any, args: Any) -> Any:
        room = cgutils.alloca_once(b, ir.ArrayType(_I64, -(-count // 8)))
        return b.ptrtoint(room, _I64)

    return int64(size), code


@_inlined
def _set(ctx: Any, base: Any, index: Any, value: Any) -> Any:
    """Write an int64."""

    def code(context: Any, b: Any, _: Any, args: Any) -> Any:
        b.store(args[2], _address(b, args[0], _I64, args[1]))
        return context.get_dummy_value()

    return void(int64, int64, int64), code


@_inlined
def _take(ctx: Any, address: Any) -> Any:
    """The next number of a counter that threads share."""

    def code(_: Any, b: Any, __: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], _I64.as_pointer()), _I64(1), "monotonic")

    return int64(int64), code


@_inlined
def _on_threads(ctx: Any, parallel: Any, function: Any, job: Any, threads: Any) -> Any:
    """`function(job)` on a team of OpenMP's; by the caller alone where `parallel` is no address."""

    def code(context: Any, b: Any, _: Any, args: Any) -> Any:
        parallel, function, job, threads = args
        alone = b.icmp_unsigned("==", parallel, _I64(0))
        with b.if_else(alone) as (then, otherwise):
            with then:
                kind = ir.FunctionType(ir.VoidType(), [_I64])
                b.call(b.inttoptr(function, kind.as_pointer()), [job])
            with otherwise:
                kind = ir.FunctionType(ir.VoidType(), [_BYTE, _BYTE, _I32, _I32])
                parts = [b.inttoptr(function, _BYTE), b.inttoptr(job, _BYTE), b.trunc(threads, _I32), _I32(0)]
                b.call(b.inttoptr(parallel, kind.as_pointer()), parts)
        return context.get_dummy_value()

    return void(*[int64] * 4), code


@_inlined
def _dots(ctx: Any, rows: Any, x: Any, weight: Any, width: Any, out: Any) -> Any:
    """out[r] = x[r] weight, for one row of the matrix: x [rows, 2, width / 2] has even numbers before odd ones.

    Two bfloat16 are read as one int32, of which either half is a float32 but for a shift or a mask. Every row is summed
    in the same order, however many there are.
    """
    count = _known(rows)
    numbers, bits = ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)

    def code(context: Any, b: Any, _: Any, args: Any) -> Any:
        x, weight, width, out = args[1:]
        half = b.udiv(width, _I64(2))
        places = [(row, odd) for row in range(count) for odd in (0, 1)]
        sums = {place: cgutils.alloca_once(b, numbers) for place in places}
        for register in sums.values():
            b.store(ir.Constant(numbers, [0.0] * _LANES), register)
        kind = ir.FunctionType(ir.VoidType(), [_BYTE, _I32, _I32, _I32])
        fetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        with cgutils.for_range(b, b.udiv(width, _I64(_STEP))) as loop:
            at = b.mul(loop.index, _I64(_LANES))
            pairs = b.bitcast(_address(b, weight, _I32, at), bits.as_pointer())
            later = b.add(b.ptrtoint(pairs, _I64), _I64(_AHEAD))
            b.call(fetch, [b.inttoptr(later, _BYTE), _I32(0), _I32(3), _I32(1)])
            both = b.load(pairs, align=4)
            halves = (
                b.bitcast(b.shl(both, ir.Constant(bits, [16] * _LANES)), numbers),
                b.bitcast(b.and_(both, ir.Constant(bits, [-(2**16)] * _LANES)), numbers),
            )
            for (row, odd), register in sums.items():
                place = b.add(at, b.mul(half, _I64(2 * row + odd)))
                mine = b.load(b.bitcast(_address(b, x, _F32, place), numbers.as_pointer()), align=4)
                b.store(_multiply_add(b, halves[odd], mine, b.load(register)), register)
        name = f"llvm.vector.reduce.fadd.v{_LANES}f32"
        total = cgutils.get_or_insert_function(b.module, ir.FunctionType(_F32, [_F32, numbers]), name)
        for row in range(count):
            both = b.fadd(b.load(sums[row, 0]), b.load(sums[row, 1]))
            number = b.call(total, [_F32(0.0), both], fastmath=("reassoc", "nsz"))
            b.store(number, _address(b, out, _F32, _I64(row)), align=4)
        return context.get_dummy_value()

    return void(rows, *[int64] * 4), code


# ---- the product -----------------------------------------------------------------------------------------------


@cache
def _part(rows: int) -> Any:
    """A thread's work on a job: shares of the outputs until none is left, a late thread's too."""
    room = 4 * rows

    def run(job: int) -> None:
        x, weight, bias = get_int(8, job, _X), get_int(8, job, _WEIGHT), get_int(8, job, _BIAS)
        out, outputs, width = get_int(8, job, _OUT), get_int(8, job, _OUTPUTS), get_int(8, job, _WIDTH)
        share, found = get_int(8, job, _SHARE), _room(room)
        while True:
            first = _take(job) * share
            if first >= outputs:
                break
            for output in range(first, min(first + share, outputs)):
                _dots(rows, x, weight + output * width * 2, width, found)
                more = float32(0) if bias == 0 else get(2, bias, output)
                for row in range(rows):
                    put(2, out + row * outputs * 2, output, get(4, found, row) + more)

    try:
        return cfunc(void(int64), cache=True, **_OPTIONS)(run)
    except RuntimeError:  # no place to keep it, as in `_compiled`
        return cfunc(void(int64), **_OPTIONS)(run)


@cache
def product(rows: int) -> Callable[..., None]:
    """`f(parallel, part, threads, x, weight, bias, out, outputs, width)`: out = x weightᵀ + bias, all bfloat16.

    x [rows, width], weight [outputs, width], out [rows, outputs]; a bias of 0 (no address) means none. Rounded once.
    """
    job_room, x_room = 8 * _JOB, 4 * rows * MOST_WIDTH

    @_compiled(void(*[int64] * 9), nogil=True)
    def run(
        parallel: int,
        part: int,
        threads: int,
        x: int,
        weight: int,
        bias: int,
        out: int,
        outputs: int,
        width: int,
    ) -> None:
        job, wide = _room(job_room), _room(x_room)
        half = width // 2
        for row in range(rows):
            source, even = x + row * width * 2, wide + row * width * 4
            odd = even + half * 4
            for i in range(half):
                put(4, even, i, get(2, source, 2 * i))
                put(4, odd, i, get(2, source, 2 * i + 1))
        _set(job, _NEXT, 0)
        _set(job, _SHARE, -(-outputs // threads))
        _set(job, _X, wide)
        _set(job, _WEIGHT, weight)
        _set(job, _BIAS, bias)
        _set(job, _OUT, out)
        _set(job, _OUTPUTS, outputs)
        _set(job, _WIDTH, width)
        _on_threads(parallel, part, job, threads)

    return run


@cache
def _parallel() -> int:
    """Address of the OpenMP function that runs a team of the threads that PyTorch uses; 0 if it has none."""
    for library in Path(torch.__file__).parent.joinpath("lib").glob("libtorch_cpu.*"):
        try:
            function = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def few_rows(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """`x -> x weightᵀ + bias` for x [1 or 2, in]; None for a matrix that is not small bfloat16."""
    outputs, width = weight.shape
    small = weight.numel() * 2 <= MOST_BYTES and width <= MOST_WIDTH and width % _STEP == 0
    if (
        not small
        or weight.dtype is not torch.bfloat16
        or (bias is not None and bias.dtype is not weight.dtype)
    ):
        return None
    kept = weight.contiguous(), None if bias is None else bias.contiguous()
    places = kept[0].data_ptr(), 0 if kept[1] is None else kept[1].data_ptr()
    runs = {rows: (product(rows), _part(rows).address) for rows in range(1, MOST_ROWS + 1)}
    team = _parallel()

    def run(x: Tensor, kept: object = kept) -> Tensor:
        rows, threads = len(x), torch.get_num_threads()
        x = x.contiguous()
        out = x.new_empty(rows, outputs)
        function, part = runs[rows]
        function(
            *(team if threads > 1 else 0, part, threads, x.data_ptr(), *places, out.data_ptr()),
            *(outputs, width),
        )
        return out

    return run
