"""Promises about latency: limits on percentiles (`--slo`) and per request (`--goodput`), as typed.

Milliseconds appear in the text a user types; everything else here is in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from serving.errors import UsageError, nearest

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")

TICK_S = 1e-9
"""A latency is a difference of two times of a clock of 64 bits: what exceeds a limit by no more than this is rounding."""

_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?|100)")


@dataclass(frozen=True, slots=True)
class Slo:
    """A limit on one statistic of one latency, such as P95 TTFT ≤ 0.5 s."""

    statistic: str
    """"mean", "median", "max" or a percentile such as "p95"."""
    metric: str
    """One of `METRICS`."""
    limit_s: float

    def met(self, value_s: float) -> bool:
        """Whether a statistic of this value, in seconds, keeps the limit; NaN does not."""
        return bool(value_s <= self.limit_s + TICK_S)

    @property
    def name(self) -> str:
        """As it is typed, such as "p95_ttft"."""
        return f"{self.statistic}_{self.metric}"

    @property
    def label(self) -> str:
        """As it is printed, such as "P95 TTFT"."""
        statistic = self.statistic if self.statistic.startswith("p") else self.statistic + " "
        return f"{statistic.strip().capitalize()} {self.metric.upper()}"

    @property
    def percentile(self) -> float | None:
        """The percentile in 0 to 100, or None for a mean."""
        if self.statistic == "mean":
            return None
        return {"median": 50.0, "max": 100.0}.get(self.statistic) or float(self.statistic[1:])


@dataclass(frozen=True, slots=True)
class Goodput:
    """Limits that one request must keep, each in seconds, to count as good; None where there is none."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def limits_s(self) -> dict[str, float]:
        """The limits that are set, by metric name."""
        named = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2el_s}
        return {name: limit for name, limit in named.items() if limit is not None}


PRESETS: dict[str, tuple[Slo, ...]] = {
    "chat": (Slo("p95", "ttft", 1.0), Slo("p95", "tpot", 0.080)),
    "autocomplete": (Slo("p95", "ttft", 0.200),),
    "api": (Slo("p95", "e2el", 10.0),),
    "batch": (Slo("p95", "e2el", 600.0),),
}
"""Named sets. Chat and autocomplete follow what readers notice; api and batch are points to start from."""


def parse_slo(items: Sequence[str]) -> tuple[Slo, ...]:
    """Read `["p95_ttft:500", "mean_tpot:50"]` (ms) or the name of a preset.

    Raises UsageError for an unknown preset, statistic or metric, a limit that is not a positive number, and
    for a name given twice.
    """
    slos: list[Slo] = []
    for item in items:
        slos.extend(_one_slo(item.strip().lower()))
    names = [slo.name for slo in slos]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--slo: {name} is given {names.count(name)} times; keep one limit for it")
    return tuple(slos)


def parse_goodput(items: Sequence[str]) -> Goodput:
    """Read `["ttft:500", "tpot:50", "e2el:5000"]`, ms per request. Raises UsageError as `parse_slo` does."""
    limits: dict[str, float] = {}
    for item in items:
        name, limit_s = _pair("--goodput", item.strip().lower(), "ttft:500")
        if name not in GOODPUT_METRICS:
            raise UsageError(f"--goodput: unknown metric {name!r}; {nearest(name, GOODPUT_METRICS)}")
        if name in limits:
            raise UsageError(f"--goodput: {name} is given twice; keep one limit for it")
        limits[name] = limit_s
    return Goodput(limits.get("ttft"), limits.get("tpot"), limits.get("e2el"))


def _one_slo(item: str) -> tuple[Slo, ...]:
    if ":" not in item and item in PRESETS:
        return PRESETS[item]
    if ":" not in item and "_" not in item:
        raise UsageError(f"--slo: unknown preset {item!r}; {nearest(item, PRESETS)} (or write p95_ttft:500)")
    name, limit_s = _pair("--slo", item, "p95_ttft:500")
    statistic, _, metric = name.partition("_")
    if metric not in METRICS or not _is_statistic(statistic):
        known = [f"{s}_{m}" for s in ("mean", "median", "max", "p50", "p90", "p95", "p99") for m in METRICS]
        raise UsageError(f"--slo: unknown name {name!r}; {nearest(name, known)}")
    return (Slo(statistic, metric, limit_s),)


def _is_statistic(text: str) -> bool:
    match = _PERCENTILE.fullmatch(text)
    return text in ("mean", "median", "max") or (match is not None and float(match[1]) > 0)


def _pair(flag: str, item: str, example: str) -> tuple[str, float]:
    name, colon, value = item.partition(":")
    if not colon or not name:
        raise UsageError(f"{flag}: {item!r} is not NAME:MILLISECONDS, such as {example}")
    try:
        limit_ms = float(value)
    except ValueError:
        raise UsageError(f"{flag}: {value!r} in {item!r} is not a number of milliseconds") from None
    if not (math.isfinite(limit_ms) and limit_ms > 0):
        raise UsageError(f"{flag}: the limit in {item!r} must be a positive, finite number of milliseconds")
    return name, limit_ms / 1000
