"""Pictures of a run as a monitor sees it: share of peak over time, and alert rules with when they fired."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from experiments import theme
from experiments.alert_series import histories, history_words
from experiments.alerts import LATENCIES, SHARES, History
from experiments.minutes import device_columns, minute_columns
from experiments.observed import span_s
from experiments.report_figures import Roofline, clock, window_s
from experiments.utilisation import Work, engine_work
from sim.record import Floats, RunRecord

Panel = tuple[str, str, Any, bool]

_DRIVER = {
    "gpu_utilization": ("GPU busy (driver)", theme.PURPLE),
    "memory_utilization": ("memory busy (driver)", theme.SKY),
}


def observed_panels(record: RunRecord, roofline: Roofline | None) -> list[Panel]:
    """Share of peak, then the alert rules; those without anything to show are left out."""
    out: list[Panel] = []
    work: Work | None = roofline if roofline is not None else engine_work(record)
    if work is not None and len(record.steps) and record.fleet is None:  # pools may have other devices
        window = window_s(record)
        every = "minute" if window == 60 else f"{window:.3g} s"
        known = np.isfinite(work.peak_flops_per_s)
        heading = "Share of the device's peaks" if known else "Work per second"
        words = (
            f"Model FLOPs and memory traffic per {every}, counted from the model's shape, "
            f"{'over what the device could have done' if known else 'of one device'}; idle time counts."
        )
        out.append((heading, words, utilisation_figure(record, work, window), True))
    found = histories(record)
    if found:
        from_s = span_s(record)[0]
        words = " ".join(history_words(history, from_s) for history in found)
        out.append(("Alerts", words, alert_figure(record, found), True))
    return out


def utilisation_figure(record: RunRecord, work: Work, window: float) -> Any:
    """MFU and MBU by window in percent, or FLOP/s and bytes/s where peaks are not known; the driver's beside them."""
    at, columns = clock(record), minute_columns(record, work, window_s=window)
    t = at(at.from_s + columns["start_s"] + window / 2)
    known = np.isfinite(work.peak_flops_per_s)
    fig = theme.figure(height=300)
    lines = (
        (("mfu", "MFU", 100.0, theme.BLUE), ("mbu", "MBU", 100.0, theme.ORANGE))
        if known
        else (("flops_per_s", "GFLOP/s", 1e-9, theme.BLUE), ("bytes_per_s", "GB/s", 1e-9, theme.ORANGE))
    )
    for name, word, scale, colour in lines:
        _line(fig, t, columns[name] * scale, word, colour)
    driver = device_columns(record, at.from_s + columns["start_s"] + window, window) if known else {}
    for name, (word, colour) in _DRIVER.items():
        if name in driver:
            _line(fig, t, driver[name], word, colour, dash="dot")
    fig.update_yaxes(title_text="Share of peak (%)" if known else "Per second", rangemode="tozero")
    return fig.update_xaxes(title_text=at.title)


def alert_figure(record: RunRecord, found: tuple[History, ...]) -> Any:
    """A row per rule: its value at each evaluation, its threshold, and shades from firing to clearing."""
    at = clock(record)
    fig = theme.stacked(len(found), height=90 + 150 * len(found))
    for row, history in enumerate(found, 1):
        rule = history.rule
        scale = 1000.0 if rule.metric in LATENCIES else 100.0 if rule.metric in SHARES else 1.0
        unit = " (ms)" if rule.metric in LATENCIES else " (%)" if rule.metric in SHARES else ""
        x = at(history.times_s)
        name = html.escape(f"{rule.metric} {rule.statistic}".strip())
        _line(fig, x, history.values * scale, name, theme.BLUE, row=row, col=1)
        ends = [float(x[0]), float(x[-1])]
        line = {"color": theme.LIMIT, "dash": "dash"}
        fig.add_scatter(
            x=ends,
            y=[rule.threshold * scale] * 2,
            mode="lines",
            line=line,
            name=html.escape(str(rule)),
            row=row,
            col=1,
        )
        for one in history.firings:
            until_s = history.times_s[-1] if one.cleared_s is None else one.cleared_s
            edges = at(np.array([one.fired_s, max(until_s, one.fired_s)]))
            shade = theme.translucent(theme.LIMIT, 0.2)
            fig.add_vrect(x0=edges[0], x1=edges[1], fillcolor=shade, line_width=0, row=row, col=1)
        fig.update_yaxes(title_text=f"{rule.metric}{unit}", rangemode="tozero", row=row, col=1)
    fig.update_layout(showlegend=False)
    return fig.update_xaxes(title_text=at.title, row=len(found), col=1)


def _line(
    fig: Any, x: Floats, y: Floats, name: str, colour: str, *, dash: str = "solid", **place: int
) -> None:
    style = {"mode": "lines+markers", "line": {"color": colour, "dash": dash}, "marker": {"size": 4}}
    fig.add_scatter(x=x, y=y, name=name, **style, **place)
