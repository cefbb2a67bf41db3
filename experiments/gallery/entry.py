"""What an entry of the gallery is, and the small worlds that entries compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sim.deployment import Deployment, build, simulate
from sim.metrics import Summary, summarise
from sim.record import RunRecord
from sim.workload import Workload, WorkloadSpec, load_workload
from sim.workload.flags import spec_from_flags

MODEL, GPU = "llama-3.1-8b", "h100"


@dataclass(frozen=True, slots=True)
class Entry:
    """One technique."""

    name: str
    """Of its picture's file."""
    title: str
    options: str
    """The options that switch it, the same in simulate, run and serve unless the words say otherwise."""
    words: str
    """One paragraph: what it does, what it gained here, what it cost."""
    figure: Any
    """A Plotly figure."""


Maker = Callable[[], Entry]


@lru_cache(maxsize=64)
def _workload(seed: int, flags: tuple[tuple[str, Any], ...]) -> Workload:
    return load_workload(spec_from_flags(dict(flags)), seed=seed)


def traffic(seed: int = 0, **flags: Any) -> Workload:
    """A workload of the command line's flags (names with underscores)."""
    flags.setdefault("dataset_name", "random")
    return _workload(seed, tuple(sorted(flags.items())))


def mixed(tenants: Sequence[dict[str, Any]], seed: int = 0) -> Workload:
    """A workload of several tenants, each as in a workload file."""
    return load_workload(WorkloadSpec.model_validate({"tenants": list(tenants)}), seed=seed)


def run(workload: Workload, **deployment: Any) -> tuple[RunRecord, Summary]:
    """One simulated run, without noise, and its numbers."""
    given: dict[str, Any] = {"model": MODEL, "gpu": GPU, **deployment}
    record = simulate(workload, build(Deployment(**given)))
    return record, summarise(record)


def p(summary: Summary, metric: str, percentile: float = 95.0) -> float:
    """A percentile of a latency in milliseconds."""
    return float(1e3 * getattr(summary, metric).at(percentile))


def times(ratio: float) -> str:
    """`3.2 times`."""
    return f"{ratio:.1f} times" if ratio < 20 else f"{ratio:.0f} times"


def knee(x: Sequence[float], y: Sequence[float]) -> int:
    """Index where a falling curve bends most: farthest below the line between its ends, both axes scaled to 0 to 1."""
    width, height = x[-1] - x[0], y[0] - y[-1]
    if not width or not height:
        return 0
    below = [1 - (a - x[0]) / width - (b - y[-1]) / height for a, b in zip(x, y, strict=True)]
    return below.index(max(below))
