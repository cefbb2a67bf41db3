"""The operators of the CPU with what lies between the products compiled (`realengine.glue_kernels`).

Where rows are few PyTorch's operators cost more to call than to compute. What the compiled ones do not take, other types,
quantised caches, work that is worth many threads, is PyTorch's, which also is the reference of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realengine.batch import Batch, LayerCache
from realengine.ops_torch import PlainCache, TorchAttention, TorchOps

if TYPE_CHECKING:
    from realengine.models import HeadNorms
    from realengine.ops import Attend, Linear, Weight

_ONE_THREAD = 2**15
"""Numbers up to which PyTorch's elementwise operators stay on one thread."""
_NORM_THREADS = 2
"""Compiled norms on one thread were as fast as PyTorch's on so many, however many rows."""
_ATTENTION_THREADS = 3
"""The same of attention of decodes, which gathers nothing; it was 2 to 9 times as fast as PyTorch's on one thread."""
_FEW_KEYS = 2**18
"""Numbers of K, read by decodes or written, up to which it takes no longer than calling PyTorch's operators does."""


def cpu_ops(cos: Tensor, sin: Tensor, dtype: torch.dtype, group: int | None = None) -> TorchOps:
    """The fastest operators of the CPU that are installed, for float32 tables [max_positions, head_dim / 2].

    With `group`, the query heads of a KV head, attention is compiled at once and not in the first step.
    """
    if dtype in (torch.float32, torch.bfloat16):
        try:
            from realengine import glue_kernels
        except ImportError:
            pass
        else:
            if group is not None:
                glue_kernels.attention(dtype.itemsize, 2 * cos.shape[1], group)
            return CompiledOps(cos, sin, dtype, glue_kernels)
    return TorchOps(cos, sin, dtype)


def _takes(dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    return all(x is None or (x.dtype is dtype and x.is_contiguous()) for x in tensors)


class CompiledOps(TorchOps):
    """Operators of which those between the products are compiled."""

    def __init__(self, cos: Tensor, sin: Tensor, dtype: torch.dtype, kernels: ModuleType) -> None:
        super().__init__(cos, sin, dtype)
        self._kernels = kernels
        self._norm, self._silu = kernels.add_norm(dtype.itemsize), kernels.silu_mul(dtype.itemsize)
        from realengine.few_rows import MOST_ROWS, few_rows

        self._few_rows, self._most_rows = few_rows, MOST_ROWS

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        many = super().linear(weight, bias)
        few = self._few_rows(weight, bias) if isinstance(weight, Tensor) else None
        if few is None:
            return many
        most = self._most_rows

        def product(x: Tensor) -> Tensor:
            rows = len(x)
            return few(x) if rows == 1 or (0 < rows <= most and torch.get_num_threads() > 1) else many(x)

        return product

    def add_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        count = x.numel()
        if not _takes(self._dtype, x, residual, weight) or (
            count > _ONE_THREAD and torch.get_num_threads() > _NORM_THREADS
        ):
            return super().add_norm(x, residual, weight, eps)
        out, width = torch.empty_like(x), x.shape[1]
        total, added = (x, 0) if residual is None else (torch.empty_like(x), residual.data_ptr())
        self._norm(
            *(x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), total.data_ptr()),
            *(count // width, width, eps),
        )
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        width //= 2
        if not _takes(self._dtype, gate_up) or (rows * width > _ONE_THREAD and torch.get_num_threads() > 1):
            return super().silu_mul(gate_up)
        out = gate_up.new_empty(rows, width)
        self._silu(gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out

    def attention(self, batch: Batch, num_heads: int, num_kv_heads: int) -> Attend:
        tokens = int(batch.context_len[: batch.num_decodes].sum()) + len(batch.positions)
        many = tokens * num_kv_heads * self._cos.shape[1] > _FEW_KEYS
        # Reading float32 from memory keeps two threads busy; small groups cost PyTorch more than that.
        wide = self._dtype is torch.float32 and num_heads > 4 * num_kv_heads
        threads = 1 if wide else _ATTENTION_THREADS
        if batch.recent is not None or (many and torch.get_num_threads() > threads):
            return super().attention(batch, num_heads, num_kv_heads)
        return CompiledAttention(batch, self._cos, self._sin, num_heads, num_kv_heads, self._kernels)


class CompiledAttention(TorchAttention):
    """Rotation, writing and attention of decodes in one compiled call a layer; chunks attend as they do in PyTorch."""

    def __init__(
        self, batch: Batch, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, kernels: ModuleType
    ) -> None:
        super().__init__(batch, cos, sin, num_heads, num_kv_heads)
        self._kernels = kernels
        self._run: Callable[..., None] | None = None
        self._step = 0
        self._kept: list[Tensor | npt.NDArray[np.int64]] = []

    def __call__(self, qkv: Tensor, cache: LayerCache, norms: HeadNorms | None) -> Tensor:
        if self._run is None:
            if self._made or not _takes(qkv.dtype, qkv, cache.k, cache.v):
                return super().__call__(qkv, cache, norms)
            self._describe(cache, qkv)
        assert self._run is not None
        rows, dim, decodes = len(qkv), cache.k.shape[3], self.batch.num_decodes
        out = qkv.new_empty(rows, self.num_heads * dim)
        weights = (0, 0, 0.0) if norms is None else (norms.q.data_ptr(), norms.k.data_ptr(), norms.eps)
        self._run(
            *(self._step, qkv.data_ptr(), cache.k.data_ptr(), cache.v.data_ptr(), out.data_ptr()), *weights
        )
        if not self._chunks:
            return out
        store = PlainCache(cache)
        for chunk in self._chunks:
            q = self._chunk_q[chunk.start - decodes : chunk.end - decodes]
            part = self._chunk(q, chunk, store, dim)
            if len(part) == rows:
                return part
            out[chunk.start : chunk.end] = part
        return out

    def _describe(self, cache: LayerCache, qkv: Tensor) -> None:
        """What all layers share: `STEP` of the kernels, and which slots chunks attend."""
        batch, heads = self.batch, self.num_heads
        pages, page_tokens, kv_heads, dim = cache.k.shape
        rows, decodes = len(qkv), batch.num_decodes
        width = batch.page_table.shape[1]
        lengths = batch.context_len[:decodes]
        longest = int(lengths.max()) if decodes else 0
        # Compiled code would read and write whatever lies there.
        for what, values, end in (
            ("position", batch.positions, len(self.cos)),
            ("slot", batch.slots, pages * page_tokens),
            ("page", batch.page_table, pages),
            ("context length", lengths, width * page_tokens + 1),
        ):
            if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < end:
                raise IndexError(f"a {what} of the step is not in 0 to {end - 1}")
        # Rows of scores a power of two apart would compete for the same lines of the processor's cache.
        pitch = -(-longest // 16) * 16 + 16
        self._chunk_q = qkv.new_empty(rows - decodes, heads, dim)
        tensors = {
            "positions": batch.positions.to(torch.int64).contiguous(),
            "slots": batch.slots.to(torch.int64).contiguous(),
            "page_table": batch.page_table.to(torch.int32).contiguous(),
            "context_len": batch.context_len.to(torch.int32).contiguous(),
            "cos": self.cos,
            "sin": self.sin[:, dim // 2 :],
            "q": torch.empty(decodes, heads, dim),
            "scores": torch.empty(heads, pitch),
            "chunk_q": self._chunk_q,
        }
        fields = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        fields |= {"rows": rows, "decodes": decodes, "heads": heads, "kv_heads": kv_heads}
        fields |= {"page_tokens": page_tokens, "pages": width, "pitch": pitch}
        step = np.array([fields[name] for name in self._kernels.STEP], np.int64)
        self._kept = [step, *tensors.values()]
        self._step = step.ctypes.data
        self._run = self._kernels.attention(qkv.dtype.itemsize, dim, heads // kv_heads)
        self._prepare_chunks(page_tokens, qkv.dtype)
