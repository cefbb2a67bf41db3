"""Two runs compared: a table for the terminal, a JSON file, and a page with a waterfall per metric."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from calibration.diff import PARTS, RunDiff, Split
from calibration.step_diff import FirstDifference
from experiments import theme
from experiments.page import page, plot_section, table_section
from experiments.results import writable

JSON_FILE, PAGE = "diff.json", "diff.html"
_RATES = {
    "request_throughput": "Requests (/s)",
    "output_throughput": "Output tok (/s)",
    "total_token_throughput": "Total tok (/s)",
    "request_goodput": "Goodput (/s)",
    "slo_attainment": "SLO attainment",
}
_KINDS = {"decode": "decode only", "prefill": "prefill only", "mixed": "both"}
_WORDS = {
    "num_tokens": "tokens",
    "num_prefill_tokens": "prompt tokens",
    "num_prefills": "prompt chunks",
    "num_decodes": "decodes",
    "decode_context_sum": "decode context",
    "prefill_attention_area": "query-key pairs",
}


def label(metric: str) -> str:
    """As it is printed, with its unit: `P95 TTFT (ms)`."""
    statistic, _, name = metric.rpartition("_")
    if name in ("ttft", "tpot", "itl", "e2el"):
        return f"{statistic.capitalize()} {name.upper()} (ms)"
    return _RATES.get(metric, metric.replace("_", " "))


def shown(split: Split, value: float) -> float:
    """A value of the split's metric in the printed unit."""
    return value * 1000 if label(split.metric).endswith("(ms)") else value


def diff_lines(found: RunDiff, names: tuple[str, str] = ("A", "B")) -> list[str]:
    """The table and what there is to say about it, at most 80 columns where the names allow.

    More than four parts are a table of their own.
    """
    parts = tuple(found.splits[0].parts)
    several = len(parts) > len(PARTS)
    shown_parts = () if several else parts
    lines = [f"A: {names[0]}", f"B: {names[1]}", ""]
    rows = [("", ["A", "B", "B - A", *shown_parts])]
    for split in found.splits:
        row = cells(split, (split.a, split.b))
        row += cells(split, (split.difference, *(split.parts[part] for part in shown_parts)), signed=True)
        rows.append((label(split.metric), row))
    lines += [f"{name[:17]:<17}" + "".join(f"{cell:>9}" for cell in row) for name, row in rows]
    if several:
        lines += ["", *_parts_table(found.splits, parts)]
    lines.append("")
    lines += sentences(found)
    return lines


def _parts_table(splits: Sequence[Split], parts: Sequence[str]) -> list[str]:
    """What each part adds, in columns as wide as they need to be."""
    rows = [list(parts)]
    rows += [cells(split, (split.parts[part] for part in parts), signed=True) for split in splits]
    widths = [1 + max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{name[:15]:<15}" + "".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for name, row in zip(["", *(label(split.metric) for split in splits)], rows, strict=True)
    ]


def sentences(found: RunDiff) -> list[str]:
    """What the table cannot say."""
    missed = [
        f"{label(split.metric)} {cells(split, [split.unexplained], signed=True)[0]}"
        for split in found.splits
        if split.unexplained
    ]
    out = []
    if missed:
        out.append(
            f"Unexplained, because replays of the two runs with their own parts miss it: {', '.join(missed)}."
        )
    first = found.first_difference
    if first is None:
        out.append(f"All {found.num_steps[0]:,} steps compute the same.")
    else:
        out.append(
            f"First different step: number {first.step} of replica {first.replica}, after "
            f"{found.identical_steps:,} alike (A has {found.num_steps[0]:,}, B {found.num_steps[1]:,}). "
            f"A: {_step(first, first.a)}. B: {_step(first, first.b)}."
        )
    if found.kernel_ratio:
        ratios = [
            f"{_KINDS[kind]} {ratio:.3f} ({count:,})" for kind, (ratio, count) in found.kernel_ratio.items()
        ]
        out.append(f"Device time B / A of steps that both had: {', '.join(ratios)}.")
    return [*out, *(f"Note: {note}." for note in found.notes)]


def diff_json(found: RunDiff, names: tuple[str, str] = ("A", "B")) -> dict[str, Any]:
    """Everything as JSON values; times in seconds."""
    first = found.first_difference
    return {
        "a": names[0],
        "b": names[1],
        "metrics": {
            split.metric: {
                "a": split.a,
                "b": split.b,
                "difference": split.difference,
                "parts": split.parts,
                "unexplained": split.unexplained,
            }
            for split in found.splits
        },
        "identical_steps": found.identical_steps,
        "num_steps": list(found.num_steps),
        "first_difference": None
        if first is None
        else {
            "replica": first.replica,
            "step": first.step,
            "a": first.a,
            "b": first.b,
            "columns": list(first.columns),
        },
        "kernel_ratio": {
            kind: {"mean": ratio, "steps": count} for kind, (ratio, count) in found.kernel_ratio.items()
        },
        "replays": found.worlds,
        "notes": list(found.notes),
    }


def save_diff(found: RunDiff, folder: str | Path, names: tuple[str, str] = ("A", "B")) -> list[Path]:
    """Write `diff.json` and `diff.html` and return their paths. Raises UsageError when they cannot be written."""
    base = Path(folder)
    paths = [base / JSON_FILE, base / PAGE]
    with writable(base):
        base.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(
            json.dumps(diff_json(found, names), indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        paths[1].write_text(diff_html(found, names), encoding="utf-8")
    return paths


def diff_html(found: RunDiff, names: tuple[str, str] = ("A", "B")) -> str:
    """The page: what differs, a waterfall per metric, the table."""
    said = "".join(f"<li>{escape(line)}</li>" for line in sentences(found))
    plots = [
        plot_section(
            index,
            label(split.metric),
            "From A to B, one part at a time; each step is the mean of its effect over all orders.",
            waterfall(split),
        )
        for index, split in enumerate(found.splits)
    ]
    rows = [
        [
            label(split.metric),
            *cells(split, (split.a, split.b)),
            *cells(split, (split.difference, *split.parts.values(), split.unexplained), signed=True),
        ]
        for split in found.splits
    ]
    return page(
        "Difference of two runs",
        [
            "<h1>Why two runs differ</h1>",
            f'<p class="sub">A: {escape(names[0])}<br>B: {escape(names[1])}</p>',
            f'<section class="verdict"><h2>Steps</h2><ul>{said}</ul></section>',
            f'<div class="grid">{"".join(plots)}</div>',
            table_section("Parts", ["", "A", "B", "B − A", *found.splits[0].parts, "unexplained"], rows),
        ],
    )


def waterfall(split: Split) -> Any:
    """A's value, what each part adds, B's value."""
    go: Any = import_module("plotly.graph_objects")
    steps = list(split.parts.items())
    if split.unexplained:
        steps.append(("unexplained", split.unexplained))
    raw = [value for _, value in steps]
    values = [shown(split, v) for v in (split.a, *raw, split.b)]
    ends, changes = cells(split, (split.a, split.b)), cells(split, raw, signed=True)
    fig = theme.figure(height=320, showlegend=False)
    fig.add_trace(
        go.Waterfall(
            x=["A", *(name for name, _ in steps), "B"],
            y=values,
            measure=["absolute", *("relative" for _ in steps), "total"],
            text=[ends[0], *changes, ends[1]],
            textposition="outside",
            cliponaxis=False,
            connector={"line": {"color": theme.GREY, "width": 1}},
            increasing={"marker": {"color": theme.ORANGE}},
            decreasing={"marker": {"color": theme.SKY}},
            totals={"marker": {"color": theme.BLUE}},
            hovertemplate="%{x}: %{text}<extra></extra>",
        )
    )
    low, high = _span(values)
    fig.update_yaxes(title_text=label(split.metric), range=[low, high])
    return fig


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Axis range around the running total, with room for the numbers; from 0 unless the change is small."""
    levels = [values[0], values[-1]]
    total = values[0]
    for value in values[1:-1]:
        total += value
        levels.append(total)
    low, high = min(levels), max(levels)
    if low > 0 and high - low > 0.2 * high:
        low = 0.0
    room = 0.18 * ((high - low) or abs(high) or 1.0)
    return (low - room if low else 0.0), high + room


def _step(first: FirstDifference, row: dict[str, float]) -> str:
    if not row:
        return "no such step"
    counts = [(row[name], _WORDS[name]) for name in _interesting(first.columns)]
    return ", ".join(
        f"{count:.0f} {word.removesuffix('s') if count == 1 else word}" for count, word in counts
    )


def _interesting(columns: Iterable[str]) -> list[str]:
    return [name for name in columns if name != "prefill_attention_area"] or list(columns)


def cells(split: Split, values: Iterable[float], *, signed: bool = False) -> list[str]:
    """Values of a split's metric as text, with as many decimals as give the larger of A and B five digits."""
    most = max(abs(shown(split, split.a)), abs(shown(split, split.b)))
    digits = 4 if most < 1 else max(4 - math.floor(math.log10(most)), 0)
    texts = [f"{shown(split, value):{'+' if signed else ''}.{digits}f}" for value in values]
    return ["0" if not float(text) else text for text in texts]
