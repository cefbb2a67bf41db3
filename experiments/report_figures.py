"""The pictures of a report, each a plotly figure made from a run."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import theme
from experiments.series import (
    Band,
    band,
    ecdf,
    in_system,
    output_rate_per_s,
    over_replicas,
    percentile_by_window,
    rate_per_s,
    thin,
)
from experiments.utilisation import twin_work
from sim.fleet.record import FleetRecord, ReplicaState
from sim.latency import STAGES, latencies, stage_times
from sim.metrics import Summary
from sim.record import Floats, RunRecord, Status
from sim.slo import Slo

if TYPE_CHECKING:
    from sim.deployment import Built

Figure = Any
"""A `plotly.graph_objects.Figure`."""

MAX_POINTS = 3000
SLOWEST_HEIGHT = 530


@dataclass(frozen=True, slots=True)
class Roofline:
    """Work of every step, in rows of the step table, and the device's limits (all replicas alike)."""

    flops: Floats
    bytes: Floats
    peak_flops_per_s: float
    peak_bytes_per_s: float
    device: str = ""


def step_roofline(record: RunRecord, built: Built) -> Roofline:
    """FLOPs and bytes of every step on one device (`twin_work`), beside the device's peaks."""
    if built.pools and record.fleet is not None:
        return _pools_roofline(record, built, record.fleet)
    work = twin_work(record, built)
    return Roofline(work.flops, work.bytes, work.peak_flops_per_s, work.peak_bytes_per_s, work.device)


def _pools_roofline(record: RunRecord, built: Built, fleet: FleetRecord) -> Roofline:
    """Each step by the prices of its pool; without peaks where pools have different ones."""
    pool_of = fleet.pool_of[record.steps.replica]
    flops, num_bytes = np.zeros(len(record.steps)), np.zeros(len(record.steps))
    parts = []
    for number, pool in enumerate(built.pools):
        mine = pool_of == number
        drafts = None if record.draft_steps is None else record.draft_steps.where(mine)
        of_pool = replace(record, steps=record.steps.where(mine), draft_steps=drafts)
        parts.append(step_roofline(of_pool, pool))
        flops[mine], num_bytes[mine] = parts[-1].flops, parts[-1].bytes
    peaks = {(part.peak_flops_per_s, part.peak_bytes_per_s, part.device) for part in parts}
    if len(peaks) == 1:
        return replace(parts[0], flops=flops, bytes=num_bytes)
    return Roofline(flops, num_bytes, math.nan, math.nan, " and ".join(sorted(p[2] for p in peaks)))


@dataclass(frozen=True, slots=True)
class Clock:
    """The time axis of a run: seconds, minutes or hours since the first request."""

    from_s: float
    to_s: float
    unit: str
    unit_s: float

    def __call__(self, times_s: Floats) -> Floats:
        return (times_s - self.from_s) / self.unit_s

    @property
    def title(self) -> str:
        return f"Time since the first request ({self.unit})"


def clock(record: RunRecord) -> Clock:
    """From the first request to the last token."""
    sent_s = record.requests.sent_s
    from_s = float(sent_s.min()) if len(sent_s) else 0.0
    last_s = record.requests.last_token_s
    to_s = float(np.nanmax(last_s)) if (~np.isnan(last_s)).any() else record.end_s
    to_s = max(to_s, from_s + 1e-3)
    for unit, unit_s in (("h", 3600.0), ("min", 60.0)):
        if to_s - from_s > 5 * unit_s:
            return Clock(from_s, to_s, unit, unit_s)
    return Clock(from_s, to_s, "s", 1.0)


def latency_ecdf(record: RunRecord, summary: Summary, metric: str) -> Figure:
    """Share of requests within a latency, for "ttft", "tpot" or "e2el", per tenant where there are several."""
    lat, r = latencies(record), record.requests
    tpot_s = np.where(r.output_tokens > 1, lat.tpot_s, np.nan)
    values_s = {"ttft": lat.ttft_s, "tpot": tpot_s, "e2el": lat.e2el_s}[metric]
    values_ms = np.where(r.status == Status.FINISHED, values_s, np.nan) * 1000
    fig = theme.figure()
    several = len(record.tenants) > 1
    groups = list(enumerate(record.tenants[: len(theme.SERIES)])) if several else [(None, None)]
    for index, tenant in groups:
        x, share = ecdf(values_ms if index is None else values_ms[r.tenant == index])
        name = html.escape(tenant.name) if tenant else metric.upper()
        fig.add_scatter(
            x=x,
            y=share * 100,
            name=name,
            mode="lines",
            line_shape="hv",
            hovertemplate="%{x:.4g} ms: %{y:.2f} %",
        )
    for slo in (o.slo for o in summary.slos if o.slo.metric == metric):
        limit_line(fig, slo)
    limit_s = summary.goodput_limits.limits_s().get(metric)
    if limit_s is not None:
        _vertical(fig, limit_s * 1000, f"goodput limit {limit_s * 1000:g} ms", theme.GREY)
    return latency_axes(fig, metric, values_ms)


def latency_axes(fig: Figure, metric: str, values_ms: Floats) -> Figure:
    """Axes of shares within a latency, logarithmic where the values (NaN allowed) span much."""
    known = values_ms[values_ms > 0]
    wide = len(known) > 0 and known.max() / known.min() > 30
    fig.update_xaxes(
        title_text=f"{metric.upper()} (ms)" + (", logarithmic" if wide else ""),
        type="log" if wide else "linear",
    )
    if not wide:
        fig.update_xaxes(rangemode="tozero")
    return fig.update_yaxes(title_text="Share of requests (%)", range=[0, 101])


def limit_line(fig: Figure, slo: Slo) -> None:
    """An SLO in a plot of shares: where it is, and the point above which the curve must pass."""
    limit_ms = slo.limit_s * 1000
    _vertical(fig, limit_ms, f"SLO {slo.label} ≤ {limit_ms:g} ms", theme.LIMIT)
    if slo.percentile is not None:
        fig.add_scatter(
            x=[limit_ms],
            y=[slo.percentile],
            mode="markers",
            showlegend=False,
            hovertemplate="the curve must pass above",
            marker={
                "color": theme.LIMIT,
                "size": 11,
                "symbol": "x-thin",
                "line": {"width": 2.5, "color": theme.LIMIT},
            },
        )


def _vertical(fig: Figure, x: float, name: str, colour: str) -> None:
    fig.add_scatter(
        x=[x, x],
        y=[0, 100],
        mode="lines",
        name=name,
        line={"color": colour, "dash": "dash"},
        hoverinfo="name",
    )


def _banded(fig: Figure, at: Clock, b: Band, name: str, colour: str, row: int, scale: float = 1.0) -> None:
    x = at(b.time_s)
    if (b.high > b.low).any():
        fig.add_scatter(
            x=np.concatenate([x, x[::-1]]),
            y=np.concatenate([b.high, b.low[::-1]]) * scale,
            fill="toself",
            fillcolor=theme.translucent(colour, 0.22),
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            row=row,
            col=1,
        )
    fig.add_scatter(
        x=x, y=b.mean * scale, name=name, mode="lines", line={"color": colour, "width": 1.6}, row=row, col=1
    )


def load_over_time(record: RunRecord) -> Figure:
    """Running and waiting requests above, batch and KV occupancy below; bands are extremes in a bucket."""
    at, s = clock(record), record.steps
    fig = theme.stacked(2, height=520)

    def one(column: Any) -> Band:
        return band(over_replicas(s, column), at.from_s, at.to_s)

    running, waiting = one(s.num_running), one(s.num_waiting)
    _banded(fig, at, running, "running", theme.BLUE, 1)
    _banded(fig, at, waiting, "waiting", theme.ORANGE, 1)
    # Shares of what the most replicas that served at once have.
    most = max(record.num_replicas, 1)
    if record.fleet is not None:
        most = max(int(record.fleet.counts(ReplicaState.READY)[1].max(initial=0)), 1)
    batch = s.num_running / record.limit_at_steps("max_num_seqs")
    pages = s.used_pages / np.maximum(record.limit_at_steps("num_pages"), 1)
    _banded(fig, at, one(batch), "batch occupancy", theme.SKY, 2, 100 / most)
    _banded(fig, at, one(pages), "KV occupancy", theme.GREEN, 2, 100 / most)
    fig.update_yaxes(title_text="Requests", rangemode="tozero", row=1, col=1)
    fig.update_yaxes(title_text="Occupancy (%)", range=[0, 105], row=2, col=1)
    return fig.update_xaxes(title_text=at.title, row=2, col=1)


def throughput_over_time(record: RunRecord) -> Figure:
    """Tokens per second above, where their times are known; arrivals per second; requests in the system."""
    at, r = clock(record), record.requests
    timed = len(record.tokens.first_step) > 0
    row = 1 + timed
    fig = theme.stacked(row + 1, height=560 if timed else 400)
    if timed:
        t, rate = output_rate_per_s(record, at.from_s, at.to_s)
        line = {"color": theme.GREEN, "width": 1.4}
        fig.add_scatter(x=at(t), y=rate, name="output tokens/s", mode="lines", line=line, row=1, col=1)
    buckets = 60
    for name, times_s, colour in (
        ("arrivals/s", r.sent_s, theme.BLUE),
        ("completions/s", r.last_token_s, theme.ORANGE),
    ):
        t, rate = rate_per_s(times_s, at.from_s, at.to_s, buckets)
        line = {"color": colour, "shape": "hvh", "width": 1.6}
        fig.add_scatter(x=at(t), y=rate, name=name, mode="lines", line=line, row=row, col=1)
    inside = band(in_system(record), at.from_s, at.to_s)
    _banded(fig, at, inside, "requests in the system", theme.PURPLE, row + 1)
    for number, title in enumerate([*["Tokens/s"] * timed, "Requests/s", "Requests"], 1):
        fig.update_yaxes(title_text=title, rangemode="tozero", row=number, col=1)
    return fig.update_xaxes(title_text=at.title, row=row + 1, col=1)


LEAST = 10
"""Requests that a window's P95 should be of; those with fewer than five are left out."""


def window_s(record: RunRecord, least: int = 0) -> float:
    """A minute, or a thirtieth of a run shorter than ten minutes; longer to hold `least` requests on average."""
    at = clock(record)
    span_s = at.to_s - at.from_s
    usual_s = 60.0 if span_s >= 600 else span_s / 30
    return max(usual_s, min(least / max(len(record.requests), 1), 1.0) * span_s, 1e-3)


def p95_over_time(record: RunRecord, summary: Summary) -> Figure:
    """P95 of TTFT, and of TPOT where answers stream, per window, by time of arrival."""
    at, lat, r = clock(record), latencies(record), record.requests
    lines = [("ttft", lat.ttft_s, theme.BLUE)]
    if summary.streams:
        lines.append(("tpot", np.where(r.output_tokens > 1, lat.tpot_s, np.nan), theme.GREEN))
    fig = theme.stacked(len(lines), height=460 if summary.streams else 300)
    for row, (metric, values_s, colour) in enumerate(lines, 1):
        t, p95 = percentile_by_window(r.sent_s, values_s * 1000, window_s(record, LEAST), at.from_s, 95)
        style = {"mode": "lines+markers", "line": {"color": colour}, "marker": {"size": 4}}
        fig.add_scatter(x=at(t), y=p95, name=f"P95 {metric.upper()}", row=row, col=1, **style)
        for slo in (o.slo for o in summary.slos if o.slo.metric == metric):
            ends = at(np.array([at.from_s, at.to_s]))
            line = {"color": theme.LIMIT, "dash": "dash"}
            name = f"SLO {slo.label} ≤ {slo.limit_s * 1000:g} ms"
            fig.add_scatter(
                x=ends, y=[slo.limit_s * 1000] * 2, mode="lines", name=name, line=line, row=row, col=1
            )
        fig.update_yaxes(title_text=f"P95 {metric.upper()} (ms)", rangemode="tozero", row=row, col=1)
    return fig.update_xaxes(title_text=at.title, row=len(lines), col=1)


def prefill_by_prompt(record: RunRecord) -> Figure:
    """Prefill time against prompt length, with cached and preempted prompts marked."""
    lat, r = latencies(record), record.requests
    fig = theme.figure(height=SLOWEST_HEIGHT)
    ran = ~np.isnan(lat.prefill_s)
    whole = r.preemptions == 0
    cached = r.cached_tokens >= 0.1 * np.maximum(r.prompt_tokens, 1)
    kinds = (
        ("under 10 % cached", ran & ~cached & whole, theme.BLUE, "circle"),
        ("more cached", ran & cached & whole, theme.ORANGE, "diamond"),
        ("preempted", ran & ~whole, theme.VERMILLION, "x"),
    )
    total = max(int(ran.sum()), 1)
    for name, mask, colour, symbol in kinds:
        share = max(int(MAX_POINTS * mask.sum() / total), 60)
        rows = thin(np.flatnonzero(mask), lat.prefill_s[mask], share)
        if len(rows):
            fig.add_scatter(
                x=r.prompt_tokens[rows],
                y=lat.prefill_s[rows] * 1000,
                name=f"{name} ({int(mask.sum())})",
                mode="markers",
                marker={"color": theme.translucent(colour, 0.55), "size": 5, "symbol": symbol},
                customdata=r.request_id[rows],
                hovertemplate="request %{customdata}: %{x} tokens, %{y:.4g} ms",
            )
    fig.update_xaxes(title_text="Prompt length (tokens)", rangemode="tozero")
    return fig.update_yaxes(title_text="Prefill time (ms)", rangemode="tozero")


def slowest(record: RunRecord, count: int = 20) -> Figure:
    """Where the time of the slowest requests went, stage by stage."""
    r, stages, lat = record.requests, stage_times(record), latencies(record)
    done = np.flatnonzero(r.status == Status.FINISHED)
    rows = done[np.argsort(-lat.e2el_s[done], kind="stable")[:count]][::-1]
    names = [f"#{r.request_id[i]} · {r.prompt_tokens[i]}→{r.output_tokens[i]}" for i in rows]
    fig = theme.figure(height=SLOWEST_HEIGHT, barmode="stack", bargap=0.25)
    fig.update_layout(legend_traceorder="normal")
    for name in STAGES:
        if not np.any(stages[name][done]):
            continue
        fig.add_bar(
            y=names,
            x=stages[name][rows],
            name=name,
            orientation="h",
            marker_color=theme.STAGES[name],
            hovertemplate="%{x:.4g} s",
        )
    fig.update_yaxes(tickfont_size=11)
    return fig.update_xaxes(title_text="Time since it was sent (s)")


def roofline(record: RunRecord, work: Roofline) -> Figure:
    """Steps by arithmetic intensity and speed reached, as cells of a grid sized by the time spent there."""
    s = record.steps
    fig = theme.figure(height=420)
    ok = (work.flops > 0) & (work.bytes > 0) & (s.gpu_s > 0)
    kinds = (
        ("decode only", ok & (s.num_prefills == 0), theme.SKY),
        ("with prompt chunks", ok & (s.num_prefills > 0), theme.BLUE),
    )
    total_s = max(float(s.gpu_s[ok].sum()), 1e-300)
    x_seen: list[float] = []
    for name, mask, colour in kinds:
        if not mask.any():
            continue
        intensity, speed = work.flops[mask] / work.bytes[mask], work.flops[mask] / s.gpu_s[mask]
        cell = np.stack([np.round(np.log10(intensity) * 24), np.round(np.log10(speed) * 24)])
        _, which = np.unique(cell, axis=1, return_inverse=True)
        which = which.ravel()
        spent_s = np.bincount(which, weights=s.gpu_s[mask])
        x = np.bincount(which, weights=intensity * s.gpu_s[mask]) / spent_s
        y = np.bincount(which, weights=speed * s.gpu_s[mask]) / spent_s
        x_seen += [float(x.min()), float(x.max())]
        size = 5 + 30 * np.sqrt(spent_s / total_s)
        fig.add_scatter(
            x=x,
            y=y / 1e12,
            mode="markers",
            name=name,
            customdata=spent_s / total_s * 100,
            marker={
                "size": size,
                "color": theme.translucent(colour, 0.6),
                "line": {"width": 0.5, "color": theme.INK},
            },
            hovertemplate="%{x:.3g} FLOP/byte, %{y:.3g} TFLOP/s: %{customdata:.2f} % of device time",
        )
    ridge = work.peak_flops_per_s / work.peak_bytes_per_s
    low, high = min([ridge / 30, *x_seen]) / 1.5, max([ridge * 10, *x_seen]) * 1.5
    roof = np.minimum(np.array([low, ridge, high]) * work.peak_bytes_per_s, work.peak_flops_per_s) / 1e12
    name = f"peaks: {work.peak_flops_per_s / 1e12:.4g} TFLOP/s, {work.peak_bytes_per_s / 1e12:.3g} TB/s"
    fig.add_scatter(
        x=[low, ridge, high], y=roof, mode="lines", name=name, line={"color": theme.INK, "width": 2}
    )
    fig.update_xaxes(title_text="Intensity (FLOP/byte), logarithmic", type="log")
    return fig.update_yaxes(title_text="Speed (TFLOP/s), logarithmic", type="log")


def by_tenant(summary: Summary) -> Figure:
    """Median, P95 and P99 of TTFT of each tenant, and of TPOT where answers stream."""
    metrics = [name for name in ("ttft", "tpot") if name in summary.metrics]
    fig = theme.beside(len(metrics), height=150 + 34 * len(summary.tenants), spacing=0.12)
    names = [html.escape(t.name) for t in summary.tenants]
    points = [p for p, _ in summary.ttft.percentiles_s] or [50.0]
    shown = [p for p in points if p in (50, 95, 99)] or points[-3:]
    for col, metric in enumerate(metrics, 1):
        for p, symbol, colour in zip(shown, ("circle", "diamond", "square"), theme.SERIES, strict=False):
            x = [getattr(t, metric).at(p) * 1000 for t in summary.tenants]
            fig.add_scatter(
                x=x,
                y=names,
                mode="markers",
                name=f"P{p:g}",
                showlegend=col == 1,
                row=1,
                col=col,
                marker={"size": 10, "symbol": symbol, "color": colour},
            )
        fig.update_xaxes(title_text=f"{metric.upper()} (ms)", rangemode="tozero", row=1, col=col)
    return fig.update_yaxes(type="category", autorange="reversed")
