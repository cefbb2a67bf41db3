"""`run.plot.…`: the pictures of a run as Plotly figures. Each is made when it is asked for."""

from __future__ import annotations

import inspect
from html import escape
from typing import TYPE_CHECKING, Any

from serving.errors import UsageError, nearest
from sim.metrics import NOT_STREAMED

if TYPE_CHECKING:
    from plotly.graph_objs._figure import Figure

    from tokentwin.run import Run

LATENCIES = ("ttft", "tpot", "e2el")


class Plots:
    """The pictures of one result. `dir` lists them, and so does showing this object."""

    def __dir__(self) -> list[str]:
        return [name for name in type(self).__dict__ if not name.startswith("_")]

    def _words(self) -> list[tuple[str, str]]:
        """Every picture as it is called, and the first line about it."""
        found = []
        for name in dir(self):
            method = getattr(self, name)
            first = (inspect.getdoc(method) or "").splitlines()[0]
            found.append((f"{name}{_arguments(method)}", first))
        return found

    def __repr__(self) -> str:
        width = max(len(call) for call, _ in self._words()) + 2
        return "\n".join(f".plot.{call:<{width}}{words}" for call, words in self._words())

    def _repr_html_(self) -> str:
        items = "".join(
            f"<li><code>.plot.{escape(call)}</code> {escape(words)}</li>" for call, words in self._words()
        )
        return f"<ul>{items}</ul>"


def _arguments(method: Any) -> str:
    shown = [
        name if p.default is p.empty else f"{name}={p.default!r}"
        for name, p in inspect.signature(method).parameters.items()
    ]
    return f"({', '.join(shown)})"


class RunPlots(Plots):
    """The pictures of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def ecdf(self, metric: str = "ttft") -> Figure:
        """Share of requests within a latency: ttft, tpot or e2el, with its limits; by tenant where there are several."""
        from experiments.report_figures import latency_ecdf

        name, summary = known_latency(metric), self._run.summary
        if name not in summary.metrics:
            raise UsageError(f"ecdf({metric!r}): {NOT_STREAMED}")
        return latency_ecdf(self._run.record, summary, name)

    def timeline(self) -> Figure:
        """A bar per request over time, coloured by the gaps between its tokens (the first 1,000 requests)."""
        from experiments.timeline import timeline

        return timeline(self._run.record)

    def load(self) -> Figure:
        """Requests running and waiting over time, and how full the batch and the KV cache are."""
        from experiments.report_figures import load_over_time

        return load_over_time(self._run.record)

    def throughput(self) -> Figure:
        """Output tokens, arrivals and completions a second over time, and requests in the system."""
        from experiments.report_figures import throughput_over_time

        return throughput_over_time(self._run.record)

    def p95(self) -> Figure:
        """P95 of TTFT and, where answers stream, of TPOT per minute (or thirtieth of a short run), with the SLOs."""
        from experiments.report_figures import p95_over_time

        return p95_over_time(self._run.record, self._run.summary)

    def prefill(self) -> Figure:
        """Time in prefill against the length of the prompt; cached and preempted ones marked."""
        from experiments.report_figures import prefill_by_prompt

        return prefill_by_prompt(self._run.record)

    def slowest(self, count: int = 20) -> Figure:
        """Where the time of the slowest requests went, stage by stage."""
        from experiments.report_figures import slowest

        return slowest(self._run.record, count)

    def roofline(self) -> Figure:
        """Steps by arithmetic intensity and speed, below the device's peaks."""
        from experiments.report_figures import roofline

        return roofline(self._run.record, self._run.roofline())

    def tenants(self) -> Figure:
        """Median, P95 and P99 of TTFT and TPOT of each tenant."""
        from experiments.report_figures import by_tenant

        return by_tenant(self._run.summary)


def known_latency(metric: str) -> str:
    """The metric in lower case. Raises UsageError, with the nearest, for one that no request has."""
    name = metric.lower()
    if name not in LATENCIES:
        raise UsageError(f"unknown metric {metric!r}; {nearest(name, LATENCIES)}")
    return name
