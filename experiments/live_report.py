"""The report of a live validation: lines for the terminal, a JSON file, and one page with tables and step scatter."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from calibration.live import SCHEMA, LiveReport, LoadPoint
from experiments import theme
from experiments.page import page, plot_section, table_section
from experiments.results import writable

RESULT, PAGE = "live.json", "live.html"
KINDS = ("decode", "prefill", "mixed")
_MOST_DOTS = 1500
HEAD = ("figure", "real ms", "twin ms", "error", "95% interval", "covered")
TARGETS = (
    ("TPOT", "tpot", ("mean", "median", "p95", "p99"), 0.05),
    ("E2EL", "e2el", ("mean", "median", "p95", "p99"), 0.05),
    ("mean TTFT", "ttft", ("mean",), 0.10),
    ("P95 TTFT", "ttft", ("p95",), 0.20),
)
"""Median absolute errors that a profile should keep at loads of up to 80 % of capacity."""


def save_live(report: LiveReport, folder: str | Path) -> list[Path]:
    """Write `live.json` and `live.html`. Raises `UsageError` when it cannot be written."""
    base = Path(folder)
    with writable(base):
        base.mkdir(parents=True, exist_ok=True)
        text = json.dumps(live_json(report), indent=1, allow_nan=False)
        (base / RESULT).write_text(text + "\n", encoding="utf-8")
        (base / PAGE).write_text(live_html(report), encoding="utf-8")
    return [base / RESULT, base / PAGE]


def live_lines(report: LiveReport) -> list[str]:
    """Every load as a table of at most 80 columns, the verdict last."""
    out = [report.title, f"capacity {report.capacity_rps:.3g} requests/s", ""]
    for point in report.points:
        out.append(_heading(point))
        out.append(f"  {'':<12}{'real ms':>10}{'twin ms':>10}{'error':>8}   95% interval")
        for f in point.figures:
            name = f"{f.metric.upper()} {f.statistic}"
            out.append(f"  {name:<12}{f.real_ms:>10,.1f}{f.twin_ms:>10,.1f}{f.error:>+8.1%}   {_interval(f)}")
        out += [f"  {line}" for line in _step_lines(point)]
        out += [f"  {line}" for line in _split_lines(point)]
        out.append("")
    return [*out, *verdict_lines(report)]


def verdict_lines(report: LiveReport) -> list[str]:
    """Median errors at up to 80 % of capacity against what they should be, coverage, and the wander beside them."""
    out = []
    for name, metric, statistics, limit in TARGETS:
        errors = report.errors(metric, statistics, up_to=0.8)
        if errors:
            median = float(np.median(errors))
            word = "within" if median <= limit else "over"
            out.append(f"{name}: median absolute error {median:.1%}, {word} the {limit:.0%} aimed at")
    if not math.isnan(report.coverage()):
        out.append(f"intervals cover {report.coverage():.0%} of the figures (80% aimed at)")
    out.append(f"wander of the machine (reference step, 10th to 90th percentile): {report.wander:.1%}")
    return [*out, *(f"note: {note}" for note in report.notes)]


def _heading(point: LoadPoint) -> str:
    return (
        f"load {point.load:g}: {point.request_rate:.3g} requests/s, {point.num_requests} requests, "
        f"{point.cached_share:.0%} of prompts cached, machine {point.wander:+.1%}"
    )


def _interval(figure: Any) -> str:
    if math.isnan(figure.low_ms):
        return "none"
    return f"{figure.low_ms:,.1f} to {figure.high_ms:,.1f}{'' if figure.covered else '  missed'}"


def _step_lines(point: LoadPoint) -> list[str]:
    steps = point.steps
    parts = [
        f"{kind} {steps.bias(kind):+.1%} ({int((steps.kind == kind).sum())})"
        for kind in KINDS
        if (steps.kind == kind).any()
    ]
    return [f"device time of steps, twin to real: {', '.join(parts)}; all {steps.bias():+.1%}"]


def _split_lines(point: LoadPoint) -> list[str]:
    return [
        f"{s.metric}: {s.difference * 1e3:+.2f} ms = "
        + ", ".join(f"{part} {value * 1e3:+.2f}" for part, value in s.parts.items())
        + f", unexplained {s.unexplained * 1e3:+.2f}"
        for s in point.splits
    ]


def live_json(report: LiveReport) -> dict[str, Any]:
    """Everything but the single steps, as JSON values; errors as fractions."""
    return {
        "schema": SCHEMA,
        "title": report.title,
        "settings": report.settings,
        "capacity_rps": report.capacity_rps,
        "wander": report.wander,
        "coverage": _number(report.coverage()),
        "median_absolute_error_to_load_0.8": {
            name: _number(float(np.median(errors)) if (errors := report.errors(m, s, 0.8)) else math.nan)
            for name, m, s, _ in TARGETS
        },
        "loads": [
            {
                "load": p.load,
                "request_rate": p.request_rate,
                "num_requests": p.num_requests,
                "cached_share": p.cached_share,
                "wander": p.wander,
                "figures": [
                    {
                        "metric": f.metric,
                        "statistic": f.statistic,
                        "real_ms": f.real_ms,
                        "twin_ms": f.twin_ms,
                        "error": _number(f.error),
                        "low_ms": _number(f.low_ms),
                        "high_ms": _number(f.high_ms),
                        "covered": f.covered,
                    }
                    for f in p.figures
                ],
                "step_bias": {kind: _number(p.steps.bias(kind)) for kind in KINDS} | {"all": p.steps.bias()},
                "num_steps": len(p.steps.kind),
                "split_s": [
                    {"metric": s.metric, "difference": s.difference, **s.parts, "unexplained": s.unexplained}
                    for s in p.splits
                ],
            }
            for p in report.points
        ],
        "notes": list(report.notes),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def live_html(report: LiveReport) -> str:
    """One document that loads nothing."""
    body = [f"<h1>{escape(report.title)}</h1>"]
    body += [f"<p>{escape(line)}</p>" for line in verdict_lines(report)]
    if report.points:
        body.append(
            plot_section(
                0,
                "Step times",
                "One dot a step: what the engine's device took, and what the twin charges for the same work. "
                "Dots on the line are priced right.",
                _scatter(report.points),
            )
        )
    for point in report.points:
        rows = [
            (
                f"{f.metric.upper()} {f.statistic}",
                f"{f.real_ms:,.2f}",
                f"{f.twin_ms:,.2f}",
                f"{f.error:+.1%}",
                _interval(f),
                {True: "yes", False: "no", None: ""}[f.covered],
            )
            for f in point.figures
        ]
        body.append(table_section(_heading(point), HEAD, rows))
        split = [
            (
                s.metric,
                *(f"{v * 1e3:+.2f}" for v in (s.difference, *s.parts.values(), s.unexplained)),
            )
            for s in point.splits
        ]
        if point.splits:
            head = ("twin - real, ms", "all", *point.splits[0].parts, "unexplained")
            body.append(table_section(f"Load {point.load:g}: where the error comes from", head, split))
    settings = json.dumps(report.settings, indent=1)
    body.append(f"<details><summary>Settings</summary><pre>{escape(settings)}</pre></details>")
    return page(f"Live validation: {report.title}", body)


def _scatter(points: Iterable[LoadPoint]) -> Any:
    go: Any = import_module("plotly.graph_objects")
    fig = go.Figure()
    found = list(points)
    most = max(float(max(p.steps.real_s.max(), p.steps.twin_s.max())) for p in found) * 1e3
    least = min(float(min(p.steps.real_s.min(), p.steps.twin_s.min())) for p in found) * 1e3
    fig.add_scatter(
        x=[least, most], y=[least, most], mode="lines", line={"color": theme.BLACK, "width": 1}, name="right"
    )
    for kind in KINDS:
        real = np.concatenate([p.steps.real_s[p.steps.kind == kind] for p in found]) * 1e3
        twin = np.concatenate([p.steps.twin_s[p.steps.kind == kind] for p in found]) * 1e3
        if len(real):
            every = max(1, len(real) // _MOST_DOTS)
            fig.add_scatter(
                x=np.round(real[::every], 3).tolist(),
                y=np.round(twin[::every], 3).tolist(),
                mode="markers",
                marker={"size": 4, "opacity": 0.5},
                name=kind,
            )
    fig.update_layout(height=480, xaxis_title="Engine (ms)", yaxis_title="Twin (ms)")
    fig.update_xaxes(type="log")
    fig.update_yaxes(type="log")
    return fig
