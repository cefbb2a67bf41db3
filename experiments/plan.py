"""The cheapest fleet for a traffic and its promises: candidates, bounds, then simulation of those that could still win.

Candidates are taken in order of the least that they could cost. A bound that rules one out is recorded with its reason;
what is left is simulated as a whole fleet at the traffic's own load, with as few replicas as sustain it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from experiments.capacity import Capacity, Search, find_capacity
from experiments.capacity_lengths import Lengths
from experiments.capacity_traffic import Ladder, Steady, Traffic, head
from experiments.capacity_trial import Promises, Trial
from experiments.plan_bounds import bounds_of, broken
from experiments.prices import HOURS_PER_MONTH
from serving.errors import InfeasibleError, UsageError
from serving.speculative_config import parse_speculative_config
from sim.deployment import Built, Deployment, build
from sim.fleet.spec import Pool
from sim.metrics import Summary, summarise
from sim.record import RunRecord
from sim.replications import replicate
from sim.verdict import Bound, what_bounds
from sim.workload import Workload, WorkloadSpec

SAMPLE = 256
"""Requests that the bounds are worked out for."""
HEADROOM_REQUESTS = 2048
Why = Literal["invalid", "memory", "format", "roofline", "cost", "alone", "replicas", "gpus"]
Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica's configuration, and what its GPUs cost."""

    deployment: Deployment
    usd_per_gpu_hour: float

    @property
    def usd_per_hour(self) -> float:
        """Of one replica."""
        return self.deployment.gpus_per_replica * self.usd_per_gpu_hour


@dataclass(frozen=True, slots=True)
class Pruned:
    """A candidate that was left out."""

    candidate: Candidate
    why: Why
    reason: str
    simulated: bool = False


@dataclass(frozen=True)
class Fleet:
    """As many replicas of a candidate as the traffic needs."""

    candidate: Candidate
    replicas: int
    trial: Trial
    summary: Summary
    bound: Bound
    built: Built = field(repr=False)
    record: RunRecord = field(repr=False)
    capacity: Capacity | None = None
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """95 % intervals of `p95_ttft` and the like, seconds."""
    on_front: bool = False

    @property
    def gpus(self) -> int:
        return self.replicas * self.candidate.deployment.gpus_per_replica

    @property
    def usd_per_hour(self) -> float:
        return self.replicas * self.candidate.usd_per_hour

    @property
    def usd_per_month(self) -> float:
        """730 hours."""
        return self.usd_per_hour * HOURS_PER_MONTH

    @property
    def usd_per_million_tokens(self) -> float:
        """Of output, at the planned load; input tokens come with it."""
        rate = self.summary.output_throughput
        return self.usd_per_hour / (rate * 3600) * 1e6 if rate > 0 else math.inf

    @property
    def joules_per_token(self) -> float:
        """An estimate: TDP while a step runs, nothing while idle, hosts and cooling left out."""
        watts = self.built.profile.facts.tdp_w * self.gpus * self.summary.gpu_busy_share
        rate = self.summary.output_throughput
        return watts / rate if rate > 0 else math.inf

    def doubtful(self, promises: Promises) -> tuple[str, ...]:
        """SLOs that the run keeps and whose interval reaches beyond their limit."""
        ends = {slo: self.intervals.get(slo.name) for slo in promises.slos}
        return tuple(slo.label for slo, end in ends.items() if end is not None and end[1] > slo.limit_s)

    def headroom(self, load: float) -> float | None:
        """Share by which the load could rise before a promise breaks; None where it was not searched."""
        if self.capacity is None or self.capacity.load is None:
            return None
        return self.capacity.load / load - 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Fleets that keep the promises, cheapest first, and why the others are not among them."""

    load: float
    variable: str
    requests_per_s: float
    fleets: tuple[Fleet, ...]
    pruned: tuple[Pruned, ...]
    promises: Promises
    notes: tuple[str, ...] = ()

    @property
    def winner(self) -> Fleet | None:
        return self.fleets[0] if self.fleets else None


def make_candidates(
    base: Deployment, prices: dict[str, float], axes: dict[str, Sequence[object]]
) -> list[Candidate]:
    """Every combination of the axes (fields of a deployment; `gpu` comes from `prices`) over `base`."""
    names = list(axes)
    out = []
    for gpu, price in prices.items():
        for values in itertools.product(*axes.values()):
            content = base.model_dump() | {"gpu": gpu} | dict(zip(names, values, strict=True))
            out.append(Candidate(Deployment.model_validate(content), price))
    return out


def make_plan(
    candidates: Sequence[Candidate],
    traffic: Traffic,
    load: float,
    promises: Promises,
    *,
    top: int = 5,
    headroom: int | None = None,
    max_replicas: int = 64,
    total_gpus: int | None = None,
    full: int | None = None,
    replications: int = 6,
    seed: int = 0,
    jobs: int | None = None,
    told: Told | None = None,
    progress: Told | None = None,
) -> Plan:
    """The `top` cheapest fleets at a load, with the capacity of the first `headroom` of them (None: of all).

    `told` hears of every candidate, `progress` of every run for it as it goes.
    Raises UsageError for promises that promise nothing.
    """
    sample = traffic.workload(load, SAMPLE)
    if len(sample) > 4 * SAMPLE:
        sample = head(sample, 4 * SAMPLE)
    promises.check(sample)
    full = Lengths.of(sample, full).full
    rate = traffic.requests_per_s(load)
    fixed = _fixed(traffic, load)
    pruned: list[Pruned] = []
    open_: list[tuple[float, int, Candidate, Built]] = []
    for candidate in candidates:
        built = _build(candidate, pruned)
        if built is None:
            continue
        bounds = bounds_of(built, sample)
        why = broken(bounds, sample, promises)
        if why is not None:
            pruned.append(Pruned(candidate, "roofline", f"even at datasheet peaks {why}"))
            continue
        least = 1 if math.isnan(rate) else bounds.least_replicas(rate)
        open_.append((least * candidate.usd_per_hour, least, candidate, built))
    open_.sort(key=lambda entry: entry[0])
    fleets: list[Fleet] = []
    for number, (cost, least, candidate, built) in enumerate(open_, 1):
        what = f"{number} of {len(open_)}: {label(candidate.deployment)}"
        if told is not None:
            told(what)
        costs = sorted(fleet.usd_per_hour for fleet in fleets)
        most_usd = costs[top - 1] if len(costs) >= top else math.inf
        if cost > most_usd * (1 + 1e-9):
            words = f"cannot cost less than ${cost:,.2f} an hour ({_replicas(least)} at datasheet peaks)"
            pruned.append(Pruned(candidate, "cost", f"{words}; {top} fleets cost at most ${most_usd:,.2f}"))
            continue
        most = _most_replicas(candidate, most_usd, max_replicas, total_gpus)
        if least > most:
            pruned.append(
                Pruned(candidate, "gpus", f"needs at least {_replicas(least)}, and {most} are allowed")
            )
            continue
        found = _fewest(candidate, built, fixed, promises, least, most, full, _within(what, progress))
        if isinstance(found, Pruned):
            pruned.append(found)
        else:
            fleets.append(found)
    fleets.sort(key=lambda f: (f.usd_per_hour, f.trial.worst.ratio))  # of equals, the one with more to spare
    fleets = _with_front(fleets[:top])
    finished = []
    for rank, fleet in enumerate(fleets):
        what = f"headroom of {label(fleet.candidate.deployment)}"
        if told is not None:
            told(what)
        if headroom is None or rank < headroom:
            count = min(full, HEADROOM_REQUESTS)
            capacity = find_capacity(
                fleet.built,
                traffic,
                promises,
                start=load,
                full=count,
                replications=1,
                progress=_within(what, progress),
            )
            fleet = replace(fleet, capacity=capacity)
        if rank < 2 and replications > 1:
            more = _within(f"intervals of {label(fleet.candidate.deployment)}", progress)
            fleet = replace(fleet, intervals=_intervals(fleet, traffic, load, replications, seed, jobs, more))
        finished.append(fleet)
    return Plan(load, traffic.variable, rate, tuple(finished), tuple(pruned), promises)


def _within(what: str, progress: Told | None) -> Told | None:
    """Tells of the runs for something."""
    return None if progress is None else lambda words: progress(f"{what}: {words}")


def label(deployment: Deployment) -> str:
    """One replica, such as "h200 TP2 llama-3.1-70b fp8, kv fp8, chunk 4096"; what is default is left out."""
    d = deployment
    ranks = f"TP{d.tensor_parallel_size} " if d.tensor_parallel_size > 1 else ""
    ranks += f"PP{d.pipeline_parallel_size} " if d.pipeline_parallel_size > 1 else ""
    words = f"{d.gpu} {ranks}{'EP ' if d.enable_expert_parallel else ''}{d.model}"
    if d.quantization is not None:
        words += f" {d.quantization}"
    rest = [
        *([f"kv {d.kv_cache_dtype}"] if d.kv_cache_dtype != "auto" else []),
        *([f"chunk {d.max_num_batched_tokens}"] if d.max_num_batched_tokens is not None else []),
        *([f"batch {d.max_num_seqs}"] if d.max_num_seqs is not None else []),
        *([d.policy] if d.policy != "chunked" else []),
        *([_drafts(d)] if d.speculative_config is not None else []),
    ]
    return ", ".join([words, *rest])


def _drafts(deployment: Deployment) -> str:
    config = parse_speculative_config(deployment.speculative_config or {})
    return f"{config.num_speculative_tokens} drafts by {config.method}"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _fixed(traffic: Traffic, load: float) -> Traffic:
    return replace(traffic, ladder=OneRung(only=load))  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class OneRung(Ladder):
    """The traffic as it is."""

    only: float = 1.0

    def load(self, rung: int) -> float:
        return self.only


def _build(candidate: Candidate, pruned: list[Pruned]) -> Built | None:
    d = candidate.deployment
    try:
        built = build(d)
    except InfeasibleError as error:
        pruned.append(Pruned(candidate, "memory", str(error)))
        return None
    except UsageError as error:
        pruned.append(Pruned(candidate, "invalid", str(error)))
        return None
    if d.quantization in ("fp8", "fp8_block") and "fp8" not in built.profile.facts.peak_flops:
        pruned.append(Pruned(candidate, "format", f"{d.gpu} has no fp8 arithmetic"))
        return None
    return built


def _most_replicas(candidate: Candidate, most_usd: float, max_replicas: int, total_gpus: int | None) -> int:
    most = max_replicas
    if total_gpus is not None:
        most = min(most, total_gpus // candidate.deployment.gpus_per_replica)
    if math.isfinite(most_usd):
        most = min(most, math.floor(most_usd / candidate.usd_per_hour * (1 + 1e-9)))
    return most


def servers(built: Built, count: int) -> Built:
    """So many servers alike; of a mixture they are a pool, since data-parallel replicas would share its experts."""
    d = built.deployment
    if count == 1 or not built.model.num_experts:
        return replace(built, deployment=d.model_copy(update={"data_parallel_size": count}))
    pooled = build(d.model_copy(update={"pools": (Pool(name="default", replicas=count),)}))
    return replace(pooled, pools=(replace(pooled.pools[0], pricer=built.pricer),), pricer=built.pricer)


def _fewest(
    candidate: Candidate,
    built: Built,
    traffic: Traffic,
    promises: Promises,
    least: int,
    most: int,
    full: int,
    progress: Told | None = None,
) -> Fleet | Pruned:
    """The fleet with the fewest replicas that sustain the traffic, at least `least` and at most `most`."""
    tested: dict[int, tuple[Trial, RunRecord | None, Built]] = {}

    def sustained(count: int) -> bool:
        if count not in tested:
            several = servers(built, count)
            search = Search(several, traffic, promises, full, None, None, _within(_replicas(count), progress))
            trial = search.short(0)
            if trial.sustained:
                trial = search.final(0)
            tested[count] = (trial, search.best[1] if search.best else None, several)
        return tested[count][0].sustained

    one = Search(built, traffic, promises, full, None, None, progress)
    lone = one.lone()
    if any(not outcome.kept and outcome.settled for outcome in lone.outcomes):
        return Pruned(
            candidate, "alone", f"of requests that have a replica to themselves, {lone.reason}", True
        )
    start = least
    if traffic.variable != "max_concurrency":
        start = math.ceil(0.7 * traffic.ladder.load(0) / one.guess() / 0.9)
    at = min(max(start, least), most)
    low, high = least - 1, most + 1  # low is too few, high is enough (or one too many to be allowed)
    step = 1
    while high - low > 1:
        if sustained(at):
            high = at
            at = max(high - step, low + 1) if low == least - 1 else (low + high) // 2
        else:
            low = at
            at = min(low + step, high - 1) if high == most + 1 else (low + high) // 2
        step *= 2
    if high > most:
        trial = tested[most][0]
        return Pruned(candidate, "replicas", f"{_replicas(most)} cannot do it: {trial.reason}", True)
    trial, record, several = tested[high]
    assert record is not None
    summary = summarise(record, goodput=promises.goodput, slos=promises.slos)
    return Fleet(candidate, high, trial, summary, what_bounds(record, summary), several, record)


def _intervals(
    fleet: Fleet,
    traffic: Traffic,
    load: float,
    replications: int,
    seed: int,
    jobs: int | None,
    progress: Told | None = None,
) -> dict[str, tuple[float, float]]:
    """95 % intervals of the fleet's P95s."""
    count = min(len(fleet.record.requests), 2048)
    # A generated workload is drawn anew in every replication; a trace is that very traffic.
    workload: Workload | WorkloadSpec = traffic.workload(load, count)
    if isinstance(traffic, Steady):
        workload = traffic.spec_at(load, count)
    told = None if progress is None else lambda done, total: progress(f"{done} of {total} runs")
    figures = replicate(
        workload,
        fleet.built,
        seed=seed,
        replications=replications,
        percentiles=(95.0,),
        jobs=jobs,
        progress=told,
    )
    intervals: dict[str, tuple[float, float]] = {}
    for name in ("p95_ttft", "p95_tpot", "p95_e2el"):
        interval = figures.interval(name)
        if interval is not None and interval.value > 0:
            # The run of the plan is longer than those of the interval: its own value, their relative width.
            own = dict(getattr(fleet.summary, name[4:]).percentiles_s)[95.0]
            intervals[name] = (own * interval.low / interval.value, own * interval.high / interval.value)
    return intervals


def _with_front(fleets: Sequence[Fleet]) -> list[Fleet]:
    """Mark the fleets that no other beats in all of: cost, P95 TTFT, P95 TPOT, output tokens per second and GPU."""
    points = np.nan_to_num(
        [front_point(fleet) for fleet in fleets]
    )  # where no answer streams there is no TPOT
    out = []
    for i, fleet in enumerate(fleets):
        others = np.delete(points, i, axis=0)
        beaten = bool(((others <= points[i]).all(axis=1) & (others < points[i]).any(axis=1)).any())
        out.append(replace(fleet, on_front=not beaten))
    return out


def front_point(fleet: Fleet) -> tuple[float, float, float, float]:
    """What a front is of, smaller is better."""
    s = fleet.summary
    ttft, tpot = (dict(stats.percentiles_s)[95.0] for stats in (s.ttft, s.tpot))
    return fleet.usd_per_hour, ttft, tpot, -s.output_throughput / fleet.gpus
