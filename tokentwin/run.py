"""A finished run: its record, its numbers and its verdict, and the ways to look at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.results import METRICS
from sim.certainty import Certainty
from sim.deployment import Built, Deployment
from sim.metrics import Summary
from sim.record import RunRecord, Status
from sim.verdict import Verdict

if TYPE_CHECKING:
    from experiments.report_figures import Roofline

TRACE, REPORT = "trace.json.gz", "report.html"


@dataclass(frozen=True)
class Run:
    """What `tt.simulate` returns. Picklable; shows itself in a notebook."""

    record: RunRecord
    summary: Summary
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
    def requests(self) -> Any:
        """One row per request: a pandas DataFrame where pandas is installed, else a `pyarrow.Table`."""
        from experiments.results import request_columns

        return _frame(request_columns(self.record))

    @property
    def steps(self) -> Any:
        """One row per engine step, as `requests`."""
        return _frame(self.record.steps.columns())

    def summary_table(self) -> Any:
        """Latencies in ms, one row per metric, as `requests`."""
        rows: list[dict[str, Any]] = []
        for name in METRICS:
            stats = getattr(self.summary, name)
            points = {f"p{p:g}": value_s * 1000 for p, value_s in stats.percentiles_s}
            row = {
                "metric": name,
                "count": stats.count,
                "mean": stats.mean_s * 1000,
                "std": stats.std_s * 1000,
            }
            rows.append({**row, **points, "max": stats.max_s * 1000})
        return _frame({key: [row[key] for row in rows] for key in rows[0]})

    def print(self) -> None:
        """The table that `tokentwin simulate` prints."""
        from experiments.console import print_run

        print_run(self.record, self.summary, self.verdict, certainty=self.certainty)

    def roofline(self) -> Roofline:
        """FLOPs and bytes of every step on one device, beside the device's peaks.

        Every prompt chunk counts as sampled once, which overstates the LM head's work of unfinished chunks.
        """
        from experiments.report_figures import Roofline

        s, pricer = self.record.steps, self.built.pricer
        flops, num_bytes = pricer.step_work(
            s.num_tokens,
            s.num_decodes + s.num_prefills,
            s.prefill_attention_area,
            s.prefill_context_sum,
            s.decode_context_sum,
        )
        peaks = (pricer.peak_flops, pricer.peak_bytes_per_s)
        return Roofline(flops, num_bytes, *peaks, device=self.built.profile.facts.product)

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
        from experiments.perfetto import write_trace
        from experiments.results import save_run

        base = Path(folder)
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
        )
        return [*paths, write_trace(self.record, base / TRACE), self.report(base / REPORT)]

    def __repr__(self) -> str:
        s = self.summary
        return (
            f"<Run of {s.sent:,} requests on {self.built.model.name}/{self.built.profile.name}: "
            f"{s.request_throughput:.2f} req/s; {self.verdict.sentences[0]}>"
        )

    def _repr_html_(self) -> str:
        lines = "".join(f"<li>{escape(line)}</li>" for line in self.verdict.sentences)
        points = [p for p, _ in self.summary.ttft.percentiles_s]
        head = "".join(f"<th>{name}</th>" for name in ("ms", "mean", *(f"P{p:g}" for p in points), "max"))
        rows = []
        for name in METRICS:
            stats = getattr(self.summary, name)
            values = [stats.mean_s, *(v for _, v in stats.percentiles_s), stats.max_s]
            cells = "".join(f"<td>{value * 1000:,.2f}</td>" for value in values)
            rows.append(f"<tr><th>{name.upper()}</th>{cells}</tr>")
        title = escape(f"{self.built.model.name} on {self.built.profile.facts.product}")
        return (
            f"<div><b>{title}</b>: {self.summary.sent:,} requests, "
            f"{self.summary.request_throughput:,.2f} completed a second<ul>{lines}</ul>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        )


def _frame(columns: Mapping[str, Any]) -> Any:
    if find_spec("pandas") is not None:
        return import_module("pandas").DataFrame(dict(columns))
    pa: Any = import_module("pyarrow")
    return pa.table({name: pa.array(values, from_pandas=True) for name, values in columns.items()})
