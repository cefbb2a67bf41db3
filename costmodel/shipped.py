"""Shapes of the models shipped by name, as their `config.json` on Hugging Face states them.

Each row is what the file says, field for field; defaults that the file leaves out are left out here too, so
that a shipped name and the same file read from disk go through one parser.
"""

from __future__ import annotations

from typing import Any

_LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8, "model_type": "llama"}
_QWEN2 = {"vocab_size": 152064, "model_type": "qwen2", "max_position_embeddings": 32768}
_QWEN3 = {"vocab_size": 151936, "model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960}


def _shape(
    base: dict[str, Any], hidden: int, inter: int, layers: int, heads: int, **rest: Any
) -> dict[str, Any]:
    return {
        **base,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **rest,
    }


_L2: dict[str, Any] = {"vocab_size": 32000, "model_type": "llama", "max_position_embeddings": 4096}
_L31: dict[str, Any] = {**_LLAMA3, "max_position_embeddings": 131072}
_MIX: dict[str, Any] = {
    "model_type": "mixtral",
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_Q3M: dict[str, Any] = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
}
_TIED = {"tie_word_embeddings": True}
_SMALL = {**_TIED, "vocab_size": 151936}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _shape(_L2, 4096, 11008, 32, 32),
    "llama-2-13b": _shape(_L2, 5120, 13824, 40, 40),
    "llama-2-70b": _shape(_L2, 8192, 28672, 80, 64, num_key_value_heads=8),
    "llama-3-8b": _shape(_LLAMA3, 4096, 14336, 32, 32, max_position_embeddings=8192),
    "llama-3-70b": _shape(_LLAMA3, 8192, 28672, 80, 64, max_position_embeddings=8192),
    "llama-3.1-8b": _shape(_L31, 4096, 14336, 32, 32),
    "llama-3.1-70b": _shape(_L31, 8192, 28672, 80, 64),
    "llama-3.1-405b": _shape(_L31, 16384, 53248, 126, 128),
    "llama-3.2-1b": _shape(_L31, 2048, 8192, 16, 32, head_dim=64, **_TIED),
    "llama-3.2-3b": _shape(_L31, 3072, 8192, 28, 24, head_dim=128, **_TIED),
    "llama-3.3-70b": _shape(_L31, 8192, 28672, 80, 64, head_dim=128),
    "qwen2.5-0.5b": _shape(_QWEN2, 896, 4864, 24, 14, num_key_value_heads=2, **_SMALL),
    "qwen2.5-1.5b": _shape(_QWEN2, 1536, 8960, 28, 12, num_key_value_heads=2, **_SMALL),
    "qwen2.5-3b": _shape(_QWEN2, 2048, 11008, 36, 16, num_key_value_heads=2, **_SMALL),
    "qwen2.5-7b": _shape(_QWEN2, 3584, 18944, 28, 28, num_key_value_heads=4),
    "qwen2.5-14b": _shape(_QWEN2, 5120, 13824, 48, 40, num_key_value_heads=8),
    "qwen2.5-32b": _shape(_QWEN2, 5120, 27648, 64, 40, num_key_value_heads=8),
    "qwen2.5-72b": _shape(_QWEN2, 8192, 29568, 80, 64, num_key_value_heads=8),
    "qwen3-0.6b": _shape(_QWEN3, 1024, 3072, 28, 16, num_key_value_heads=8, **_TIED),
    "qwen3-1.7b": _shape(_QWEN3, 2048, 6144, 28, 16, num_key_value_heads=8, **_TIED),
    "qwen3-4b": _shape(_QWEN3, 2560, 9728, 36, 32, num_key_value_heads=8, **_TIED),
    "qwen3-8b": _shape(_QWEN3, 4096, 12288, 36, 32, num_key_value_heads=8),
    "qwen3-14b": _shape(_QWEN3, 5120, 17408, 40, 40, num_key_value_heads=8),
    "qwen3-32b": _shape(_QWEN3, 5120, 25600, 64, 64, num_key_value_heads=8),
    "qwen3-30b-a3b": _shape(_Q3M, 2048, 6144, 48, 32, moe_intermediate_size=768),
    "qwen3-235b-a22b": _shape(_Q3M, 4096, 12288, 94, 64, moe_intermediate_size=1536),
    "mistral-7b": _shape(
        {"model_type": "mistral", "vocab_size": 32768, "max_position_embeddings": 32768},
        4096, 14336, 32, 32, num_key_value_heads=8, sliding_window=None,
    ),
    "mixtral-8x7b": _shape(_MIX, 4096, 14336, 32, 32, vocab_size=32000, max_position_embeddings=32768),
    "mixtral-8x22b": _shape(_MIX, 6144, 16384, 56, 48, vocab_size=32768, max_position_embeddings=65536),
    "smollm2-135m": _shape(
        {"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192},
        576, 1536, 30, 9, num_key_value_heads=3, **_TIED,
    ),
}  # fmt: skip

ALIASES: dict[str, str] = {
    "llama-2-7b-hf": "llama-2-7b",
    "meta-llama-3-8b": "llama-3-8b",
    "meta-llama-3-70b": "llama-3-70b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "meta-llama-3.1-70b": "llama-3.1-70b",
    "meta-llama-3.1-405b": "llama-3.1-405b",
}
"""Repository names that do not reduce to a shipped name by dropping organisation and suffixes."""
