"""Repairs of Triton's interpreter (TRITON_INTERPRET=1), which runs the kernels on the CPU in tests. Nothing else.

Two faults, in the versions named; a self-test follows every repair, and a failure of it stops the program:

* bfloat16 (all versions to 3.9 at least): the interpreter keeps bfloat16 as uint16 and computes on the bits. Here it
  is `ml_dtypes.bfloat16`, seen as uint16 only where C++ code moves it, and rounded to nearest even.
* Loops with a run-time bound (before 3.7, with NumPy 2.4 or later): a scalar is an array of shape (1,), whose `int()`
  NumPy no longer gives, so `range(n)` raises.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def repair() -> None:
    """Patch the interpreter, once, and test it. Call before the first kernel is launched."""
    from triton.runtime import interpreter

    if getattr(interpreter, "_tokentwin_repaired", False):
        return
    _repair_bfloat16(interpreter)
    _repair_index(interpreter)
    interpreter._tokentwin_repaired = True
    _self_test()


def _repair_bfloat16(interpreter: Any) -> None:
    import triton.language as tl

    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        raise ImportError(
            "Triton's interpreter needs ml_dtypes for bfloat16: pip install ml_dtypes"
        ) from error
    bf16 = np.dtype(bfloat16)
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    numpy_type = interpreter._get_np_dtype
    dot, fp_to_fp, atomic = builder.create_dot, builder.create_fp_to_fp, builder.create_atomic_rmw

    def get_np_dtype(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return bf16 if scalar == tl.bfloat16 else numpy_type(kind)

    def masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *hints: Any, **named: Any) -> Any:
        element = ptrs.get_element_ty()
        kind = get_np_dtype(element)
        moved = np.dtype(np.uint16) if kind == bf16 else kind
        fill = np.zeros(ptrs.data.shape, kind) if other is None else other.data
        loaded = interpreter._interpreter.load(ptrs.data, mask.data, fill.view(moved), moved)
        return handle(loaded.view(kind), element)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *hints: Any) -> Any:
        moved = value.data.view(np.uint16) if value.data.dtype == bf16 else value.data
        return interpreter._interpreter.store(ptrs.data, moved, mask.data)

    def cast(self: Any, source: Any, kind: Any) -> Any:
        return handle(source.data.astype(get_np_dtype(kind)), kind.scalar)

    def float_to_float(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, kind.scalar):
            return cast(self, source, kind)
        return fp_to_fp(self, source, kind, rounding)

    def dot_in_float32(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype == bf16:
            a = handle(a.data.astype(np.float32), tl.float32)
        if b.data.dtype == bf16:
            b = handle(b.data.astype(np.float32), tl.float32)
        return dot(self, a, b, d, *options)

    def no_bf16_atomic(self: Any, operation: Any, ptr: Any, value: Any, *rest: Any) -> Any:
        if value.data.dtype == bf16:
            raise NotImplementedError("bfloat16 atomics cannot be interpreted")
        return atomic(self, operation, ptr, value, *rest)

    interpreter._get_np_dtype = get_np_dtype
    builder.create_masked_load = masked_load
    builder.create_masked_store = masked_store
    builder.cast_impl = cast
    builder.create_fp_to_fp = float_to_float
    builder.create_dot = dot_in_float32
    builder.create_atomic_rmw = no_bf16_atomic


def _repair_index(interpreter: Any) -> None:
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7):
        return
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


def _self_test() -> None:
    """Both repairs on numbers that the faulty interpreter gets wrong."""
    import torch

    from realengine.kernels import interpreter_test_kernel

    # 257 steps of 1/128 above 1: the product needs rounding to nearest even in bfloat16.
    x = (1 + torch.arange(256) / 128).view(16, 16).to(torch.bfloat16)
    try:
        got = interpreter_test_kernel.third_and_square(x, rounds=3)
    except Exception as error:
        raise RuntimeError(f"Triton's interpreter is not usable here: {error}") from error
    third = (x.float() * 3 / 8).to(torch.bfloat16)
    expected = torch.stack((third, (third.float() @ third.float()).to(torch.bfloat16)))
    if not torch.equal(got, expected):
        raise RuntimeError(
            "Triton's interpreter computes bfloat16 wrongly in spite of realengine's repair of it"
        )
