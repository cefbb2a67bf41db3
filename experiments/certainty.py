"""Intervals and extrapolations in words and keys, for the terminal, the JSON file and the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.replications import RATES, SHARES
from sim.slo import METRICS

if TYPE_CHECKING:
    from sim.certainty import Certainty
    from sim.intervals import Interval
    from sim.verdict import Verdict

THIN_MARK = "*"
_HEADLINE = ("mean_ttft", "p95_ttft", "mean_tpot", "p95_tpot", "output_throughput", "request_goodput")


def bracket(certainty: Certainty | None, name: str, scale: float = 1000.0, digits: int = 2) -> str:
    """`[25.10, 31.92]` for a figure in its printed unit, with a mark where samples are few; empty without interval."""
    interval = None if certainty is None else certainty.interval(name)
    mark = THIN_MARK if certainty is not None and certainty.is_thin(name) else ""
    if interval is None:
        return mark
    ends = f"[{interval.low * scale:.{digits}f}, {interval.high * scale:.{digits}f}]"
    return f"{ends} {mark}".rstrip()


def interval_keys(certainty: Certainty, metrics: Sequence[str] = METRICS) -> dict[str, float | None]:
    """`p95_ttft_ci95_low_ms`, `output_throughput_ci95_high` and so on, for every figure with an interval."""
    out: dict[str, float | None] = {}
    replicated = certainty.replicated
    for name in replicated.names() if replicated is not None else ():
        if name.startswith("slo_") and name not in SHARES:
            continue
        metric = name.rsplit("_", 1)[-1]
        if metric in METRICS and metric not in metrics:
            continue
        interval = certainty.interval(name)
        assert interval is not None
        unit, scale = ("", 1.0) if name in (*RATES, *SHARES) else ("_ms", 1000.0)
        out[f"{name}_ci95_low{unit}"] = interval.low * scale
        out[f"{name}_ci95_high{unit}"] = interval.high * scale
    return out


def certainty_json(certainty: Certainty) -> dict[str, Any]:
    """What else the JSON says: replications, shares of variance, extrapolations, thin percentiles."""
    replicated = certainty.replicated
    names = replicated.names() if replicated is not None else ()
    intervals = {name: certainty.interval(name) for name in names}
    return {
        "sim_replications": 1 if replicated is None else len(replicated.replicas),
        "sim_variance_shares": {name: _shares(i) for name, i in intervals.items() if i is not None},
        "sim_extrapolations": [line.words for line in certainty.extrapolations],
        "sim_thin_percentiles": {
            thin.name: {"samples": thin.samples, "needed": thin.needed} for thin in certainty.thin
        },
    }


def _shares(interval: Interval) -> dict[str, float]:
    return {
        "calibration": interval.calibration,
        "noise": interval.noise,
        "sampling": interval.sampling,
    }


def ends_ms(interval: Interval) -> str:
    """`4.989 to 24,140`: seconds in ms, to four digits or all of a larger whole number."""
    ends = (1000 * interval.low, 1000 * interval.high)
    low, high = (f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in ends)
    return f"{low} to {high}"


def doubts(verdict: Verdict, certainty: Certainty | None) -> list[str]:
    """A sentence for each SLO whose limit lies within the interval of its figure."""
    lines = []
    for slo in (outcome.slo for outcome in verdict.slos):
        interval = None if certainty is None else certainty.interval(slo.name)
        if interval is not None and interval.low <= slo.limit_s < interval.high:
            lines.append(
                f"Not certain: the 95% interval of {slo.label}, {ends_ms(interval)} ms, contains the limit."
            )
    return lines


def certainty_lines(certainty: Certainty, warned: Sequence[str] = ()) -> list[str]:
    """Sentences: what the brackets are, what they come from, what was not measured, what is thin.

    What is among the warnings of the same page, `warned`, is not said again.
    """
    lines = []
    replicated = certainty.replicated
    if replicated is not None and replicated.names():
        lines.append(
            f"Brackets are 95% intervals for another run of this traffic, from {len(replicated.replicas)} "
            "replications."
        )
        for name in ("mean_tpot", "p95_ttft"):
            interval = certainty.interval(name)
            if interval is not None and any(_shares(interval).values()):
                statistic, _, metric = name.partition("_")
                lines.append(
                    f"{statistic.capitalize()} {metric.upper()}: calibration {interval.calibration:.0%}, "
                    f"step noise {interval.noise:.0%}, sampling {interval.sampling:.0%} of its variance."
                )
    elif certainty.interrupted:
        lines.append("Interrupted before intervals were known.")
    elif certainty.too_long:
        lines.append("No intervals, because the run is long: --replications 4 makes them, in minutes.")
    lines += [f"Not measured: {line.words}." for line in certainty.extrapolations if line.words not in warned]
    lines += [f"{THIN_MARK} {thin.words}." for thin in certainty.thin]
    return lines


def headline_rows(certainty: Certainty, metrics: Sequence[str] = METRICS) -> list[list[str]]:
    """Figure, value, low, high and the share of each source in the variance, for the page's table; latencies are those
    of `metrics`."""
    rows = []
    for name in _HEADLINE:
        interval = certainty.interval(name)
        statistic, _, metric = name.partition("_")
        if interval is None or (metric in METRICS and metric not in metrics):
            continue
        scale, title = (1.0, name.replace("_", " ").capitalize() + " (/s)")
        if metric in METRICS:
            scale, title = 1000.0, f"{statistic.capitalize()} {metric.upper()} (ms)"
        values = (interval.value, interval.low, interval.high)
        shares = (interval.calibration, interval.noise, interval.sampling)
        rows.append([title, *(f"{v * scale:,.2f}" for v in values), *(f"{share:.0%}" for share in shares)])
    return rows
