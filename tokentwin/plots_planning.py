"""The pictures of capacities, sweeps and plans as Plotly figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments import theme
from serving.errors import UsageError, nearest
from tokentwin.plots import Plots

if TYPE_CHECKING:
    from plotly.graph_objs._figure import Figure

    from experiments.plan import Fleet
    from sim.deployment import Deployment
    from tokentwin.results_api import CapacityResult
    from tokentwin.results_api_plan import PlanResult
    from tokentwin.results_api_sweep import SweepResult

LOADS = ("request_rate", "max_concurrency", "rate_scale")
"""Parameters that are a load, in the order in which they are looked for."""


class CapacityPlots(Plots):
    """The pictures of a search for capacity."""

    def __init__(self, result: CapacityResult) -> None:
        self._result = result

    def latency_vs_load(self, promise: str | None = None) -> Figure:
        """A promised statistic at every load that was tested, its limit, and the capacity with its interval.

        `promise` is one of them, such as p95_ttft; by default that which gives first.
        """
        found = self._result.answer.found
        shown = found.trials or ((found.lone,) if found.lone is not None else ())
        names = [outcome.name for outcome in shown[0].outcomes]
        chosen = promise or (found.beyond or shown[-1]).worst.name
        if chosen not in names:
            raise UsageError(f"{chosen!r} was not promised; {nearest(chosen, names)}")
        at = names.index(chosen)
        share = chosen == "slo_attainment"
        outcome = shown[0].outcomes[at]
        scale = 100.0 if share else 1000.0
        fig = theme.figure()
        kinds = (
            ("sustained", lambda t: t.sustained, theme.GREEN, "circle"),
            ("not sustained", lambda t: not t.sustained, theme.VERMILLION, "x"),
        )
        for name, mine, colour, symbol in kinds:
            trials = [trial for trial in shown if mine(trial)]
            fig.add_scatter(
                x=[trial.load for trial in trials],
                y=[trial.outcomes[at].value * scale for trial in trials],
                customdata=[[trial.num_requests, trial.reason] for trial in trials],
                mode="markers",
                name=name,
                marker={
                    "color": colour,
                    "symbol": symbol,
                    "size": [11 if trial.final else 7 for trial in trials],
                },
                hovertemplate="%{x:.4g}: %{y:.4g}<br>%{customdata[0]:,} requests<br>%{customdata[1]}",
            )
        loads = [trial.load for trial in shown]
        _dashed(fig, [min(loads), max(loads)], outcome.limit * scale, "limit")
        if found.load is not None:
            fig.add_vline(x=found.load, line={"color": theme.INK, "width": 1}, annotation_text="capacity")
        if found.interval is not None:
            fig.add_vrect(
                x0=found.interval.low,
                x1=found.interval.high,
                fillcolor=theme.translucent(theme.GREY, 0.18),
                line_width=0,
                layer="below",
            )
        title = "SLO attainment (%)" if share else f"{outcome.label} (ms), logarithmic"
        fig.update_xaxes(title_text=f"Load ({self._result.unit})")
        return fig.update_yaxes(title_text=title, type="linear" if share else "log")

    def ecdf(self, metric: str = "ttft") -> Figure:
        """Share of requests within a latency (ttft, tpot or e2el) in the run at capacity."""
        return self._result.run().plot.ecdf(metric)

    def load(self) -> Figure:
        """Requests running and waiting over time in the run at capacity."""
        return self._result.run().plot.load()


class SweepPlots(Plots):
    """The pictures of a sweep."""

    def __init__(self, result: SweepResult) -> None:
        self._result = result

    def latency_vs_load(self, metric: str = "p95_ttft_ms", load: str | None = None) -> Figure:
        """A figure of the runs against the load, a line for each setting of everything else.

        `load` is the parameter on the x axis: request_rate, max_concurrency or rate_scale, whichever varies.
        """
        x = self._parameter(load) if load is not None else self._load()
        rows = self._rows(metric)
        fig = theme.figure(height=420)
        for number, (name, mine) in enumerate(_by(rows, [p for p in self._result.parameters if p != x])):
            mine = sorted(mine, key=lambda row: row[x])
            fig.add_scatter(
                x=[row[x] for row in mine],
                y=[row[metric] for row in mine],
                mode="lines+markers",
                name=name or metric,
                marker={"symbol": number % 8, "size": 8},
                hovertemplate="%{x:.4g}: %{y:.4g}",
            )
        limit_ms = _limit_ms(self._result.spec.base.get("slo"), metric)
        if limit_ms is not None and rows:
            loads = [row[x] for row in rows]
            _dashed(fig, [min(loads), max(loads)], limit_ms, f"SLO {limit_ms:g} ms")
        fig.update_xaxes(title_text=x)
        return fig.update_yaxes(title_text=metric, rangemode="tozero")

    def pareto(self, x: str = "p95_tpot_ms", y: str = "output_throughput_per_gpu") -> Figure:
        """Two figures against each other (less of x, more of y), with the points that no other beats in both."""
        rows = [row for row in self._rows(x) if row[y] is not None] if self._known(y) else []
        front, best = [], float("-inf")
        for row in sorted(rows, key=lambda row: (row[x], -row[y])):
            if row[y] > best:
                front.append(row)
                best = row[y]
        on_it = {row["index"] for row in front}
        fig = theme.figure(height=420)
        kinds = (("beaten", False, theme.GREY, "circle-open"), ("front", True, theme.BLUE, "circle"))
        for name, wanted, colour, symbol in kinds:
            mine = front if wanted else [row for row in rows if row["index"] not in on_it]
            fig.add_scatter(
                x=[row[x] for row in mine],
                y=[row[y] for row in mine],
                customdata=[_words(row, self._result.parameters) for row in mine],
                mode="lines+markers" if wanted else "markers",
                line={"shape": "vh", "width": 1.2, "color": colour},
                name=name,
                marker={"color": colour, "symbol": symbol, "size": 9},
                hovertemplate="%{customdata}<br>%{x:.4g}, %{y:.4g}",
            )
        fig.update_xaxes(title_text=x)
        return fig.update_yaxes(title_text=y)

    def heatmap(self, x: str, y: str, metric: str = "p95_ttft_ms") -> Figure:
        """A figure over two parameters; the mean where more than those vary."""
        x, y = self._parameter(x), self._parameter(y)
        cells: dict[tuple[Any, Any], list[float]] = {}
        for row in self._rows(metric):
            cells.setdefault((row[x], row[y]), []).append(float(row[metric]))
        across, up = (sorted({key[i] for key in cells}, key=_order) for i in (0, 1))
        means = [
            [sum(cells[a, b]) / len(cells[a, b]) if (a, b) in cells else None for a in across] for b in up
        ]
        fig = theme.figure(height=420)
        fig.add_heatmap(
            x=[str(a) for a in across],
            y=[str(b) for b in up],
            z=means,
            colorscale="Cividis",
            texttemplate="%{z:.4g}",
            colorbar={"title": {"text": metric, "side": "right"}},
            hovertemplate=f"{x} %{{x}}, {y} %{{y}}: %{{z:.4g}}<extra></extra>",
        )
        fig.update_xaxes(title_text=x, type="category")
        return fig.update_yaxes(title_text=y, type="category")

    def _rows(self, figure: str) -> list[Mapping[str, Any]]:
        self._known(figure)
        rows = [row for row in self._result.rows if row[figure] is not None]
        if not rows:
            raise UsageError(
                f"no run of the sweep has a {figure}; summary() lists the figures that there are"
            )
        return rows

    def _known(self, figure: str) -> bool:
        from experiments.sweep_store import COLUMNS

        numbers = [name for name, kind in COLUMNS.items() if kind in ("int", "float")]
        if figure not in numbers:
            raise UsageError(f"{figure!r} is not a figure of a run; {nearest(figure, numbers)}")
        return True

    def _parameter(self, name: str) -> str:
        if name not in self._result.parameters:
            hint = nearest(name, self._result.parameters) if self._result.parameters else "nothing varies"
            raise UsageError(f"{name!r} does not vary in this sweep; {hint}")
        return name

    def _load(self) -> str:
        found = next((name for name in LOADS if name in self._result.parameters), None)
        if found is None:
            raise UsageError(f"none of {', '.join(LOADS)} varies in this sweep; name the x axis: load='…'")
        return found


class PlanPlots(Plots):
    """The pictures of a plan."""

    def __init__(self, result: PlanResult) -> None:
        self._result = result

    def pareto(self, metric: str = "tpot") -> Figure:
        """P95 of a latency (ttft, tpot or e2el) of each fleet against its cost a month, with intervals and the limit."""
        from tokentwin.plots import known_latency

        name = known_latency(metric)
        fig = theme.figure(height=420)
        kinds = (
            ("on the Pareto front", True, theme.BLUE, "circle"),
            ("beaten", False, theme.GREY, "circle-open"),
        )
        for title, wanted, colour, symbol in kinds:
            mine = [fleet for fleet in self._result.fleets if fleet.on_front is wanted]
            y = [p95_ms(fleet, name) for fleet in mine]
            ends = [fleet.intervals.get(f"p95_{name}") for fleet in mine]
            fig.add_scatter(
                x=[fleet.usd_per_month for fleet in mine],
                y=y,
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [0 if e is None else e[1] * 1000 - v for e, v in zip(ends, y, strict=True)],
                    "arrayminus": [0 if e is None else v - e[0] * 1000 for e, v in zip(ends, y, strict=True)],
                    "thickness": 1.2,
                },
                text=[f" {fleet.replicas} x {_short(fleet.candidate.deployment)}" for fleet in mine],
                textposition="middle right",
                mode="markers+text",
                name=title,
                marker={"color": colour, "symbol": symbol, "size": 10},
                hovertemplate="%{text}: $%{x:,.0f} a month, %{y:.4g} ms",
            )
        most = 1.25 * max((fleet.usd_per_month for fleet in self._result.fleets), default=1.0)
        for slo in self._result.answer.plan.promises.slos:
            if slo.name == f"p95_{name}":
                _dashed(fig, [0, most], slo.limit_s * 1000, f"SLO {slo.limit_s * 1000:g} ms")
        fig.update_xaxes(title_text="Cost ($ a month)", range=[0, most])
        return fig.update_yaxes(title_text=f"P95 {name.upper()} (ms), logarithmic", type="log")

    def cost(self) -> Figure:
        """What each fleet costs a month."""
        fleets = self._result.fleets[::-1]
        from experiments.plan import label

        fig = theme.figure(height=120 + 40 * len(fleets))
        fig.add_bar(
            x=[fleet.usd_per_month for fleet in fleets],
            y=[f"{fleet.replicas} x {label(fleet.candidate.deployment)}" for fleet in fleets],
            orientation="h",
            marker_color=theme.BLUE,
            text=[f"${fleet.usd_per_month:,.0f}" for fleet in fleets],
            hovertemplate="%{y}: $%{x:,.0f} a month<extra></extra>",
        )
        return fig.update_xaxes(title_text="Cost ($ a month)")

    def ecdf(self, metric: str = "ttft") -> Figure:
        """Share of requests within a latency (ttft, tpot or e2el) in the winner's run."""
        return self._result.run().plot.ecdf(metric)


def p95_ms(fleet: Fleet, metric: str) -> float:
    """P95 of a latency of a fleet's run."""
    return float(getattr(fleet.summary, metric).at(95.0)) * 1000


def _short(deployment: Deployment) -> str:
    """The GPU, and the format of the weights where it is not 16 bit."""
    return f"{deployment.gpu} {deployment.quantization or ''}".strip()


def _dashed(fig: Figure, x: list[float], y: float, name: str) -> None:
    fig.add_scatter(
        x=x, y=[y, y], mode="lines", name=name, line={"color": theme.LIMIT, "dash": "dash"}, hoverinfo="name"
    )


def _by(rows: list[Mapping[str, Any]], keys: list[str]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Rows by their values of `keys`, with those in words, in order."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    ordered = sorted(groups, key=lambda values: tuple(map(_order, values)))
    return [(_words(dict(zip(keys, values, strict=True)), keys), groups[values]) for values in ordered]


def _words(row: Mapping[str, Any], keys: Any) -> str:
    return ", ".join(f"{key} {row[key]}" for key in keys)


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers before words, so that a mixed axis can be sorted."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return 1, 0.0, str(value)


def _limit_ms(slos: Any, metric: str) -> float | None:
    """The limit on a column such as p95_ttft_ms, where the sweep's base promises one."""
    from sim.slo import parse_slo
    from tokentwin.job import words

    found = [slo.limit_s * 1000 for slo in parse_slo(words(slos)) if f"{slo.name}_ms" == metric]
    return found[0] if found else None
