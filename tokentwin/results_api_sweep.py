"""What `tt.sweep` returns: a row per run, pictures over the points, and any run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.sweep import make_tasks
from experiments.sweep_spec import SweepSpec
from experiments.sweep_store import COLUMNS, INTERVALS
from serving.errors import UsageError
from sim.frames import frame, pandas
from tokentwin.commands.sweep import SERVING
from tokentwin.frames import card, number
from tokentwin.job import run_job
from tokentwin.plots_planning import SweepPlots
from tokentwin.sweep_point import point_job

if TYPE_CHECKING:
    from pandas import DataFrame

    from tokentwin.run import Run


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
        ends = [name for name in INTERVALS if name in self.rows[0]] if self.rows else []
        names = ["run", *self.parameters, "status", "error", *COLUMNS, *ends]
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
