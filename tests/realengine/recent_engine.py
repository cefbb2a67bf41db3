"""An engine whose steps are computed twice: by the CPU's operators, and by the kernels' on caches and rings of their own.

Both follow one schedule, so that whatever it brings (cached prefixes, swapping, recomputing, forks, chunks), each step's
logits can be compared. By the kernels, pure decodes are padded to a recorded size and other steps arrive by one upload,
as on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realengine.batch import LayerCache
from realengine.cuda import DecodeGraphs, Recording, Uploads, arrays_of
from realengine.engine import Engine
from realengine.inputs import StepInputs
from realengine.kernels import Operators
from realengine.load import Source, load
from realengine.models import Model
from realengine.ops import KernelOps, rotary_tables
from realengine.runner import Drawn, StepRunner
from realengine.seats import Draws
from realengine.swap_store import SwapStore
from tests.realengine.engines import CPU, running, tiny_source


def rerun(forward: Callable[[], Tensor]) -> Recording:
    """In place of a CUDA graph: runs the forward again into the result that was handed out."""
    result = forward()

    def compute_again() -> None:
        result.copy_(forward())

    return compute_again, result


def cloned(cache: LayerCache) -> LayerCache:
    tensors = (getattr(cache, field.name) for field in fields(cache))
    return LayerCache(*(None if tensor is None else tensor.clone() for tensor in tensors))  # type: ignore[arg-type]


class Twice(StepRunner):
    """`step` again, which compares. Both share what they know of seats and of tokens in flight."""

    def __init__(self, step: StepRunner, kernels: Model, swap_pages: int, sizes: Sequence[int]) -> None:
        super().__init__(step.model, step.caches, None, len(step.last_token), step.device)
        self.recent, self.last_token = step.recent, step.last_token
        others = [cloned(cache) for cache in step.caches]
        self.paged = [*step.caches, *others]
        self.swap = SwapStore(self.paged, swap_pages) if swap_pages else None
        self._other = StepRunner(kernels, others, None, len(step.last_token), step.device)
        self._other.recent, self._other.last_token = step.recent, step.last_token
        with torch.inference_mode():
            self._graphs = DecodeGraphs(self._other, sizes, 32, rerun)
            self._graphs.record()
        self._uploads = Uploads(step.device)
        self.replayed = self.computed = self.copied = self.swapped_in = self.behind_prefixes = 0
        self.worst = 0.0

    @torch.inference_mode()
    def run(
        self, inputs: StepInputs, draws: Draws, put: Callable[[npt.NDArray[np.generic]], Tensor]
    ) -> Drawn:
        self.prepare(inputs)
        assert inputs.recent is not None
        self.behind_prefixes += int((inputs.recent.first > 0).sum())
        self.copied += len(inputs.moves.copies)
        self.swapped_in += len(inputs.moves.swap_in)
        self.move_pages(inputs.moves)
        logits = self.model.forward(self.batch(inputs, put), self.caches)
        found = self._graphs.replay(inputs)
        if found is None:
            self.computed += 1
            sent = self._uploads.send(arrays_of(inputs))
            batch = self._other.batch(inputs, lambda array: sent[id(array)])
            found = self._other.model.forward(batch, self._other.caches)
        else:
            self.replayed += 1
            found = found[inputs.sample_rows]
        if not len(inputs.sample_rows):
            return Drawn(np.empty(0, np.int64), 0.0)
        self.worst = max(self.worst, float((found - logits).abs().max() / logits.abs().max()))
        (tokens,) = self.draw(logits, inputs, draws, put)
        return Drawn(tokens.numpy(), 0.0)


@contextmanager
def running_twice(
    operators: Operators,
    recent_tokens: int,
    kv: str,
    *,
    source: Source | None = None,
    sizes: Sequence[int] = (1, 2, 4, 8),
    **limits: Any,
) -> Iterator[tuple[Engine, Twice]]:
    """An engine over `source` or the tiny model, and the step runner that says how far both ways were apart."""
    model = load(
        source if source is not None else tiny_source(),
        device=CPU,
        dtype=torch.float32,
        max_positions=256,
        kv_cache_dtype=kv,
        kv_recent_tokens=recent_tokens,
    )
    shape = model.architecture.shape
    ops = KernelOps(*rotary_tables(model.architecture.rope, shape.head_dim, 256, CPU), operators)
    kernels = Model(model.architecture, model.weights, ops, kv_cache_dtype=kv)
    with running(model, start=False, **limits) as engine:
        runner: Any = engine.runner
        config = engine.config
        twice = runner.step = Twice(runner.step, kernels, config.swap_pages + config.host_cache_pages, sizes)
        engine.start()
        yield engine, twice
    if engine.fault is not None:
        raise engine.fault
