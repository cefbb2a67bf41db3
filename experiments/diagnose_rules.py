"""Which stage governs a promise, and which known pattern a run shows: rules with a statistic and a threshold each.

The patterns are rules of thumb of the trade: a high share of queue means capacity or admission; prefill that grows faster
than prompts, fragmentation or a missing prefix cache; TPOT that rises with the batch, saturated bandwidth; P99 far above
P50 TPOT, eviction or swap. A rule that the source has no columns for says so instead of guessing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.diagnose_run import Measured
from experiments.diagnose_stats import (
    concurrency,
    decode_split,
    decode_steps,
    growth_exponent,
    shared_share,
    tail_rows,
)
from sim.deployment import build
from sim.metrics import summarise
from sim.pipeline import bubble_share
from sim.saturation import CRITICAL_T, Load, saturation
from sim.slo import Slo
from sim.verdict import what_bounds

STAGE_WORDS = {
    "network": "the network and the frontend",
    "queue": "the queue",
    "prefill": "prefill",
    "decode": "decode",
    "kernels": "the decode kernels",
    "prompts": "prompts computed between tokens",
    "preempted": "preemption: sequences waiting to run again",
    "host": "the host",
    "unknown": "a stage that the source does not tell apart",
}


@dataclass(frozen=True, slots=True)
class Judged:
    """One promise: its figure, and how the requests at that figure spent their time."""

    slo: Slo
    value_s: float
    stages: Mapping[str, float]
    """Shares by stage that add up to 1; empty where the source cannot tell stages apart."""
    exists: bool = True
    """Whether the run has such a figure."""

    @property
    def met(self) -> bool | None:
        """None where there is nothing to judge."""
        return self.slo.met(self.value_s) if self.exists else None

    @property
    def stage(self) -> str:
        """The stage with the largest share."""
        return max(self.stages, key=lambda name: self.stages[name]) if self.stages else "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule found. `fired` is None where the rule does not apply, and `evidence` then says why."""

    rule: str
    means: str
    """What it points to when it fires."""
    statistic: str
    fired: bool | None
    value: float | None
    threshold: float
    evidence: str
    metrics: tuple[str, ...]
    """Latencies that it can explain."""
    cause: str = ""
    """Which of the rule's causes: what the queue waited for, why prefixes were not found, and so on."""

    @property
    def strength(self) -> float:
        """How far beyond its threshold the statistic is; to rank findings."""
        if not self.fired or self.value is None or self.threshold <= 0:
            return 0.0
        return self.value / self.threshold


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule before it is applied: `test` gives (fired, value, evidence, cause)."""

    name: str
    means: str
    statistic: str
    threshold: float
    metrics: tuple[str, ...]
    test: Callable[[Measured, Sequence[Judged], float], tuple[bool | None, float | None, str, str]]


Result = tuple[bool | None, float | None, str, str]
TTFT, TPOT, EVERY = ("ttft", "e2el"), ("tpot", "itl", "e2el"), ("ttft", "tpot", "itl", "e2el")


def judge(run: Measured, slos: Sequence[Slo]) -> tuple[Judged, ...]:
    """Every promise with the stages of the requests at its figure, worst first, those without a figure last."""
    found = [
        Judged(slo, run.value_s(slo), stages_of(run, slo))
        if run.has(slo.metric)
        else Judged(slo, math.nan, {}, exists=False)
        for slo in slos
    ]
    return tuple(sorted(found, key=lambda j: -_overrun(j)))


def _overrun(judged: Judged) -> float:
    if not judged.exists:
        return -math.inf
    return judged.value_s / judged.slo.limit_s if not math.isnan(judged.value_s) else math.inf


def stages_of(run: Measured, slo: Slo) -> dict[str, float]:
    """Shares of the stages in an SLO's latency, over the requests around its figure (all of them for a mean)."""
    if slo.metric in ("tpot", "itl"):
        return decode_split(run)
    if run.queue_s is None or run.prefill_s is None or run.network_s is None:
        return {}
    rows = tail_rows(run.column(slo.metric), slo.percentile)
    parts = {"network": run.network_s, "queue": run.queue_s, "prefill": run.prefill_s}
    if slo.metric == "e2el":
        parts["decode"] = run.decode_s
    seconds = {name: float(np.nansum(values[rows])) for name, values in parts.items()}
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total > 0 else {}


def apply_rules(run: Measured, judged: Sequence[Judged]) -> tuple[Finding, ...]:
    """Every rule in order, applied or not."""
    out = []
    for rule in RULES:
        fired, value, evidence, cause = rule.test(run, judged, rule.threshold)
        out.append(
            Finding(
                rule.name,
                rule.means,
                rule.statistic,
                fired,
                value,
                rule.threshold,
                evidence,
                rule.metrics,
                cause,
            )
        )
    return tuple(out)


def explain(findings: Sequence[Finding], judged: Judged) -> tuple[Finding, ...]:
    """The findings that can explain a promise's latency: those about its governing stage, then by strength."""
    stage = judged.stage
    of_stage = {
        "queue": ("queue", "backlog", "preemption", "imbalance"),
        "prefill": ("prefix cache", "prefill growth", "prefill", "preemption"),
        "kernels": ("floor", "bandwidth"),
        "decode": ("floor", "stalls", "bandwidth", "tail", "preemption", "host"),
        "prompts": ("stalls", "tail"),
        "preempted": ("preemption", "tail"),
        "host": ("host",),
        "network": ("network",),
    }.get(stage, ())
    fitting = [f for f in findings if f.fired and judged.slo.metric in f.metrics]
    first = {rule: place for place, rule in enumerate(of_stage)}
    return tuple(sorted(fitting, key=lambda f: (first.get(f.rule, len(first)), -f.strength)))


def _missing(what: str) -> Result:
    return None, None, f"does not apply: {what}", ""


def _tail_of(judged: Sequence[Judged]) -> Judged | None:
    return next((j for j in judged if j.slo.metric in TTFT), None)


def _share(
    run: Measured, judged: Sequence[Judged], threshold: float, stage: str
) -> tuple[Result, Judged | None]:
    """Share of a stage in the tail of TTFT (of E2EL where only that is promised)."""
    at = _tail_of(judged) or Judged(
        slo := Slo("p95", "ttft", math.inf), run.value_s(slo), stages_of(run, slo)
    )
    if not at.stages:
        return _missing(f"{run.source} has no queue times"), None
    share = at.stages[stage]
    words = f"{share:.0%} of {at.slo.metric.upper()} around {at.slo.label} is {STAGE_WORDS[stage]}"
    return (share >= threshold, share, words, ""), at


def _queue(run: Measured, judged: Sequence[Judged], threshold: float) -> Result:
    (fired, value, words, _), at = _share(run, judged, threshold, "queue")
    if not fired or run.record is None or at is None:
        return fired, value, words, ""
    bound = what_bounds(run.record, summarise(run.record))
    causes = ("max_num_seqs", "token_budget", "kv_pages", "policy")
    cause = max(causes, key=lambda name: bound.shares.get(name, 0.0))
    if not bound.shares.get(cause):
        return fired, value, words, ""
    lack = {
        "max_num_seqs": f"all {run.record.max_num_seqs} seats were taken",
        "token_budget": f"all {run.record.max_num_batched_tokens} tokens of a step were spent",
        "kv_pages": "KV pages lacked",
        "policy": "there was room: the batch policy made them wait",
    }[cause]
    return (
        fired,
        value,
        f"{words}; in {bound.shares[cause]:.0%} of busy time requests waited while {lack}",
        cause,
    )


def _backlog(run: Measured, judged: Sequence[Judged], threshold: float) -> Result:
    if run.record is None:
        return _missing(f"{run.source} has no step of the engine to tell a queue by")
    load = saturation(run.record)
    drift = max((d.t for d in (load.waiting, load.in_system) if d is not None), default=0.0)
    if load.load is Load.INCONCLUSIVE:
        return None, None, f"does not apply: {load.reason}", ""
    return load.load is Load.SATURATED, drift, load.reason, ""


def _prefill(run: Measured, judged: Sequence[Judged], threshold: float) -> Result:
    return _share(run, judged, threshold, "prefill")[0]


def _network(run: Measured, judged: Sequence[Judged], threshold: float) -> Result:
    return _share(run, judged, threshold, "network")[0]


def _growth(run: Measured, judged: Sequence[Judged], threshold: float) -> Result:
    if run.prefill_s is None:
        return _missing(f"{run.source} has no prefill times")
    cached = run.cached_tokens if run.cached_tokens is not None else np.zeros(len(run), np.int64)
    found = growth_exponent(run.prompt_tokens - cached, run.prefill_s)
    if isinstance(found, str):
        return _missing(found)
    words = (
        f"prefill grows as prompt tokens to the power {found.value:.2f} [{found.low:.2f}, {found.high:.2f}]; "
        f"{found.above} of {len(run)} requests took over three times the line"
    )
    return bool(found.value >= threshold and found.low > 1.0), found.value, words, ""


def _prefixes(run: Measured, judged: Sequence[Judged], threshold: float) -> Result:
    if run.record is None or run.traffic is None or run.cached_tokens is None:
        return _missing(f"{run.source} does not say which prompts begin alike")
    share = shared_share(run.traffic, run.seed, run.record.page_tokens)
    if share is None:
        return _missing("shared prefixes are not in the record")
    found = float(run.cached_tokens.sum() / max(run.prompt_tokens.sum(), 1))
    missed = max(share - found, 0.0)
    off = not (run.record.meta.get("limits") or {}).get("enable_prefix_caching", True)
    words = (
        f"{share:.0%} of prompt tokens repeat a prompt before them and {found:.0%} were found in the cache"
    )
    if off:
        words += "; prefix caching is off"
    return missed >= threshold, missed, words, "off" if off else "evicted"


def _bandwidth(run: Measured, judged: Sequence[Judged], threshold: float) -> Result:
    steps = decode_steps(run)
    if steps is not None:
        batch, seconds = steps
        low, high = (float(np.quantile(batch, q)) for q in (0.1, 0.9))
        if high < 1.5 * low:
            return _missing(f"the batch hardly varies ({low:.0f} to {high:.0f} decodes)")
        bins = [seconds[(batch >= n * 0.85) & (batch <= n * 1.15)] for n in (low, high)]
        at = [float(np.median(part)) for part in bins]
        growth = at[1] / at[0] - 1
        words = f"a decode step takes {at[0] * 1e3:.3g} ms at batch {low:.0f} and {at[1] * 1e3:.3g} ms at {high:.0f}"
        return growth >= threshold, growth, words, ""
    if not run.streams:
        return _missing("every answer came whole")
    several = ~np.isnan(run.tpot_s)
    active = concurrency(run)[several]
    low, high = (float(np.quantile(active, q)) for q in (0.1, 0.9)) if len(active) else (0.0, 0.0)
    if len(active) < 30 or high < 1.5 * max(low, 1):
        return _missing(f"concurrency hardly varies ({low:.0f} to {high:.0f} requests)")
    slope, at_zero = np.polyfit(active, run.tpot_s[several], 1)
    rest = run.tpot_s[several] - slope * active - at_zero
    error = float(rest.std(ddof=2) / math.sqrt(len(active)) / active.std())
    base = at_zero + slope * low
    growth = float(slope * (high - low) / base) if base > 0 else math.inf
    words = (
        f"TPOT changes by {growth:+.0%} from {low:.0f} to {high:.0f} requests in service "
        f"({slope / error:.1f} standard errors)"
    )
    return bool(growth >= threshold and slope > 2 * error), growth, words, ""


def _floor(run: Measured, judged: Sequence[Judged], threshold: float) -> Result:
    limit = next((j for j in judged if j.slo.metric in ("tpot", "itl") and j.exists), None)
    if limit is None:
        return _missing("no promise on TPOT or ITL")
    if run.deployment is None:
        return _missing("what was deployed is not known; give --model and --gpu")
    built = build(run.deployment)
    context = int(np.median(run.prompt_tokens + run.output_tokens // 2))
    alone_s = built.pricer.step_s(1, 1, (), 1, context, context)
    if not built.limits.async_scheduling:
        alone_s += built.pricer.host_s(1, 1)
    share = alone_s / limit.slo.limit_s
    words = f"a lone sequence at context {context:,} takes {alone_s * 1e3:.3g} ms a token: {share:.0%} of the limit"
    return share >= threshold, share, words, ""


def _stalls(run: Measured, judged: Sequence[Judged], threshold: float) -> Result:
    split = decode_split(run)
    if "prompts" not in split:
        return _missing(f"{run.source} has neither steps nor gaps between tokens")
    share = split["prompts"]
    what = "steps that also compute prompts" if run.record is not None else "gaps longer than the median"
    words = f"{what} add {share:.0%} of the time between tokens"
    if run.gaps_s is not None:
        p50, p99 = (float(np.percentile(run.gaps_s, p)) for p in (50, 99))
        words += f"; P99 of the gaps is {p99 * 1e3:.4g} ms, P50 {p50 * 1e3:.4g} ms"
    return share >= threshold, share, words, ""


def _tail(run: Measured, judged: Sequence[Judged], threshold: float) -> Result:
    if not run.streams:
        return _missing("every answer came whole")
    values = run.tpot_s[~np.isnan(run.tpot_s)]
    if len(values) < 100:
        return _missing(f"P99 of {len(values)} requests is little more than the maximum")
    p50, p99 = (float(np.percentile(values, p)) for p in (50, 99))
    ratio = p99 / p50 if p50 > 0 else math.inf
    words = f"P99 TPOT is {p99 * 1e3:.3g} ms and P50 {p50 * 1e3:.3g} ms"
    cause = ""
    if run.preemptions is not None and ratio >= threshold:
        slow = run.tpot_s >= np.percentile(values, 98)
        hit = float((run.preemptions[slow] > 0).mean())
        cause = "eviction" if hit >= 0.5 else "stalls"
        words += f"; {hit:.0%} of the slowest 2% were preempted"
        words += "" if hit >= 0.5 else ", so it is not eviction"
    return ratio >= threshold, ratio, words, cause


def _preemption(run: Measured, judged: Sequence[Judged], threshold: float) -> Result:
    if run.preemptions is None:
        return _missing(f"{run.source} does not count preemptions")
    each = float(run.preemptions.mean())
    words = f"{int(run.preemptions.sum())} preemptions of {len(run)} requests"
    if run.record is not None:
        summary = summarise(run.record)
        busy, most = summary.kv_occupancy_busy, summary.kv_occupancy_max
        words += f"; KV pages were {busy:.0%} full while busy, {most:.0%} at most"
    return each >= threshold, each, words, ""


def _host(run: Measured, judged: Sequence[Judged], threshold: float) -> Result:
    if run.record is None or not len(run.record.steps):
        return _missing(f"{run.source} has no device times")
    if bubble_share(run.record) is not None:
        return _missing("bubbles of a pipeline and waits for the host are not told apart")
    s = run.record.steps
    busy_s = float((s.end_s - s.start_s).sum())
    share = max(0.0, 1 - float(s.gpu_s.sum()) / busy_s) if busy_s else 0.0
    return share >= threshold, share, f"the device waited for the host in {share:.0%} of busy time", ""


def _imbalance(run: Measured, judged: Sequence[Judged], threshold: float) -> Result:
    if run.record is None or run.record.num_replicas < 2:
        return _missing("one replica" if run.record is not None else f"{run.source} does not name replicas")
    s = run.record.steps
    busy = np.bincount(s.replica, s.end_s - s.start_s, minlength=run.record.num_replicas)
    ratio = float(busy.max() / busy.mean()) if busy.mean() > 0 else 1.0
    words = f"the busiest of {len(busy)} replicas worked {ratio:.2f} times the mean"
    return ratio >= threshold, ratio, words, ""


RULES = (
    Rule("queue", "capacity or admission", "share of queue in the tail", 0.5, TTFT, _queue),
    Rule("backlog", "more arrives than is served", "drift of the queue, t", CRITICAL_T, TTFT, _backlog),
    Rule("prefill", "prompt compute", "share of prefill in the tail", 0.5, TTFT, _prefill),
    Rule(
        "prefill growth",
        "fragmentation or a missing prefix cache",
        "exponent over prompt tokens",
        1.2,
        TTFT,
        _growth,
    ),
    Rule("prefix cache", "prefixes computed again", "share of prompts missed", 0.1, TTFT, _prefixes),
    Rule(
        "floor",
        "weights and KV against the device's bandwidth",
        "lone token over the limit",
        1.0,
        TPOT,
        _floor,
    ),
    Rule("bandwidth", "bandwidth saturated by the batch", "growth of a decode step", 0.2, TPOT, _bandwidth),
    Rule("stalls", "prompts hold decodes up", "share of time between tokens", 0.25, TPOT, _stalls),
    Rule("tail", "eviction or swap", "P99 TPOT over P50", 3.0, TPOT, _tail),
    Rule("preemption", "too little KV memory", "preemptions a request", 0.05, EVERY, _preemption),
    Rule("host", "the host", "share of busy time", 0.2, TPOT, _host),
    Rule("network", "network and frontend", "share in the tail", 0.5, TTFT, _network),
    Rule("imbalance", "the router", "busiest replica over the mean", 1.2, EVERY, _imbalance),
)
"""In the order of a request's path; thresholds are in docs/diagnose.md."""
