"""`tokentwin memory`: where a GPU's memory goes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from serving.errors import UsageError
from sim.deployment import build
from tokentwin.config_file import print_config, with_config
from tokentwin.flag_tables import CONFIG_FLAGS, DEPLOYMENT, JSON
from tokentwin.flags import takes
from tokentwin.job import DEPLOYMENT_NAMES, make_deployment

USED = (
    "model",
    "gpu",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "kv_cache_recent_tokens",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "gpu_memory_utilization",
    "block_size",
    "enforce_eager",
    "speculative_config",
)
"""Fields of a deployment that have an effect on memory."""
MEMORY = tuple(flag for flag in DEPLOYMENT if flag.name in USED)
KNOWN = {flag.name: flag for flag in (*MEMORY, *CONFIG_FLAGS, JSON)}


@takes(MEMORY, CONFIG_FLAGS, (JSON,))
def memory(**flags: Any) -> int:
    """Work out where a GPU's memory goes: weights, activations, graphs, and how many KV pages are left.

    Example: tokentwin memory --model llama-3.1-70b --gpu h200 --tp 2
    """
    given = with_config(flags, KNOWN, unused=DEPLOYMENT_NAMES)
    built = build(make_deployment(given))
    if given.get("data_parallel_size", 1) > 1 and not built.in_lockstep:
        raise UsageError(
            f"--data-parallel-size has no effect on memory: {built.model.name} has no experts to share; leave it out"
        )
    if given.get("print_config"):
        return print_config(given, built, KNOWN)
    plan = built.memory
    if given.get("json"):
        derived = ("budget_bytes", "kv_cache_bytes", "kv_tokens", "longest_context")
        content = asdict(plan) | {name: getattr(plan, name) for name in derived}
        content |= {
            "sequences_of_4096_paged": plan.paged_sequences(4096),
            "sequences_contiguous": plan.contiguous_sequences(),
            "warnings": list(built.warnings),
        }
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return 0
    lines = [*plan.arithmetic(), *(f"warning: {warning}" for warning in built.warnings)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
