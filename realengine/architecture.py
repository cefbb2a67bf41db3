"""What a checkpoint says about its model beyond dimensions: norms, rotary positions, tokens that end a text."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from costmodel.model import ModelShape, model_from_config
from serving.errors import UsageError

FAMILIES = ("llama", "qwen2", "qwen3")
"""Families that the engine runs: dense, one rotary embedding, SwiGLU, RMSNorm before each block."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of rotary wavelengths: the long ones by `factor`, the short ones not at all."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: base `theta`; each pair of a head turns with a frequency of its own."""

    theta: float = 10000.0
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    factors: tuple[float, ...] = ()
    """Divisors of the frequencies, one per pair, where a GGUF file holds the scaling worked out."""

    def frequencies(self, head_dim: int) -> npt.NDArray[np.float64]:
        """Radians per position of each of the head_dim / 2 pairs."""
        exponents: npt.NDArray[np.float64] = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        frequencies: npt.NDArray[np.float64] = np.power(self.theta, -exponents) / self.linear_factor
        if self.factors:
            return frequencies / np.asarray(self.factors, np.float64)
        if self.llama3 is None:
            return frequencies
        s = self.llama3
        # Turns that a pair makes within the original context decide how far it is stretched.
        turns = s.original_max_positions * frequencies / (2 * math.pi)
        share = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        share = np.clip(share, 0.0, 1.0)
        return frequencies * (share + (1 - share) / s.factor)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model's shape and the numbers that its layers need."""

    shape: ModelShape
    rope: Rope
    norm_eps: float
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


def read_architecture(folder: Path) -> Architecture:
    """From `config.json` (and `generation_config.json`, which may name more tokens that end a text).

    Raises `UsageError` for a missing or malformed file and for a model that the engine does not run.
    """
    config = read_json(folder / "config.json")
    try:
        architecture = architecture_from_config(config, name=folder.name)
    except UsageError as error:
        raise UsageError(f"--model {folder}: {error}") from None
    generation = folder / "generation_config.json"
    if not generation.is_file():
        return architecture
    eos = _token_ids(read_json(generation).get("eos_token_id"))
    ids = tuple(dict.fromkeys((*architecture.eos_token_ids, *eos)))
    return Architecture(
        architecture.shape, architecture.rope, architecture.norm_eps, ids, architecture.bos_token_id
    )


def architecture_from_config(config: dict[str, Any], *, name: str) -> Architecture:
    """From the fields of a Hugging Face configuration.

    Raises `UsageError` for a family or a rotary scaling that the engine does not have.
    """
    shape = model_from_config(config, name=name)
    if shape.family not in FAMILIES:
        raise UsageError(f"the engine does not run {shape.family} models; it runs {', '.join(FAMILIES)}")
    if shape.sliding_window:
        raise UsageError("the engine has no sliding-window attention")
    for field, usual in (("hidden_act", "silu"), ("mlp_bias", False)):
        if config.get(field, usual) != usual:
            raise UsageError(f"{field} is {config[field]!r}; the engine runs {usual!r} only")
    if config.get("attention_bias") and shape.family != "qwen2":
        raise UsageError("attention_bias is on; the engine has biases of q, k and v for qwen2 only")
    bos = config.get("bos_token_id")
    return Architecture(
        shape,
        _rope(config, shape.family),
        float(config.get("rms_norm_eps", 1e-6)),
        _token_ids(config.get("eos_token_id")),
        bos if isinstance(bos, int) else None,
    )


def _rope(config: dict[str, Any], family: str) -> Rope:
    # transformers 5 writes rope_parameters; before, rope_theta stood beside rope_scaling.
    fields: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    fields |= config.get("rope_scaling") or {}
    fields |= config.get("rope_parameters") or {}
    theta = float(fields.get("rope_theta") or 10000.0)
    kind = str(fields.get("rope_type") or fields.get("type") or "default")
    try:
        if kind == "default":
            return Rope(theta)
        if kind == "linear":
            return Rope(theta, linear_factor=float(fields["factor"]))
        if kind == "llama3":
            return Rope(
                theta,
                llama3=Llama3Scaling(
                    float(fields["factor"]),
                    float(fields["low_freq_factor"]),
                    float(fields["high_freq_factor"]),
                    int(fields["original_max_position_embeddings"]),
                ),
            )
    except KeyError as error:
        raise UsageError(f"rotary scaling {kind!r} lacks {error.args[0]!r}") from None
    raise UsageError(
        f"rotary scaling {kind!r} is not implemented for {family}; default, linear and llama3 are"
    )


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(int(item) for item in value) if isinstance(value, list) else ()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `UsageError` when the file holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UsageError(
            f"--model {path.parent}: there is no {path.name} in it; give a Hugging Face folder or a GGUF file"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"--model {path}: expected a JSON object, found {type(value).__name__}")
    return value
