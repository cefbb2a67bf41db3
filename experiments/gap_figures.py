"""Distributions of the gaps between tokens, where a run's record holds the times of its tokens."""

from __future__ import annotations

import html

import numpy as np

from experiments import theme
from experiments.report_figures import Figure, latency_axes, limit_line
from sim.latency import Bools, inter_token_gaps
from sim.metrics import Summary
from sim.record import Floats, RunRecord, Status

MAX_POINTS = 1500


def gap_curve(record: RunRecord, keep: Bools) -> tuple[Floats, Floats]:
    """Gaps of the rows `keep` in ms, sorted, and the share of all of them at or below each; at most `MAX_POINTS`."""
    pool = inter_token_gaps(record, keep)
    upto = np.cumsum(pool.counts)
    at = np.unique(np.searchsorted(upto, np.linspace(1, max(pool.size, 1), MAX_POINTS)))
    at = at[at < len(upto)]
    return pool.values_s[at] * 1000, upto[at] / max(pool.size, 1)


def itl_ecdf(record: RunRecord, summary: Summary) -> Figure:
    """Share of gaps between tokens within a time, per tenant where there are several."""
    done = record.requests.status == Status.FINISHED
    several = len(record.tenants) > 1
    shown: list[tuple[str, Bools]] = [("ITL", done)]
    if several:
        tenants = enumerate(record.tenants[: len(theme.SERIES)])
        shown = [(html.escape(t.name), done & (record.requests.tenant == index)) for index, t in tenants]
    fig = theme.figure()
    every = [np.empty(0)]
    for name, keep in shown:
        x, share = gap_curve(record, keep)
        every.append(x)
        fig.add_scatter(
            x=x,
            y=share * 100,
            name=name,
            mode="lines",
            line_shape="hv",
            hovertemplate="%{x:.4g} ms: %{y:.2f} %",
        )
    for slo in (o.slo for o in summary.slos if o.slo.metric == "itl"):
        limit_line(fig, slo)
    latency_axes(fig, "itl", np.concatenate(every))
    return fig.update_yaxes(title_text="Share of gaps (%)")
