"""What `tt.capacity` returns: the answer, tables, pictures, and the run behind it.

Like its siblings of `tt.sweep` and `tt.plan`, it can be pickled and shows itself in a notebook. Tables are pandas
DataFrames and need the extra `notebook`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.capacity import unit
from experiments.capacity_report import target_sentence
from experiments.capacity_trial import Outcome, words
from serving.errors import UsageError
from sim.fleet.build import devices, num_gpus, num_replicas
from sim.frames import frame
from tokentwin.commands.capacity import CapacityAnswer, run_at_capacity
from tokentwin.frames import card, number
from tokentwin.plots_planning import CapacityPlots

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
        gpus = num_gpus(d)
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
            replicas = num_replicas(self.answer.built.deployment)
            out.append(target_sentence(found, self.answer.target, replicas))
        return out

    def _title(self) -> str:
        return f"Capacity of {self.answer.built.model.name} on {devices(self.answer.built)}"

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
