"""Speed of the engine's steps: tokens a second, and the share of the device's bandwidth or arithmetic that they reach."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from calibration.device_calibrate import Plan, prepare
from calibration.device_facts import measured_facts
from calibration.device_memory import weight_bytes
from calibration.microbench_steps import Composition
from realengine.build import EngineOptions


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = EngineOptions(options.model, load_format=options.load_format, device=options.device)
    bench = prepare(Plan(engine, options.max_num_seqs, options.max_num_batched_tokens, options.max_model_len))
    facts, shape = measured_facts(bench.device), bench.shape
    weights = weight_bytes(shape, 2)
    kv_token = shape.kv_bytes_per_token(1, 2)
    linear = 2.0 * (shape.num_layers * shape.linear_params_per_layer() + 0)
    context = bench.limits.max_model_len // 2
    rows: list[dict[str, Any]] = []
    steps = [Composition((context,) * b) for b in (1, 4, 16, 64, 256) if b <= options.max_num_seqs]
    steps += [Composition(chunks=((t, 0),)) for t in (64, 512, 2048) if t <= options.max_num_batched_tokens]
    for what in steps:
        if not bench.steps.fits(what) or not bench.bounds.allows(what):
            continue
        bench.steps.run(what)
        seconds = float(np.median([bench.steps.run(what)["total"] for _ in range(5)]))
        moved = weights + kv_token * what.kv_tokens
        flops = linear * what.num_tokens
        rows.append(
            {
                "step": what.key,
                "ms": seconds * 1e3,
                "tokens_per_s": what.num_tokens / seconds,
                "share_of_bandwidth": moved / seconds / facts.hbm_bytes_per_s,
                "share_of_arithmetic": flops / seconds / facts.peak_flops["bfloat16"],
            }
        )
    lines = [
        f"{shape.name} on {facts.product}",
        f"{'step':<14}{'ms':>10}{'tokens/s':>11}{'bandwidth':>11}{'FLOPs':>8}",
    ]
    lines += [
        f"{r['step']:<14}{r['ms']:>10.2f}{r['tokens_per_s']:>11,.0f}{r['share_of_bandwidth']:>11.1%}"
        f"{r['share_of_arithmetic']:>8.1%}"
        for r in rows
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json:
        options.json.write_text(
            json.dumps({"model": shape.name, "steps": rows}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
