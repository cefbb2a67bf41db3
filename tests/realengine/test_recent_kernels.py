"""Rings of recent tokens by the engine's kernels: the CPU's logits and text, whatever the schedule, graphs or none."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from realengine import cuda
from realengine.complete import complete
from realengine.generation import Sampling
from realengine.kernels import operators
from realengine.models import Model
from realengine.ops import KernelOps, rotary_tables
from tests.realengine.engines import CPU, running
from tests.realengine.recent_engine import rerun, running_twice
from tests.realengine.test_quant_recent import FEW, PROMPTS, SAMPLING, texts, tiny

SHARED = [[3 * i % 59 + 1 for i in range(28)] + prompt[:9] for prompt in PROMPTS]
SCARCE = {"num_pages": 16, "page_tokens": 8, "max_num_seqs": 5, "max_num_batched_tokens": 24}


@pytest.mark.parametrize("kv", ["int4", "int8", "fp8"])
@pytest.mark.parametrize(
    ("limits", "preempts"),
    [
        pytest.param({}, False, id="enough memory"),
        pytest.param(SCARCE, True, id="recomputed"),
        pytest.param(SCARCE | {"swap_pages": 20}, True, id="swapped"),
        pytest.param(SCARCE | {"async_scheduling": True}, True, id="asynchronous"),
        pytest.param({"page_tokens": 8, "max_num_seqs": 3, "max_num_batched_tokens": 9}, False, id="chunked"),
    ],
)
def test_the_kernels_read_what_the_cpu_reads(limits: dict[str, int], preempts: bool, kv: str) -> None:
    """Prompts that begin alike, two answers each: cached prefixes and copies of pages come by themselves."""
    sampling = Sampling(max_tokens=14, temperature=1.0, seed=5, n=2, ignore_eos=True)
    with running_twice(operators("cpu"), 6, kv, **limits) as (engine, twice):
        complete(engine, SHARED, sampling)
    assert any(row.preemptions for row in engine.recorder.requests) == preempts
    assert min(twice.replayed, twice.computed, twice.copied, twice.behind_prefixes) > 0
    assert (twice.swapped_in > 0) == ("swap_pages" in limits)
    # A number that lies between two levels may be rounded to either; a token read where it should not: 0.4 and more.
    assert twice.worst < 5e-3


class NoDevice:
    """PyTorch, with what a CUDA stream has to offer done at once on the CPU."""

    def __init__(self) -> None:
        event = SimpleNamespace(
            record=lambda stream: None, synchronize=lambda: None, elapsed_time=lambda later: 1.0
        )
        self.cuda = SimpleNamespace(
            Event=lambda enable_timing: event,
            Stream=lambda device: None,
            is_available=lambda: False,
            stream=lambda stream: nullcontext(),
            synchronize=lambda device: None,
        )

    def empty(self, *size: Any, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        return torch.empty(*size, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize("limits", [{}, FEW, {"max_num_batched_tokens": 11, "max_num_seqs": 3}])
@pytest.mark.parametrize("graphs", [False, True])
def test_the_runner_for_cuda_gives_the_text_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], graphs: bool
) -> None:
    monkeypatch.setattr(cuda, "torch", NoDevice())
    monkeypatch.setattr(cuda, "CudaRecorder", lambda: rerun)
    model = tiny(12)
    shape, rope = model.architecture.shape, model.architecture.rope
    ops = KernelOps(*rotary_tables(rope, shape.head_dim, 256, CPU), operators("cpu"))
    kernels = Model(model.architecture, model.weights, ops, kv_cache_dtype="int4", kv_recent_tokens=12)
    with running(kernels, start=False, enable_prefix_caching=False, **limits) as engine:
        step = engine.runner.step  # type: ignore[attr-defined]
        engine.runner = cuda.CudaRunner(step, engine.config.max_num_seqs, 32, graphs=graphs)
        engine.start()
        found = [answer.token_ids for (answer,) in complete(engine, PROMPTS, SAMPLING)]
    assert found == texts(model)
