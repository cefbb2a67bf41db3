"""The quantised KV cache: which tensors it is made of, and how the CPU writes and reads it.

int8 and int4 have a scale per token and head (`kernels.kv_quant_ref`), so that writing a token never changes another,
and a page that sequences share never changes at all. fp8 (e4m3) has none. The CPU dequantises what it gathers; Triton's
attention kernels read the numbers as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from costmodel.formats import KV_DTYPES
from realengine.batch import LayerCache
from realengine.kernels.kv_quant_ref import quantize_kv
from realengine.quant import from_fp8, to_fp8
from serving.errors import UsageError, nearest

ENGINE_KV_DTYPES = tuple(name for name in KV_DTYPES if name != "fp8_e5m2")
"""`--kv-cache-dtype` names that the engine has."""

Layout = list[tuple[tuple[int, ...], torch.dtype]]


def cache_layout(kv_cache_dtype: str, head_dim: int, dtype: torch.dtype) -> Layout:
    """(last axes, type) of each tensor of a layer's cache: K, V and, of int8 and int4, their scales.

    `auto` caches in the engine's own `dtype`. Raises `UsageError` for a format that the engine does not have.
    """
    if kv_cache_dtype not in ENGINE_KV_DTYPES:
        raise UsageError(
            f"--kv-cache-dtype {kv_cache_dtype!r} is not known to the engine; "
            f"{nearest(kv_cache_dtype, ENGINE_KV_DTYPES)}"
        )
    name = KV_DTYPES[kv_cache_dtype]
    if name == "int4" and head_dim % 2:
        raise UsageError(
            f"--kv-cache-dtype int4: heads of {head_dim} numbers cannot be packed in pairs; use int8"
        )
    whole: tuple[int, ...] = (head_dim,)
    if kv_cache_dtype in ("bfloat16", "float16"):
        kind = torch.bfloat16 if kv_cache_dtype == "bfloat16" else torch.float16
        if kind != dtype:
            raise UsageError(
                f"--kv-cache-dtype {kv_cache_dtype}: the engine computes in {str(dtype).removeprefix('torch.')} and "
                "caches in that; leave it at auto, or set --dtype"
            )
    if name == "bfloat16":
        return [(whole, dtype)] * 2
    if name == "fp8":
        return [(whole, torch.float8_e4m3fn)] * 2
    stored = (whole, torch.int8) if name == "int8" else ((head_dim // 2,), torch.uint8)
    return [stored, stored, ((), torch.float32), ((), torch.float32)]


def check_device(kv_cache_dtype: str, device: torch.device) -> None:
    """Raise `UsageError` for an fp8 cache on a GPU that has no e4m3 numbers (before Ada and Hopper)."""
    if device.type != "cuda" or KV_DTYPES.get(kv_cache_dtype) != "fp8":
        return
    if torch.cuda.get_device_capability(device) < (8, 9):  # pragma: no cover - needs a GPU
        raise UsageError(f"--kv-cache-dtype {kv_cache_dtype}: this GPU has no fp8 (e4m3); use int8")


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, kv_cache_dtype: str, dtype: torch.dtype
) -> int:
    """Bytes that a token takes in the caches of all layers."""
    layout = cache_layout(kv_cache_dtype, head_dim, dtype)
    per_head = sum((last[0] if last else 1) * kind.itemsize for last, kind in layout)
    return num_layers * num_kv_heads * per_head


def kv_bits(cache: LayerCache, head_dim: int) -> int:
    """8 or 4 of a cache with scales; 16 of any other."""
    if cache.k_scale is None:
        return 16
    return 8 if cache.k.shape[-1] == head_dim else 4


class Scratch:
    """Buffers that the layers of a step use one after the other: memory that is new for each layer has to be mapped."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def take(self, what: str, which: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised; what was taken under this name before is overwritten."""
        count = math.prod(shape)
        buffer = self._buffers.get((what, which))
        if buffer is None or len(buffer) < count:
            buffer = self._buffers[what, which] = torch.empty(count, dtype=dtype)
        return buffer[:count].view(*shape)


class QuantisedCache:
    """One layer's quantised cache on the CPU, slot by slot."""

    def __init__(self, cache: LayerCache, head_dim: int, scratch: Scratch) -> None:
        self._bits = kv_bits(cache, head_dim)
        self._dim, self._scratch = head_dim, scratch
        self._parts = [tensor.flatten(0, 1) for tensor in cache.tensors]

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """K and V [T, KVH, D] of new tokens into their slots."""
        if self._bits == 16:
            for part, x in zip(self._parts, (k, v), strict=True):
                part.index_copy_(0, slots, to_fp8(x).view(torch.uint8))
            return
        heads = k.shape[1]
        levels, scales = quantize_kv(torch.cat((k, v), dim=1), self._bits)
        for which, half in enumerate((slice(None, heads), slice(heads, None))):
            self._parts[which].index_copy_(0, slots, levels[:, half])
            self._parts[which + 2].index_copy_(0, slots, scales[:, half])

    def read(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V [tokens, KVH, D] of the slots at `index`, in `dtype`, until the next call."""
        return self._read(0, index, dtype), self._read(1, index, dtype)

    def _read(self, which: int, index: Tensor, dtype: torch.dtype) -> Tensor:
        part = self._parts[which]
        size = (len(index), *part.shape[1:])
        stored = torch.index_select(part, 0, index, out=self._scratch.take("stored", which, size, part.dtype))
        if self._bits == 16:
            return from_fp8(stored, dtype)
        scales = self._parts[which + 2].index_select(0, index).to(dtype).unsqueeze(-1)
        out = self._scratch.take("numbers", which, (*size[:-1], self._dim), dtype)
        if self._bits == 8:
            return out.copy_(stored).mul_(scales)
        half = self._dim // 2
        high = torch.bitwise_right_shift(stored, 4, out=self._scratch.take("high", which, size, part.dtype))
        out[..., :half] = stored.bitwise_and_(15).view(torch.int8).sub_(8)
        out[..., half:] = high.view(torch.int8).sub_(8)
        return out.mul_(scales)


def has_own_layout(cache: LayerCache) -> bool:
    """Whether a cache needs `QuantisedCache` to be read."""
    return cache.k_scale is not None or cache.k.dtype == torch.float8_e4m3fn
