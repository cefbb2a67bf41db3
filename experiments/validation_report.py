"""A validation as a table for the terminal, a JSON file and one HTML page: the real run and its twin overlaid."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from calibration.compare import METRICS, Comparison, Figure
from experiments import theme
from experiments.page import page, plot_section
from experiments.results import writable
from experiments.series import ecdf

REAL, TWIN = theme.BLACK, theme.ORANGE
RESULT, PAGE = "validation.json", "validation.html"
_UNITS = {"running": "Running requests", "waiting": "Waiting requests", "kv": "KV pages in use (%)"}


def save_validation(comparison: Comparison, folder: str | Path) -> list[Path]:
    """Write `validation.json` and `validation.html` into `folder`, made if missing.

    Raises `UsageError` when it cannot be written.
    """
    base = Path(folder)
    with writable(base):
        base.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_strict(comparison.to_json()), indent=1, allow_nan=False)
        (base / RESULT).write_text(text + "\n", encoding="utf-8")
        (base / PAGE).write_text(validation_html(comparison), encoding="utf-8")
    return [base / RESULT, base / PAGE]


def validation_lines(comparison: Comparison, tolerance: float | None = None) -> list[str]:
    """The side-by-side as lines of at most 80 columns, verdict last."""
    lines = [comparison.title, ""]
    several = any(f.label for f in comparison.figures)
    head = "point" if several else ""
    lines.append(f"{head:<26}{'metric':<14}{'real ms':>12}{'twin ms':>12}{'error':>9}")
    for f in comparison.figures:
        mark = " *" if f.excluded else ""
        what = f"{f.metric} {f.statistic}"
        lines.append(
            f"{f.label[:25]:<26}{what:<14}{f.real_ms:>12,.2f}{f.twin_ms:>12,.2f}{f.error:>+9.1%}{mark}"
        )
    if excluded := comparison.excluded():
        lines.append(f"* {excluded[0].excluded}: not counted below")
    lines += ["", *_totals(comparison)]
    if comparison.pages is not None:
        lines.append(_pages(comparison))
    for s in comparison.series:
        scale, unit = (100, " points of a percent") if s.name == "kv" else (1, " requests")
        lines.append(f"{s.name} over time: RMS difference {s.rms * scale:.2f}{unit}")
    lines += [f"note: {note}" for note in comparison.notes]
    if tolerance is not None:
        held = "within" if comparison.within(tolerance) else "over"
        lines.append(
            f"{held} the tolerance: mean absolute error {comparison.mean_error():.2%}, limit {tolerance:.2%}"
        )
    return lines


def validation_html(comparison: Comparison) -> str:
    """The page as one HTML document that loads nothing; the same bytes for the same comparison."""
    title = escape(comparison.title)
    plots = "".join(plot_section(i, *panel) for i, panel in enumerate(_panels(comparison)))
    facts = [*_totals(comparison), *([_pages(comparison)] if comparison.pages else [])]
    facts += [
        f"{s.name} over time: RMS difference {s.rms * (100 if s.name == 'kv' else 1):.2f}"
        for s in comparison.series
    ]
    notes = "".join(f'<li class="plain">{escape(text)}</li>' for text in (*facts, *comparison.notes))
    settings = escape(json.dumps(_strict(dict(comparison.settings)), indent=1))
    body = [
        f"<h1>{title}</h1>",
        '<p class="sub">The real run in black, its twin in orange. Errors are twin / real − 1.</p>',
        f'<section class="verdict" aria-labelledby="h-v"><h2 id="h-v">How close</h2><ul>{notes}</ul></section>',
        _table(comparison.figures),
        plots,
        f'<section><h2>Settings</h2><div class="scroll"><pre>{settings}</pre></div></section>',
    ]
    return page(f"{comparison.title} · validation", body)


def _totals(comparison: Comparison) -> list[str]:
    worst = comparison.worst()
    where = " ".join(filter(None, (worst.label, worst.metric, worst.statistic)))
    return [
        f"mean absolute error {comparison.mean_error():.2%} (bias {comparison.bias():+.2%}) over "
        f"{len(comparison.counted())} figures, largest {worst.error:+.2%} ({where})",
        *(
            f"{metric}: mean absolute error {comparison.mean_error(metric):.2%}, "
            f"bias {comparison.bias(metric):+.2%}"
            for metric in METRICS
            if comparison.counted(metric)
        ),
    ]


def _pages(comparison: Comparison) -> str:
    pages = comparison.pages
    assert pages is not None
    if pages.recorded is None or pages.error is None:
        return f"KV pages: {pages.predicted:,} predicted, not recorded in the run"
    text = f"KV pages: {pages.predicted:,} predicted, {pages.recorded:,} recorded ({pages.error:+.2%})"
    return text + ("; the twin ran with the recorded count" if pages.used != pages.predicted else "")


def _panels(comparison: Comparison) -> Iterable[tuple[str, str, Any]]:
    for metric, (real, twin) in comparison.samples.items():
        fig = theme.figure()
        for name, values, colour in (("real", real, REAL), ("twin", twin, TWIN)):
            x, share = ecdf(values * 1000)
            fig.add_scatter(x=x, y=share * 100, name=name, mode="lines", line_shape="hv", line_color=colour)
        fig.update_xaxes(title_text=f"{metric.upper()} (ms)", rangemode="tozero")
        fig.update_yaxes(title_text="Share of requests (%)", range=[0, 101])
        yield metric.upper(), f"Share of requests within each {metric.upper()}.", fig
    for s in comparison.series:
        scale = 100 if s.name == "kv" else 1
        fig = theme.figure()
        fig.add_scatter(x=s.time_s, y=s.real * scale, name="real", mode="lines", line_color=REAL)
        fig.add_scatter(x=s.time_s, y=s.twin * scale, name="twin", mode="lines", line_color=TWIN)
        fig.update_xaxes(title_text="Time (s)")
        fig.update_yaxes(title_text=_UNITS.get(s.name, s.name), rangemode="tozero")
        yield (
            _UNITS.get(s.name, s.name),
            f"At the times of the real series; RMS difference {s.rms * scale:.2f}.",
            fig,
        )
    if any(f.label for f in comparison.figures):
        for metric in METRICS:
            points = [f for f in comparison.figures if f.metric == metric]
            if points:
                yield (
                    f"{metric.upper()} of every point",
                    "On the line the twin is right; hollow points are not counted.",
                    _parity(points),
                )


def _parity(points: list[Figure]) -> Any:
    """Twin against real on logarithmic axes, with the line where they agree."""
    fig = theme.figure(height=460)
    values = [v for f in points for v in (f.real_ms, f.twin_ms)]
    ends = [min(values) * 0.9, max(values) * 1.1]
    fig.add_scatter(x=ends, y=ends, mode="lines", name="equal", line_color=theme.GREY)
    for name, chosen, symbol in (
        ("counted", [f for f in points if not f.excluded], "circle"),
        ("not counted", [f for f in points if f.excluded], "circle-open"),
    ):
        if chosen:
            fig.add_scatter(
                x=[f.real_ms for f in chosen],
                y=[f.twin_ms for f in chosen],
                mode="markers",
                name=name,
                marker={"color": TWIN, "symbol": symbol, "size": 8},
                text=[f"{escape(f.label)}: {f.error:+.1%}" for f in chosen],
                hovertemplate="%{text}<extra></extra>",
            )
    fig.update_xaxes(type="log", title_text="Real (ms)")
    return fig.update_yaxes(type="log", title_text="Twin (ms)")


def _table(figures: Iterable[Figure]) -> str:
    rows = "".join(
        f"<tr><td>{escape(' '.join(filter(None, (f.label, f.metric, f.statistic))))}</td><td>{f.real_ms:,.2f}</td>"
        f"<td>{f.twin_ms:,.2f}</td><td>{f.error:+.2%}</td><td>{escape(f.excluded)}</td></tr>"
        for f in figures
    )
    head = "".join(
        f'<th scope="col">{h}</th>' for h in ("", "Real (ms)", "Twin (ms)", "Error", "Not counted")
    )
    return (
        '<section><h2>Side by side</h2><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _strict(value: Any) -> Any:
    """The same value with null where JSON has no number."""
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
