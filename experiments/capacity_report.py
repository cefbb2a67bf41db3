"""A capacity as lines for the terminal and as JSON."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from experiments.capacity import Capacity, unit
from experiments.capacity_trial import Outcome, Trial, in_ms
from sim.deployment import Built
from sim.fleet.build import devices, num_gpus, num_replicas
from sim.hull import Extrapolation
from sim.pipeline_build import of_version

WIDTH = 80
SCHEMA = "tokentwin-capacity/1"


def capacity_lines(
    found: Capacity,
    built: Built,
    *,
    target: float | None = None,
    extrapolations: tuple[Extrapolation, ...] = (),
    again: str = "",
) -> list[str]:
    """The answer first, then what it rests on. `again` is a command that repeats the run at capacity."""
    d = built.deployment
    gpus = num_gpus(d)
    lines = [f" Capacity of {built.model.name} on {devices(built)} ".center(WIDTH, "=")]
    if found.infeasible is not None:
        lines += _wrap(f"Infeasible at any load: {found.infeasible}.")
        lines += _alone(found)
    else:
        lines += _headline(found, gpus)
        assert found.at is not None
        lines += _wrap("There: " + "; ".join(_short(outcome) for outcome in found.at.outcomes) + ".")
        if found.beyond is not None:
            lines += _wrap(f"Gives first, at {found.next_load:.4g}: {found.gives_first}.")
        if found.bound is not None:
            lines += _wrap(f"Bound by {found.bound.words}: {found.bound.evidence}.")
        lines += _alone(found)
    if target is not None:
        lines += _wrap(target_sentence(found, target, num_replicas(d)))
    if found.trials:
        lines += [" Tested ".center(WIDTH, "="), *_table(found.trials, found.variable)]
        if found.variable != "rate_scale":  # a trace is judged whole
            lines += _wrap("Figures are of each run's middle; reports count its warm-up and drain too.")
    for extrapolation in extrapolations[:3]:
        lines += _wrap(f"Not measured: {extrapolation.words}.")
    if again:
        lines += [" Again ".center(WIDTH, "="), *_wrap(again)]
    return [*lines, "=" * WIDTH]


def target_sentence(found: Capacity, target: float, replicas: int) -> str:
    """Whether a load that was asked for is sustained, and how many such deployments it takes."""
    what = f"{target:g} {unit(found.variable)}"
    if found.load is None:
        return f"Target {what}: not attainable with any number of such deployments."
    if target <= found.load:
        least = found.interval.low if found.interval is not None else found.load
        sure = "" if target <= least else "; the interval reaches below the target, so that it is not certain"
        return f"Target {what}: sustained, with {found.load / target - 1:.0%} to spare{sure}."
    count = math.ceil(target / found.load * (1 - 1e-9))
    return (
        f"Target {what}: NOT sustained, capacity is {found.load:.4g}. By division it takes {count} such "
        f"deployments; check with --data-parallel-size {count * replicas}."
    )


def capacity_json(
    found: Capacity,
    built: Built,
    *,
    target: float | None = None,
    extrapolations: tuple[Extrapolation, ...] = (),
    provenance: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Strict JSON values: what does not exist is null, and infinities are null."""
    d = built.deployment
    interval = found.interval
    out = {
        "schema": SCHEMA,
        "variable": found.variable,
        "unit": unit(found.variable),
        "capacity": found.load,
        "next_load": found.next_load,
        "request_rate": found.requests_per_s if found.load is not None else None,
        "capacity_ci95": None if interval is None else [interval.low, interval.high],
        "capacity_ci95_dominant": None if interval is None else interval.dominant,
        "is_lower_bound": not found.limited,
        "infeasible": found.infeasible,
        "gives_first": found.gives_first if found.load is not None else None,
        "bound": None if found.bound is None else found.bound.kind,
        "bound_evidence": None if found.bound is None else found.bound.evidence,
        "bound_shares": None if found.bound is None else found.bound.shares,
        "num_gpus": num_gpus(d),
        "target": target,
        "target_sustained": None if target is None else found.load is not None and target <= found.load,
        "at_capacity": None if found.at is None else _trial_json(found.at),
        "just_above": None if found.beyond is None else _trial_json(found.beyond),
        "alone": None if found.lone is None else _trial_json(found.lone),
        "trials": [_trial_json(trial) for trial in found.trials],
        "simulated_requests": found.simulated_requests,
        "not_measured": [extrapolation.words for extrapolation in extrapolations],
        "deployment": d.model_dump(mode="json"),
        "profile_hash": built.profile.content_hash,
        **of_version(built),
        **(provenance or {}),
    }
    return {key: _strict(value) for key, value in out.items()}


def _headline(found: Capacity, gpus: int) -> list[str]:
    assert found.load is not None
    sign = "" if found.limited else "at least "
    lines = [f"{'Sustained load:':<24}{sign}{found.load:.4g} {unit(found.variable)}"]
    if found.interval is not None:
        interval = found.interval
        lines.append(
            f"{'95% interval:':<24}{interval.low:.4g} to {interval.high:.4g}, mostly of {interval.dominant}"
        )
    if found.variable != "request_rate":
        lines.append(f"{'Request rate there:':<24}{found.requests_per_s:.4g} requests/s")
    if gpus > 1:
        lines.append(f"{'Per GPU:':<24}{found.requests_per_s / gpus:.4g} requests/s")
    return lines


def _alone(found: Capacity) -> list[str]:
    if found.lone is None:
        return []
    return _wrap("One at a time: " + "; ".join(_short(outcome) for outcome in found.lone.outcomes) + ".")


def _short(outcome: Outcome) -> str:
    if outcome.name == "slo_attainment":
        return f"{outcome.value:.1%} of requests good ({outcome.limit:.0%} asked for)"
    if math.isnan(outcome.value):
        return f"{outcome.label} cannot be judged, because no answer has one"
    return f"{outcome.label} {in_ms(outcome.value)} of {in_ms(outcome.limit)}"


def _table(trials: tuple[Trial, ...], variable: str) -> list[str]:
    names = list(trials[0].outcomes)[:3]
    head = {"request_rate": "req/s", "rate_scale": "speed", "max_concurrency": "at once"}[variable]
    row = f"{head:>9}{'requests':>10}" + "".join(f"{_column(o):>15}" for o in names) + "  verdict"
    lines = [row]
    for trial in trials:
        values = "".join(f"{_cell(outcome):>15}" for outcome in trial.outcomes[:3])
        verdict = "sustained" if trial.sustained else _why(trial)
        lines.append(f"{trial.load:>9.4g}{trial.num_requests:>10,}{values}  {verdict}"[:WIDTH])
    return lines


def _column(outcome: Outcome) -> str:
    return "good" if outcome.name == "slo_attainment" else outcome.label


def _cell(outcome: Outcome) -> str:
    return f"{outcome.value:.1%}" if outcome.name == "slo_attainment" else in_ms(outcome.value)


def _why(trial: Trial) -> str:
    if trial.worst.kept:
        return str(trial.saturation.load)
    return "missed"


def _trial_json(trial: Trial) -> dict[str, Any]:
    return {
        "load": trial.load,
        "num_requests": trial.num_requests,
        "sustained": trial.sustained,
        "full_length": trial.final,
        "saturation": str(trial.saturation.load),
        "rejected": trial.rejected,
        "promises": {
            o.name: {
                "value": _strict(o.value if o.name == "slo_attainment" else o.value * 1000),
                "limit": o.limit if o.name == "slo_attainment" else o.limit * 1000,
                "unit": "share" if o.name == "slo_attainment" else "ms",
                "kept": None if math.isnan(o.value) else o.kept,
            }
            for o in trial.outcomes
        },
    }


def _strict(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
