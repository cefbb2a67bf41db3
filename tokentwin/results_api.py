"""What `tt.capacity`, `tt.sweep` and `tt.plan` return: tables, pictures, and the runs behind them.

Each can be pickled and shows itself in a notebook. Tables are pandas DataFrames and need the extra `notebook`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.capacity import unit
from experiments.capacity_report import target_sentence
from experiments.capacity_trial import Outcome, words
from experiments.plan import Fleet, label
from experiments.plan_report import flips, vllm_command
from experiments.sweep import make_tasks
from experiments.sweep_spec import SweepSpec
from experiments.sweep_store import COLUMNS
from serving.errors import UsageError
from sim.frames import frame, pandas
from tokentwin.commands.capacity import CapacityAnswer, run_at_capacity
from tokentwin.commands.plan import PlanAnswer, fleet_run
from tokentwin.commands.sweep import SERVING
from tokentwin.frames import card, number
from tokentwin.plots_planning import CapacityPlots, PlanPlots, SweepPlots
from tokentwin.sweep_point import point_job

if TYPE_CHECKING:
    from pandas import DataFrame

    from sim.intervals import Interval
    from tokentwin.run import Run


@dataclass(frozen=True)
class CapacityResult:
    """The highest load that a deployment sustains, or why it sustains none."""

    answer: CapacityAnswer

    @property
    def load(self) -> float | None:
        """The answer, in `unit`; None where no load is sustained."""
        return self.answer.found.load

    @property
    def unit(self) -> str:
        """What is counted: requests/s, times the trace's speed, or requests at once."""
        return unit(self.answer.found.variable)

    @property
    def interval(self) -> Interval | None:
        """95 % interval of `load`; None without replications, or without a limit."""
        return self.answer.found.interval

    @property
    def infeasible(self) -> str | None:
        """Why no load is sustained; None where one is."""
        return self.answer.found.infeasible

    @property
    def plot(self) -> CapacityPlots:
        """Pictures of the search: `found.plot.latency_vs_load()`."""
        return CapacityPlots(self)

    @property
    def requests(self) -> DataFrame:
        """One row per request of the run at capacity. Raises UsageError where there is none, or without pandas."""
        return self.run().requests

    def run(self) -> Run:
        """The run at capacity, with all that a run has. Raises UsageError where no load is sustained."""
        run = run_at_capacity(self.answer)
        if run is None:
            raise UsageError(f"there is no run at capacity, because no load is sustained: {self.infeasible}")
        return run

    def summary(self) -> DataFrame:
        """The answer as figures: load, interval, rate, and every promise there. Raises UsageError without pandas."""
        found, d = self.answer.found, self.answer.built.deployment
        gpus = d.tensor_parallel_size * d.data_parallel_size
        figures: dict[str, float | None] = {
            found.variable: found.load,
            "low": None if found.interval is None else found.interval.low,
            "high": None if found.interval is None else found.interval.high,
            "not_sustained": found.next_load,
            "requests_per_s": found.requests_per_s if found.load is not None else None,
            "requests_per_s_per_gpu": found.requests_per_s / gpus if found.load is not None else None,
        }
        figures |= {
            f"{o.name}{_unit_of(o)}": _scaled(o, o.value) for o in (found.at.outcomes if found.at else ())
        }
        values = [math.nan if value is None else value for value in figures.values()]
        return frame({"value": values}, index=list(figures), name="figure")

    def trials(self) -> DataFrame:
        """One row per load that was tested, with every promise. Raises UsageError without pandas.

        Runs that are not of full length guide the search: they flatter the server and settle nothing.
        """
        tested = self.answer.found.trials
        columns: dict[str, list[Any]] = {
            self.answer.found.variable: [trial.load for trial in tested],
            "num_requests": [trial.num_requests for trial in tested],
            "full_length": [trial.final for trial in tested],
            "sustained": [trial.sustained for trial in tested],
        }
        for i, o in enumerate(tested[0].outcomes if tested else ()):
            columns[f"{o.name}{_unit_of(o)}"] = [_scaled(o, trial.outcomes[i].value) for trial in tested]
        columns["reason"] = [trial.reason for trial in tested]
        return frame(columns)

    def lines(self) -> list[str]:
        """The answer in sentences."""
        found = self.answer.found
        if found.load is None or found.at is None:
            return [f"Infeasible at any load: {found.infeasible}."]
        least = "" if found.limited else "at least "
        sure = ""
        if (ends := found.interval) is not None:
            sure = f" (95% interval {ends.low:.4g} to {ends.high:.4g}, mostly of {ends.dominant})"
        out = [f"Sustains {least}{found.load:.4g} {self.unit}{sure}."]
        out += [f"There, {words(outcome)}." for outcome in found.at.outcomes]
        if found.beyond is not None and found.next_load is not None:
            out.append(f"Gives first, at {found.next_load:.4g}: {found.gives_first}.")
        if found.bound is not None:
            out.append(f"Bound by {found.bound.words}: {found.bound.evidence}.")
        if self.answer.target is not None:
            replicas = self.answer.built.deployment.data_parallel_size
            out.append(target_sentence(found, self.answer.target, replicas))
        return out

    def _title(self) -> str:
        d = self.answer.built.deployment
        gpus = d.tensor_parallel_size * d.data_parallel_size
        return f"Capacity of {self.answer.built.model.name} on {gpus} x {self.answer.built.profile.name}"

    def __repr__(self) -> str:
        return f"<{self._title()}: {self.lines()[0]}>"

    def _repr_html_(self) -> str:
        tested = self.answer.found.trials
        names = [outcome.label for outcome in tested[0].outcomes] if tested else []
        rows = [
            [
                number(trial.load),
                f"{trial.num_requests:,}",
                *(number(_scaled(o, o.value)) for o in trial.outcomes),
                "yes" if trial.sustained else "no",
            ]
            for trial in tested
        ]
        head = (self.unit, "requests", *(f"{name} (ms)" if "attain" not in name else name for name in names))
        return card(self._title(), self.lines(), (*head, "sustained"), rows, more="trials()")


def _unit_of(outcome: Outcome) -> str:
    return "" if outcome.name == "slo_attainment" else "_ms"


def _scaled(outcome: Outcome, value: float) -> float:
    return value if outcome.name == "slo_attainment" else value * 1000


@dataclass(frozen=True)
class SweepResult:
    """Every run of a sweep, failures among them."""

    rows: tuple[Mapping[str, Any], ...] = field(repr=False)
    """One per run, in order: parameters, status, and the figures of `result.json`."""
    spec: SweepSpec = field(repr=False)
    columns: Mapping[str, str] = field(repr=False)
    """Column of each parameter that varies."""
    folder: Path | None = None
    """Where the Parquet files are; None where nobody asked to keep them."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Columns of what varies."""
        return tuple(self.columns.values())

    @property
    def failed(self) -> int:
        """Runs that ended in an error; `summary()` has it."""
        return sum(row["status"] != "done" for row in self.rows)

    @property
    def plot(self) -> SweepPlots:
        """Pictures over the points: `swept.plot.latency_vs_load()`."""
        return SweepPlots(self)

    @property
    def requests(self) -> DataFrame:
        """One row per request of every run that is done, with the run's `index` and parameters.

        The runs are simulated again, which gives the same requests. Raises UsageError without pandas.
        """
        pd = pandas()
        parts = []
        for row in self.rows:
            if row["status"] == "done":
                known = {name: row[name] for name in ("index", *self.parameters)}
                parts.append(self.run(row["index"]).requests.assign(**known))
        return pd.concat(parts, ignore_index=True) if parts else frame({})

    def run(self, index: int) -> Run:
        """Run `index` of the sweep, simulated again with the same seed, with all that a run has.

        Raises UsageError for an index that is not there, and as the run did where it failed.
        """
        from tokentwin.job import run_job

        row = next((row for row in self.rows if row["index"] == index), None)
        if row is None:
            raise UsageError(f"there is no run {index}; the sweep has {len(self.rows)}, from 0")
        if self.spec.search is None:
            params = make_tasks(self.spec, SERVING)[index].params
        else:
            params = {key: row[column] for key, column in self.columns.items()}
        seed = int(params.get("seed") or self.spec.base.get("seed", 0)) + int(row["run"])
        return run_job(point_job({**self.spec.base, "seed": seed}, params))

    def summary(self) -> DataFrame:
        """One row per run: its parameters, then its figures; columns that no run has are left out.

        Raises UsageError without pandas.
        """
        names = ["run", *self.parameters, "status", "error", *COLUMNS]
        columns = {name: [row[name] for row in self.rows] for name in names}
        used = {k: v for k, v in columns.items() if k == "status" or any(value is not None for value in v)}
        return frame(used, index=[row["index"] for row in self.rows], name="index")

    def best(self, figure: str, *, maximize: bool = False) -> Run:
        """The run with the least (or the most) of a column of `summary()`, simulated again.

        Raises UsageError where no run has it.
        """
        known = [row for row in self.rows if row.get(figure) is not None]
        if not known:
            raise UsageError(f"no run has a figure {figure!r}; summary() lists those there are")
        row = (max if maximize else min)(known, key=lambda row: row[figure])
        return self.run(row["index"])

    def __repr__(self) -> str:
        return f"<Sweep of {len(self.rows)} runs over {', '.join(self.parameters) or 'nothing'}; {self.failed} failed>"

    def _repr_html_(self) -> str:
        shown = ("output_throughput", "p95_ttft_ms", "p95_tpot_ms", "slo_attainment")
        used = [name for name in shown if any(row[name] is not None for row in self.rows)]
        rows = [
            [*(_plain(row[name]) for name in (*self.parameters, *used)), _meets(row)] for row in self.rows
        ]
        errors = dict.fromkeys(row["error"] for row in self.rows if row["error"])
        lines = [f"{self.failed} failed." if self.failed else "All done.", *list(errors)[:3]]
        title = f"Sweep: {len(self.rows)} runs over {', '.join(self.parameters) or 'nothing'}"
        return card(title, lines, (*self.parameters, *used, "meets SLOs"), rows, more="summary()")


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _meets(row: Mapping[str, Any]) -> str:
    if row["status"] != "done":
        return str(row["status"])
    return {True: "yes", False: "no", None: "–"}[row["sim_meets_slos"]]


@dataclass(frozen=True)
class PlanResult:
    """The cheapest fleets for a traffic and its promises, and why the others are not among them."""

    answer: PlanAnswer

    @property
    def fleets(self) -> tuple[Fleet, ...]:
        """Cheapest first."""
        return self.answer.plan.fleets

    @property
    def winner(self) -> Fleet | None:
        """The cheapest; None where no candidate keeps the promises."""
        return self.answer.plan.winner

    @property
    def plot(self) -> PlanPlots:
        """Pictures of the fleets: `planned.plot.pareto()`."""
        return PlanPlots(self)

    @property
    def requests(self) -> DataFrame:
        """One row per request of the winner's run. Raises UsageError where no fleet won, or without pandas."""
        return self.run().requests

    @property
    def command(self) -> str:
        """`vllm serve …` of one replica of the winner; empty where vLLM cannot serve it, or nobody won."""
        return vllm_command(self.winner)[0] if self.winner is not None else ""

    @property
    def flips(self) -> list[str]:
        """What would flip the choice, in sentences."""
        return flips(self.answer.plan) if self.fleets else []

    def run(self, rank: int = 0) -> Run:
        """The run that a fleet was judged by, with all that a run has. Raises UsageError where there is no such fleet."""
        if not 0 <= rank < len(self.fleets):
            raise UsageError(f"there is no fleet {rank}; the plan has {len(self.fleets)}, from 0")
        return fleet_run(self.fleets[rank], self.answer)

    def summary(self) -> DataFrame:
        """One row per fleet, cheapest first; index is the rank. Raises UsageError without pandas."""
        plan = self.answer.plan
        rows = []
        for fleet in self.fleets:
            d = fleet.candidate.deployment
            room = fleet.headroom(plan.load)
            rows.append(
                {
                    "fleet": f"{fleet.replicas} x {label(d)}",
                    "gpu": d.gpu,
                    "replicas": fleet.replicas,
                    "gpus": fleet.gpus,
                    "usd_per_hour": fleet.usd_per_hour,
                    "usd_per_month": fleet.usd_per_month,
                    "usd_per_million_tokens": fleet.usd_per_million_tokens,
                    **{f"p95_{name}_ms": p95_ms(fleet, name) for name in ("ttft", "tpot", "e2el")},
                    "output_throughput": fleet.summary.output_throughput,
                    "joules_per_token": fleet.joules_per_token,
                    "headroom": math.nan if room is None else room,
                    "on_front": fleet.on_front,
                }
            )
        return frame({name: [row[name] for row in rows] for name in (rows[0] if rows else ())}, name="rank")

    def pruned(self) -> DataFrame:
        """One row per candidate that was left out, with the reason. Raises UsageError without pandas."""
        left = self.answer.plan.pruned
        return frame(
            {
                "candidate": [label(p.candidate.deployment) for p in left],
                "why": [p.why for p in left],
                "reason": [p.reason for p in left],
                "simulated": [p.simulated for p in left],
            }
        )

    def lines(self) -> list[str]:
        """The answer in sentences."""
        plan, winner = self.answer.plan, self.winner
        what = f"{plan.load:.4g} {unit(plan.variable)}"
        if winner is None:
            return [f"No candidate sustains {what} with these promises.", *plan.notes]
        name = f"{winner.replicas} x {label(winner.candidate.deployment)}"
        gpus = f"{winner.gpus} GPU{'s' if winner.gpus > 1 else ''}"
        first = f"For {what}: {name}, {gpus}, ${winner.usd_per_hour:,.2f} an hour, ${winner.usd_per_month:,.0f} a month."
        doubtful = winner.doubtful(plan.promises)
        sure = (
            [f"Not certain: the interval of {' and '.join(doubtful)} reaches beyond the limit."]
            if doubtful
            else []
        )
        return [first, *sure, *self.flips, *plan.notes]

    def __repr__(self) -> str:
        return f"<Plan of {len(self.fleets)} fleets: {self.lines()[0]}>"

    def _repr_html_(self) -> str:
        rows = []
        for fleet in self.fleets:
            room = fleet.headroom(self.answer.plan.load)
            rows.append(
                [
                    f"{fleet.replicas} x {label(fleet.candidate.deployment)}{' *' if fleet.on_front else ''}",
                    str(fleet.gpus),
                    f"{fleet.usd_per_month:,.0f}",
                    number(fleet.usd_per_million_tokens, 3),
                    number(p95_ms(fleet, "ttft")),
                    number(p95_ms(fleet, "tpot")),
                    "–" if room is None else f"{room:+.0%}",
                ]
            )
        head = (
            "fleet (* on the Pareto front)",
            "GPUs",
            "$/month",
            "$/Mtok output",
            "P95 TTFT (ms)",
            "P95 TPOT (ms)",
            "room",
        )
        return card("Plan", self.lines(), head, rows, more="summary()")


def p95_ms(fleet: Fleet, metric: str) -> float:
    """P95 of a latency of a fleet's run."""
    return float(getattr(fleet.summary, metric).at(95.0)) * 1000
