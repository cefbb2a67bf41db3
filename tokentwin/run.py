"""A finished run: its record, its numbers and its verdict, and the ways to look at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.results import METRICS
from sim.certainty import Certainty
from sim.deployment import Built, Deployment
from sim.frames import frame
from sim.metrics import NOT_STREAMED, Summary
from sim.record import RunRecord, Status
from sim.replications import RATES, SHARES
from sim.verdict import Verdict
from tokentwin.frames import card, number
from tokentwin.plots import RunPlots

if TYPE_CHECKING:
    from pandas import DataFrame

    from experiments.alerts import History
    from experiments.report_figures import Roofline

TRACE, REPORT = "trace.json.gz", "report.html"


@dataclass(frozen=True)
class Run:
    """What `tt.simulate` returns. Picklable; shows itself in a notebook."""

    record: RunRecord
    summary: Summary
    """Every number; called, `summary()`, they are a pandas DataFrame."""
    verdict: Verdict
    built: Built
    """The deployment worked out: model shape, profile, memory plan, limits, prices."""
    num_requests: int
    """Requests of the workload, whether or not they were sent."""
    certainty: Certainty = field(default_factory=Certainty)
    """Intervals (`run.certainty.interval("p95_ttft")`, in seconds), extrapolations, percentiles of few samples."""

    @property
    def deployment(self) -> Deployment:
        return self.built.deployment

    @property
    def num_lost(self) -> int:
        """Requests that neither finished nor were rejected with a reason."""
        status = self.record.requests.status
        return self.num_requests - int((status != Status.UNFINISHED).sum())

    @property
    def requests(self) -> DataFrame:
        """One row per request that was sent, in order of sending. Raises UsageError without pandas."""
        from experiments.results import request_columns

        return frame(request_columns(self.record))

    @property
    def steps(self) -> DataFrame:
        """One row per engine step, as `requests`."""
        return frame(self.record.steps.columns())

    @property
    def minutes(self) -> DataFrame:
        """The run minute by minute (`experiments.minutes`), as `requests`."""
        from experiments.minutes import minute_columns

        return frame(minute_columns(self.record, self.roofline()))

    @property
    def alerts(self) -> tuple[History, ...]:
        """What became of each rule of `alert=["ttft:p95:1m > 1s for 3m"]`: its values, and when it fired and cleared."""
        from experiments.alert_series import histories

        return histories(self.record)

    @property
    def plot(self) -> RunPlots:
        """The run's pictures, as Plotly figures: `run.plot.ecdf("tpot")`."""
        return RunPlots(self)

    def latencies(self) -> DataFrame:
        """Latencies in ms, one row per metric and one column per statistic. Raises UsageError without pandas."""
        stats = {name: getattr(self.summary, name) for name in METRICS}
        columns: dict[str, list[float]] = {
            "count": [each.count for each in stats.values()],
            "mean": [each.mean_s * 1000 for each in stats.values()],
            "std": [each.std_s * 1000 for each in stats.values()],
        }
        for p, _ in self.summary.ttft.percentiles_s:
            columns[f"p{p:g}"] = [each.at(p) * 1000 for each in stats.values()]
        columns["max"] = [each.max_s * 1000 for each in stats.values()]
        return frame(columns, index=list(stats), name="ms")

    def intervals(self) -> DataFrame:
        """95 % intervals by the names of `summary()`, and the share of each source in the variance.

        Empty without replications (`tt.simulate(…, replications=8)`). Raises UsageError without pandas.
        """
        replicated = self.certainty.replicated
        names = replicated.names() if replicated is not None else ()
        found = {name: interval for name in names if (interval := self.certainty.interval(name)) is not None}
        in_ms = {name: 1.0 if name in (*RATES, *SHARES) else 1000.0 for name in found}
        columns = {
            end: [getattr(interval, end) * in_ms[name] for name, interval in found.items()]
            for end in ("value", "low", "high")
        }
        columns |= {
            source: [getattr(interval, source) for interval in found.values()]
            for source in ("calibration", "noise", "sampling")
        }
        index = [name if scale == 1.0 else f"{name}_ms" for name, scale in in_ms.items()]
        return frame(columns, index=index, name="figure")

    def print(self) -> None:
        """The table that `tokentwin simulate` prints."""
        from experiments.console import print_run

        print_run(self.record, self.summary, self.verdict, certainty=self.certainty)

    def roofline(self) -> Roofline:
        """FLOPs and bytes of every step on one device, beside the device's peaks."""
        from experiments.report_figures import step_roofline

        return step_roofline(self.record, self.built)

    def report(self, path: str | Path = REPORT) -> Path:
        """Write the HTML report and return its path."""
        from experiments.report import write_report

        return write_report(
            self.record,
            self.summary,
            self.verdict,
            path,
            roofline=self.roofline(),
            certainty=self.certainty,
        )

    def save(
        self,
        folder: str | Path,
        *,
        detailed: bool = False,
        label: str | None = None,
        metadata: Mapping[str, str] | Sequence[str] = (),
        date: str | None = None,
        metrics: Sequence[str] = METRICS,
    ) -> list[Path]:
        """Write everything into a folder: JSON, Parquet, Perfetto trace and report. Returns the files."""
        from experiments.minutes import write_minutes
        from experiments.perfetto import write_trace
        from experiments.results import save_run
        from experiments.utilisation import step_share_columns

        base, work = Path(folder), self.roofline()
        paths = save_run(
            self.record,
            self.summary,
            base,
            verdict=self.verdict,
            detailed=detailed,
            steps=True,
            label=label,
            metadata=metadata,
            date=date,
            metrics=metrics,
            certainty=self.certainty,
            step_columns=step_share_columns(self.record, work),
        )
        paths.append(write_minutes(self.record, work, base))
        return [*paths, write_trace(self.record, base / TRACE), self.report(base / REPORT)]

    def __repr__(self) -> str:
        s = self.summary
        return (
            f"<Run of {s.sent:,} requests on {self.built.model.name}/{self.built.profile.name}: "
            f"{s.request_throughput:.2f} req/s; {self.verdict.sentences[0]}>"
        )

    def _repr_html_(self) -> str:
        points = [p for p, _ in self.summary.ttft.percentiles_s]
        rows = []
        for name in self.summary.metrics:
            stats = getattr(self.summary, name)
            values_s = [stats.mean_s, *(value_s for _, value_s in stats.percentiles_s), stats.max_s]
            rows.append([name.upper(), *(number(value_s * 1000) for value_s in values_s)])
        d = self.deployment
        replicas = f"{d.data_parallel_size} x " if d.data_parallel_size > 1 else ""
        product = f"{d.gpus_per_replica} x " if d.gpus_per_replica > 1 else ""
        title = f"{replicas}{self.built.model.name} on {product}{self.built.profile.facts.product}"
        traffic = (
            f"{self.summary.completed:,} of {self.summary.sent:,} requests completed, "
            f"{self.summary.request_throughput:,.2f} a second."
        )
        head = ("ms", "mean", *(f"P{p:g}" for p in points), "max")
        notes = [] if self.summary.streams else [NOT_STREAMED]
        return card(title, [traffic, *self.verdict.sentences, *notes], head, rows)
