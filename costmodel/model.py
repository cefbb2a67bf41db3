"""The shape of a decoder-only transformer: what its layers multiply, hold and cache.

Read from a Hugging Face `config.json` or a shipped name. Nothing is assumed that the file states; what it
leaves out takes the default that `transformers` documents for that model type.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from costmodel.shipped import ALIASES, CONFIGS
from serving.errors import UsageError, nearest

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Gemm:
    """One matrix product `(m, k) x (k, n)` of a layer on one tensor-parallel rank; `m` is the number of
    tokens."""

    name: str
    n: int
    k: int

    @property
    def weights(self) -> int:
        return self.n * self.k


class ModelShape(BaseModel):
    """A model's dimensions. Counts of parameters and bytes are methods, so that they cannot disagree with
    them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    family: str
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    """Width of the MLP, or of one expert when `num_experts` > 0."""
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias on the q, k and v projections (Qwen2)."""
    qk_norm: bool = False
    """RMS norm of queries and keys per head (Qwen3)."""
    max_position_embeddings: int = Field(default=131072, gt=0)
    sliding_window: int | None = None
    num_experts: int = Field(default=0, ge=0)
    experts_per_token: int = Field(default=0, ge=0)

    # -- sharding --------------------------------------------------------------------------------------------

    def check_tensor_parallel(self, tensor_parallel_size: int) -> None:
        """Raise `UsageError` unless heads and MLP divide among the ranks as vLLM needs it."""
        tp = tensor_parallel_size
        if tp < 1:
            raise UsageError(f"--tensor-parallel-size must be at least 1, not {tp}")
        kv_ok = self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0
        if self.num_heads % tp or self.intermediate_size % tp or not kv_ok:
            sizes = [
                t for t in (1, 2, 4, 8, 16) if self.num_heads % t == 0 and self.intermediate_size % t == 0
            ]
            raise UsageError(
                f"--tensor-parallel-size {tp} does not divide {self.name} ({self.num_heads} heads, "
                f"{self.num_kv_heads} KV heads, MLP width {self.intermediate_size}); try one of {sizes}"
            )

    def heads_per_rank(self, tp: int) -> int:
        return self.num_heads // tp

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads on one rank; when there are fewer heads than ranks each is replicated, so at least 1."""
        return max(1, self.num_kv_heads // tp)

    def vocab_per_rank(self, tp: int) -> int:
        """Rows of the embedding on one rank, padded to a multiple of 64 as vLLM pads it."""
        padded = -(-self.vocab_size // 64) * 64
        return -(-padded // tp)

    # -- linear layers ---------------------------------------------------------------------------------------

    def attention_gemms(self, tp: int = 1) -> tuple[Gemm, Gemm]:
        """The qkv projection (fused) and the output projection of one layer on one rank."""
        q = self.heads_per_rank(tp) * self.head_dim
        kv = self.kv_heads_per_rank(tp) * self.head_dim
        return Gemm("qkv", q + 2 * kv, self.hidden_size), Gemm("o", self.hidden_size, q)

    def mlp_gemms(self, tp: int = 1) -> tuple[Gemm, Gemm]:
        """Fused gate and up projection, and the down projection: of the MLP, or of one expert."""
        width = self.intermediate_size // tp
        return Gemm("gate_up", 2 * width, self.hidden_size), Gemm("down", self.hidden_size, width)

    def router_gemm(self) -> Gemm:
        """The expert router (replicated on each rank)."""
        return Gemm("router", self.num_experts, self.hidden_size)

    def lm_head_gemm(self, tp: int = 1) -> Gemm:
        return Gemm("lm_head", self.vocab_per_rank(tp), self.hidden_size)

    # -- parameters and bytes --------------------------------------------------------------------------------

    def linear_params_per_layer(self, tp: int = 1) -> int:
        """Weights in the matrices of one layer on one rank, all experts counted."""
        attention = sum(g.weights for g in self.attention_gemms(tp))
        mlp = sum(g.weights for g in self.mlp_gemms(tp))
        if self.num_experts:
            return attention + mlp * self.num_experts + self.router_gemm().weights
        return attention + mlp

    def small_params_per_layer(self, tp: int = 1) -> int:
        """Norm weights and biases of one layer on one rank."""
        bias = self.attention_gemms(tp)[0].n if self.attention_bias else 0
        return 2 * self.hidden_size + bias + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def num_params(self) -> int:
        """All parameters, tied embeddings counted once."""
        embedding = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layers = self.num_layers * (self.linear_params_per_layer() + self.small_params_per_layer())
        return embedding + layers + self.hidden_size

    @property
    def active_params(self) -> int:
        """Parameters one token passes through: all of them, or `experts_per_token` experts of each layer."""
        if not self.num_experts:
            return self.num_params
        expert = sum(g.weights for g in self.mlp_gemms())
        return self.num_params - self.num_layers * expert * (self.num_experts - self.experts_per_token)

    @property
    def attention_tokens(self) -> float:
        """Context at which a token's attention (4 x heads x head_dim FLOPs a layer and token of context) costs as many
        FLOPs as all else (2 a parameter)."""
        return self.active_params / (2 * self.num_layers * self.num_heads * self.head_dim)

    def kv_bytes_per_token(self, tp: int = 1, kv_bytes: float = 2.0) -> float:
        """KV cache bytes one token takes on one rank: 2 (K and V) x layers x KV heads x head_dim x bytes."""
        return 2 * self.num_layers * self.kv_heads_per_rank(tp) * self.head_dim * kv_bytes


def shipped_models() -> tuple[str, ...]:
    """Names that `load_model` knows without a file."""
    return tuple(CONFIGS)


def load_model(name_or_path: str | Path) -> ModelShape:
    """The shape of a shipped model (or its Hugging Face id), or of a `config.json` (or a folder holding one).

    Raises `UsageError` for an unknown name (with the nearest known ones), an unreadable file, a missing or
    wrong field, and an architecture that is not one of `FAMILIES`.
    """
    text = str(name_or_path)
    if not text.strip():
        raise UsageError("--model is empty; name one (tokentwin model list) or give a config.json")
    path = Path(text).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_file(path)
    key = _canonical(text)
    if key in CONFIGS:
        return model_from_config(CONFIGS[key], name=key)
    if path.name == "config.json" and path.parent.is_dir() and Path(text).name != "config.json":
        raise UsageError(
            f"--model {text}: is a folder without a config.json; name one that has it, or the file"
        )
    if path.suffix == ".json" or text.startswith(("/", "./", "../", "~")):
        raise UsageError(f"--model {text}: no such file")
    raise UsageError(
        f"--model {text!r} is not a shipped model; {nearest(key, CONFIGS)} (or give a config.json)"
    )


def _canonical(text: str) -> str:
    """`meta-llama/Llama-3.1-8B-Instruct` → `llama-3.1-8b`: no organisation, no fine-tuning or format
    suffix."""
    key = text.strip().lower().rsplit("/", 1)[-1]
    if key in CONFIGS:
        return key
    key = re.sub(
        r"-(instruct|chat|base|hf|it|fp8|awq|gptq|int4|int8|bf16|thinking|v\d+(\.\d+)?|\d{4})(?=-|$)", "", key
    )
    return ALIASES.get(key, key)


def _from_file(path: Path) -> ModelShape:
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {path}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict):
        raise UsageError(f"--model {path}: expected a JSON object, found {type(config).__name__}")
    try:
        return model_from_config(config, name=path.parent.name or path.stem)
    except UsageError as error:
        raise UsageError(f"--model {path}: {error}") from None


def model_from_config(config: dict[str, Any], *, name: str) -> ModelShape:
    """A `ModelShape` from the fields of a Hugging Face configuration.

    Defaults where a field is absent are those of `transformers`: `num_key_value_heads` = heads (llama, qwen3:
    32), `head_dim` = hidden_size / heads (128 for qwen3), `tie_word_embeddings` = false, qkv bias for qwen2
    only.
    """
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        raise UsageError(f"model_type {family!r} is not supported; known: {', '.join(FAMILIES)}")
    heads = _integer(config, "num_attention_heads")
    hidden = _integer(config, "hidden_size")
    moe = family in ("mixtral", "qwen3_moe")
    experts_field = "num_local_experts" if family == "mixtral" else "num_experts"
    if family == "qwen3_moe":
        _refuse_mixed_layers(config)
    kv_heads = _integer(config, "num_key_value_heads", _default_kv_heads(family, heads))
    if kv_heads < 1 or heads % kv_heads:
        raise UsageError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
            "correct the config.json"
        )
    head_dim = _integer(config, "head_dim", 128 if family.startswith("qwen3") else hidden // heads)
    window = config.get("sliding_window")
    if family.startswith("qwen") and not config.get("use_sliding_window", False):
        window = None
    return ModelShape(
        name=name,
        family=family,
        hidden_size=hidden,
        intermediate_size=_integer(
            config, "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
        ),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_integer(config, "vocab_size"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", family == "qwen2")),
        qk_norm=family.startswith("qwen3"),
        max_position_embeddings=_integer(config, "max_position_embeddings", 32768),
        sliding_window=int(window) if window else None,
        num_experts=_integer(config, experts_field, 8 if family == "mixtral" else 128) if moe else 0,
        experts_per_token=_integer(config, "num_experts_per_tok", 2 if family == "mixtral" else 8)
        if moe
        else 0,
    )


def _default_kv_heads(family: str, heads: int) -> int:
    return {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}.get(family, heads)


def _refuse_mixed_layers(config: dict[str, Any]) -> None:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UsageError(
            "mlp_only_layers and decoder_sparse_step > 1 (dense layers among expert layers) are not modelled"
        )


def _integer(config: dict[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        if default is None:
            raise UsageError(f"field {field!r} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise UsageError(f"field {field!r} must be a positive integer, not {value!r}")
    return value
