"""Requests over time as bars, coloured by the gaps between their tokens: the picture of
`vllm bench serve --plot-timeline`, as one self-contained HTML page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from experiments import theme
from experiments.page import page, plot_section, write_page
from sim.record import Floats, Ints, RunRecord

THRESHOLDS_MS = (25.0, 50.0)
"""Gaps up to the first are smooth to read, beyond the second they show; those of vLLM's plot."""
MAX_REQUESTS = 1000
COLOURS = (theme.GREY, theme.BLUE, theme.ORANGE, theme.VERMILLION)


def write_timeline(
    record: RunRecord, path: str | Path, *, thresholds_ms: Sequence[float] = THRESHOLDS_MS
) -> Path:
    """Write the page and return its path. Raises UsageError when it cannot be written."""
    fig = timeline(record, thresholds_ms=thresholds_ms)
    count = len(record.requests)
    words = f"The first {MAX_REQUESTS:,} of {count:,} requests" if count > MAX_REQUESTS else "Every request"
    words += ", from sending to the last token; colours are the gaps between tokens."
    title = " · ".join(str(record.meta[key]) for key in ("label", "model_id") if record.meta.get(key))
    body = ["<h1>Timeline</h1>", f'<p class="sub">{escape(title)}</p>']
    return write_page(page("Timeline", [*body, plot_section(0, "Requests over time", words, fig)]), path)


def timeline(record: RunRecord, *, thresholds_ms: Sequence[float] = THRESHOLDS_MS) -> Any:
    """One bar per request: the wait for the first token, then its tokens by class of gap."""
    rows = min(len(record.requests), MAX_REQUESTS)
    parts = [segments(record, row, thresholds_ms) for row in range(rows)]
    number = np.repeat(np.arange(rows), [len(start_s) for start_s, _, _ in parts])
    empty = np.empty(0)
    start_s, end_s, kind = (np.concatenate([empty, *(part[i] for part in parts)]) for i in range(3))
    low, high = thresholds_ms
    names = ("to first token", f"gaps up to {low:g} ms", f"up to {high:g} ms", "longer")
    fig = theme.figure(height=min(900, max(360, 12 * rows)))
    for index, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
        mine = kind == index
        gap = np.full(int(mine.sum()), np.nan)
        fig.add_scatter(
            x=np.stack([start_s[mine], end_s[mine], gap], axis=1).ravel(),
            y=np.repeat(number[mine], 3),
            mode="lines",
            name=name,
            line={"color": colour, "width": max(1, min(6, 600 // max(rows, 1)))},
            connectgaps=False,
            hovertemplate="request %{y}: %{x:.3f} s",
        )
    fig.update_yaxes(title_text="Request, in order of sending", autorange="reversed")
    return fig.update_xaxes(title_text="Simulated time (s)")


def segments(record: RunRecord, row: int, thresholds_ms: Sequence[float]) -> tuple[Floats, Floats, Ints]:
    """(start, end, class) of the bar's pieces: class 0 waits for the first token, 1 and up are classes of gaps.

    Neighbouring gaps of one class are one piece. Shape (pieces,) each.
    """
    sent_s = float(record.requests.sent_s[row])
    tokens_s = record.token_times_s(row)
    if not len(tokens_s):
        return np.empty(0), np.empty(0), np.empty(0, np.int64)
    edges_s = np.concatenate([[sent_s], tokens_s])
    gaps = np.searchsorted(np.asarray(thresholds_ms) / 1000, np.diff(tokens_s), side="left") + 1
    kinds = np.concatenate([[0], gaps]).astype(np.int64)
    first = np.flatnonzero(np.concatenate([[True], kinds[1:] != kinds[:-1]]))
    last = np.concatenate([first[1:], [len(kinds)]])
    return edges_s[first], edges_s[last], kinds[first]
