"""`tokentwin profile …` and `tokentwin model …`: what is shipped, and what is in it."""

from __future__ import annotations

import json as json_format
import sys
from typing import Annotated

from cyclopts import Parameter

from tokentwin.flags import as_text

AsJson = Annotated[bool, Parameter(help="Print JSON instead.", negative=())]


def list_profiles() -> int:
    """The shipped device profiles."""
    from costmodel.profile import list_profiles as names
    from costmodel.profile import load_profile

    sys.stdout.write(f"{'profile':<12}{'memory':>7}{'bandwidth':>11}{'fitted':>8}  device\n")
    for name in names():
        profile = load_profile(name)
        facts, kernels = profile.facts, profile.kernels()
        fitted = f"{sum(fit.fitted for _, fit in kernels)}/{len(kernels)}"
        memory, bandwidth = f"{facts.memory_bytes / 1e9:.0f} GB", f"{facts.hbm_bytes_per_s / 1e12:.2f} TB/s"
        product = facts.product.removeprefix("NVIDIA ")
        sys.stdout.write(f"{name:<12}{memory:>7}{bandwidth:>11}{fitted:>8}  {product}\n")
    return 0


def show_profile(
    name: Annotated[str, Parameter(help="A shipped profile or a profile file.", converter=as_text)],
    /,
    *,
    json: AsJson = False,
) -> int:
    """Facts, coefficients, fit errors and hull of a device profile."""
    from costmodel.profile import load_profile
    from costmodel.render import render_profile

    profile = load_profile(name)
    if json:
        text = json_format.dumps(json_format.loads(profile.to_json()), indent=1)
    else:
        text = render_profile(profile)
    sys.stdout.write(text + "\n")
    return 0


def list_models() -> int:
    """The shipped models."""
    from costmodel.model import load_model, shipped_models

    for name in shipped_models():
        model = load_model(name)
        experts = f", {model.num_experts} experts" if model.num_experts else ""
        sys.stdout.write(
            f"{name:<18}{model.num_params / 1e9:>8.1f}B{model.max_position_embeddings:>9,} positions   "
            f"{model.family}{experts}\n"
        )
    return 0


def show_model(
    name: Annotated[str, Parameter(help="A shipped model or a path to a config.json.", converter=as_text)],
    /,
    *,
    json: AsJson = False,
) -> int:
    """Dimensions, parameters and bytes of a model."""
    from costmodel.model import load_model

    model = load_model(name)
    if json:
        sys.stdout.write(model.model_dump_json(indent=1) + "\n")
        return 0
    rows = [(key.replace("_", " "), value) for key, value in model.model_dump().items() if key != "name"]
    if not model.num_experts:
        rows = [row for row in rows if row[0] not in ("num experts", "experts per token")]
    rows.append(("parameters", f"{model.num_params / 1e9:,.2f} billion"))
    if model.num_experts:
        rows.append(("of them per token", f"{model.active_params / 1e9:,.2f} billion"))
    rows.append(("KV bytes per token", f"{model.kv_bytes_per_token():,.0f} in 16 bit"))
    lines = [model.name, *(f"  {key:<26}{_cell(value)}" for key, value in rows)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _cell(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
