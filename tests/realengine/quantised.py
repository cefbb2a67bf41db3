"""AWQ and GPTQ folders for tests, packed nibble by nibble as the formats are written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from realengine.checkpoint import tensor_shapes
from realengine.export import hugging_face_config
from realengine.load import Source
from realengine.quant import Int4Matrix, quantize_int4


def awq_words(numbers: Tensor) -> Tensor:
    """[R, C] numbers 0 to 15 as int32 [R, C / 8]: nibbles from the low one up are columns 0, 2, 4, 6, 1, 3, 5, 7."""
    rows, columns = numbers.shape
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for row in range(rows):
        for word in range(columns // 8):
            for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                words[row, word] |= int(numbers[row, word * 8 + column]) << (4 * nibble)
    return signed(words)


def gptq_words(numbers: Tensor) -> Tensor:
    """[R, C] numbers 0 to 15 as int32 [R, C / 8]: nibbles from the low one up are columns in a row."""
    rows, columns = numbers.shape
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for row in range(rows):
        for column in range(columns):
            words[row, column // 8] |= int(numbers[row, column]) << (4 * (column % 8))
    return signed(words)


def signed(words: Tensor) -> Tensor:
    """The same 32 bits as int32."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def awq_tensors(matrix: Int4Matrix) -> dict[str, Tensor]:
    """What an AWQ folder holds of one matrix."""
    return {
        "qweight": awq_words(matrix.levels.T),
        "qzeros": awq_words(matrix.zeros.T),
        "scales": matrix.scales.T.to(torch.float16).contiguous(),
    }


def gptq_tensors(matrix: Int4Matrix, *, less: int = 1, g_idx: Tensor | None = None) -> dict[str, Tensor]:
    """What a GPTQ folder holds of one matrix whose columns are inputs in a row; zero points are stored `less` 1."""
    inputs = matrix.shape[1]
    return {
        "qweight": gptq_words(matrix.levels).T.contiguous(),
        "qzeros": gptq_words(matrix.zeros.T - less),
        "scales": matrix.scales.T.to(torch.float16).contiguous(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // matrix.group if g_idx is None else g_idx,
    }


def write_quantised(source: Source, folder: Path, config: dict[str, Any], group: int) -> None:
    """`source` as an AWQ or GPTQ folder: every matrix of its layers rounded to nearest."""
    tensors: dict[str, Tensor] = {}
    for name in tensor_shapes(source.architecture.shape):
        weight = source.checkpoint.tensor(name)
        if "_proj.weight" not in name:
            tensors[name] = weight.contiguous()
            continue
        matrix = quantize_int4(weight, group, scale_dtype=torch.float16)
        made = awq_tensors(matrix) if config["quant_method"] == "awq" else gptq_tensors(matrix)
        tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in made.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    whole = hugging_face_config(source.architecture) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
