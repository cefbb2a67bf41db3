"""The run that speed is measured on: Azure's 2023 conversation trace on Llama-3.1-8B and one H200."""

from __future__ import annotations

from pathlib import Path

from sim.deployment import Built, Deployment, build
from sim.workload.flags import spec_from_flags
from sim.workload.load import load_workload
from sim.workload.types import Workload

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
CONVERSATIONS = TRACES / "AzureLLMInferenceTrace_conv.csv"
MOONCAKE = TRACES / "mooncake_conversation_trace.jsonl"

RATE_SCALE = 2.8
"""About 70 % of capacity. `python -m tests.benchmarks.capacity` measures what that is relative to."""


def deployment() -> Built:
    """vLLM's defaults on this device: policy chunked, asynchronous, prefix caching on."""
    return build(Deployment(model="llama-3.1-8b", gpu="h200"))


def conversations(rate_scale: float = RATE_SCALE) -> Workload:
    """The trace, all 19,366 requests, sped up by `rate_scale`."""
    flags = {"dataset_name": "azure", "dataset_path": str(CONVERSATIONS), "rate_scale": rate_scale}
    return load_workload(spec_from_flags(flags), seed=0)
