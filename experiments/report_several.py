"""Several saved runs on one page: what differs in their settings, their numbers beside the first's, curves overlaid."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from experiments import theme
from experiments.certainty import doubts
from experiments.gap_figures import gap_curve
from experiments.page import framed, list_section, page, write_page
from experiments.report import Panel, laid_out
from experiments.report_figures import clock, latency_axes, limit_line
from experiments.saved import REPORT, Opened
from experiments.series import band, ecdf, in_system, over_replicas
from serving.errors import UsageError
from sim.latency import STAGES, latencies
from sim.meta import meta_value
from sim.metrics import NOT_STREAMED, Summary
from sim.record import Floats, Status

MOST = len(theme.SERIES)
DASHES = ("solid", "dash", "dot", "dashdot")
_Value = Callable[[Summary], float | None]


def _latency(metric: str, percentile: float | None) -> _Value:
    def value(s: Summary) -> float | None:
        stats = getattr(s, metric)
        if not stats.count or metric not in s.metrics:
            return None
        return stats.mean_s if percentile is None else dict(stats.percentiles_s).get(percentile)

    return value


NUMBERS: tuple[tuple[str, _Value, float, int], ...] = (
    *(
        (f"{'Mean' if p is None else f'P{p:g}'} {metric.upper()} (ms)", _latency(metric, p), 1000.0, -1)
        for metric in ("ttft", "tpot", "itl", "e2el")
        for p in (None, 50.0, 95.0, 99.0)
    ),
    ("Requests completed (/s)", lambda s: s.request_throughput, 1.0, 1),
    ("Goodput (requests/s)", lambda s: s.request_goodput, 1.0, 1),
    ("SLO attainment (%)", lambda s: s.slo_attainment, 100.0, 1),
    ("Output tokens (/s)", lambda s: s.output_throughput, 1.0, 1),
    ("Failed requests", lambda s: float(s.failed), 1.0, -1),
    ("Preemptions", lambda s: float(s.preemptions), 1.0, -1),
    ("Prompt tokens cached (%)", lambda s: s.prefix_hit_rate, 100.0, 1),
    ("Batch occupancy, mean (%)", lambda s: s.batch_occupancy_mean, 100.0, 0),
    ("KV occupancy, mean (%)", lambda s: s.kv_occupancy_mean, 100.0, 0),
    ("GPU busy (%)", lambda s: s.gpu_busy_share, 100.0, 0),
)
"""Name, value, factor to the printed unit, and which way is better (0: neither)."""


def write_several(runs: Sequence[Opened], path: str | Path) -> Path:
    """Write the page and return its path. Raises UsageError for fewer than two runs or more than can be told apart."""
    if not 2 <= len(runs) <= MOST:
        raise UsageError(f"a page shows 2 to {MOST} runs side by side, got {len(runs)}; name fewer")
    return write_page(several_html(runs, Path(path).parent), path)


def several_html(runs: Sequence[Opened], at: Path) -> str:
    """The page as one HTML document that is to lie in the folder `at`; the same bytes for the same runs."""
    names = run_names(runs)
    requests = " and ".join(sorted({f"{run.summary.sent:,}" for run in runs}))
    body = [
        f"<h1>{escape(' · '.join(names) if len(runs) < 4 else f'{len(runs)} runs')}</h1>",
        f'<p class="sub">{len(runs)} runs of {requests} requests side by side. Differences are to {escape(names[0])}; '
        "whether one is more than chance, tokentwin compare says.</p>",
        _promises(runs, names),
        _settings(runs, names),
        _numbers(runs, names),
        *laid_out(panels(runs, names)),
        _links(runs, names, at),
    ]
    return page(" · ".join(names), body, css=CSS)


def run_names(runs: Sequence[Opened]) -> list[str]:
    """Labels where every run has its own, else the last parts of the folders that tell them apart."""
    labels = [str(meta_value(run.record, "label") or "") for run in runs]
    if all(labels) and len(set(labels)) == len(labels):
        return labels
    parts = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(p[-1:])} ({number})" for number, p in enumerate(parts, 1)]


def panels(runs: Sequence[Opened], names: Sequence[str]) -> list[Panel]:
    """The pictures, each run in a colour and a dash of its own."""
    words = "Share of completed requests within each latency. A curve further left and up is better."
    out: list[Panel] = [
        (title, words, overlaid(runs, names, metric), False)
        for metric, title in (("ttft", "Time to first token"), ("tpot", "Time per output token"))
        if any(metric in run.summary.metrics for run in runs)
    ]
    if any(run.summary.streams and len(run.record.tokens.first_step) for run in runs):
        gaps = "Share of the gaps between tokens of one request, all requests together."
        out.append(("Inter-token latency", gaps, overlaid(runs, names, "itl"), False))
    out.append(("End to end", words, overlaid(runs, names, "e2el"), False))
    out += [
        ("Where the time goes", "Mean of each stage over completed requests.", stages(runs, names), True),
        ("Load over time", "Means within each slice of time, since each run's first request.",
         over_time(runs, names), True),
    ]  # fmt: skip
    return out


def curve(run: Opened, metric: str) -> tuple[Floats, Floats]:
    """Latencies of completed requests in ms, sorted, and the share at or below each; for "itl", of gaps of tokens."""
    lat, r = latencies(run.record), run.record.requests
    done = (r.status == Status.FINISHED) & (metric in run.summary.metrics)
    if metric == "itl":
        return gap_curve(run.record, done)
    several = np.where(r.output_tokens > 1, lat.tpot_s, np.nan)
    values_s = {"ttft": lat.ttft_s, "tpot": several, "e2el": lat.e2el_s}[metric]
    return ecdf(values_s[done] * 1000)


def overlaid(runs: Sequence[Opened], names: Sequence[str], metric: str) -> Any:
    """One empirical distribution per run, and the promises on that latency."""
    fig = theme.figure()
    every = [curve(run, metric) for run in runs]
    for style, name, (x, share) in zip(styles(), names, every, strict=False):
        fig.add_scatter(
            x=x,
            y=share * 100,
            name=escape(name),
            mode="lines",
            line={**style, "shape": "hv"},
            hovertemplate="%{x:.4g} ms: %{y:.2f} %",
        )
    promised = dict.fromkeys(o.slo for run in runs for o in run.summary.slos if o.slo.metric == metric)
    for slo in promised:
        limit_line(fig, slo)
    latency_axes(fig, metric, np.concatenate([x for x, _ in every]))
    return fig.update_yaxes(title_text=f"Share of {'gaps' if metric == 'itl' else 'requests'} (%)")


def stages(runs: Sequence[Opened], names: Sequence[str]) -> Any:
    """Mean time in each stage, a bar per run."""
    fig = theme.figure(height=130 + 44 * len(runs), barmode="stack", bargap=0.3)
    fig.update_layout(legend_traceorder="normal")
    for stage in STAGES:
        if not any(run.summary.stage_mean_s[stage] for run in runs):
            continue
        fig.add_bar(
            y=[escape(name) for name in names],
            x=[run.summary.stage_mean_s[stage] for run in runs],
            name=stage,
            orientation="h",
            marker_color=theme.STAGES[stage],
            hovertemplate="%{x:.4g} s",
        )
    fig.update_yaxes(type="category", autorange="reversed")
    return fig.update_xaxes(title_text="Mean time since it was sent (s)")


def over_time(runs: Sequence[Opened], names: Sequence[str]) -> Any:
    """Requests in the system above, KV occupancy below."""
    fig = theme.stacked(2, height=480)
    clocks = [clock(run.record) for run in runs]
    longest = max(clocks, key=lambda at: at.to_s - at.from_s)
    for style, name, run, at in zip(styles(), names, runs, clocks, strict=False):
        record = run.record
        pages = max(record.total("num_pages"), 1)
        shown = (
            (in_system(record), 1.0),
            (over_replicas(record.steps, record.steps.used_pages), 100 / pages),
        )
        for row, (function, scale) in enumerate(shown, 1):
            b = band(function, at.from_s, at.to_s, 240)
            x = (b.time_s - at.from_s) / longest.unit_s
            fig.add_scatter(
                x=x, y=b.mean * scale, name=escape(name), legendgroup=name, showlegend=row == 1, mode="lines",
                line={**style, "width": 1.6}, row=row, col=1,
            )  # fmt: skip
    fig.update_yaxes(title_text="Requests in the system", rangemode="tozero", row=1, col=1)
    fig.update_yaxes(title_text="KV occupancy (%)", rangemode="tozero", row=2, col=1)
    return fig.update_xaxes(title_text=longest.title, row=2, col=1)


def styles() -> Iterator[dict[str, Any]]:
    """Colour and dash of each run."""
    for index, colour in enumerate(theme.SERIES):
        yield {"color": colour, "dash": DASHES[index % len(DASHES)]}


def _promises(runs: Sequence[Opened], names: Sequence[str]) -> str:
    lines = []
    for run, name in zip(runs, names, strict=True):
        slos = len(run.verdict.slos)
        mark = {True: "good", False: "bad", None: "warn" if slos else "plain"}[run.verdict.meets_slos]
        said = run.verdict.sentences[:slos] or run.verdict.sentences[:1]
        lines.append((mark, f"{name}: {' '.join(said)}"))
        if not run.summary.streams:
            lines.append(("plain", f"{name}: {NOT_STREAMED}"))
        lines += [("warn", f"{name}: {doubt}") for doubt in doubts(run.verdict, run.certainty)]
        lines += [("warn", f"{name}: {note}") for note in run.missing]
    return list_section("Which keeps its promises", lines)


def _numbers(runs: Sequence[Opened], names: Sequence[str]) -> str:
    rows = []
    for title, value, scale, better in NUMBERS:
        found = [value(run.summary) for run in runs]
        if all(v is None for v in found):
            continue
        first = found[0]
        cells = "".join(_cell(v, first if i else None, scale, better) for i, v in enumerate(found))
        rows.append(f'<tr><th scope="row">{title}</th>{cells}</tr>')
    return framed("Numbers", _beside(names, rows))


def _beside(names: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("", *names))
    return f'<table class="beside"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _cell(value: float | None, first: float | None, scale: float, better: int) -> str:
    if value is None or not math.isfinite(value):
        return "<td>–</td>"
    text = f"{value * scale:,.4g}" if abs(value * scale) < 10_000 else f"{value * scale:,.0f}"
    if not first or not math.isfinite(first):
        return f"<td>{text}</td>"
    change = value / first - 1
    if abs(change) < 0.0005:
        return f"<td>{text} <small>=</small></td>"
    words = f"{change:+.1%}" if abs(change) < 9 else f"×{change + 1:,.0f}"
    mark = {1: "good", -1: "bad", 0: ""}[int(math.copysign(1, change)) * better]
    return f'<td>{text} <small class="{mark}">{words}</small></td>'


def _settings(runs: Sequence[Opened], names: Sequence[str]) -> str:
    every = [dict(_flat(_asked(run))) for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for settings in every for key in settings)
        if len({repr(settings.get(key)) for settings in every}) > 1
    ]
    if not keys:
        return list_section(
            "Settings that differ", [("plain", "None: the same deployment, traffic and seed.")]
        )
    rows = []
    for key in keys:
        cells = "".join(f"<td>{escape(_word(key, settings.get(key)))}</td>" for settings in every)
        rows.append(f'<tr><th scope="row">{escape(key)}</th>{cells}</tr>')
    return framed("Settings that differ", _beside(names, rows))


def _asked(run: Opened) -> dict[str, Any]:
    meta = run.record.meta
    workload = meta.get("workload") or {}
    known = {
        key: meta.get(key)
        for key in ("seed", "gpu", "model_id", "profile_hash", "version", "slos", "goodput_s")
    }
    return {**known, **(meta.get("deployment") or {}), "workload": workload.get("spec") or workload}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            mine = item.get("name", index) if isinstance(item, Mapping) else index
            yield from _flat(item, f"{name}.{mine}")
    else:
        yield name, value


def _word(key: str, value: Any) -> str:
    if value is None:
        return "–" if key.startswith(("workload", "slos", "goodput_s")) else "default"
    return str(value)


def _links(runs: Sequence[Opened], names: Sequence[str], at: Path) -> str:
    items = []
    for run, name in zip(runs, names, strict=True):
        report = run.folder / REPORT
        if report.is_file():
            href = Path(os.path.relpath(report.resolve(), at.resolve())).as_posix()
            items.append(f'<li class="plain"><a href="{escape(href)}">{escape(name)}</a></li>')
        else:
            items.append(
                f'<li class="plain">{escape(name)}: <code>tokentwin report {escape(str(run.folder))}</code></li>'
            )
    return f'<section class="verdict"><h2>Each by itself</h2><ul>{"".join(items)}</ul></section>'


CSS = """
.beside th:first-child { position: sticky; left: 0; background: var(--card); font-weight: 400; }
.beside thead th { font-weight: 700; }
.beside small { color: var(--soft); display: inline-block; min-width: 4.6em; }
.beside small.good { color: var(--good); } .beside small.bad { color: var(--bad); }
"""
