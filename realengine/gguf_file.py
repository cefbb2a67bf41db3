"""A GGUF file as a checkpoint: its metadata read as a configuration and a tokenizer, its blocks dequantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realengine.architecture import Architecture, Rope, architecture_from_config
from realengine.gguf_tokenizer import tokenizer_from_gguf
from realengine.tokenizer import Tokenizer
from serving.errors import UsageError

QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
"""Block formats that are dequantised (others are refused by name)."""

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufFile:
    """Answers to Hugging Face names. Tensors are dequantised to float32 when asked for."""

    def __init__(self, path: Path, fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        self.path = path
        self.fields = fields
        self._tensors = tensors
        self.architecture = self._read_architecture()
        self.tokenizer: Tokenizer | None = tokenizer_from_gguf(fields, self.architecture.eos_token_ids)

    def has(self, name: str) -> bool:
        return _gguf_name(name) in self._tensors

    def tensor(self, name: str) -> Tensor:
        stored = self._tensors.get(_gguf_name(name))
        if stored is None:
            raise UsageError(f"--model {self.path}: no tensor {_gguf_name(name)!r} ({name})")
        tensor = torch.from_numpy(_dequantised(stored, self.path))
        shape = self.architecture.shape
        if shape.family == "llama" and name.endswith("q_proj.weight"):
            return _unpermuted(tensor, shape.num_heads)
        if shape.family == "llama" and name.endswith("k_proj.weight"):
            return _unpermuted(tensor, shape.num_kv_heads)
        return tensor

    def _read_architecture(self) -> Architecture:
        fields = self.fields
        family = str(fields.get("general.architecture"))

        def get(key: str, default: Any = None) -> Any:
            value = fields.get(f"{family}.{key}", default)
            if value is None:
                raise UsageError(f"--model {self.path}: metadata lacks {family}.{key}")
            return value

        heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
        scaling = fields.get(f"{family}.rope.scaling.type", "none")
        config: dict[str, Any] = {
            "model_type": family,
            "hidden_size": hidden,
            "intermediate_size": int(get("feed_forward_length")),
            "num_hidden_layers": int(get("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(get("attention.head_count_kv", heads)),
            "head_dim": int(get("attention.key_length", get("rope.dimension_count", hidden // heads))),
            "vocab_size": len(fields.get("tokenizer.ggml.tokens", ())) or int(get("vocab_size")),
            "max_position_embeddings": int(get("context_length")),
            "rms_norm_eps": float(get("attention.layer_norm_rms_epsilon")),
            "rope_theta": float(get("rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": _optional_int(fields.get("tokenizer.ggml.bos_token_id")),
            "eos_token_id": _end_tokens(fields),
        }
        if scaling not in ("none", "linear"):
            raise UsageError(f"--model {self.path}: rotary scaling {scaling!r} is not implemented")
        if scaling == "linear":
            config["rope_scaling"] = {"rope_type": "linear", "factor": float(get("rope.scaling.factor"))}
        try:
            architecture = architecture_from_config(config, name=self.path.stem)
        except UsageError as error:
            raise UsageError(f"--model {self.path}: {error}") from None
        if (factors := self._tensors.get("rope_freqs.weight")) is not None:
            rope = Rope(architecture.rope.theta, factors=tuple(_dequantised(factors, self.path).tolist()))
            architecture = Architecture(
                architecture.shape,
                rope,
                architecture.norm_eps,
                architecture.eos_token_ids,
                architecture.bos_token_id,
            )
        return architecture


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file. Raises `UsageError` when it is not one or its model is not supported."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UsageError(f"--model {path}: cannot be read as GGUF ({error})") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return GgufFile(path, fields, {tensor.name: tensor for tensor in reader.tensors})


def _gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return _NAMES.get(name, name)
    index, _, rest = name.removeprefix("model.layers.").partition(".")
    stem, _, kind = rest.rpartition(".")
    return f"blk.{index}.{_LAYER_NAMES.get(stem, stem)}.{kind}"


def _dequantised(stored: Any, path: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    from gguf.quants import dequantize

    kind = stored.tensor_type.name
    if kind not in QUANTISATIONS:
        raise UsageError(
            f"--model {path}: tensor {stored.name} is {kind}; the engine reads {', '.join(QUANTISATIONS)}"
        )
    values: np.ndarray[Any, np.dtype[np.float32]] = dequantize(stored.data, stored.tensor_type)
    return np.array(values, np.float32)


def _unpermuted(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of interleaved pairs (0, 1), (2, 3), … back to halves (0, D/2), (1, D/2 + 1), … within each head."""
    rows, width = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, width)
    return pairs.transpose(1, 2).reshape(rows, width)


def _end_tokens(fields: dict[str, Any]) -> list[int]:
    keys = ("eos_token_id", "eot_token_id")
    ids = (_optional_int(fields.get(f"tokenizer.ggml.{key}")) for key in keys)
    return list(dict.fromkeys(token for token in ids if token is not None))


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)
