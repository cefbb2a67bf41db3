"""Llama 2/3, Qwen2/2.5 and Qwen3 as one decoder: what is multiplied, in what order. How, is the operators' business.

The families differ in three switches: biases of q, k and v (Qwen2), norms of each q and k head (Qwen3), and tied
embeddings. Weights keep Hugging Face's orientation, [out, in].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realengine.architecture import Architecture
from realengine.batch import Batch, LayerCache
from realengine.ops import Linear, Ops
from realengine.parallel import SINGLE, TensorParallel


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each query and key head before rotation, weights [head_dim]."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One block on one tensor-parallel rank."""

    input_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything that a rank holds. `head` has this rank's share of the vocabulary's rows."""

    embedding: Tensor
    layers: Sequence[Layer]
    norm: Tensor
    head: Linear


class Model:
    """The decoder on one rank. `forward` writes K and V into the caches; nothing else keeps state.

    `kv_cache_dtype` says how those are to be made (`realengine.quant_kv.cache_layout`), and `kv_recent_tokens` how many
    of a sequence's last tokens are to be kept as they are beside it.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        ops: Ops,
        ranks: TensorParallel = SINGLE,
        kv_cache_dtype: str = "auto",
        kv_recent_tokens: int = 0,
    ) -> None:
        self.architecture = architecture
        self.weights = weights
        self.ops = ops
        self.ranks = ranks
        self.kv_cache_dtype, self.kv_recent_tokens = kv_cache_dtype, kv_recent_tokens
        shape = architecture.shape
        self.num_heads = shape.heads_per_rank(ranks.size)
        self.num_kv_heads = shape.kv_heads_per_rank(ranks.size)

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        """Logits [rows wanted, vocabulary] of one step, the same on every rank."""
        ops, weights, eps = self.ops, self.weights, self.architecture.norm_eps
        attend = ops.attention(batch, self.num_heads, self.num_kv_heads)
        residual: Tensor | None = None
        x = weights.embedding[batch.ids]
        for layer, cache in zip(weights.layers, caches, strict=True):
            x, residual = ops.add_norm(x, residual, layer.input_norm, eps)
            x = self.ranks.sum(layer.o(attend(layer.qkv(x), cache, layer.head_norms)))
            x, residual = ops.add_norm(x, residual, layer.post_norm, eps)
            x = self.ranks.sum(layer.down(ops.silu_mul(layer.gate_up(x))))
        if batch.sample_rows is not None and residual is not None:
            x, residual = x[batch.sample_rows], residual[batch.sample_rows]
        vocabulary = self.architecture.shape.vocab_size
        if not len(x):
            return x.new_empty(0, vocabulary)
        x, _ = ops.add_norm(x, residual, weights.norm, eps)
        logits = self.ranks.gather(weights.head(x))
        return logits[:, :vocabulary]
