"""Where weights come from: a Hugging Face folder of safetensors, or random numbers of the right shapes.

Every source answers to Hugging Face's tensor names; a GGUF file does so in `realengine.gguf_file`.
"""

from __future__ import annotations

import json
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from costmodel.model import ModelShape
from serving.errors import UsageError


class Checkpoint(Protocol):
    """Tensors by Hugging Face name, in whatever type they are stored; the loader casts."""

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`. Raises `UsageError` when there is none."""

    def has(self, name: str) -> bool: ...


class FolderCheckpoint:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` lists; files are mapped, not read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.is_file():
            try:
                self._file_of = {
                    str(name): folder / str(file)
                    for name, file in json.loads(index.read_text())["weight_map"].items()
                }
            except (ValueError, KeyError, AttributeError) as error:
                raise UsageError(f"{index}: not an index of safetensors ({error!r})") from None
        elif single.is_file():
            self._file_of = dict.fromkeys(self._reader(single).keys(), single)
        else:
            raise UsageError(
                f"--model {folder}: no model.safetensors there (give a GGUF file, or --load-format dummy)"
            )

    def tensor(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise UsageError(f"--model {self._folder}: no tensor {name!r} among its safetensors")
        tensor: Tensor = self._reader(self._file_of[name]).get_tensor(name)
        return tensor

    def has(self, name: str) -> bool:
        return name in self._file_of

    def _reader(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                self._open[file] = self._stack.enter_context(safe_open(str(file), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise UsageError(f"{file}: cannot be read as safetensors ({error})") from None
        return self._open[file]


class DummyCheckpoint:
    """Random weights of a model's shapes, small enough that activations stay finite: for timing, not for text.

    A tensor depends on `seed` and its name alone, so that every rank and every run has the same.
    """

    def __init__(self, shape: ModelShape, seed: int = 0, device: torch.device | None = None) -> None:
        self._shapes = tensor_shapes(shape)
        self._seed = seed
        self._device = device if device is not None else torch.device("cpu")

    def tensor(self, name: str) -> Tensor:
        if name not in self._shapes:
            raise UsageError(f"a model of this shape has no tensor {name!r}")
        size = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(size, device=self._device)
        generator = torch.Generator(self._device).manual_seed(self._seed * 2**32 + zlib.crc32(name.encode()))
        scale = size[-1] ** -0.5 if len(size) == 2 else 0.02
        return torch.randn(size, generator=generator, device=self._device) * scale

    def has(self, name: str) -> bool:
        return name in self._shapes


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names and shapes of every weight of a model."""
    hidden, width, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.num_heads * dim, shape.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not shape.tie_word_embeddings:
        shapes["lm_head.weight"] = (shape.vocab_size, hidden)
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (q, hidden),
            layer + "self_attn.k_proj.weight": (kv, hidden),
            layer + "self_attn.v_proj.weight": (kv, hidden),
            layer + "self_attn.o_proj.weight": (hidden, q),
            layer + "mlp.gate_proj.weight": (width, hidden),
            layer + "mlp.up_proj.weight": (width, hidden),
            layer + "mlp.down_proj.weight": (hidden, width),
        }
        if shape.attention_bias:
            shapes |= {
                layer + "self_attn.q_proj.bias": (q,),
                layer + "self_attn.k_proj.bias": (kv,),
                layer + "self_attn.v_proj.bias": (kv,),
            }
        if shape.qk_norm:
            shapes |= {
                layer + "self_attn.q_norm.weight": (dim,),
                layer + "self_attn.k_norm.weight": (dim,),
            }
    return shapes
