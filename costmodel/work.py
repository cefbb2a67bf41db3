"""What engine steps compute and move: FLOPs and bytes of memory traffic, counted from the model's shape."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from costmodel.model import ModelShape

Floats = npt.NDArray[np.float64]


def step_work(
    model: ModelShape,
    num_tokens: npt.ArrayLike,
    num_sampled: npt.ArrayLike,
    prefill_attention_area: npt.ArrayLike,
    prefill_context_sum: npt.ArrayLike,
    decode_context_sum: npt.ArrayLike,
    *,
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
    weight_bytes: float = 2.0,
    kv_bytes: float = 2.0,
    activation_bytes: float = 2.0,
) -> tuple[Floats, Floats]:
    """(FLOPs, bytes) of steps on one device; arguments are columns of a step table, results have their shape.

    A multiply-add is 2 FLOPs; norms, softmax and padding count nothing. Weights are read once a step (of an MoE, the
    experts expected to be touched), KV once per attended token and written once per new one; activations are taken as
    written and read once per layer. `weight_bytes`, `kv_bytes` and `activation_bytes` are per number; the LM head and
    activations have those of activations. Replicas that share their experts (`data_parallel_size`) are taken to do equal
    steps: each device reads its part of what the tokens of all of them touch.
    """
    tokens, sampled, area, before, decoding = (
        np.asarray(a, np.float64)
        for a in (num_tokens, num_sampled, prefill_attention_area, prefill_context_sum, decode_context_sum)
    )
    tp = tensor_parallel_size
    attention = float(sum(g.weights for g in model.attention_gemms(tp)))
    expert = float(sum(g.weights for g in model.mlp_gemms(tp)))
    passed, touched = expert, np.full(tokens.shape, expert)
    if model.num_experts:
        total, chosen = float(model.num_experts), float(model.experts_per_token)
        passed = expert * chosen
        dp = data_parallel_size
        touched = expert * total / dp * (1.0 - (1.0 - chosen / total) ** (tokens * dp))
    head = float(model.lm_head_gemm(tp).weights)
    heads = model.heads_per_rank(tp) * model.head_dim
    flops = (
        model.num_layers * (2.0 * tokens * (attention + passed) + 4.0 * heads * (area + decoding))
        + 2.0 * sampled * head
    )
    weights = model.num_layers * (attention + touched) * weight_bytes * (tokens > 0)
    kv = model.kv_bytes_per_token(tp, kv_bytes) * (before + decoding + tokens)
    activations = model.num_layers * tokens * (4.0 * model.hidden_size + 3.0 * heads) * activation_bytes
    return flops, weights + head * activation_bytes * (sampled > 0) + kv + activations
