"""A policy beside the built-in ones on five workloads, paired, with intervals; and what one of its decisions costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from serving.errors import UsageError
from serving.policies import BatchPolicy, load_policy
from sim.deployment import Built, Deployment, build, simulate
from sim.deployment_limits import policy_options
from sim.intervals import Difference, Replicated, compare
from sim.metrics import summarise
from sim.replications import replicate
from sim.slo import Goodput
from sim.workload import WorkloadSpec, load_workload
from sim.workload.arrival_spec import ArrivalSpec
from sim.workload.spec import GoodputSpec, PrefixRepetitionSpec, RandomSpec, RangeRatio, TenantSpec

BUILT_IN = ("chunked", "continuous", "static")
OPTIONS = ("static_batch_size", "static_max_wait", "size_classes", "max_running_tokens", "prefill_share")
"""Fields of a deployment that are options of one policy."""
LOAD = 0.75
"""Share of what the chunked policy serves when everything is there at once."""
NUM_PROMPTS = 300
REPLICATIONS = 6
FIGURES = ("p95_ttft", "p95_tpot", "mean_e2el", "output_throughput", "slo_attainment")
HIGHER_IS_BETTER = ("output_throughput", "slo_attainment")


def _random(prompt: int, output: int, spread: float = 0.6) -> RandomSpec:
    ratio = RangeRatio(input=spread, output=spread)
    return RandomSpec(input_len=prompt, output_len=output, range_ratio=ratio)


CHAT = GoodputSpec(ttft=1000, tpot=80)


@dataclass(frozen=True, slots=True)
class Class:
    """Requests of one kind: a share of the traffic, its promises, and how urgent it is."""

    name: str
    dataset: RandomSpec | PrefixRepetitionSpec
    share: float = 1.0
    priority: int = 0
    burstiness: float = 1.0
    goodput: GoodputSpec = CHAT


WORKLOADS: Mapping[str, tuple[Class, ...]] = {
    "chat": (Class("chat", _random(300, 200)),),
    "long prompts": (Class("documents", _random(6000, 32, 0.5), goodput=GoodputSpec(ttft=5000, tpot=80)),),
    "bursts": (Class("bursts", _random(800, 100), burstiness=0.1),),
    "shared prefixes": (
        Class(
            "agents",
            PrefixRepetitionSpec(num_prefixes=8, prefix_len=1500, suffix_len=150, output_len=100),
        ),
    ),
    "mixed classes": (
        Class("autocomplete", _random(400, 20), 0.5, 0, goodput=GoodputSpec(ttft=200)),
        Class("chat", _random(300, 200), 0.3, 1),
        Class("batch", _random(3000, 400), 0.2, 2, goodput=GoodputSpec(e2el=60_000)),
    ),
}
"""Traffic by name; the priorities of the mixed classes count under --scheduling-policy priority."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of one workload: every policy's value, and the candidate's difference from each built-in policy."""

    workload: str
    figure: str
    values: Mapping[str, float]
    differences: Mapping[str, Difference]
    """Candidate minus built-in, by the built-in's name."""
    winner: str
    """A policy that is better than every other beyond the intervals, or nothing."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Who wins where."""

    candidate: str
    rates: Mapping[str, float]
    """Requests a second by workload."""
    cells: tuple[Cell, ...]
    num_prompts: int
    replications: int


def workload_spec(name: str, rate: float, num_prompts: int) -> WorkloadSpec:
    """One of `WORKLOADS` at `rate` requests a second; infinity sends everything at once."""
    tenants = []
    for each in WORKLOADS[name]:
        count = max(round(num_prompts * each.share), 1)
        if isinstance(each.dataset, PrefixRepetitionSpec):
            count = max(count // each.dataset.num_prefixes, 1) * each.dataset.num_prefixes
        tenants.append(
            TenantSpec(
                name=each.name,
                dataset=each.dataset,
                arrivals=_arrivals(rate * each.share, each.burstiness),
                num_prompts=count,
                priority=each.priority,
                goodput=each.goodput,
            )
        )
    return WorkloadSpec(name=name, tenants=tuple(tenants))


def _arrivals(rate: float, burstiness: float) -> ArrivalSpec:
    if math.isinf(rate):
        return ArrivalSpec(request_rate=rate)
    return ArrivalSpec(request_rate=rate, burstiness=burstiness)


def label(settings: Mapping[str, Any]) -> str:
    """How a policy with its queue order is called in a table."""
    policy, order = settings.get("policy", "chunked"), settings.get("scheduling_policy", "fcfs")
    return policy if order == "fcfs" else f"{policy} {order}"


def compare_policies(
    base: Deployment,
    settings: Mapping[str, Any],
    *,
    workloads: Sequence[str] = tuple(WORKLOADS),
    num_prompts: int = NUM_PROMPTS,
    replications: int = REPLICATIONS,
    seed: int = 0,
    jobs: int | None = None,
    told: Callable[[str], None] = lambda words: None,
) -> Comparison:
    """Run the candidate (`settings` over `base`) and the built-in policies, first come first served, on each workload.

    Every policy meets the same requests, calibration errors and step noise. Raises `UsageError` as `build` does.
    """
    if replications < 2:
        raise UsageError(
            f"--replications must be at least 2 for intervals of a difference, got {replications}"
        )
    candidate = label(settings)
    plain = {**dict.fromkeys(OPTIONS), "scheduling_policy": "fcfs"}
    variants: dict[str, dict[str, Any]] = {candidate: dict(settings)}
    variants |= {name: {**plain, "policy": name} for name in BUILT_IN if name != candidate}
    if base.async_scheduling is None:
        # A deployment turns it on for chunked alone, which would then win by it.
        variants = {
            name: fields if fields["policy"] == "static" else {**fields, "async_scheduling": True}
            for name, fields in variants.items()
        }
    built = {
        name: build(Deployment.model_validate({**base.model_dump(), **fields}))
        for name, fields in variants.items()
    }
    reference = build(Deployment.model_validate({**base.model_dump(), **plain, "policy": "chunked"}))
    cells, rates = list[Cell](), dict[str, float]()
    for name in workloads:
        rates[name] = LOAD * _most(reference, name, num_prompts, seed)
        spec = workload_spec(name, rates[name], num_prompts)
        runs = dict[str, Replicated]()
        for policy, deployment in built.items():
            told(f"{name} under {policy}")
            runs[policy] = replicate(
                spec, deployment, seed=seed, replications=replications, goodput=Goodput(), jobs=jobs
            )
        cells += _cells(name, candidate, runs)
    return Comparison(candidate, rates, tuple(cells), num_prompts, replications)


def _most(built: Built, name: str, num_prompts: int, seed: int) -> float:
    """Requests a second when everything is there at once."""
    workload = load_workload(workload_spec(name, float("inf"), num_prompts), seed=seed)
    record = simulate(workload, built)
    if record.interrupted:
        raise KeyboardInterrupt
    return summarise(record).request_throughput


def _cells(workload: str, candidate: str, runs: Mapping[str, Replicated]) -> list[Cell]:
    out = []
    for figure in FIGURES:
        values = {policy: run.nominal[figure] for policy, run in runs.items() if figure in run.nominal}
        if len(values) < len(runs):
            continue
        differences = {
            policy: found[figure]
            for policy, run in runs.items()
            if policy != candidate and figure in (found := compare(run, runs[candidate]))
        }
        out.append(Cell(workload, figure, values, differences, _winner(figure, runs, values)))
    return out


def _winner(figure: str, runs: Mapping[str, Replicated], values: Mapping[str, float]) -> str:
    """The best policy, where it is better than every other beyond the interval of their difference."""
    sign = -1.0 if figure in HIGHER_IS_BETTER else 1.0
    best = min(values, key=lambda policy: sign * values[policy])
    for policy, run in runs.items():
        if policy != best:
            found = compare(runs[best], run).get(figure)
            if found is None or not found.differs:
                return ""
    return best


@dataclass(frozen=True, slots=True)
class StepCost:
    """Host time of one decision, in microseconds, medians over the steps of a run."""

    decode_us: float
    """While everybody decodes and others wait."""
    admit_us: float
    """Steps that admit."""


class _Timed(BatchPolicy):
    def __init__(self, inner: BatchPolicy) -> None:
        self.inner = inner
        self.taken_s: list[float] = []
        self.admitting: list[bool] = []

    def schedule(self, step: Any) -> None:
        started_s = time.perf_counter()
        self.inner.schedule(step)
        self.taken_s.append(time.perf_counter() - started_s)
        self.admitting.append(bool(step.admitted))

    def padding(self, scheduler: Any) -> int:
        return self.inner.padding(scheduler)

    def refuses(self, request: Any, config: Any) -> str | None:
        return self.inner.refuses(request, config)


def step_cost(base: Deployment, settings: Mapping[str, Any]) -> StepCost:
    """What a decision costs with 64 running and others waiting."""
    from experiments.policy_test_watch import run

    fields = {**base.model_dump(), **settings, "max_num_seqs": 64}
    built = build(Deployment.model_validate(fields))
    dataset = RandomSpec(input_len=64, output_len=64, range_ratio=RangeRatio(output=0.5))
    spec = WorkloadSpec(
        tenants=(TenantSpec(dataset=dataset, num_prompts=192, goodput=GoodputSpec(ttft=1000)),)
    )
    policy = _Timed(load_policy(built.deployment.policy, **policy_options(built.deployment)))
    run(replace(built), load_workload(spec, seed=0), policy, fast_forward=False)
    taken_us, admitting = np.array(policy.taken_s) * 1e6, np.array(policy.admitting)
    parts = [taken_us[~admitting], taken_us[admitting]]
    return StepCost(*(float(np.median(part)) if len(part) else float("nan") for part in parts))
