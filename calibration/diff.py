"""Why two recorded runs differ: which part of a metric's difference is workload, schedule, kernel times or host time.

Each part of B is put into A's world and A's replay measured again. Changing one part at a time gives another answer in
every order, because parts interact (slower kernels hurt more when the queue is longer), so each part gets the mean of
its effect over all orders (Shapley 1953). The parts then add up to the difference of the two replays; what a replay
misses of its own recorded run is kept apart as `unexplained`.

- workload: which requests are sent, and when (closed loops and sessions wait for their answers);
- schedule: limits, KV pages, batch policy, queue order, replicas, router;
- kernel: device time of a step, given what it computes;
- host: host time of a step, and of a request before and after the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from calibration.recorded import (
    COMPOSITION,
    RecordedPrices,
    Rules,
    frontend_of,
    rules_of,
    workload_of,
)
from serving.errors import UsageError, nearest
from serving.policies import load_policy
from sim.metrics import summarise
from sim.pipeline import bubble_share
from sim.record import RunRecord, Status
from sim.replications import figures
from sim.workload import Workload
from sim.world import Frontend, run_world

PARTS = ("workload", "schedule", "kernel", "host")
METRICS = ("mean_ttft", "p95_ttft", "mean_tpot", "p95_tpot", "mean_e2el", "p95_e2el", "output_throughput")
"""What is split unless asked otherwise; any figure of `sim.replications.figures` can be."""


@dataclass(frozen=True, slots=True)
class Split:
    """One metric's difference, B − A, in the metric's unit. `sum(parts.values()) + unexplained == b - a`."""

    metric: str
    a: float
    b: float
    parts: dict[str, float]
    unexplained: float
    """What the replays of the two runs miss of them."""

    @property
    def difference(self) -> float:
        return self.b - self.a

    def share(self, part: str) -> float:
        """A part over the difference; NaN when there is none."""
        return self.parts[part] / self.difference if self.difference else math.nan


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first step, in each replica's order, that computes something else in the two runs."""

    replica: int
    step: int
    """Number of the step in its replica; equals `identical` steps before it."""
    a: dict[str, float]
    """What A's step computes, or nothing where A has no such step."""
    b: dict[str, float]
    columns: tuple[str, ...]
    """What differs."""


@dataclass(frozen=True, slots=True)
class RunDiff:
    """The answer of `diff`."""

    splits: tuple[Split, ...]
    first_difference: FirstDifference | None
    identical_steps: int
    """Steps before the first difference, summed over replicas."""
    num_steps: tuple[int, int]
    kernel_ratio: dict[str, tuple[float, int]]
    """Mean of B's over A's device time and the number of compositions, over steps that both runs had."""
    worlds: int
    """Replays made."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Side:
    """One run taken apart."""

    record: RunRecord
    workload: Workload
    rules: Rules
    prices: RecordedPrices
    frontend: Frontend
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, record: RunRecord, name: str) -> _Side:
        workload, about_workload = workload_of(record)
        rules, about_rules = rules_of(record)
        notes = [f"{name}: {note}" for note in (*about_workload, *about_rules)]
        return cls(record, workload, rules, RecordedPrices(record), frontend_of(record), notes)


class _Swapped:
    """Device times of one run and host times of another."""

    def __init__(self, kernel: RecordedPrices, host: RecordedPrices) -> None:
        self.step_s, self.decode_run_s, self.host_s = kernel.step_s, kernel.decode_run_s, host.host_s
        self.move_s = kernel.move_s


def diff(
    a: RunRecord,
    b: RunRecord,
    *,
    metrics: Sequence[str] = METRICS,
    names: tuple[str, str] = ("A", "B"),
    progress: Callable[[int, int], None] | None = None,
) -> RunDiff:
    """Split the difference of two runs into `PARTS`.

    Raises `UsageError` for an unknown metric, a run without steps, a run with drafts (which steps of another run cannot
    price) or of a pipeline (whose steps overlap), or a run in which nothing finished.
    """
    for record, name in ((a, names[0]), (b, names[1])):
        if record.drafts is not None:
            raise UsageError(
                f"{name} verified drafts, and a replay cannot say which would stand in another schedule; "
                "tokentwin compare sets two deployments side by side"
            )
        if bubble_share(record) is not None:
            raise UsageError(
                f"{name} ran in a pipeline, and a replay has one step at a time; "
                "tokentwin compare sets two deployments side by side"
            )
    sides = (_Side.of(a, names[0]), _Side.of(b, names[1]))
    recorded = tuple(_figures(side.record) for side in sides)
    known = [name for name in recorded[0] if name in recorded[1]]
    for metric in metrics:
        if metric not in known:
            raise UsageError(f"--metric {metric!r} is not in both runs; {nearest(metric, known)}")
    wanted = [m for m in metrics if all(math.isfinite(side[m]) for side in recorded)]
    if not wanted:
        raise UsageError("no request finished in one of the runs, so there is nothing to split")
    active = tuple(part for part in PARTS if not _same(part, *sides))
    worlds = [frozenset(chosen) for n in range(len(active) + 1) for chosen in combinations(active, n)]
    values: dict[frozenset[str], dict[str, float]] = {}
    for world in worlds:
        values[world] = _replay(sides, world)
        if progress is not None:
            progress(len(values), len(worlds))
    first = first_difference(a, b)
    return RunDiff(
        splits=tuple(_split(metric, recorded, values, active) for metric in wanted),
        first_difference=first,
        identical_steps=_identical(a, b),
        num_steps=(len(a.steps), len(b.steps)),
        kernel_ratio=_ratios(sides[0].prices, sides[1].prices),
        worlds=len(worlds),
        notes=tuple(dict.fromkeys(note for side in sides for note in side.notes)),
    )


def _figures(record: RunRecord) -> dict[str, float]:
    return figures(summarise(record))


def _same(part: str, a: _Side, b: _Side) -> bool:
    if part == "workload":
        return _same_workload(a.workload, b.workload)
    if part == "schedule":
        return a.rules == b.rules
    if part == "kernel":
        return a.prices.same_kernels(b.prices)
    return a.prices.same_host(b.prices) and a.frontend == b.frontend


def _same_workload(a: Workload, b: Workload) -> bool:
    columns = (
        "sent_s",
        "prompt_tokens",
        "output_tokens",
        "priority",
        "segment_offsets",
        "segment_ends",
        "segment_streams",
        "after",
        "think_s",
    )
    rtts = [[t.rtt_s for t in w.tenants] for w in (a, b)]
    return (
        all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)
        and a.closed_loop == b.closed_loop
        and rtts[0] == rtts[1]
    )


def _replay(sides: tuple[_Side, _Side], of_b: frozenset[str]) -> dict[str, float]:
    """Figures of a world whose parts in `of_b` are B's and whose others are A's."""
    workload, rules, kernel, host = (sides[part in of_b] for part in PARTS)
    settings = rules.rules
    kernel.prices.rewind()
    record = run_world(
        workload.workload,
        settings.limits,
        _Swapped(kernel.prices, host.prices),
        make_policy=lambda: load_policy(settings.policy, **dict(settings.policy_options)),
        num_replicas=settings.num_replicas,
        router=settings.router,
        frontend=host.frontend,
        # Leaping prices more steps than it takes, which would use up the times of steps that look alike.
        fast_forward=not kernel.prices.ambiguous,
    )
    if record.interrupted:
        raise KeyboardInterrupt
    if not (record.requests.status == Status.FINISHED).any():
        raise UsageError(
            f"nothing can run when {', '.join(sorted(of_b))} of one run meets the rest of the other; their limits "
            "are too far apart to be compared"
        )
    return _figures(record)


def _split(
    metric: str,
    recorded: tuple[dict[str, float], ...],
    values: dict[frozenset[str], dict[str, float]],
    active: tuple[str, ...],
) -> Split:
    parts = dict.fromkeys(PARTS, 0.0)
    size = len(active)
    for part in active:
        others = [other for other in active if other != part]
        for n in range(size):
            weight = math.factorial(n) * math.factorial(size - n - 1) / math.factorial(size)
            for chosen in combinations(others, n):
                without = frozenset(chosen)
                parts[part] += weight * (values[without | {part}][metric] - values[without][metric])
    a, b = (side[metric] for side in recorded)
    missed = (b - values[frozenset(active)][metric]) - (a - values[frozenset()][metric])
    if abs(missed) <= 1e-9 * max(abs(a), abs(b)):
        missed = 0.0
    return Split(metric, a, b, parts, missed)


def _by_replica(record: RunRecord) -> dict[int, np.ndarray[Any, np.dtype[np.float64]]]:
    columns = np.stack([getattr(record.steps, name).astype(np.float64) for name in COMPOSITION], axis=1)
    return {int(r): columns[record.steps.replica == r] for r in np.unique(record.steps.replica)}


def _first(a: Any, b: Any) -> int:
    """Index of the first row that differs; the length of both when none does."""
    shared = min(len(a), len(b))
    differs = np.flatnonzero((a[:shared] != b[:shared]).any(axis=1))
    return int(differs[0]) if len(differs) else shared


def _identical(a: RunRecord, b: RunRecord) -> int:
    first, second = _by_replica(a), _by_replica(b)
    return sum(_first(first[r], second[r]) for r in first if r in second)


def first_difference(a: RunRecord, b: RunRecord) -> FirstDifference | None:
    """The earliest step (by A's clock) whose composition differs between the runs; None when all are alike."""
    first, second = _by_replica(a), _by_replica(b)
    empty = np.empty((0, len(COMPOSITION)))
    found: list[tuple[float, FirstDifference]] = []
    for replica in sorted(first.keys() | second.keys()):
        mine, theirs = first.get(replica, empty), second.get(replica, empty)
        at = _first(mine, theirs)
        if at == len(mine) == len(theirs):
            continue
        rows = [
            dict(zip(COMPOSITION, rows_of[at].tolist(), strict=True)) if at < len(rows_of) else {}
            for rows_of in (mine, theirs)
        ]
        columns = tuple(name for name in COMPOSITION if rows[0].get(name) != rows[1].get(name))
        starts_s = a.steps.start_s[a.steps.replica == replica]
        when_s = float(starts_s[at]) if at < len(starts_s) else math.inf
        found.append((when_s, FirstDifference(replica, at, rows[0], rows[1], columns)))
    return min(found, key=lambda entry: entry[0])[1] if found else None


def _ratios(a: RecordedPrices, b: RecordedPrices) -> dict[str, tuple[float, int]]:
    ratios = a.ratios(b)
    kinds = {
        "decode": [ratio for key, ratio in ratios.items() if not key[2]],
        "prefill": [ratio for key, ratio in ratios.items() if key[2] and not key[3]],
        "mixed": [ratio for key, ratio in ratios.items() if key[2] and key[3]],
    }
    return {name: (float(np.mean(values)), len(values)) for name, values in kinds.items() if values}
