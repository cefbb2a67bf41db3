"""How sure a run's numbers are: intervals, what was extrapolated, and percentiles of too few samples, in one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim.deployment import Built
from sim.hull import Extrapolation, after_run
from sim.intervals import Interval, Replicated
from sim.latency import DEFAULT_PERCENTILES
from sim.metrics import Summary
from sim.record import RunRecord
from sim.replications import REPLICATIONS, replicate
from sim.samples import ThinPercentile, thin_percentiles
from sim.slo import Goodput, Slo
from sim.workload import Workload, WorkloadSpec

FEW_STEPS, MANY_STEPS = 30_000, 60_000
FEW = 4


@dataclass(frozen=True, slots=True)
class Certainty:
    """What stands beside a summary. `replicated` is None without replications."""

    replicated: Replicated | None = None
    extrapolations: tuple[Extrapolation, ...] = ()
    thin: tuple[ThinPercentile, ...] = ()
    interrupted: bool = False
    """The user stopped the replications; the run itself is whole."""
    too_long: bool = False
    """Nobody said how many replications to make, and the run is too long to make any unasked."""

    def interval(self, name: str) -> Interval | None:
        """95 % interval of a figure of `sim.replications.figures`, if there is one."""
        return None if self.replicated is None else self.replicated.interval(name)

    def is_thin(self, name: str) -> bool:
        """Whether a percentile such as `p99_ttft` has too few samples to be bounded from above."""
        return any(thin.name == name for thin in self.thin)


def default_replications(record: RunRecord) -> int:
    """Enough for a steady interval; fewer where a run is long, none (1) where they would take minutes."""
    steps = len(record.steps)
    return REPLICATIONS if steps <= FEW_STEPS else FEW if steps <= MANY_STEPS else 1


def assess(
    record: RunRecord,
    summary: Summary,
    built: Built,
    workload: WorkloadSpec | Workload,
    *,
    seed: int = 0,
    replications: int | None = None,
    goodput: Goodput | None = None,
    slos: Sequence[Slo] = (),
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    fast_forward: bool = True,
    until_s: float = float("inf"),
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Certainty:
    """How sure the figures of a run are. `replications` None takes the default, 1 leaves intervals out.

    An interrupt (or an interrupted run) leaves intervals out and keeps the rest. Raises `UsageError` as `replicate`.
    """
    count = default_replications(record) if replications is None else replications
    replicated, interrupted = None, record.interrupted
    if count != 1 and not interrupted:
        try:
            replicated = replicate(
                workload,
                built,
                seed=seed,
                replications=count,
                goodput=goodput,
                slos=slos,
                percentiles=percentiles,
                fast_forward=fast_forward,
                until_s=until_s,
                jobs=jobs,
                nominal=summary,
                progress=progress,
            )
        except KeyboardInterrupt:
            interrupted = True
    too_long = replications is None and count == 1
    return Certainty(replicated, after_run(built, record), thin_percentiles(summary), interrupted, too_long)
