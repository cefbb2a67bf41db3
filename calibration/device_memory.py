"""The engine's page count from arithmetic alone: what it will allocate before anything is loaded.

On the CPU the engine's cache is bounded by its own limit, so the count is exact. On CUDA weights, buffers and the context
are predicted; the context (what a process takes before its first tensor) is measured once per device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from costmodel.formats import gemm_format, kv_format
from costmodel.model import ModelShape
from realengine.build import CPU_CACHE_BYTES
from serving.config import SchedulerConfig

_ROUND = 2 * 2**20
"""CUDA's allocator takes memory in pieces of this size."""


@dataclass(frozen=True, slots=True)
class PagePlan:
    """How many KV pages, and the bytes behind it."""

    num_pages: int
    page_bytes: int
    weight_bytes: int
    activation_bytes: int
    context_bytes: int

    def error(self, real_pages: int) -> float:
        """Signed relative error against the engine's own count."""
        return self.num_pages / real_pages - 1.0


def weight_bytes(
    shape: ModelShape, element_bytes: int, ranks: int = 1, quantization: str | None = None
) -> int:
    """Bytes of the engine's weights on one rank: matrices, norms, biases, and the head where it is not the embedding."""
    embedding = shape.vocab_size * shape.hidden_size
    head = 0 if shape.tie_word_embeddings else shape.vocab_per_rank(ranks) * shape.hidden_size
    small = shape.num_layers * shape.small_params_per_layer(ranks)
    plain = (small + embedding + head + shape.hidden_size) * element_bytes
    if quantization is None:
        return plain + shape.num_layers * shape.linear_params_per_layer(ranks) * element_bytes
    fmt = gemm_format("auto", quantization)
    gemms = (*shape.attention_gemms(ranks), *shape.mlp_gemms(ranks))
    return plain + shape.num_layers * sum(fmt.matrix_bytes(g.n, g.k) for g in gemms)


def predict_pages(
    shape: ModelShape,
    limits: SchedulerConfig,
    *,
    device: str,
    element_bytes: int = 2,
    memory_bytes: int = 0,
    utilization: float = 0.92,
    context_bytes: int = 0,
    ranks: int = 1,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> PagePlan:
    """Pages that `realengine.build.pages_that_fit` will find. `device` is "cpu" or "cuda"."""
    kv = kv_format(kv_cache_dtype)
    kv_bytes = float(element_bytes) if kv.bits == 16 else kv.element_bytes(shape.head_dim)
    page_bytes = int(shape.kv_bytes_per_token(ranks, kv_bytes) * limits.page_tokens)
    wanted = limits.max_num_seqs * -(-limits.max_model_len // limits.page_tokens)
    weights = weight_bytes(shape, element_bytes, ranks, quantization)
    if device == "cpu":
        return PagePlan(max(1, min(wanted, CPU_CACHE_BYTES // page_bytes)), page_bytes, weights, 0, 0)
    width = 3 * shape.intermediate_size // ranks + 4 * shape.hidden_size
    activations = limits.max_num_batched_tokens * width * element_bytes
    activations += limits.max_num_seqs * shape.vocab_size * (element_bytes + 8)
    taken = context_bytes + -(-weights // _ROUND) * _ROUND
    room = int(memory_bytes * utilization) - taken - activations
    return PagePlan(max(0, min(wanted, room // page_bytes)), page_bytes, weights, activations, context_bytes)


def measure_context_bytes(device: torch.device) -> int:
    """Memory that a process holds on a CUDA device before its first weight; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    torch.zeros(1, device=device)  # pragma: no cover - needs a GPU
    torch.cuda.synchronize(device)  # pragma: no cover
    free, total = torch.cuda.mem_get_info(device)  # pragma: no cover
    return total - free  # pragma: no cover
