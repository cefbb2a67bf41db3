"""A diagnosis in lines for the terminal and in keys for programs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import Any

from experiments.console import WIDTH
from experiments.diagnose import HIGHER_IS_BETTER, Diagnosis, Trial
from experiments.diagnose_rules import STAGE_WORDS, Finding, Judged
from sim.intervals import Difference
from sim.metrics import NO_PACE


def diagnosis_lines(d: Diagnosis) -> list[str]:
    """The diagnosis, at most `WIDTH` wide."""
    lines = [" Diagnosis ".center(WIDTH, "=")]
    lines += _wrap(_what(d))
    if d.assumed:
        lines += _wrap("No SLO came with the run or --slo: preset chat stands in.")
    for judged in d.judged:
        lines += _wrap(_slo_words(judged))
    lines += _wrap(_governed(d.target)) if d.target.exists else []
    lines += _wrap(f"{d.run.lost} requests were lost.") if d.run.lost else []
    lines.append(" Rules ".center(WIDTH, "="))
    for finding in d.findings:
        lines += _rule(finding, "!" if finding in d.causes and not d.healthy else "+")
    lines += _wrap(
        f"!: explains {d.target.slo.label}; +: beyond its threshold; -: does not apply. Thresholds are rules of thumb."
    )
    lines.append(" Changes ".center(WIDTH, "="))
    lines += _changes(d)
    lines += [line for note in d.run.notes for line in _wrap(f"note: {note}")]
    return [*lines, "=" * WIDTH]


def _what(d: Diagnosis) -> str:
    deployed = ""
    if d.run.deployment is not None:
        deployed = f" of {d.run.deployment.model} on {d.run.deployment.gpu}"
    return f"{d.run.name}: {len(d.run):,} finished requests{deployed}, from {d.run.source}."


def _slo_words(judged: Judged) -> str:
    limit = f"{judged.slo.label} ≤ {judged.slo.limit_s * 1000:g} ms"
    if not judged.exists:
        return f"Cannot judge {limit}: {NO_PACE} {judged.slo.metric.upper()}; limit E2EL instead."
    if math.isnan(judged.value_s):
        return f"Misses {limit}: no request gives a value for it."
    over = judged.value_s / judged.slo.limit_s - 1
    how = (
        f"{-over:.0%} below" if judged.met else f"{over:.0%} above" if over < 9 else f"{over + 1:,.0f} times"
    )
    return f"{'Meets' if judged.met else 'Misses'} {limit}: it is {_ms(judged.value_s)}, {how} the limit."


def _governed(judged: Judged) -> str:
    if not judged.stages:
        return (
            f"Which stage governs {judged.slo.label} cannot be told: the source has no times of its stages."
        )
    rest = sorted(((s, n) for n, s in judged.stages.items() if n != judged.stage), reverse=True)
    others = ", ".join(f"{STAGE_WORDS[name]} {share:.0%}" for share, name in rest if share >= 0.005)
    share = f"{judged.stages[judged.stage]:.0%}"
    return f"{judged.slo.label} is governed by {STAGE_WORDS[judged.stage]}: {share}{f' ({others})' if others else ''}."


def _rule(f: Finding, mark: str) -> list[str]:
    if f.fired is None:
        return _wrap(f"- {f.rule}: {f.evidence}")
    sign = "≥" if (f.value or 0.0) >= f.threshold else "<"
    value = 0.0 if f.value is None or abs(f.value) < 5e-4 else f.value
    shown, limit = f"{value:.3g}", f"{f.threshold:.3g}"
    if shown == limit:
        shown = f"{value:.6g}"
    head = f"{mark if f.fired else ' '} {f.rule}: {f.statistic} {shown} {sign} {limit}"
    points = f" → {f.means}" if f.fired else ""
    return _wrap(f"{head}{points}. {_capital(f.evidence)}.")


def _changes(d: Diagnosis) -> list[str]:
    if d.healthy:
        which = "every promise" if all(j.exists for j in d.judged) else "every promise that can be judged"
        return _wrap(f"Nothing wrong: {which} is kept, nobody was lost and no queue grows.")
    lines = []
    if d.check is not None:
        lines += _wrap(
            f"The twin gives {d.target.slo.label} {_ms(d.check.twin_s)} where the run had {_ms(d.check.run_s)} "
            f"({d.check.error:+.1%})."
        )
    if d.why_nothing:
        return lines + _wrap(f"No change was simulated: {d.why_nothing}.")
    if not d.proposed:
        lines += _wrap("Nothing tried helps.")
    for number, trial in enumerate(d.proposed, 1):
        lines += _proposal(number, trial, d)
    for head, trials in (
        ("Helps as well", [t for t in d.rejected if t.helps]),
        ("Does not help, or less than those above", [t for t in d.rejected if not t.helps]),
    ):
        lines += _wrap(f"{head}: " + "; ".join(_brief(t) for t in trials) + ".") if trials else []
    unknown = {words.partition(":")[0]: words for t in d.proposed for words in t.not_measured}
    lines += [line for words in unknown.values() for line in _wrap(f"Not measured: {words}.")]
    lines += [
        line for change, why in d.impossible for line in _wrap(f"Not possible: {change.flags} ({why}).")
    ]
    return lines


def _proposal(number: int, trial: Trial, d: Diagnosis) -> list[str]:
    assert trial.effect is not None
    keeps = "keeps the promise" if trial.met else "still misses it"
    lines = _wrap(f"{number}. {trial.change.words} ({trial.change.flags})")
    lines += _wrap(
        f"   {d.target.slo.label} {_ms(trial.effect.a)} → {_ms(trial.effect.b)}: {_span(trial.effect)}; {keeps}. "
        f"Because of: {trial.change.rule}."
    )
    worse = [f"{_title(name)} {_change(name, difference)}" for name, difference in trial.worse]
    worse += [f"breaks {label}" for label in trial.breaks]
    worse += [trial.change.cost] if trial.change.cost else []
    return lines + _wrap(f"   Worse: {'; '.join(worse) or 'nothing of the figures watched'}.")


def _brief(trial: Trial) -> str:
    if trial.effect is None:
        return f"{trial.change.flags} ({_ms(trial.after_s)})"
    return f"{trial.change.flags} ({_span(trial.effect)})"


def _span(difference: Difference) -> str:
    """`−492 ms [−520, −455]`."""
    values = (difference.value, difference.low, difference.high)
    value, low, high = (f"{v * 1000:+,.0f}" if abs(v) >= 0.1 else f"{v * 1000:+,.2f}" for v in values)
    return f"{value} ms [{low}, {high}]"


def _change(name: str, difference: Difference) -> str:
    if name in HIGHER_IS_BETTER:
        value, low, high = (v / difference.a for v in (difference.value, difference.low, difference.high))
        return f"{value:+.1%} [{low:+.1%}, {high:+.1%}]"
    return _span(difference)


def _title(name: str) -> str:
    statistic, _, metric = name.partition("_")
    return (
        name.replace("_", " ") if name in HIGHER_IS_BETTER else f"{statistic.capitalize()} {metric.upper()}"
    )


def _ms(value_s: float) -> str:
    if math.isinf(value_s):
        return "never"
    return f"{value_s * 1000:.4g} ms" if value_s < 10 else f"{value_s:,.1f} s"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _wrap(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(
        text.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def diagnosis_json(d: Diagnosis) -> dict[str, Any]:
    """Strict JSON values; latencies in ms."""
    out: dict[str, Any] = {
        "run": d.run.name,
        "source": d.run.source,
        "requests": len(d.run),
        "lost": d.run.lost,
        "healthy": d.healthy,
        "slo_assumed": d.assumed,
        "promises": [
            {
                "slo": j.slo.name,
                "limit_ms": j.slo.limit_s * 1000,
                "value_ms": _number(j.value_s * 1000),
                "met": j.met,
                "stage": j.stage,
                "stage_shares": dict(j.stages),
            }
            for j in d.judged
        ],
        "target": d.target.slo.name,
        "rules": [
            {
                "rule": f.rule,
                "fired": f.fired,
                "statistic": f.statistic,
                "value": _number(f.value),
                "threshold": f.threshold,
                "means": f.means,
                "cause": f.cause,
                "evidence": f.evidence,
            }
            for f in d.findings
        ],
        "explained_by": [f.rule for f in d.causes],
        "twin": None
        if d.check is None
        else {
            "run_ms": d.check.run_s * 1000,
            "twin_ms": d.check.twin_s * 1000,
            "error": _number(d.check.error),
        },
        "proposed": [_trial(t) for t in d.proposed],
        "not_proposed": [_trial(t) for t in d.rejected],
        "impossible": [{"flags": change.flags, "why": why} for change, why in d.impossible],
        "why_nothing": d.why_nothing,
        "notes": list(d.run.notes),
    }
    return out


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "flags": trial.change.flags,
        "fields": dict(trial.change.fields),
        "words": trial.change.words,
        "rule": trial.change.rule,
        "kind": trial.change.kind,
        "cost": trial.change.cost,
        "before_ms": _number(trial.before_s * 1000),
        "after_ms": _number(trial.after_s * 1000),
        "effect_ms": None if trial.effect is None else _difference(trial.effect, 1000.0),
        "meets_slo": trial.met,
        "worse": {n: _difference(diff, 1.0 if n in HIGHER_IS_BETTER else 1000.0) for n, diff in trial.worse},
        "breaks": list(trial.breaks),
        "not_measured": list(trial.not_measured),
    }


def _difference(difference: Difference, scale: float) -> Mapping[str, float | None]:
    return {
        "value": _number(difference.value * scale),
        "ci95_low": _number(difference.low * scale),
        "ci95_high": _number(difference.high * scale),
    }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
