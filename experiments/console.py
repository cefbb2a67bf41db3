"""A run as a table in the terminal: the rows of `vllm bench serve` by their names, then what the twin knows.

Plain text when the output is not a terminal, never wider than 80 columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from experiments.beams import beam_rows, candidate_rows
from experiments.certainty import bracket, certainty_lines, doubts
from experiments.drafts import draft_rows
from experiments.fleet_report import fleet_lines, limit_words
from experiments.observed import alert_lines, utilisation_rows
from experiments.perceived import perceived_rows
from experiments.results import METRICS
from sim.latency import SELDOM, LatencyStats
from sim.meta import meta_value
from sim.metrics import NOT_STREAMED, Summary
from sim.pipeline import bubble_share
from sim.record import RunRecord
from sim.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console

    from sim.certainty import Certainty

WIDTH = 80
Row = tuple[str, str, str]
"""Name, value, and the formula where another tool could mean something else."""

LATENCIES = (
    ("ttft", "TTFT", "Time to First Token", "send to first token received"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)", "(E2EL - TTFT) / (tokens - 1)"),
    ("itl", "ITL", "Inter-token Latency", "gap between stream events"),
    ("e2el", "E2EL", "End-to-end Latency", "send to last token received"),
)
NOTHING_STREAMED: list[Row] = [(NOT_STREAMED, "", "")]
STAGE_WORDS = {
    "blocked": "Blocked",
    "network": "Network",
    "gateway": "Gateway",
    "tokenize": "Tokenise",
    "queue": "Queue",
    "prefill": "Prefill",
    "decode": "Decode",
    "detokenize": "Detokenise",
    "stream": "Stream",
    "reader": "Reader",
}


def print_run(
    record: RunRecord,
    summary: Summary,
    verdict: Verdict | None = None,
    *,
    console: Console | None = None,
    metrics: Sequence[str] = METRICS,
    certainty: Certainty | None = None,
) -> None:
    """Print a run. The console defaults to standard output; `metrics` are the latencies to print, `certainty` their
    intervals.
    """
    from rich.console import Console
    from rich.text import Text

    out = console or Console()
    width = min(WIDTH, out.width)
    for title, rows in sections(record, summary, metrics, certainty):
        out.print(Text(f" {title} ".center(width, "="), style="bold"))
        for row in rows:
            out.print(_line(row, width), no_wrap=True, crop=True)
    if len(summary.tenants) > 1:
        out.print(Text(" Tenants ".center(width, "="), style="bold"))
        for line in _tenant_lines(summary):
            out.print(Text(line[:width]), no_wrap=True, crop=True)
    if fleet := fleet_lines(record):
        out.print(Text(" Fleet ".center(width, "="), style="bold"))
        for line in fleet:
            out.print(Text(line[:width]), no_wrap=True, crop=True)
    sure = certainty_lines(certainty, summary.warnings) if certainty is not None else []
    if sure:
        out.print(Text(" Certainty ".center(width, "="), style="bold"))
        _print_wrapped(out, sure, width, "dim")
    alerts = alert_lines(record)
    if alerts:
        out.print(Text(" Alerts ".center(width, "="), style="bold"))
        for fired, line in alerts:
            _print_wrapped(out, [line], width, "red" if fired else "green")
    notes = [f"Warning: {warning}" for warning in summary.warnings]
    if record.interrupted:
        notes.insert(0, "Warning: interrupted; these results are partial")
    if notes:
        out.print(Text(" Warnings ".center(width, "="), style="bold"))
        _print_wrapped(out, notes, width, "yellow")
    if verdict is not None:
        out.print(Text(" Verdict ".center(width, "="), style="bold"))
        bad = verdict.meets_slos is False or verdict.saturated is True
        style, promises = "red" if bad else "green", len(verdict.slos)
        for outcome, line in zip(verdict.slos, verdict.sentences, strict=False):
            _print_wrapped(out, [line], width, "yellow" if outcome.met is None else style)
        _print_wrapped(out, doubts(verdict, certainty), width, "yellow")
        _print_wrapped(out, verdict.sentences[promises:], width, style)
    out.print(Text("=" * width, style="bold"))


def sections(
    record: RunRecord,
    summary: Summary,
    metrics: Sequence[str] = METRICS,
    certainty: Certainty | None = None,
) -> list[tuple[str, list[Row]]]:
    """The table's titles and rows, as text."""
    out = [("Serving Benchmark Result", _headline(record, summary, certainty))]
    for name, short, title, formula in LATENCIES:
        if name not in metrics:
            continue
        rows = NOTHING_STREAMED
        if name in summary.metrics:
            rows = _latency(short, getattr(summary, name), formula, certainty)
        if rows != out[-1][1]:
            out.append((title, rows))
    stages = [
        (
            f"{word} (ms):",
            _num(summary.stage_mean_s[name] * 1000),
            f"{summary.stage_share[name]:.1%} of mean E2EL",
        )
        for name, word in STAGE_WORDS.items()
        if summary.stage_mean_s[name] or name not in SELDOM
    ]
    out.append(("Stages (mean)", stages))
    if summary.perceived is not None:
        out.append(("Reading", perceived_rows(summary.perceived)))
    out.append(("Engine", _engine(record, summary)))
    if record.drafts is not None:
        out.append(("Speculative Decoding", draft_rows(record.drafts)))
    if record.beams is not None:
        out.append(("Beam Search", beam_rows(record.beams)))
    if record.candidates is not None:
        out.append(("Best Of", candidate_rows(record.candidates)))
    return out


def _headline(record: RunRecord, s: Summary, certainty: Certainty | None) -> list[Row]:
    rate, limit = meta_value(record, "request_rate"), meta_value(record, "max_concurrency")
    rows = [
        ("Successful requests:", str(s.completed), f"of {s.sent} sent"),
        ("Failed requests:", str(s.failed), _failed(s)),
    ]
    if limit is not None:
        rows.append(("Maximum request concurrency:", str(limit), ""))
    if isinstance(rate, float | int) and math.isfinite(rate):
        rows.append(("Request rate configured (RPS):", _num(float(rate)), ""))
    rows += [
        ("Benchmark duration (s):", _num(s.duration_s), "first send to last completion"),
        ("Total input tokens:", str(s.total_input_tokens), "of completed requests"),
        ("Total generated tokens:", str(s.total_output_tokens), ""),
        (
            "Request throughput (req/s):",
            _num(s.request_throughput),
            bracket(certainty, "request_throughput", 1.0) or "completed / duration",
        ),
    ]
    if s.request_goodput is not None and s.slo_attainment is not None:
        limits = s.goodput_limits.limits_s().items()
        words = " ".join(f"{name}<={limit_s * 1000:g}" for name, limit_s in limits if name in s.metrics)
        between = bracket(certainty, "request_goodput", 1.0)
        attained = bracket(certainty, "slo_attainment", 100.0)
        rows.append(
            ("Request goodput (req/s):", _num(s.request_goodput), between or words or "limits per tenant")
        )
        if between and words:
            rows.append((f"  ({words})", "", ""))
        rows.append(("SLO attainment (%):", _num(s.slo_attainment * 100), attained or "good / sent"))
        for name, share in s.slo_attainment_by_metric.items():
            rows.append((f"  {name.upper()} within its limit (%):", _num(share * 100), ""))
    return [
        *rows,
        (
            "Output token throughput (tok/s):",
            _num(s.output_throughput),
            bracket(certainty, "output_throughput", 1.0),
        ),
        ("Peak output token throughput (tok/s):", _num(s.max_output_tokens_per_s), "in one second"),
        ("Peak concurrent requests:", _num(s.max_concurrent_requests), "in one second"),
        (
            "Total token throughput (tok/s):",
            _num(s.total_token_throughput),
            bracket(certainty, "total_token_throughput", 1.0) or "input + output",
        ),
    ]


def _failed(s: Summary) -> str:
    if not s.errors:
        return f"{s.rejected} rejected, {s.unfinished} unfinished"
    kinds = ((s.rejected, "rejected"), (s.errors, "failed"), (s.unfinished, "open"))
    return ", ".join(f"{count} {word}" for count, word in kinds if count)


def _latency(short: str, stats: LatencyStats, formula: str, certainty: Certainty | None) -> list[Row]:
    metric = short.lower()
    mean, median = (bracket(certainty, f"{statistic}_{metric}") for statistic in ("mean", "median"))
    rows = [
        (f"Mean {short} (ms):", _num(stats.mean_s * 1000), mean or formula),
        (f"Median {short} (ms):", _num(stats.median_s * 1000), median),
    ]
    for p, value_s in stats.percentiles_s:
        if p != 50:
            note = bracket(certainty, f"p{p:g}_{metric}")
            rows.append((f"P{p:g} {short} (ms):", _num(value_s * 1000), note))
    if mean:
        rows.append((f"  ({formula})", "", ""))
    return rows


def _engine(record: RunRecord, s: Summary) -> list[Row]:
    seats, pages = (limit_words(record, name).replace(",", "") for name in ("max_num_seqs", "num_pages"))
    idle = "" if " to " in seats else ", idle as 0"
    return [
        ("Batch occupancy, mean (%):", _num(s.batch_occupancy_mean * 100), f"running / {seats}{idle}"),
        ("Batch occupancy, while busy (%):", _num(s.batch_occupancy_busy * 100), ""),
        ("Batch occupancy, max (%):", _num(s.batch_occupancy_max * 100), ""),
        ("KV occupancy, mean (%):", _num(s.kv_occupancy_mean * 100), f"pages held / {pages}"),
        ("KV occupancy, max (%):", _num(s.kv_occupancy_max * 100), ""),
        ("Prefix cache hit rate (%):", _num(s.prefix_hit_rate * 100), "cached / prompt tokens"),
        ("Preemptions:", str(s.preemptions), ""),
        *(
            [("Answered before:", str(s.answered_before), "by the response cache")]
            if s.answered_before
            else []
        ),
        ("GPU busy (%):", _num(s.gpu_busy_share * 100), "device time / duration"),
        *(
            [("Pipeline bubbles (%):", _num(bubbles * 100), "stages idle / steps in flight")]
            if (bubbles := bubble_share(record)) is not None
            else []
        ),
        *utilisation_rows(record),
        ("Engine steps:", str(s.num_steps), ""),
        (
            "Run time (s):" if meta_value(record, "real") else "Simulated time (s):",
            _num(s.sim_duration_s),
            "",
        ),
    ]


def _tenant_lines(summary: Summary) -> Iterable[str]:
    yield f"{'':<20}{'sent':>7}{'failed':>7}{'P95 TTFT':>11}{'P95 TPOT':>10}{'P95 E2EL':>12}{'good %':>8}"
    for t in summary.tenants:
        p95 = [dict(stats.percentiles_s).get(95.0, math.nan) * 1000 for stats in (t.ttft, t.tpot, t.e2el)]
        good = _num(t.slo_attainment * 100, 1) if t.slo_attainment is not None else "-"
        ttft, tpot, e2el = (_num(value, 1) for value in p95)
        failed = t.sent - t.completed
        yield f"{t.name[:19]:<20}{t.sent:>7}{failed:>7}{ttft:>11}{tpot:>10}{e2el:>12}{good:>8}"


def _line(row: Row, width: int) -> object:
    from rich.text import Text

    name, value, note = row
    line = f"{name:<40} {value:<10}" if note else f"{name:<40} {value}"
    room = width - len(line) - 1
    text = Text(line)
    if note and room >= len(note):
        text.append(f" {note}", style="dim")
    return text


def _print_wrapped(out: Console, lines: Iterable[str], width: int, style: str) -> None:
    import textwrap

    unicode = out.encoding.lower().startswith("utf")
    for line in lines:
        plain = line if unicode else line.replace("≤", "<=").encode("ascii", "replace").decode()
        for part in textwrap.wrap(plain, width, subsequent_indent="  "):
            out.print(part, style=style, markup=False, highlight=False)


def _num(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"
