"""Any model that the engine reads, written as a Hugging Face folder: dequantised once, mapped in no time afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from realengine.architecture import Architecture
from realengine.checkpoint import tensor_shapes
from realengine.load import Source

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def write_folder(source: Source, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `config.json`, `model.safetensors`, and the tokenizer's files where there is one. Creates `folder`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    names = tensor_shapes(source.architecture.shape)
    tensors = {name: source.checkpoint.tensor(name).to(dtype).contiguous() for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = hugging_face_config(source.architecture) | {"dtype": str(dtype).removeprefix("torch.")}
    _write(folder / "config.json", config)
    if (tokenizer := source.tokenizer) is not None:
        tokenizer.backend.save(str(folder / "tokenizer.json"))
        fields = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        if tokenizer.template is not None:
            fields["chat_template"] = tokenizer.template
        _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **fields})


def hugging_face_config(architecture: Architecture) -> dict[str, Any]:
    """The `config.json` that this architecture would be read from."""
    shape, rope = architecture.shape, architecture.rope
    config: dict[str, Any] = {
        "architectures": [_CLASSES[shape.family]],
        "model_type": shape.family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "rms_norm_eps": architecture.norm_eps,
        "rope_theta": rope.theta,
        "hidden_act": "silu",
        "eos_token_id": list(architecture.eos_token_ids) or None,
        "bos_token_id": architecture.bos_token_id,
    }
    if rope.linear_factor != 1.0:
        config["rope_scaling"] = {"rope_type": "linear", "factor": rope.linear_factor}
    if (llama3 := rope.llama3) is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": llama3.factor,
            "low_freq_factor": llama3.low_freq_factor,
            "high_freq_factor": llama3.high_freq_factor,
            "original_max_position_embeddings": llama3.original_max_positions,
        }
    return config


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
