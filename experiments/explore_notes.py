"""What a sweep is not sure of, in sentences: limits within intervals, what was not measured, few samples."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments.explore_space import Point, read_object
from sim.samples import ThinPercentile

_SHARE = re.compile(r" \(in [^()]+ of steps\)$")
_LISTED = 6


def certainty_notes(points: Sequence[Point], limits_ms: Mapping[str, float]) -> list[str]:
    """Sentences about the points that ended well; the runs' JSON files are read where they are. Raises UsageError."""
    done = {point.number: point for point in points if not point.error}
    lines = []
    for name, limit_ms in limits_ms.items():
        ends = {number: point.intervals.get(f"{name}_ms", (0.0, 0.0)) for number, point in done.items()}
        if doubtful := [number for number, (low, high) in ends.items() if low <= limit_ms < high]:
            lines.append(
                f"Not certain at {_where(doubtful, done)}: the 95% interval of {_label(name)} contains the sweep's "
                f"limit of {limit_ms:g} ms."
            )
    unmeasured: dict[int, list[str]] = {}
    thin: dict[str, list[int]] = {}
    for number, point in done.items():
        for result in _results(point):
            unmeasured.setdefault(number, []).extend(result.get("sim_extrapolations") or ())
            for name, few in (result.get("sim_thin_percentiles") or {}).items():
                if name in limits_ms:
                    words = ThinPercentile(name, few["samples"], few["needed"]).words
                    thin.setdefault(words, []).append(number)
    lines += unmeasured_notes(unmeasured, done)
    return [*lines, *(f"At {_where(found, done)}, {words}." for words, found in thin.items())]


def unmeasured_notes(
    words_of: Mapping[int, Iterable[str]], every: Collection[int], plural: str = "points"
) -> list[str]:
    """A sentence for each thing that was not measured, by number of the points that extrapolate it."""
    by_kind: dict[str, dict[int, str]] = {}
    for number, lines in words_of.items():
        for words in lines:
            what = _SHARE.sub("", words)
            by_kind.setdefault(re.sub(r"\d+( to \d+)?", "0", what), {}).setdefault(number, what)
    out = []
    for found in by_kind.values():
        (number, what), *others = found.items()
        differ = any(other != what for _, other in others)
        at_first = f" (#{number}; alike at the others)" if differ else ""
        out.append(f"Not measured at {_where(found, every, plural)}: {what}{at_first}.")
    return out


def without_figure(points: Sequence[Point], name: str) -> list[int]:
    """Numbers of the points that ended well and lack a figure of this name, as TPOT where every answer comes whole."""
    key = name.replace("median", "p50") + "_ms"
    return [p.number for p in points if not p.error and p.figures.get(key, math.nan) is None]


def unjudged_notes(
    points: Sequence[Point], limits_ms: Mapping[str, float], plural: str = "points"
) -> list[str]:
    """A sentence for each limit by which some of the points cannot be judged."""
    every = [p.number for p in points if not p.error]
    found = {name: without_figure(points, name) for name in limits_ms}
    return [
        f"Not judged at {_where(numbers, every, plural)}: {_label(name)} ≤ {limits_ms[name]:g} ms; there is no such "
        + "figure"
        + ("." if len(numbers) == len(every) else ", and they do not count as keeping it.")
        for name, numbers in found.items()
        if numbers
    ]


def _results(point: Point) -> Iterator[Mapping[str, Any]]:
    """The result of each run of a point, where its file is there."""
    if point.folder is not None:
        for path in sorted(point.folder.parent.glob("run=*[0-9].json")):
            yield read_object(path)


def _where(found: Iterable[int], every: Collection[int], plural: str = "points") -> str:
    """`all 8 points`, or `#1, #2 and 3 more`."""
    numbers = list(dict.fromkeys(found))
    if len(numbers) == len(every) > 1:
        return f"all {len(numbers)} {plural}"
    shown = [f"#{number}" for number in numbers[:_LISTED]]
    more = len(numbers) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _label(name: str) -> str:
    statistic, _, metric = name.partition("_")
    return f"{statistic.capitalize()} {metric.upper()}"
