"""The operators on the CPU: PyTorch's own, arranged so that what a step shares between layers is made once.

Weights are laid out for oneDNN at loading where PyTorch has it: at one token a product then reads them at the speed of
memory, which plain `linear` does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from realengine.attention_blocks import block_attention, blocks_win, padded
from realengine.batch import Batch, LayerCache
from realengine.quant_cpu import quantised_linear
from realengine.quant_kv import QuantisedCache, Scratch, has_own_layout

if TYPE_CHECKING:
    from realengine.models import HeadNorms
    from realengine.ops import Attend, Linear, Weight


_FEW_ROWS = 8
"""Up to so many, an operator costs more to call than to compute."""
_PACKED_FOR_TOKENS = 16
"""Asked to pack for one token, oneDNN leaves float32 weights as they are, at two thirds of the speed."""


def packed_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """`x -> x weightᵀ + bias` over a packed copy of the weight; the plain one need not be kept."""
    if not torch._C._has_mkldnn or weight.dtype not in (torch.float32, torch.bfloat16):
        return lambda x: linear(x, weight, bias)
    mkldnn: Any = torch.ops.mkldnn
    packed = mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_TOKENS)
    product = mkldnn._linear_pointwise.default
    return lambda x: product(x, packed, bias, "none", [], "")


class TorchOps:
    """Operators of the CPU. `cos, sin` are float32 [max_positions, head_dim / 2]; `dtype` is that of activations."""

    def __init__(self, cos: Tensor, sin: Tensor, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        # Both halves of a head at once: x cos + swapped(x) sin, with the sign in the table.
        self._cos = torch.cat((cos, cos), dim=1)
        self._sin = torch.cat((-sin, sin), dim=1)
        self._doubled: dict[int, tuple[Tensor, Tensor]] = {}

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        if not isinstance(weight, Tensor):
            return quantised_linear(weight, bias, self._dtype)
        return packed_linear(weight, bias)

    def add_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if residual is not None:
            x = x + residual
        if len(x) > _FEW_ROWS:
            return torch.rms_norm(x, weight.shape, weight, eps), x
        # PyTorch's RMS norm is eight operators on a CPU, its layer norm one. Of (x, -x) the mean is 0 and the variance
        # the mean square of x.
        size = weight.shape[0]
        doubled = torch.layer_norm(
            torch.cat((x, x.neg()), dim=1), (2 * size,), self._twice(weight), None, eps
        )
        return doubled[:, :size], x

    def _twice(self, weight: Tensor) -> Tensor:
        known = self._doubled.get(id(weight))
        if known is None:  # the weight is kept too, so that its id stays its own
            known = self._doubled[id(weight)] = weight, torch.cat((weight, weight))
        return known[1]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def attention(self, batch: Batch, num_heads: int, num_kv_heads: int) -> Attend:
        if batch.recent is not None:
            from realengine.quant_recent import RecentAttention

            return RecentAttention(batch, self._cos, self._sin, num_heads, num_kv_heads)
        return TorchAttention(batch, self._cos, self._sin, num_heads, num_kv_heads)


class TorchAttention:
    """Attention of one step over the cache's pages; `cos` and `sin` are tables [max_positions, dim]."""

    def __init__(self, batch: Batch, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> None:
        self.batch = batch
        self.cos, self.sin = cos, sin
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self._made = False
        self._token_index: Tensor | None = None
        self._visible: Tensor | None = None
        self._chunks: list[Chunk] = []
        self.scratch = Scratch()

    def _prepare(self, page_tokens: int, dtype: torch.dtype) -> None:
        """Rotation, index and masks that every layer shares."""
        self._take_positions(dtype)
        decodes = self.batch.num_decodes
        if decodes:
            lengths = self.batch.context_len.long()
            tables = self.batch.page_table.long()
            length = int(lengths[:decodes].max())
            index = token_index(tables[:decodes], length, page_tokens)
            seen = torch.arange(length) < lengths[:decodes, None]
            if not bool(seen.all()):
                # Slots past the end may hold anything, NaN included: read the first token's instead, with weight 0.
                index = torch.where(seen, index, index[:, :1])
                self._visible = seen[:, None, None, :]
            self._token_index = index.flatten()
        self._prepare_chunks(page_tokens, dtype)

    def _take_positions(self, dtype: torch.dtype) -> None:
        self._made = True
        self.cos, self.sin = (
            table[self.batch.positions].unsqueeze(1).to(dtype) for table in (self.cos, self.sin)
        )

    def _prepare_chunks(self, page_tokens: int, dtype: torch.dtype) -> None:
        batch, decodes = self.batch, self.batch.num_decodes
        lengths, tables = batch.context_len, batch.page_table.long()
        starts = batch.query_start.tolist()
        for row in range(decodes, len(tables)):
            start, end = (decodes + starts[row - decodes + i] for i in (0, 1))
            context = int(lengths[row])
            index = token_index(tables[row : row + 1], context, page_tokens).flatten()
            if blocks := blocks_win(dtype, end - start, context):
                index = torch.cat((index, index[-1:].expand(padded(context) - context)))
            self._chunks.append(Chunk(start, end, context, index, blocks))

    def rotated(
        self, qkv: Tensor, page_tokens: int, norms: HeadNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k and v [T, KVH, D] with positions; what layers share is made at the first call."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        tokens, dim = qkv.shape[0], qkv.shape[1] // (heads + 2 * kv_heads)
        if not self._made:
            self._prepare(page_tokens, qkv.dtype)
        split = qkv.view(tokens, heads + 2 * kv_heads, dim)
        qk, v = split[:, : heads + kv_heads], split[:, heads + kv_heads :]
        if norms is not None:
            qk[:, :heads] = torch.rms_norm(qk[:, :heads], (dim,), norms.q, norms.eps)
            qk[:, heads:] = torch.rms_norm(qk[:, heads:], (dim,), norms.k, norms.eps)
        qk = torch.addcmul(qk * self.cos, qk.roll(dim // 2, -1), self.sin)
        return qk[:, :heads], qk[:, heads:], v

    def __call__(self, qkv: Tensor, cache: LayerCache, norms: HeadNorms | None) -> Tensor:
        q, k, v = self.rotated(qkv, cache.k.shape[1], norms)
        dim = q.shape[2]
        store = QuantisedCache(cache, dim, self.scratch) if has_own_layout(cache) else PlainCache(cache)
        store.write(self.batch.slots, k, v)
        decodes = self.batch.num_decodes
        if decodes == len(q):
            return self._decode(q, store, dim)
        parts = [self._decode(q[:decodes], store, dim)] if decodes else []
        parts += [self._chunk(q[chunk.start : chunk.end], chunk, store, dim) for chunk in self._chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, q: Tensor, store: QuantisedCache | PlainCache, dim: int) -> Tensor:
        """The heads of a group are the query rows of their KV head, so that K and V are never repeated."""
        rows, index = q.shape[0], self._token_index
        assert index is not None
        shape = (rows, -1, self.num_kv_heads, dim)
        k, v = (x.view(shape).transpose(1, 2) for x in store.read(index, q.dtype))
        q = q.reshape(rows, self.num_kv_heads, -1, dim)
        return scaled_dot_product_attention(q, k, v, self._visible).reshape(rows, -1)

    def _chunk(self, q: Tensor, chunk: Chunk, store: QuantisedCache | PlainCache, dim: int) -> Tensor:
        k, v = (x.view(len(chunk.index), self.num_kv_heads, dim) for x in store.read(chunk.index, q.dtype))
        if chunk.blocks:
            return block_attention(q, k, v, chunk.context)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = scaled_dot_product_attention(
            q, k, v, chunk.mask(), is_causal=chunk.whole, enable_gqa=self.num_kv_heads != self.num_heads
        )
        return out[0].transpose(0, 1).reshape(chunk.end - chunk.start, -1)


class PlainCache:
    """One layer's cache in the type of the activations, slot by slot."""

    def __init__(self, cache: LayerCache) -> None:
        width = cache.k.shape[2] * cache.k.shape[3]
        self._k, self._v = cache.k.view(-1, width), cache.v.view(-1, width)

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """K and V [T, KVH, D] of new tokens into their slots."""
        self._k.index_copy_(0, slots, k.reshape(len(slots), -1))
        self._v.index_copy_(0, slots, v.reshape(len(slots), -1))

    def read(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V [tokens, KVH * D] of the slots at `index`."""
        return self._k.index_select(0, index), self._v.index_select(0, index)


class Chunk:
    """Tokens `start` to `end` of the step, the last of `context` tokens at `index` in the cache.

    With `blocks` they attend in blocks, and `index` is padded with the last token.
    """

    def __init__(self, start: int, end: int, context: int, index: Tensor, blocks: bool) -> None:
        self.start, self.end, self.context, self.index, self.blocks = start, end, context, index, blocks
        self.whole = end - start == context
        self._mask: Tensor | None = None

    def mask(self) -> Tensor | None:
        """Who sees what, [tokens, context]; None for a whole prompt, where plain causality says it."""
        if self._mask is None and not self.whole:
            count = self.end - self.start
            last_seen = torch.arange(self.context - count, self.context)
            self._mask = torch.arange(self.context) <= last_seen.unsqueeze(1)
        return self._mask


def token_index(tables: Tensor, length: int, page_tokens: int) -> Tensor:
    """Slots of the first `length` tokens of each row of page tables, int64 [rows, length]."""
    pages = tables[:, : -(-length // page_tokens)]
    slots = pages.unsqueeze(2) * page_tokens + torch.arange(page_tokens)
    return slots.flatten(1)[:, :length]
