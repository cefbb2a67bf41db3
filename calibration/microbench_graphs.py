"""A decode step launched from the host kernel by kernel, against the same step replayed from a recorded graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from calibration.microbench_steps import Composition, StepBench
from realengine.cuda import DecodeGraphs, Recording, Uploads, arrays_of
from realengine.runner import StepRunner


@dataclass(frozen=True, slots=True)
class Launches:
    """Seconds of one decode step of `rows` sequences, steps queued one behind the other."""

    rows: int
    eager_s: float
    graph_s: float

    def __str__(self) -> str:
        return (
            f"decode of {self.rows} sequences: {self.graph_s * 1e3:.2f} ms replayed from a graph, "
            f"{self.eager_s * 1e3:.2f} ms launched kernel by kernel"
        )


def measure_launches(
    step: StepRunner,
    bench: StepBench,
    sizes: Sequence[int],
    table_width: int,
    *,
    context: int = 64,
    repeats: int = 20,
    recorder: Callable[[Callable[[], Tensor]], Recording] | None = None,
) -> list[Launches]:
    """Both ways at every batch size that the cache has room for.

    `recorder` stands in for CUDA graphs where there are none.
    """
    fitting = [size for size in sizes if bench.fits(Composition((context,) * size))]
    if not fitting:
        return []
    cuda = step.device.type == "cuda"
    uploads = Uploads(step.device)
    found = []
    with torch.inference_mode():
        graphs = DecodeGraphs(step, fitting, table_width, recorder)
        graphs.record()
        for size in fitting:
            inputs = bench.inputs(Composition((context,) * size))
            step.prepare(inputs)

            def eager(inputs=inputs) -> None:  # type: ignore[no-untyped-def]
                sent = uploads.send(arrays_of(inputs))
                step.model.forward(step.batch(inputs, lambda array: sent[id(array)]), step.caches)

            def replayed(inputs=inputs) -> None:  # type: ignore[no-untyped-def]
                graphs.replay(inputs)

            found.append(Launches(size, _mean_s(eager, cuda, repeats), _mean_s(replayed, cuda, repeats)))
    return found


def _mean_s(run: Callable[[], None], cuda: bool, repeats: int, rounds: int = 3) -> float:
    """Seconds a call, calls queued without waiting; the median of `rounds`."""
    run()
    times = []
    for _ in range(rounds):
        if cuda:
            torch.cuda.synchronize()
        begun_s = time.perf_counter()
        for _ in range(repeats):
            run()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begun_s) / repeats)
    return float(np.median(times))
