"""The operators that a model is made of, by device: Triton kernels on CUDA, PyTorch operators on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from realengine.architecture import Rope
from realengine.batch import Batch, LayerCache
from realengine.kernels import Operators, operators
from realengine.quant import Matrix
from realengine.quant_kernels import kernel_linear
from realengine.recent_kernels import NoRecent, RecentLayer

if TYPE_CHECKING:
    from realengine.models import HeadNorms

Linear = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out]."""
Weight = Tensor | Matrix
"""A matrix [out, in], plain or quantised."""
NO_RECENT = NoRecent()


class Attend(Protocol):
    """Attention of one step's tokens, layer by layer."""

    def __call__(self, qkv: Tensor, cache: LayerCache, norms: HeadNorms | None) -> Tensor:
        """Rotate q and k, write k and v to the cache, attend: [T, (H + 2 KVH) D] -> [T, H D]."""


class Ops(Protocol):
    """What a kind of device can do."""

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """`x -> x weightᵀ + bias`, with the weight [out, in] laid out as this device likes it."""

    def add_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """RMS norm of `x + residual`, and that sum (the next residual)."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of the halves of the last axis."""

    def attention(self, batch: Batch, num_heads: int, num_kv_heads: int) -> Attend:
        """Attention for the rows of `batch`; called once a step."""


def rotary_tables(
    rope: Rope, head_dim: int, max_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, float32 [max_positions, head_dim / 2]."""
    frequencies = torch.from_numpy(rope.frequencies(head_dim)).to(torch.float32)
    angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return angles.cos().to(device), angles.sin().to(device)


def make_ops(
    rope: Rope,
    head_dim: int,
    max_positions: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    group: int | None = None,
) -> Ops:
    """The fastest operators for `device`; `dtype` is that of activations.

    With `group`, the query heads of a KV head, what is to be compiled for them is compiled now and not in a step.
    """
    cos, sin = rotary_tables(rope, head_dim, max_positions, device)
    if device.type == "cpu":
        from realengine.glue import cpu_ops

        return cpu_ops(cos, sin, dtype, group)
    return KernelOps(cos, sin, operators(device))


class KernelOps:
    """The operators of `realengine.kernels`: Triton's on CUDA; elsewhere their references, for tests."""

    def __init__(self, cos: Tensor, sin: Tensor, kernels: Operators) -> None:
        self._cos, self._sin, self._kernels = cos, sin, kernels

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        if not isinstance(weight, Tensor):
            return kernel_linear(weight, bias, self._kernels)
        return lambda x: linear(x, weight, bias)

    def add_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self._kernels.rms_norm(x, weight, eps), x
        normed, total = self._kernels.rms_norm(x, weight, eps, residual)
        return normed, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out: Tensor = self._kernels.silu_mul(gate_up)
        return out

    def attention(self, batch: Batch, num_heads: int, num_kv_heads: int) -> Attend:
        kernels, cos, sin = self._kernels, self._cos, self._sin
        decodes = batch.num_decodes
        tables, lengths = batch.page_table, batch.context_len

        def attend(qkv: Tensor, cache: LayerCache, norms: HeadNorms | None) -> Tensor:
            dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
            q, k, v = torch.split(qkv.view(len(qkv), -1, dim), [num_heads, num_kv_heads, num_kv_heads], 1)
            named = {"q_norm": norms.q, "k_norm": norms.k, "eps": norms.eps} if norms is not None else {}
            scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
            recent = NO_RECENT if batch.recent is None else RecentLayer(batch, cache, k, v)
            q = kernels.rotary_write_kv(
                *(q, k, v, cos, sin, batch.positions, cache.k, cache.v, batch.slots),
                **named,
                **scales,
                **recent.write,
            )
            out = torch.empty_like(q)
            scale = dim**-0.5
            if decodes:
                kernels.paged_decode_attention(
                    *(
                        q[:decodes],
                        cache.k,
                        cache.v,
                        tables[:decodes],
                        lengths[:decodes],
                        scale,
                        out[:decodes],
                    ),
                    **scales,
                    **recent.decodes,
                )
            if decodes < len(tables):
                kernels.paged_prefill_attention(
                    q[decodes:],
                    cache.k,
                    cache.v,
                    tables[decodes:],
                    batch.query_start,
                    lengths[decodes:],
                    scale,
                    batch.max_query,
                    out[decodes:],
                    **scales,
                    **recent.chunks,
                )
                recent.keep(kernels)
            return out.view(len(qkv), -1)

        return attend
