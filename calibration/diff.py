"""Why two recorded runs differ: which part of a metric's difference is workload, schedule, kernel times or host time.

Each part of B is put into A's world and A's replay measured again. Changing one part at a time gives another answer in
every order, because parts interact (slower kernels hurt more when the queue is longer), so each part gets the mean of
its effect over all orders (Shapley 1953). Luck and passes of drafts change nothing without drafts, and neither does a
link without prefill apart from decode: only orders count that swap them while there are (Faigle and Kern 1992). The
parts then add up to the difference of the two replays; what a replay misses of its own recorded run is kept apart as
`unexplained`.

- workload: which requests are sent, when (closed loops and sessions wait for their answers) and by whom, and how many
  answers they ask for;
- schedule: limits, KV pages, batch policy, queue order, how long drafts are;
- kernel: device time of a step, given what it computes, verifications and draft passes included;
- host: host time of a step, and of a request before and after the engine;
- acceptance: which drafts stand;
- routing: which replicas there are and who goes where: router, pools, autoscaler, failures, door, cache of answers;
- pipeline: how many steps are in flight, and with them the bubbles;
- transfer: hand-overs between a pipeline's stages, and of KV from prefill to decode;
- network: lines, connections and readers, and how tokens gather before they are sent.

The last five are there only where a run has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

import numpy as np
import numpy.typing as npt

from calibration.recorded import RecordedPrices
from calibration.sides import INSTEAD, Side
from calibration.sides import PARTS as ALL_PARTS
from calibration.step_diff import FirstDifference, first_difference, identical_steps
from calibration.take_apart import take_apart
from calibration.worlds import world
from serving.errors import UsageError, nearest
from sim.metrics import summarise
from sim.record import RunRecord, Status
from sim.replications import figures
from sim.workload import Workload

PARTS = ("workload", "schedule", "kernel", "host")
"""What every run has."""
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


def diff(
    a: RunRecord,
    b: RunRecord,
    *,
    metrics: Sequence[str] = METRICS,
    names: tuple[str, str] = ("A", "B"),
    progress: Callable[[int, int], None] | None = None,
) -> RunDiff:
    """Split the difference of two runs into the parts that they have.

    Raises `UsageError` for an unknown metric, a run without steps or without a finished request, a fleet or a pipeline
    whose deployment is not at hand, and a pipeline beside what no pipeline has.
    """
    sides = (take_apart(a, names[0]), take_apart(b, names[1]))
    _check(sides)
    recorded = tuple(_figures(side.record) for side in sides)
    known = [name for name in recorded[0] if name in recorded[1]]
    for metric in metrics:
        if metric not in known:
            public = [name for name in known if not name.startswith("_")]
            raise UsageError(f"--metric {metric!r} is not in both runs; {nearest(metric, public)}")
    wanted = [m for m in metrics if all(math.isfinite(side[m]) for side in recorded)]
    if not wanted:
        raise UsageError("no request finished in one of the runs, so there is nothing to split")
    parts = _parts(sides)
    active = tuple(part for part in parts if not _same(part, *sides))
    steps = _steps(active, _first_of(sides))
    worlds = sorted(
        {world for step in steps for world in step} | {frozenset()}, key=lambda w: (len(w), sorted(w))
    )
    values: dict[frozenset[str], dict[str, float]] = {}
    for chosen in worlds:
        values[chosen] = _replay(sides, chosen, all_of_b=len(chosen) == len(active) > 0)
        if progress is not None:
            progress(len(values), len(worlds))
    return RunDiff(
        splits=tuple(_split(metric, recorded, values, steps, parts) for metric in wanted),
        first_difference=first_difference(a, b),
        identical_steps=identical_steps(a, b),
        num_steps=(len(a.steps), len(b.steps)),
        kernel_ratio=_ratios(sides),
        worlds=len(worlds),
        notes=tuple(dict.fromkeys(note for side in sides for note in side.notes)),
    )


def _check(sides: tuple[Side, Side]) -> None:
    """Raise `UsageError` where some mixture of the two could not run."""
    has = [_traits(side) for side in sides]
    for one, other in _NEVER_TOGETHER:
        for mine, theirs in ((0, 1), (1, 0)):
            if one in has[mine] and other in has[theirs] and not {one, other} <= has[mine] & has[theirs]:
                raise UsageError(
                    f"{sides[mine].name} has {one} and {sides[theirs].name} {other}, which no run has together: their "
                    f"parts cannot be put into one world; {INSTEAD}"
                )


_NEVER_TOGETHER = (
    ("a pipeline", "drafts"),
    ("a pipeline", "static batches"),
    ("a pipeline", "copies of KV on the host"),
    ("beam searches", "drafts"),
)


def _traits(side: Side) -> set[str]:
    limits = [pool.limits for pool in side.pools]
    there = {
        "a pipeline": max(side.depths) > 1,
        "drafts": side.speculates,
        "static batches": any(pool.policy == "static" for pool in side.pools),
        "copies of KV on the host": any(each.swap_pages or each.host_cache_pages for each in limits),
        "beam searches": side.workload.beam_width is not None,
    }
    return {name for name, is_there in there.items() if is_there}


def _figures(record: RunRecord) -> dict[str, float]:
    return figures(summarise(record))


def _parts(sides: tuple[Side, Side]) -> tuple[str, ...]:
    """Those that one of the runs has."""
    routed = any(s.routing.fleet or s.routing.num_replicas > 1 or s.routing.response_cache for s in sides)
    pipelined = any(max(side.depths) > 1 for side in sides)
    there = {
        "acceptance": any(side.speculates for side in sides),
        "routing": routed,
        "pipeline": pipelined,
        "transfer": pipelined or any(side.kv_transfer for side in sides),
        "network": any(side.ways.delivering(side.workload)[1] is not None for side in sides),
    }
    return tuple(part for part in ALL_PARTS if there.get(part, True))


def _same(part: str, a: Side, b: Side) -> bool:
    if part == "workload":
        return _same_workload(a.workload, b.workload) and a.until_s == b.until_s
    if part == "kernel":
        return _same_kernels(a, b)
    if part == "host":
        return _same_hosts(a, b)
    if part == "schedule" and a.depths == b.depths:
        asynchronous = [[pool.limits.async_scheduling for pool in side.pools] for side in (a, b)]
        return asynchronous[0] == asynchronous[1] and a.facts(part) == b.facts(part)
    if part == "acceptance" and (a.drafts is None or a.drafts.acceptance is None):
        return a.record is b.record
    return a.facts(part) == b.facts(part)


def _same_kernels(a: Side, b: Side, *, drafting: bool = True) -> bool:
    """Whether steps cost the same on the device; without `drafting` but for draft passes."""
    if a.made_again is not None and b.made_again is not None:
        facts = [
            [pool.known.facts(drafting=drafting) for pool in side.pools if pool.known is not None]
            for side in (a, b)
        ]
        return facts[0] == facts[1] and a.noise == b.noise
    mine, theirs = ([pool.kernels for pool in side.pools] for side in (a, b))
    return len(mine) == len(theirs) and all(
        isinstance(one, RecordedPrices) and isinstance(other, RecordedPrices) and one.same_kernels(other)
        for one, other in zip(mine, theirs, strict=True)
    )


def _same_hosts(a: Side, b: Side, *, drafting: bool = True) -> bool:
    """The same of the host, before and after the engine too."""
    if len(a.pools) != len(b.pools) or a.frontend != b.frontend:
        return False
    for one, other in zip((p.host for p in a.pools), (p.host for p in b.pools), strict=True):
        if isinstance(one, RecordedPrices) and isinstance(other, RecordedPrices):
            alike = one.same_host(other)
        elif isinstance(one, RecordedPrices) or isinstance(other, RecordedPrices):
            alike = False
        else:
            alike = one.host_facts(drafting=drafting) == other.host_facts(drafting=drafting)
        if not alike:
            return False
    return True


def _same_workload(a: Workload, b: Workload) -> bool:
    columns = (
        "sent_s",
        "prompt_tokens",
        "output_tokens",
        "tenant",
        "priority",
        "segment_offsets",
        "segment_ends",
        "segment_streams",
        "after",
        "think_s",
    )
    tenants = [[replace(t, name="", slo_class="") for t in w.tenants] for w in (a, b)]
    return (
        all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)
        and a.closed_loop == b.closed_loop
        and tenants[0] == tenants[1]
        and all(
            np.array_equal(_asked(a, name, usual), _asked(b, name, usual))
            for name, usual in (("beam_width", 0), ("best_of", 1))
        )
    )


def _asked(workload: Workload, name: str, usual: int) -> npt.NDArray[np.int64]:
    """A column that is there where a request asks for more than the usual."""
    column = getattr(workload, name)
    return np.full(len(workload), usual) if column is None else np.maximum(column, usual)


def _replay(sides: tuple[Side, Side], of_b: frozenset[str], *, all_of_b: bool) -> dict[str, float]:
    """Figures of a world whose parts in `of_b` are B's and whose others are A's."""
    for side, is_it in ((sides[0], not of_b), (sides[1], all_of_b)):
        if is_it and side.made_again is not None:
            return _figures(side.made_again)
    record = world({part: sides[part in of_b] for part in ALL_PARTS})
    if not (record.requests.status == Status.FINISHED).any():
        raise UsageError(
            f"nothing can run when {', '.join(sorted(of_b))} of one run meets the rest of the other; their limits "
            "are too far apart to be compared"
        )
    return _figures(record)


def _first_of(sides: tuple[Side, Side]) -> list[tuple[str, str]]:
    """Pairs of parts of which the first is swapped before the second, for the second to have an effect."""
    drafts = [side.speculates for side in sides]
    sent = [side.kv_transfer is not None for side in sides]
    pairs = []
    if drafts[0] != drafts[1]:
        needing = ["acceptance"]
        needing += ["kernel"] if _same_kernels(*sides, drafting=False) else []
        needing += ["host"] if _same_hosts(*sides, drafting=False) else []
        pairs += [("schedule", part) if drafts[1] else (part, "schedule") for part in needing]
    if sent[0] != sent[1]:
        pairs.append(("routing", "transfer") if sent[1] else ("transfer", "routing"))
    return pairs


def _steps(
    active: Sequence[str], first_of: Sequence[tuple[str, str]]
) -> dict[tuple[frozenset[str], frozenset[str]], float]:
    """From which world to which (parts that are B's) the orders go, and what share of the orders does."""
    orders = [
        order
        for order in permutations(active)
        if all(order.index(a) < order.index(b) for a, b in first_of if a in order and b in order)
    ]
    shares: dict[tuple[frozenset[str], frozenset[str]], float] = {}
    for order in orders:
        for step in pairwise(frozenset(order[:n]) for n in range(len(order) + 1)):
            shares[step] = shares.get(step, 0.0) + 1.0
    return {step: count / len(orders) for step, count in shares.items()}


def _split(
    metric: str,
    recorded: tuple[dict[str, float], ...],
    values: dict[frozenset[str], dict[str, float]],
    steps: dict[tuple[frozenset[str], frozenset[str]], float],
    every: tuple[str, ...],
) -> Split:
    parts = dict.fromkeys(every, 0.0)
    for (without, with_it), share in steps.items():
        (part,) = with_it - without
        parts[part] += share * (values[with_it][metric] - values[without][metric])
    a, b = (side[metric] for side in recorded)
    last = max(values, key=len)
    missed = (b - values[last][metric]) - (a - values[frozenset()][metric])
    if abs(missed) <= 1e-9 * max(abs(a), abs(b)):
        missed = 0.0
    return Split(metric, a, b, parts, missed)


def _ratios(sides: tuple[Side, Side]) -> dict[str, tuple[float, int]]:
    """Of all stages of a pipeline together, whose mean is recorded."""
    a, b = (RecordedPrices(_all_stages(side), None) for side in sides)
    ratios = a.ratios(b)
    kinds = {
        "decode": [ratio for key, ratio in ratios.items() if not key[2]],
        "prefill": [ratio for key, ratio in ratios.items() if key[2] and not key[3]],
        "mixed": [ratio for key, ratio in ratios.items() if key[2] and key[3]],
    }
    return {name: (float(np.mean(values)), len(values)) for name, values in kinds.items() if values}


def _all_stages(side: Side) -> RunRecord:
    """The run with the device time of all stages in each step."""
    record, stages = side.record, np.array(side.depths)
    fleet = record.fleet
    pool = np.zeros(len(record.steps), np.int64) if fleet is None else fleet.pool_of[record.steps.replica]
    return replace(record, steps=replace(record.steps, gpu_s=record.steps.gpu_s * stages[pool]))
