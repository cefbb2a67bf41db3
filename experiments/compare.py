"""Deployments side by side on one workload: paired differences with intervals, judged as gains and losses.

Two ways to a difference. Simulated pairs meet the same requests, step noise and calibration errors in every
replication (common random numbers, `sim.replications`). Two runs that already happened are paired request by request
(`experiments.compare_saved`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sim.deployment import Built
from sim.fleet.build import num_gpus, pool_specs
from sim.intervals import Difference, Draw, Figures, Replicated, compare, gather, plan_draws
from sim.latency import DEFAULT_PERCENTILES, LatencyStats
from sim.metrics import Summary, summarise
from sim.record import RunRecord
from sim.replications import SHARES, deployment_spread, figures, is_drawn, ladders, run_draws, simulate_draw
from sim.slo import Goodput, Slo
from sim.workload import Workload, WorkloadSpec, load_workload

GAIN, LOSS, SAME, OPEN = "gain", "loss", "no difference", "not judged"
EFFECTS = (GAIN, LOSS, SAME, OPEN)
COME_WHOLE = "answers that come whole have no TPOT or ITL, and their TTFT is their E2EL"
"""Said where that is so of all answers on one side."""

_NAMED = {
    "request_throughput": ("Requests/s", 1.0, 1),
    "output_throughput": ("Output tok/s", 1.0, 1),
    "total_token_throughput": ("Total tok/s", 1.0, 1),
    "request_goodput": ("Goodput (req/s)", 1.0, 1),
    "output_throughput_per_gpu": ("Output tok/s/GPU", 1.0, 1),
    "slo_attainment": ("SLO attainment (%)", 100.0, 1),
    "prefix_hit_rate": ("Prefix cache hits (%)", 100.0, 1),
    "failed_share": ("Failed requests (%)", 100.0, -1),
    "preemptions": ("Preemptions/request", 1.0, -1),
    "mean_queue": ("Mean queue (ms)", 1000.0, -1),
    "mean_blocked": ("Mean blocked (ms)", 1000.0, -1),
    "p95_first_word": ("P95 first word (ms)", 1000.0, -1),
    "p95_longest_pause": ("P95 longest pause (ms)", 1000.0, -1),
    "waiting_share": ("Waiting for text (%)", 100.0, -1),
}
"""Label, factor to the printed unit, and which way is better."""
_SHARES = (*SHARES, "prefix_hit_rate", "failed_share", "waiting_share")


@dataclass(frozen=True, slots=True)
class Metric:
    """How a figure is printed, and which way is better: 1 higher, -1 lower."""

    name: str
    label: str
    scale: float
    better: int

    @classmethod
    def of(cls, name: str) -> Metric:
        """From a name such as `p95_ttft`; latencies are seconds, better when lower."""
        if name in _NAMED:
            return cls(name, *_NAMED[name])
        statistic, _, metric = name.rpartition("_")
        return cls(name, f"{statistic.capitalize()} {metric.upper()} (ms)", 1000.0, -1)

    def text(self, value: float) -> str:
        """A value as it is printed, in the unit of the label: four figures, two decimals at most."""
        shown = value * self.scale
        if not math.isfinite(shown):
            return "-"
        digits = max(0, min(2, 4 - len(f"{abs(shown):.0f}")))
        return f"{shown:,.{digits}f}"


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of a variant against the base. `low` and `high` bound the difference; None where nothing does."""

    metric: Metric
    base: float
    variant: float
    low: float | None = None
    high: float | None = None

    @property
    def difference(self) -> float:
        """Variant minus base."""
        return self.variant - self.base

    @property
    def effect(self) -> str:
        """`gain`, `loss`, `no difference` (0 lies in the interval, or both print alike) or `not judged`."""
        if self.metric.text(self.base) == self.metric.text(self.variant):
            return SAME
        if self.low is None or self.high is None:
            return OPEN
        if self.low <= 0.0 <= self.high:
            return SAME
        return GAIN if self.difference * self.metric.better > 0 else LOSS

    def relative(self, difference: float) -> float | None:
        """A difference as a share of the base's value; None where that is 0."""
        return difference / self.base if self.base > 0 else None


@dataclass(frozen=True, slots=True)
class Variant:
    """What one variant changes. `differs` holds (base, variant) by name of the option."""

    name: str
    changes: tuple[Change, ...]
    differs: Mapping[str, tuple[object, object]]
    notes: tuple[str, ...] = ()

    def having(self, effect: str) -> list[Change]:
        """The changes of one effect, the largest relative ones first."""
        found = [change for change in self.changes if change.effect == effect]
        return sorted(found, key=lambda c: -abs(c.relative(c.difference) or math.inf))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A base and its variants. `method` says in a sentence what the intervals cover."""

    base: str
    variants: tuple[Variant, ...]
    method: str
    workload: str = ""
    lost: int = 0
    """Requests that never ended in one of the nominal runs."""


@dataclass(frozen=True)
class Question:
    """What is asked of every deployment alike."""

    workload: WorkloadSpec | Workload
    otherwise: Mapping[str, WorkloadSpec] = field(default_factory=dict)
    """By name of a variant the same workload with other `SEARCHES`."""
    seed: int = 0
    replications: int | None = None
    """None makes `EIGHT`, or `FOUR` where a run has many steps."""
    goodput: Goodput | None = None
    slos: Sequence[Slo] = ()
    percentiles: Sequence[float] = DEFAULT_PERCENTILES
    fast_forward: bool = True
    until_s: float = math.inf


EIGHT, FOUR, MANY_STEPS = 8, 4, 30_000
SEARCHES = ("beam_width", "best_of")
"""Of a workload what may differ: the requests are the same, and so is what is asked of each."""


def compare_deployments(
    deployments: Mapping[str, Built],
    question: Question,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """The first deployment against each of the others. A deployment that equals the base is not run again.

    Raises `UsageError` where a deployment cannot run the workload, KeyboardInterrupt when interrupted.
    """
    names = list(deployments)
    base = deployments[names[0]]
    asked = {
        name: replace(question, workload=question.otherwise.get(name, question.workload)) for name in names
    }
    requests = {name: _requests(asked[name]) for name in names}
    distinct = [
        names[0],
        *(
            name
            for name in names[1:]
            if deployments[name].deployment != base.deployment or name in question.otherwise
        ),
    ]
    devices = {name: num_devices(built) for name, built in deployments.items()}
    nominal = {name: _nominal(deployments[name], requests[name], question) for name in distinct}
    count = question.replications
    if count is None:
        count = FOUR if max(s.num_steps for s in nominal.values()) > MANY_STEPS else EIGHT
    done = 0

    def told(one: int, total: int) -> None:
        if progress is not None:
            progress(done * total + one, len(distinct) * total)

    found: dict[str, Replicated] = {}
    for name in distinct:
        found[name] = _replicated(
            deployments[name], asked[name], requests[name], count, nominal[name], devices[name], told
        )
        done += 1
    variants = []
    for name in names[1:]:
        same = name not in found
        differences = compare(found[names[0]], found[names[0] if same else name])
        if devices[name] == devices[names[0]]:
            differences.pop("output_throughput_per_gpu", None)  # says nothing that output_throughput does not
        notes: tuple[str, ...] = ("the same deployment as the base",) if same else ()
        if any(requests[one].come_whole().all() for one in (names[0], name)):
            differences = {n: d for n, d in differences.items() if not n.endswith(("_tpot", "_itl"))}
            notes += (COME_WHOLE,)
        differs = differing(base, deployments[name]) | _searches(question.workload, asked[name].workload)
        variants.append(Variant(name, changes_of(differences), differs, notes))
    return Comparison(
        names[0],
        tuple(variants),
        f"95% intervals of the paired difference in another run of this traffic, from {count} replications under "
        "common random numbers: same requests, same step noise, same calibration errors",
        workload=f"{requests[names[0]].name}, {len(requests[names[0]]):,} requests, seed {question.seed}",
        lost=max(len(requests[name]) - s.completed - s.rejected for name, s in nominal.items()),
    )


def _requests(question: Question) -> Workload:
    workload = question.workload
    return load_workload(workload, seed=question.seed) if isinstance(workload, WorkloadSpec) else workload


def _searches(a: WorkloadSpec | Workload, b: WorkloadSpec | Workload) -> dict[str, tuple[object, object]]:
    """How answers are searched for, where that differs between a workload and what it is `otherwise`."""
    if a is b or not (isinstance(a, WorkloadSpec) and isinstance(b, WorkloadSpec)):
        return {}
    pairs = {
        f"{name}{f' of {one.name}' if len(a.tenants) > 1 else ''}": (getattr(one, name), getattr(other, name))
        for name in SEARCHES
        for one, other in zip(a.tenants, b.tenants, strict=True)
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def changes_of(differences: Mapping[str, Difference]) -> tuple[Change, ...]:
    """Paired differences as changes, in their order, without those that only repeat another one."""
    return tuple(
        Change(Metric.of(name), d.a, d.b, _exact(d.low, d.a), _exact(d.high, d.a))
        for name, d in differences.items()
        if name in _NAMED or not name.startswith(("slo_", "p50_"))
    )


def _exact(end: float, base: float) -> float:
    """An end without the rounding of the log scale, so that equal runs differ by 0."""
    return 0.0 if abs(end) < 1e-12 * abs(base) else end


def all_figures(summary: Summary, devices: int | None = None) -> dict[str, float]:
    """Every figure that has a direction; throughput per device where deployments have different numbers of them."""
    out = figures(summary)
    sent = max(summary.sent, 1)
    out["mean_queue"] = summary.stage_mean_s["queue"]
    if (read := summary.perceived) is not None:
        out["mean_blocked"] = summary.stage_mean_s["blocked"]
        for name in ("first_word", "longest_pause"):
            stats: LatencyStats = getattr(read, name)
            out |= {f"p{p:g}_{name}": value_s for p, value_s in stats.percentiles_s if p == 95}
        out["waiting_share"] = read.waiting_share
    out["failed_share"] = summary.failed / sent
    out["preemptions"] = summary.preemptions / sent
    out["prefix_hit_rate"] = summary.prefix_hit_rate
    if devices is not None:
        out["output_throughput_per_gpu"] = summary.output_throughput / devices
    return out


def num_devices(built: Built) -> int | None:
    """GPUs that a deployment takes; None where an autoscaler changes that."""
    d = built.deployment
    return None if any(pool.autoscaler for pool in pool_specs(d)) else num_gpus(d)


def differing(a: Built, b: Built) -> dict[str, tuple[object, object]]:
    """Options whose values differ, limits that were left open worked out; KV pages where those follow."""
    first, second = _options(a), _options(b)
    ways = first["network"], second["network"]
    if isinstance(ways[0], dict) and isinstance(ways[1], dict):
        for options, way in zip((first, second), ways, strict=True):
            assert isinstance(way, dict)
            del options["network"]
            options |= {f"network.{name}": value for name, value in way.items()}
    return {
        name: (first.get(name), second.get(name))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    }


def _options(built: Built) -> dict[str, object]:
    limits = built.limits
    worked_out = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "async_scheduling")
    return {
        **built.deployment.model_dump(mode="json"),
        **{name: getattr(limits, name) for name in worked_out},
        "kv_pages": limits.num_pages,
    }


def _judge(record: RunRecord, question: Question) -> Summary:
    return summarise(
        record,
        percentiles=question.percentiles,
        goodput=question.goodput,
        slos=question.slos,
    )


def _nominal(built: Built, requests: Workload, question: Question) -> Summary:
    spread = deployment_spread(built)
    record = simulate_draw(
        Draw(),
        built,
        spread,
        requests,
        requests,
        fast_forward=question.fast_forward,
        until_s=question.until_s,
        seed=question.seed,
    )
    return _judge(record, question)


def _replicated(
    built: Built,
    question: Question,
    requests: Workload,
    count: int,
    nominal: Summary,
    devices: int | None,
    progress: Callable[[int, int], None],
) -> Replicated:
    spread = deployment_spread(built)

    def evaluate(draw: Draw) -> Figures:
        record = simulate_draw(
            draw,
            built,
            spread,
            question.workload,
            requests,
            fast_forward=question.fast_forward,
            until_s=question.until_s,
            seed=question.seed,
        )
        return all_figures(_judge(record, question), devices)

    draws = plan_draws(spread, seed=question.seed, replications=count, resample=is_drawn(question.workload))
    results = [all_figures(nominal, devices), *run_draws(evaluate, draws[1:], progress=progress)]
    return gather(spread, draws, results, shares=_SHARES, ladders=ladders(results[0]))
