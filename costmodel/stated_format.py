"""What a checkpoint's own `quantization_config` says of its weights, as vLLM and the engine read it by themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def stated_format(model: str) -> tuple[str | None, str | None]:
    """(the `--quantization` that a checkpoint has by itself, a warning); None and None for a plain one or a mere name."""
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        return None, None
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return None, None  # whoever reads the shape says so
    section = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(section, Mapping):
        return None, None
    name = _format(section)
    if name is None:
        method = section.get("quant_method")
        return (
            None,
            f"{path}: weights quantised by {method!r} are not modelled and priced as 16 bit; set --quantization",
        )
    return name, None


def _format(section: Mapping[str, Any]) -> str | None:
    method, bits = section.get("quant_method"), section.get("bits", section.get("w_bit"))
    if method in ("awq", "gptq"):
        return {4: str(method), 8: "int8_wo"}.get(bits) if isinstance(bits, int) else None
    if method == "fp8":
        return "fp8_block" if section.get("weight_block_size") else "fp8"
    return None
