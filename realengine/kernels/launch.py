"""How a Triton kernel is started, or compiled without a GPU: the grid, its arguments and its tile.

Every kernel module builds `Launch` objects from tensors, so that the check that compiles for a GPU that is not there
(`compiled.py`) sees the very types, alignments and constants that a run sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

jit: Callable[[Callable[..., Any]], Any] = triton.jit


def jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit` that makes no variant of the kernel for a 1 or a multiple of 16 among these arguments.

    They change from step to step (tokens, sequences, where the rows of chunks begin in an array of all sequences), and
    a variant would be compiled in the middle of serving.
    """
    decorator: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=list(names))
    return decorator


INTERPRETING = bool(triton.knobs.runtime.interpret)
if INTERPRETING:
    from realengine.kernels.interpreter import repair

    repair()


@dataclass(frozen=True)
class Device:
    """What the choice of a tile depends on. `arch` is 10 × compute capability, 0 for the interpreter."""

    name: str
    arch: int
    multiprocessors: int


INTERPRETER = Device("interpreter", 0, 4)
_assumed: list[Device] = []


@contextmanager
def assume(device: Device) -> Iterator[None]:
    """Build launches as if for `device`; their tensors may be on the meta device."""
    _assumed.append(device)
    try:
        yield
    finally:
        _assumed.pop()


def device_of(tensor: Tensor) -> Device:
    """The device that a kernel over `tensor` would run on."""
    if _assumed:
        return _assumed[-1]
    if tensor.is_cuda:
        return _cuda_device(tensor.device.index or 0)
    if INTERPRETING:
        return INTERPRETER
    raise _not_on_a_gpu(tensor)


def _not_on_a_gpu(tensor: Tensor) -> RuntimeError:
    return RuntimeError(
        f"Triton kernels need tensors on a GPU, not on {tensor.device}; on the CPU use the references "
        "(realengine.kernels.operators), or set TRITON_INTERPRET=1 before Triton is imported"
    )


@lru_cache
def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(properties.name, properties.major * 10 + properties.minor, properties.multi_processor_count)


@dataclass(frozen=True)
class Tile:
    """Block sizes along a kernel's two tiled axes, warps per program and depth of the software pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


@dataclass
class Launch:
    """One kernel over one grid. `args` are run-time arguments in order, `constants` compile-time ones by name."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 1

    def run(self) -> None:
        """Start it on the current stream; a grid with an empty side is nothing to do."""
        first = self.args[0]
        if not INTERPRETING and not first.is_cuda:
            raise _not_on_a_gpu(first)
        if 0 not in self.grid:
            self.kernel[self.grid](*self.args, **self.constants, num_warps=self.warps, num_stages=self.stages)

    def compile(self, arch: int) -> Any:
        """Triton's compiled kernel for `arch`, specialised as a launch with these arguments would be.

        Pointers and numbers divisible by 16 are declared so, 1 becomes a constant and None disappears: without these
        hints loads are one element wide.
        """
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        same_for_all = {param.name for param in self.kernel.params if param.do_not_specialize}
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        hints: dict[tuple[int, ...], list[list[Any]]] = {}
        for position, (name, value) in enumerate(zip(names, self.args, strict=False)):
            if isinstance(value, Tensor):
                signature[name] = "*" + _TYPE_NAMES[value.dtype]
                if name not in same_for_all:
                    hints[(position,)] = [["tt.divisibility", 16]]
            elif value is None or (value == 1 and name not in same_for_all):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and name not in same_for_all:
                    hints[(position,)] = [["tt.divisibility", 16]]
        for name, value in self.constants.items():
            signature[name], constants[name] = "constexpr", value
        source = ASTSource(self.kernel, signature, constants, hints)
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


_TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int32: "i32",
    torch.int64: "i64",
}

TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def power_of_2(n: int) -> int:
    """The least power of two that is at least n, the size Triton's ranges must have."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)
