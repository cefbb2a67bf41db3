"""Alert rules over a run: `ttft:p95:1m > 1s for 3m`, evaluated as Prometheus evaluates its own.

    rule      = selector comparison threshold [ "for" duration ]
    selector  = metric ":" [ statistic ":" ] window
    metric    = "ttft" | "tpot" | "e2el" | "queue"           (latencies; statistic mean, median, min, max or pN)
              | "kv_usage" | "running" | "waiting"           (gauges; statistic mean, min or max)
              | "error_rate"                                 (failed / ended; no statistic)
    window    = duration of at least 1s                      (what an evaluation looks back on)
    comparison= ">" | ">=" | "<" | "<="
    threshold = duration for a latency; a share such as 0.9 or 90% of kv_usage and error_rate; else a number
    duration  = numbers with units in falling order: 500ms, 30s, 1m30s, 2h

At an evaluation where the comparison holds, a rule becomes pending; once it has held at every evaluation for the time
that "for" says, it fires; where it does not hold, or the window has nothing to look at, it is inactive again. Source:
Prometheus, "Alerting rules". Percentiles are of the samples themselves, not of histogram buckets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from serving.errors import UsageError, nearest
from sim.record import Floats

LATENCIES = ("ttft", "tpot", "e2el", "queue")
GAUGES = ("kv_usage", "running", "waiting")
RATIOS = ("error_rate",)
METRICS = (*LATENCIES, *GAUGES, *RATIOS)
SHARES = ("kv_usage", "error_rate")
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": lambda value, limit: value > limit,
    ">=": lambda value, limit: value >= limit,
    "<": lambda value, limit: value < limit,
    "<=": lambda value, limit: value <= limit,
}
EVALUATION_INTERVAL_S = 60.0
"""Prometheus's default; a rule with a shorter window is evaluated once per window."""
LEAST_WINDOW_S = 1.0
EXAMPLE = "ttft:p95:1m > 1s for 3m"

_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?|100)")
_WORD = re.compile(r"[<>=!]+|[^\s<>=!]+")
_GAUGE_STATISTICS = ("mean", "min", "max")
_LATENCY_STATISTICS = ("mean", "median", "min", "max", "p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Rule:
    """One alert rule; `str(rule)` is what `parse_rule` reads. Times are in seconds, shares in 0 to 1."""

    metric: str
    statistic: str
    """Empty for `error_rate`."""
    window_s: float
    comparison: str
    threshold: float
    for_s: float = 0.0

    @property
    def interval_s(self) -> float:
        """Time between evaluations."""
        return min(self.window_s, EVALUATION_INTERVAL_S)

    def holds(self, value: float) -> bool:
        """Whether the comparison holds; never for NaN, which is a window without samples."""
        return not math.isnan(value) and COMPARISONS[self.comparison](value, self.threshold)

    def worse(self, a: float, b: float) -> float:
        """The one of two values that is further on the wrong side."""
        return max(a, b) if self.comparison.startswith(">") else min(a, b)

    def text(self, value: float) -> str:
        """A value of the rule's metric as it is typed."""
        if self.metric in LATENCIES:
            return duration_text(value)
        percent = f"{value * 100:g}"
        if self.metric in SHARES and float(percent) / 100 == value:
            return f"{percent}%"
        return _number(value)

    def said(self, value: float) -> str:
        """A value for people: rounded, shares in percent."""
        if self.metric in LATENCIES:
            return f"{value * 1000:.4g} ms" if value < 1 else f"{value:.3g} s"
        return f"{value:.1%}" if self.metric in SHARES else f"{value:.4g}"

    def __str__(self) -> str:
        parts = [self.metric, *([self.statistic] if self.statistic else []), duration_text(self.window_s)]
        waits = f" for {duration_text(self.for_s)}" if self.for_s else ""
        return f"{':'.join(parts)} {self.comparison} {self.text(self.threshold)}{waits}"


@dataclass(frozen=True, slots=True)
class Firing:
    """One time that a rule fired, in seconds on the clock of the run."""

    pending_s: float
    """The first evaluation at which the comparison held."""
    fired_s: float
    cleared_s: float | None
    """None when it still fired at the last evaluation."""
    worst: float


@dataclass(frozen=True, slots=True)
class History:
    """A rule over a run: its value at each evaluation (NaN without samples), and when it fired."""

    rule: Rule
    times_s: Floats
    values: Floats
    firings: tuple[Firing, ...]

    @property
    def fired(self) -> bool:
        return bool(self.firings)


def evaluate(rule: Rule, times_s: Floats, values: Floats) -> History:
    """Run a rule's states over its values at the evaluations `times_s`, shape (evaluations,) both."""
    firings: list[Firing] = []
    pending_s: float | None = None
    fired_s: float | None = None
    worst = math.nan
    for time_s, value in zip(times_s.tolist(), values.tolist(), strict=True):
        if not rule.holds(value):
            if pending_s is not None and fired_s is not None:
                firings.append(Firing(pending_s, fired_s, time_s, worst))
            pending_s = fired_s = None
            continue
        if pending_s is None:
            pending_s, worst = time_s, value
        worst = rule.worse(worst, value)
        # Sums of intervals are not exact: a millionth of a second is no delay.
        if fired_s is None and time_s - pending_s >= rule.for_s - 1e-6:
            fired_s = time_s
    if pending_s is not None and fired_s is not None:
        firings.append(Firing(pending_s, fired_s, None, worst))
    return History(rule, times_s, values, tuple(firings))


def evaluations(rule: Rule, from_s: float, to_s: float) -> Floats:
    """When a rule is evaluated in a run: every interval after its beginning, the last time at or after its end."""
    count = max(1, math.ceil((to_s - from_s) / rule.interval_s - 1e-9))
    return np.asarray(from_s + rule.interval_s * np.arange(1, count + 1))


# ---- reading -----------------------------------------------------------------------------------------------


def parse_rules(items: Sequence[str]) -> tuple[Rule, ...]:
    """Read rules. Raises `UsageError` that names column and word, also for a rule that is given twice."""
    rules = tuple(parse_rule(item) for item in items)
    for rule in rules:
        if rules.count(rule) > 1:
            raise UsageError(f"--alert: {str(rule)!r} is given {rules.count(rule)} times; keep one")
    return rules


def parse_rule(text: str) -> Rule:
    """Read a rule such as `ttft:p95:1m > 1s for 3m`. Raises `UsageError` that names the column and the wrong word."""
    words = [(match.start() + 1, match.group()) for match in _WORD.finditer(text)]
    if not words:
        raise UsageError(f"--alert: the rule is empty; write one such as {EXAMPLE!r}")
    metric, statistic, window_s = _selector(text, *words[0])
    if len(words) < 2:
        _wrong(text, len(text) + 1, "", f"a comparison is missing after the window; write {EXAMPLE!r}")
    column, comparison = words[1]
    if comparison not in COMPARISONS:
        _wrong(text, column, comparison, f"not a comparison; write one of {', '.join(COMPARISONS)}")
    if len(words) < 3:
        _wrong(text, len(text) + 1, "", f"a threshold is missing after {comparison!r}")
    threshold = _threshold(text, *words[2], metric)
    if len(words) == 3:
        return Rule(metric, statistic, window_s, comparison, threshold)
    if words[3][1] != "for":
        _wrong(text, *words[3], "only 'for' and a duration may stand here")
    if len(words) < 5:
        _wrong(text, len(text) + 1, "", "a duration is missing after 'for', such as 3m")
    if len(words) > 5:
        _wrong(text, *words[5], "nothing may stand after the duration of 'for'")
    return Rule(metric, statistic, window_s, comparison, threshold, _duration(text, *words[4]))


def _selector(text: str, column: int, word: str) -> tuple[str, str, float]:
    parts = word.split(":")
    places = [column + sum(len(part) + 1 for part in parts[:i]) for i in range(len(parts))]
    metric = parts[0]
    if metric not in METRICS:
        _wrong(text, column, metric, f"not a metric; {nearest(metric, METRICS)}")
    if metric in RATIOS:
        if len(parts) > 2:
            _wrong(text, places[1], parts[1], f"{metric} has no statistic; write {metric}:5m")
        if len(parts) < 2:
            _wrong(text, column + len(word), "", f"a window is missing; write {metric}:5m")
        return metric, "", _window(text, places[1], parts[1])
    known = _LATENCY_STATISTICS if metric in LATENCIES else _GAUGE_STATISTICS
    example = f"{metric}:{'p95' if metric in LATENCIES else 'mean'}:1m"
    if len(parts) != 3:
        what = "too many parts" if len(parts) > 3 else "metric, statistic and window are needed"
        at = 3 if len(parts) > 3 else 0
        _wrong(text, places[at], parts[at] if at else word, f"{what}; write {example}")
    statistic = parts[1]
    match = _PERCENTILE.fullmatch(statistic) if metric in LATENCIES else None
    if statistic not in known and (match is None or not float(match[1]) > 0):
        _wrong(text, places[1], statistic, f"not a statistic of {metric}; {nearest(statistic, known)}")
    return metric, statistic, _window(text, places[2], parts[2])


def _window(text: str, column: int, word: str) -> float:
    window_s = _duration(text, column, word)
    if window_s < LEAST_WINDOW_S:
        _wrong(text, column, word, "a window must be at least 1s")
    return window_s


def _threshold(text: str, column: int, word: str, metric: str) -> float:
    if metric in LATENCIES:
        if re.fullmatch(r"-?\d+(\.\d+)?", word):
            _wrong(text, column, word, f"a threshold of {metric} needs a unit, such as {word}ms or {word}s")
        return _duration(text, column, word)
    percent = word.endswith("%") and metric in SHARES
    try:
        value = float(word[:-1] if percent else word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        example = "0.9 or 90%" if metric in SHARES else "100"
        _wrong(text, column, word, f"not a threshold of {metric}; write one such as {example}")
    value = value / 100 if percent else value
    if metric in SHARES and value > 1:
        _wrong(text, column, word, f"{metric} is a share of at most 1; write {word}% or a number below 1")
    return value


def _duration(text: str, column: int, word: str) -> float:
    found = list(_PART.finditer(word))
    units = [match[2] for match in found]
    falling = [unit for unit in _UNITS_S if unit in units]
    if not found or "".join(match[0] for match in found) != word or units != falling:
        _wrong(text, column, word, "not a duration; write one such as 500ms, 30s, 1m30s or 2h")
    # Through milliseconds, in which what people write is whole: 0.3 s is then the float that 0.3 is.
    ms = sum(float(match[1]) * round(_UNITS_S[match[2]] * 1000) for match in found)
    return ms / 1000


def duration_text(seconds: float) -> str:
    """A duration as it is typed; `parse_rule` reads the same number of seconds back."""
    left = round(seconds * 1000)
    if left / 1000 != seconds:
        return f"{np.format_float_positional(seconds * 1000, trim='-')}ms"
    parts = []
    for unit, unit_s in _UNITS_S.items():
        count, left = divmod(left, round(unit_s * 1000))
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def _number(value: float) -> str:
    return str(np.format_float_positional(value, trim="-"))


def _wrong(text: str, column: int, word: str, why: str) -> NoReturn:
    at = f"column {column}, {word!r}" if word else f"column {column}"
    raise UsageError(f"--alert {text!r}: {at}: {why}")
