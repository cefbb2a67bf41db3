"""From a model's name to a model in memory: which file format, which device, which share of it on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from costmodel.model import load_model
from costmodel.shipped import CONFIGS
from realengine.architecture import Architecture, Rope, architecture_from_config, read_architecture
from realengine.checkpoint import Checkpoint, DummyCheckpoint, FolderCheckpoint
from realengine.models import HeadNorms, Layer, Model, Weights
from realengine.ops import Linear, Ops, make_ops
from realengine.parallel import SINGLE, TensorParallel
from realengine.tokenizer import Tokenizer
from serving.errors import UsageError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True, slots=True)
class Source:
    """A model found, not yet loaded. `tokenizer` is None where only a shape is known."""

    architecture: Architecture
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None


def find_model(model: str | Path, load_format: str = "auto") -> Source:
    """A Hugging Face folder or a GGUF file; with `load_format` "dummy" also any shape that the twin knows.

    Raises `UsageError` when there is no such model, a file is malformed, or the family is not supported.
    """
    if load_format not in LOAD_FORMATS:
        raise UsageError(f"--load-format {load_format!r}; use one of {', '.join(LOAD_FORMATS)}")
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        from realengine.gguf_file import read_gguf

        file = read_gguf(path)
        source = Source(file.architecture, file, file.tokenizer)
    elif path.is_dir():
        architecture = read_architecture(path)
        tokenizer = Tokenizer.from_folder(path) if (path / "tokenizer.json").is_file() else None
        if load_format == "dummy":
            return Source(architecture, DummyCheckpoint(architecture.shape), tokenizer)
        source = Source(architecture, FolderCheckpoint(path), tokenizer)
    elif load_format == "dummy":
        return _dummy(str(model))
    else:
        raise UsageError(
            f"--model {model}: neither a Hugging Face folder nor a GGUF file "
            "(--load-format dummy runs a known shape with random weights)"
        )
    if load_format == "dummy":
        return Source(source.architecture, DummyCheckpoint(source.architecture.shape), source.tokenizer)
    return source


def _dummy(model: str) -> Source:
    shape = load_model(model)
    if shape.name in CONFIGS:
        architecture = architecture_from_config(CONFIGS[shape.name], name=shape.name)
    else:
        architecture = Architecture(shape, Rope(), 1e-6)
    return Source(architecture, DummyCheckpoint(shape), None)


def load(
    source: Source,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
    ranks: TensorParallel = SINGLE,
) -> Model:
    """Put this rank's share of the weights on `device` in `dtype`. Positions run up to `max_positions` - 1."""
    architecture = source.architecture
    architecture.shape.check_tensor_parallel(ranks.size)
    ops = make_ops(architecture.rope, architecture.shape.head_dim, max_positions, device)
    return Model(architecture, _Loader(source, ops, device, dtype, ranks).weights(), ops, ranks)


class _Loader:
    def __init__(
        self, source: Source, ops: Ops, device: torch.device, dtype: torch.dtype, ranks: TensorParallel
    ) -> None:
        self.shape = source.architecture.shape
        self.norm_eps = source.architecture.norm_eps
        self.checkpoint = source.checkpoint
        self.ops, self.device, self.dtype, self.ranks = ops, device, dtype, ranks

    def weights(self) -> Weights:
        """All layers of this rank."""
        embedding = self._put(self.checkpoint.tensor("model.embed_tokens.weight"))
        tied = self.shape.tie_word_embeddings and not self.checkpoint.has("lm_head.weight")
        head = embedding if tied else self._put(self.checkpoint.tensor("lm_head.weight"))
        return Weights(
            embedding,
            [self._layer(f"model.layers.{i}.") for i in range(self.shape.num_layers)],
            self._plain("model.norm.weight"),
            self.ops.linear(self.ranks.vocabulary(head)),
        )

    def _layer(self, prefix: str) -> Layer:
        ranks, attention = self.ranks, prefix + "self_attn."
        qkv, bias = self._qkv(attention)
        norms = None
        if self.shape.qk_norm:
            norms = HeadNorms(
                self._plain(attention + "q_norm.weight"),
                self._plain(attention + "k_norm.weight"),
                self.norm_eps,
            )
        gate_up = [ranks.rows(self._get(f"{prefix}mlp.{name}_proj.weight")) for name in ("gate", "up")]
        return Layer(
            input_norm=self._plain(prefix + "input_layernorm.weight"),
            qkv=self.ops.linear(qkv, bias),
            head_norms=norms,
            o=self._columns(attention + "o_proj.weight"),
            post_norm=self._plain(prefix + "post_attention_layernorm.weight"),
            gate_up=self.ops.linear(self._put(torch.cat(gate_up))),
            down=self._columns(prefix + "mlp.down_proj.weight"),
        )

    def _qkv(self, attention: str) -> tuple[Tensor, Tensor | None]:
        """q, k and v of this rank's heads as one matrix (and one bias)."""
        parts = {"q": self.shape.num_heads, "k": self.shape.num_kv_heads, "v": self.shape.num_kv_heads}

        def fused(kind: str) -> Tensor:
            shares = [
                self.ranks.rows(self._get(f"{attention}{name}_proj.{kind}"), heads)
                for name, heads in parts.items()
            ]
            return self._put(torch.cat(shares))

        return fused("weight"), fused("bias") if self.shape.attention_bias else None

    def _columns(self, name: str) -> Linear:
        return self.ops.linear(self._put(self.ranks.columns(self._get(name))))

    def _plain(self, name: str) -> Tensor:
        return self._put(self._get(name))

    def _get(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name)

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()
