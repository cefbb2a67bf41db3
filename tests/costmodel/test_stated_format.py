"""A checkpoint that says how it is quantised is priced so without an option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from costmodel.shipped import CONFIGS
from costmodel.stated_format import stated_format
from sim.deployment import Deployment, build


def folder(path: Path, section: Any) -> str:
    config = CONFIGS["llama-3.2-1b"] | ({} if section is None else {"quantization_config": section})
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("section", "name"),
    [
        (None, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "gptq", "bits": 8}, "int8_wo"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
    ],
)
def test_known_methods_are_read(section: Any, name: str | None, tmp_path: Path) -> None:
    model = folder(tmp_path, section)
    assert stated_format(model) == (name, None)
    assert stated_format(str(tmp_path / "config.json")) == (name, None)
    built = build(Deployment(model=model, gpu="h200"))
    assert built.deployment.quantization == name
    asked = build(Deployment(model=model, gpu="h200", quantization=name))
    assert built.memory.weight_bytes == asked.memory.weight_bytes


def test_an_unknown_method_is_a_warning_and_an_option_has_the_last_word(tmp_path: Path) -> None:
    model = folder(tmp_path, {"quant_method": "bitsandbytes"})
    assert any("bitsandbytes" in warning for warning in build(Deployment(model=model)).warnings)
    given = build(Deployment(model=model, quantization="int4_wo"))
    assert given.deployment.quantization == "int4_wo"
    assert not any("bitsandbytes" in warning for warning in given.warnings)


def test_a_name_is_no_checkpoint() -> None:
    assert stated_format("llama-3.1-8b") == (None, None)
