"""What alert rules look at: the samples of a run at the time at which a monitor would have seen them.

A TTFT is seen when the first token comes, a queue time when the request is scheduled, TPOT and E2EL when the answer
ends, a failure when the request is refused. Gauges are weighted by time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.alerts import LATENCIES, History, Rule, evaluate, evaluations, parse_rules
from experiments.observed import ALERTS, span_s
from experiments.series import StepFunction, over_replicas
from sim.latency import latencies
from sim.record import Floats, RunRecord, Status


def rules_of(record: RunRecord) -> tuple[Rule, ...]:
    """The rules that a run was given."""
    return parse_rules(record.meta.get(ALERTS) or ())


def histories(record: RunRecord, rules: Sequence[Rule] | None = None) -> tuple[History, ...]:
    """Each rule over a run; the run's own rules by default. Times are on the run's clock."""
    found = []
    for rule in rules_of(record) if rules is None else rules:
        times_s = evaluations(rule, *span_s(record))
        found.append(
            evaluate(rule, times_s, values_at(record, rule.metric, rule.statistic, times_s, rule.window_s))
        )
    return tuple(found)


def values_at(record: RunRecord, metric: str, statistic: str, times_s: Floats, window_s: float) -> Floats:
    """A statistic over (time − window, time] at each of `times_s`, shape (times,); NaN where nothing was seen."""
    if metric in LATENCIES:
        seen_s, values = samples(record, metric)
        return sampled(seen_s, values, statistic, times_s, window_s)
    if metric == "error_rate":
        seen_s, failed = endings(record)
        return sampled(seen_s, failed, "mean", times_s, window_s)
    return held(gauge(record, metric), statistic, times_s, window_s)


def samples(record: RunRecord, metric: str) -> tuple[Floats, Floats]:
    """(when seen, seconds) of every sample of a latency, in order of time."""
    r, lat = record.requests, latencies(record)
    done = r.status == Status.FINISHED
    seen_s, values, kept = {
        "ttft": (r.first_token_s, lat.ttft_s, np.ones(len(r), bool)),
        "tpot": (r.last_token_s, lat.tpot_s, done & (r.output_tokens > 1)),
        "e2el": (r.last_token_s, lat.e2el_s, done),
        "queue": (r.scheduled_s, lat.queue_s, np.ones(len(r), bool)),
    }[metric]
    kept = kept & ~np.isnan(seen_s) & ~np.isnan(values)
    order = np.argsort(seen_s[kept], kind="stable")
    return seen_s[kept][order], values[kept][order]


def endings(record: RunRecord) -> tuple[Floats, Floats]:
    """(when, 1 for a refusal and 0 for an answer) of every request that ended, in order of time."""
    r = record.requests
    refused = r.status == Status.REJECTED
    at_s = np.where(refused, np.where(np.isnan(r.queued_s), r.sent_s, r.queued_s), r.last_token_s)
    kept = (refused | (r.status == Status.FINISHED)) & ~np.isnan(at_s)
    order = np.argsort(at_s[kept], kind="stable")
    return at_s[kept][order], refused[kept][order].astype(np.float64)


def gauge(record: RunRecord, metric: str) -> StepFunction:
    """Share of KV pages in use, or requests running or waiting, over all replicas."""
    s = record.steps
    if metric == "kv_usage":
        held_pages = over_replicas(s, s.used_pages)
        pages = max(record.total("num_pages"), 1)
        return StepFunction(held_pages.times_s, held_pages.values / pages)
    return over_replicas(s, s.num_running if metric == "running" else s.num_waiting)


def sampled(seen_s: Floats, values: Floats, statistic: str, times_s: Floats, window_s: float) -> Floats:
    """A statistic of the samples seen in (time − window, time] at each time; NaN without samples."""
    out = np.full(len(times_s), np.nan)
    low = np.searchsorted(seen_s, times_s - window_s, side="right")
    high = np.searchsorted(seen_s, times_s, side="right")
    for i, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        if b > a:
            out[i] = _statistic(values[a:b], statistic)
    return out


def held(function: StepFunction, statistic: str, times_s: Floats, window_s: float) -> Floats:
    """Mean by time, lowest or highest value of a step function over (time − window, time]."""
    t, v = function.times_s, function.values
    if not len(t):
        return np.zeros(len(times_s))
    area = np.concatenate([[0.0], np.cumsum(v[:-1] * np.diff(t))])

    def upto(at_s: Floats) -> Floats:
        i = np.searchsorted(t, at_s, side="right") - 1
        inside = i >= 0
        i = np.maximum(i, 0)
        return np.asarray(np.where(inside, area[i] + v[i] * (at_s - t[i]), 0.0))

    if statistic == "mean":
        return np.asarray((upto(times_s) - upto(times_s - window_s)) / window_s)
    pick = np.min if statistic == "min" else np.max
    out = np.empty(len(times_s))
    low = np.searchsorted(t, times_s - window_s, side="right")
    high = np.searchsorted(t, times_s, side="right")
    for i, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        before = v[a - 1] if a else 0.0
        out[i] = pick(np.append(v[a:b], before))
    return out


def _statistic(values: Floats, statistic: str) -> float:
    if statistic in ("mean", "median", "min", "max"):
        return float(getattr(np, statistic)(values))
    return float(np.percentile(values, float(statistic[1:])))


# ---- in words and as JSON ----------------------------------------------------------------------------------


def alerts_json(record: RunRecord) -> list[dict[str, Any]]:
    """Every rule of a run with when it fired and cleared, in seconds since the first request."""
    from_s = span_s(record)[0]
    return [_history_json(history, from_s) for history in histories(record)]


def _history_json(history: History, from_s: float) -> dict[str, Any]:
    return {
        "rule": str(history.rule),
        "evaluations": len(history.times_s),
        "interval_s": history.rule.interval_s,
        "fired": [
            {
                "pending_at_s": one.pending_s - from_s,
                "fired_at_s": one.fired_s - from_s,
                "cleared_at_s": None if one.cleared_s is None else one.cleared_s - from_s,
                "worst": one.worst,
            }
            for one in history.firings
        ],
    }


def history_words(history: History, from_s: float) -> str:
    """`ttft:p95:1m > 1s for 3m: fired at 8m, cleared at 12m (worst 2.3 s).`"""
    rule = history.rule
    if not history.fired:
        known = history.values[~np.isnan(history.values)]
        if not len(known):
            return f"{rule}: quiet; nothing to look at."
        worst = known.max() if rule.comparison.startswith(">") else known.min()
        return f"{rule}: quiet (worst {rule.said(float(worst))})."
    parts = []
    for one in history.firings:
        end = (
            "still firing at the end"
            if one.cleared_s is None
            else f"cleared at {clock_text(one.cleared_s - from_s)}"
        )
        parts.append(f"fired at {clock_text(one.fired_s - from_s)}, {end} (worst {rule.said(one.worst)})")
    return f"{rule}: {'; '.join(parts)}."


def clock_text(seconds: float) -> str:
    """`8m`, `1h3m`, `45s`: time since the first request, to the second."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    parts = [f"{count}{unit}" for count, unit in ((hours, "h"), (minutes, "m"), (rest, "s")) if count]
    return "".join(parts) or "0s"
