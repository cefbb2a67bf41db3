"""From a model's name to a model in memory: which file format, which device, which share of it on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from costmodel.model import load_model
from costmodel.shipped import CONFIGS
from realengine.architecture import Architecture, Rope, architecture_from_config, read_architecture, read_json
from realengine.checkpoint import Checkpoint, DummyCheckpoint, FolderCheckpoint
from realengine.models import HeadNorms, Layer, Model, Weights
from realengine.ops import Linear, Ops, make_ops
from realengine.parallel import SINGLE, TensorParallel
from realengine.quant import Matrix, cut_columns, cut_rows, join, moved, quantize, scheme_of
from realengine.quant_checkpoint import Packing, packing_of
from realengine.quant_kv import cache_layout, check_device
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
    packing: Packing | None = None
    """How matrices are quantised in the checkpoint itself."""


def find_model(model: str | Path, load_format: str = "auto") -> Source:
    """A Hugging Face folder or a GGUF file; with `load_format` "dummy" also any shape that the twin knows.

    Raises `UsageError` when there is no such model, a file is malformed, or the family is not supported.
    """
    if load_format not in LOAD_FORMATS:
        raise UsageError(f"--load-format {load_format!r}; use one of {', '.join(LOAD_FORMATS)}")
    if not str(model):
        raise UsageError("--model is empty; name a Hugging Face folder or a GGUF file")
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
        packing = packing_of(read_json(path / "config.json"), path)
        source = Source(architecture, FolderCheckpoint(path), tokenizer, packing)
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
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    kv_recent_tokens: int = 0,
) -> Model:
    """Put this rank's share of the weights on `device` in `dtype`. Positions run up to `max_positions` - 1.

    With `quantization` (`realengine.quant.SCHEMES`) the layers' matrices are rounded to nearest; a checkpoint that is
    quantised stays so. Raises `UsageError` for a format that the engine or the checkpoint does not have.
    """
    architecture = source.architecture
    cache_layout(kv_cache_dtype, architecture.shape.head_dim, dtype)  # a wrong name fails before loading
    check_device(kv_cache_dtype, device)
    shape = architecture.shape
    shape.check_tensor_parallel(ranks.size)
    group = shape.heads_per_rank(ranks.size) // shape.kv_heads_per_rank(ranks.size)
    scheme = scheme_of(quantization, source.packing.method if source.packing is not None else None)
    ops = make_ops(architecture.rope, shape.head_dim, max_positions, device, dtype, group)
    weights = _Loader(source, ops, device, dtype, ranks, scheme).weights()
    return Model(architecture, weights, ops, ranks, kv_cache_dtype, kv_recent_tokens)


def weight_format(source: Source, quantization: str | None) -> str:
    """The twin's name of the format that the layers' matrices have once loaded. Raises `UsageError` as `load` does."""
    packing = source.packing
    scheme = scheme_of(quantization, packing.method if packing is not None else None)
    if packing is None:
        return scheme or "bfloat16"
    if packing.method == "fp8":
        return "fp8_block" if packing.blocked else "fp8"
    return "int4_wo"


class _Loader:
    def __init__(
        self,
        source: Source,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        ranks: TensorParallel,
        scheme: str | None,
    ) -> None:
        self.shape = source.architecture.shape
        self.norm_eps = source.architecture.norm_eps
        self.checkpoint, self.packing = source.checkpoint, source.packing
        self.ops, self.device, self.dtype, self.ranks = ops, device, dtype, ranks
        self.scheme = scheme

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
        attention = prefix + "self_attn."
        norms = None
        if self.shape.qk_norm:
            norms = HeadNorms(
                self._plain(attention + "q_norm.weight"),
                self._plain(attention + "k_norm.weight"),
                self.norm_eps,
            )
        return Layer(
            input_norm=self._plain(prefix + "input_layernorm.weight"),
            qkv=self._qkv(attention),
            head_norms=norms,
            o=self._columns(attention + "o_proj.weight"),
            post_norm=self._plain(prefix + "post_attention_layernorm.weight"),
            gate_up=self._rows({f"{prefix}mlp.{name}_proj.weight": None for name in ("gate", "up")}),
            down=self._columns(prefix + "mlp.down_proj.weight"),
        )

    def _qkv(self, attention: str) -> Linear:
        """q, k and v of this rank's heads as one matrix (and one bias)."""
        parts = {"q": self.shape.num_heads, "k": self.shape.num_kv_heads, "v": self.shape.num_kv_heads}
        bias = None
        if self.shape.attention_bias:
            shares = [
                self.ranks.rows(self._get(f"{attention}{name}_proj.bias"), heads)
                for name, heads in parts.items()
            ]
            bias = self._put(torch.cat(shares))
        return self._rows({f"{attention}{name}_proj.weight": heads for name, heads in parts.items()}, bias)

    def _rows(self, parts: dict[str, int | None], bias: Tensor | None = None) -> Linear:
        """This rank's output channels of several matrices, as one; `parts` are the heads of each."""
        packed = [name for name in parts if self._is_packed(name)]
        if not packed:
            shares = [self.ranks.rows(self._get(name), heads) for name, heads in parts.items()]
            return self._linear(torch.cat(shares), bias)
        if len(packed) < len(parts):
            raise UsageError(f"{packed[0]} is quantised in the checkpoint and its neighbours are not")
        matrices = [
            cut_rows(self._matrix(name), lambda t, heads=heads: self.ranks.rows(t, heads))  # type: ignore[misc]
            for name, heads in parts.items()
        ]
        joined = join(matrices)
        if joined is not None:
            return self.ops.linear(moved(joined, self.device), bias)
        return SideBySide([self.ops.linear(moved(matrix, self.device)) for matrix in matrices], bias)

    def _columns(self, name: str) -> Linear:
        if not self._is_packed(name):
            return self._linear(self.ranks.columns(self._get(name)))
        matrix = cut_columns(self._matrix(name), self.ranks.columns, self.ranks.size)
        return self.ops.linear(moved(matrix, self.device))

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if self.scheme is None:
            return self.ops.linear(self._put(weight), bias)
        kept = torch.float32 if self.scheme.startswith("fp8") else self.dtype
        if self.device.type != "cpu":
            kept = torch.float16 if self.scheme == "int4_wo" else torch.float32
        return self.ops.linear(quantize(weight.to(self.device), self.scheme, kept), bias)

    def _is_packed(self, name: str) -> bool:
        return self.packing is not None and self.packing.holds(self.checkpoint, name)

    def _matrix(self, name: str) -> Matrix:
        assert self.packing is not None
        return self.packing.matrix(self.checkpoint, name)

    def _plain(self, name: str) -> Tensor:
        return self._put(self._get(name))

    def _get(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name)

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()


class SideBySide:
    """Linear layers of the same input whose outputs are one behind the other."""

    def __init__(self, parts: Sequence[Linear], bias: Tensor | None) -> None:
        self._parts, self._bias = parts, bias

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.cat([part(x) for part in self._parts], dim=-1)
        return out if self._bias is None else out.add_(self._bias)
