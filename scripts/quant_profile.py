"""Add int8 and int4 weights and int8 and int4 KV caches to a profile that tokentwin calibrate made on this device."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from calibration.device_calibrate import Plan
from calibration.device_formats import Format, with_formats
from costmodel.profile import load_profile
from realengine.build import EngineOptions

FORMATS: tuple[Format, ...] = (("int8_wo", "auto"), ("int4_wo", "int8"), (None, "int4"))
"""Each run measures one format of weights and one of the cache."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=30.0)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    engine = EngineOptions(options.model, load_format=options.load_format, device=options.device)
    plan = Plan(
        engine,
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.max_model_len,
        budget_s=options.budget_s,
        rounds=1,
    )
    done = with_formats(load_profile(options.profile), plan, FORMATS, say=_say)
    for name, fit in done.kernels():
        if name.startswith(("gemm", "prefill", "decode")):
            sys.stdout.write(f"{name}: {fit.num_points} points, {fit.errors}\n")
    options.output.write_text(done.to_json() + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {options.output}\n")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    main()
