"""One HTML file that answers a run: verdict, headline numbers, pictures. No network, no other file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import report_figures as figures
from experiments.beams import beam_rows, candidate_rows
from experiments.certainty import THIN_MARK, certainty_lines, doubts, ends_ms, headline_rows
from experiments.drafts import draft_rows
from experiments.fleet_report import fleet_rows, limit_words, replicas_over_time
from experiments.gap_figures import itl_ecdf
from experiments.observe_figures import observed_panels
from experiments.page import list_section, page, plot_section, table_section, write_page
from experiments.perceived import perceived_rows
from experiments.report_figures import Roofline
from sim.latency import SELDOM
from sim.meta import meta_value
from sim.metrics import NOT_STREAMED, Summary
from sim.pipeline import bubble_share
from sim.record import RunRecord
from sim.saturation import Load
from sim.verdict import Verdict

if TYPE_CHECKING:
    from sim.certainty import Certainty

Panel = tuple[str, str, Any, bool]
"""Heading, how to read it, the figure, and whether it takes the page's whole width."""


def write_report(
    record: RunRecord,
    summary: Summary,
    verdict: Verdict,
    path: str | Path,
    *,
    roofline: Roofline | None = None,
    title: str | None = None,
    certainty: Certainty | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write the report and return its path; `notes` stand below the verdict. Raises UsageError."""
    text = report_html(
        record, summary, verdict, roofline=roofline, title=title, certainty=certainty, notes=notes
    )
    return write_page(text, path)


def report_html(
    record: RunRecord,
    summary: Summary,
    verdict: Verdict,
    *,
    roofline: Roofline | None = None,
    title: str | None = None,
    certainty: Certainty | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The report as one HTML document, the same bytes for the same run."""
    name = title or _name(record) or "Run"
    body = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="sub">{escape(_subtitle(record, summary))}</p>',
        _verdict(record, summary, verdict, [*doubts(verdict, certainty), *notes]),
        _cards(summary, certainty),
        *laid_out(panels(record, summary, roofline)),
        *([_certainty(certainty, summary)] if certainty is not None else []),
        _latency_table(summary),
        _engine_table(record, summary),
        _fleet_table(record),
        _footer(record),
    ]
    return page(name, body)


def panels(record: RunRecord, summary: Summary, roofline: Roofline | None) -> list[Panel]:
    """The pictures, in reading order. Those without anything to show are left out."""
    out: list[Panel] = []
    if summary.completed:
        window = figures.window_s(record, figures.LEAST)
        every = "minute" if window == 60 else f"{window:.3g} s" if window < 100 else f"{window:,.0f} s"
        out += [
            (
                "Time to first token",
                "Share of completed requests within each TTFT. It passes above the cross of an SLO it keeps.",
                figures.latency_ecdf(record, summary, "ttft"),
                False,
            ),
            (
                "Time per output token",
                "(E2EL − TTFT) / (output tokens − 1), over completed requests with more than one token.",
                figures.latency_ecdf(record, summary, "tpot"),
                False,
            )
            if summary.streams
            else _end_to_end(record, summary),
            (
                f"P95 per {every}",
                f"Over the requests that arrived in each {every}; windows with fewer than five are left out.",
                figures.p95_over_time(record, summary),
                True,
            ),
        ]
    if len(record.steps):
        out.append(
            (
                "Queue, batch and KV cache",
                "Lines are means, bands the lowest and highest value within each slice of time.",
                figures.load_over_time(record),
                True,
            )
        )
    if record.fleet is not None and len(record.fleet.event_s) > record.num_replicas:
        out.append(
            (
                "Replicas",
                "By what they do; the top edge is what is paid for.",
                replicas_over_time(record, figures.clock(record)),
                True,
            )
        )
    if summary.completed:
        out += [
            (
                "Throughput and concurrency",
                "Tokens as clients receive them; arrivals above completions fill the system.",
                figures.throughput_over_time(record),
                True,
            ),
            *_token_panels(record, summary),
            (
                "Prompt length and prefill time",
                "Points far above the others waited inside prefill, or would gain from a prefix cache.",
                figures.prefill_by_prompt(record),
                False,
            ),
            (
                "The slowest requests",
                "Where their time went. Labels are request · prompt→output tokens.",
                figures.slowest(record),
                False,
            ),
        ]
    if roofline is not None and len(record.steps) and math.isfinite(roofline.peak_flops_per_s):
        out.append(
            (
                "Roofline of the steps",
                "Steps by arithmetic intensity and speed, sized by device time, below the peaks of "
                f"{roofline.device or 'the device'}. Left of the bend memory limits them, right of it compute.",
                figures.roofline(record, roofline),
                True,
            )
        )
    out += observed_panels(record, roofline)
    if len(summary.tenants) > 1:
        out.append(("Latency by tenant", "Over completed requests.", figures.by_tenant(summary), True))
    return out


def _token_panels(record: RunRecord, summary: Summary) -> list[Panel]:
    """Gaps between tokens where their times are known, beside the whole answer's time; none where nothing streamed."""
    if not summary.streams:
        return []
    whole = _end_to_end(record, summary)
    if not summary.itl.count:
        return [whole]
    words = "Gaps between tokens of one request, all together: steps that carry prompts make the long ones."
    return [("Inter-token latency", words, itl_ecdf(record, summary), False), whole]


def _end_to_end(record: RunRecord, summary: Summary) -> Panel:
    words = "Share of completed requests within each E2EL, from sending to the last token."
    return "End to end", words, figures.latency_ecdf(record, summary, "e2el"), False


def laid_out(items: Iterable[Panel]) -> Iterable[str]:
    """Sections of panels, the narrow ones side by side where there is room."""
    narrow: list[str] = []
    for index, (heading, words, fig, wide) in enumerate(items):
        section = plot_section(index, heading, words, fig)
        if not wide:
            narrow.append(section)
            continue
        if narrow:
            yield f'<div class="grid">{"".join(narrow)}</div>'
            narrow = []
        yield section
    if narrow:
        yield f'<div class="grid">{"".join(narrow)}</div>'


def _name(record: RunRecord) -> str:
    """Label, model and GPUs, those of all pools of a fleet."""
    gpus = _facts(record, "gpu")
    if record.fleet is not None:
        gpus = list(dict.fromkeys(pool.gpu for pool in record.fleet.pools))
    return " · ".join([*_facts(record, "label", "model_id"), *([" + ".join(gpus)] if gpus else [])])


def _subtitle(record: RunRecord, summary: Summary) -> str:
    clock = "on the engine" if meta_value(record, "real") else "simulated"
    words = [f"{summary.sent:,} requests", f"{summary.duration_s:,.1f} s {clock}"]
    if record.num_replicas > 1:
        words.append(f"{record.num_replicas} replicas")
    words += [f"seed {seed}" for seed in _facts(record, "seed")]
    return " · ".join(words)


def _verdict(record: RunRecord, summary: Summary, verdict: Verdict, notes: Sequence[str]) -> str:
    lines = []
    if record.interrupted:
        lines.append(("warn", "Interrupted: these results are partial."))
    marks = [{True: "good", False: "bad", None: "warn"}[o.met] for o in verdict.slos]
    rest = verdict.sentences[len(marks) :]
    load = {Load.SATURATED: "bad", Load.STABLE: "good"}.get(verdict.saturation.load, "warn")
    marks += ["bad"] * (len(rest) - 2) + [load, "plain"]
    lines += list(zip(marks, verdict.sentences, strict=True))
    if not summary.streams:
        lines.append(("plain", NOT_STREAMED))
    return list_section("Verdict", [*lines, *(("warn", text) for text in (*summary.warnings, *notes))])


def _certainty(certainty: Certainty, summary: Summary) -> str:
    """What the intervals are, and what lies outside the measured hull, unless the verdict warns of it."""
    lines = certainty_lines(certainty, summary.warnings)
    if not lines:
        return ""
    marked = [("warn" if line.startswith(("Not", THIN_MARK)) else "plain", line) for line in lines]
    head = ["", "Predicted", "95% from", "to", "calibration", "noise", "sampling"]
    rows = headline_rows(certainty, summary.metrics)
    table = table_section("Intervals and where their variance comes from", head, rows) if rows else ""
    return list_section("How sure", marked) + table


def _between(certainty: Certainty | None, name: str) -> str:
    """A card's 95 % interval in ms, or nothing."""
    interval = None if certainty is None else certainty.interval(name)
    return "" if interval is None else f" [{ends_ms(interval)}]"


def _cards(s: Summary, certainty: Certainty | None = None) -> str:
    pace = [(_ms(_p95(s.tpot)), "P95 TPOT" + _between(certainty, "p95_tpot"))] if s.streams else []
    cards = [
        (_ms(_p95(s.ttft)), "P95 TTFT" + _between(certainty, "p95_ttft")),
        *pace,
        (_ms(_p95(s.e2el)), "P95 end to end" + _between(certainty, "p95_e2el")),
        (f"{s.request_throughput:,.2f}/s", "requests completed"),
        (f"{s.output_throughput:,.0f}/s", "output tokens"),
    ]
    if s.slo_attainment is not None and s.request_goodput is not None:
        cards.append(
            (f"{s.slo_attainment:.1%}", f"SLO attainment (good / sent), {s.request_goodput:,.2f}/s good")
        )
    cards += [
        (f"{s.batch_occupancy_mean:.0%}", f"batch occupancy, at most {s.batch_occupancy_max:.0%}"),
        (f"{s.kv_occupancy_mean:.0%}", f"KV occupancy, at most {s.kv_occupancy_max:.0%}"),
        (f"{s.prefix_hit_rate:.0%}", "of prompt tokens cached"),
        (f"{s.failed:,}", f"failed of {s.sent:,} requests"),
    ]
    items = "".join(f'<div class="card"><b>{escape(v)}</b><span>{escape(n)}</span></div>' for v, n in cards)
    return f'<div class="cards">{items}</div>'


def _latency_table(s: Summary) -> str:
    points = [p for p, _ in s.ttft.percentiles_s]
    head = ["ms", "Mean", "Std", *(f"P{p:g}" for p in points), "Max"]
    rows = []
    for metric in s.metrics:
        stats = getattr(s, metric)
        if metric == "itl" and not stats.count:
            continue
        values = [stats.mean_s, stats.std_s, *(v for _, v in stats.percentiles_s), stats.max_s]
        name = "ITL (per event)" if metric == "itl" else metric.upper()
        rows.append([name, *(_number(v * 1000) for v in values)])
    return table_section("Latencies", head, rows)


def _engine_table(record: RunRecord, s: Summary) -> str:
    rows = [
        [f"Stage: {name}", _number(t * 1000) + " ms", f"{s.stage_share[name]:.1%} of mean E2EL"]
        for name, t in s.stage_mean_s.items()
        if t or name not in SELDOM
    ]
    rows += [
        ["Preemptions", f"{s.preemptions:,}", ""],
        ["GPU busy", f"{s.gpu_busy_share:.1%}", "device time / duration"],
        *(
            [["Pipeline bubbles", f"{bubbles:.1%}", "time that stages idle / time with steps in flight"]]
            if (bubbles := bubble_share(record)) is not None
            else []
        ),
        ["Engine steps", f"{s.num_steps:,}", ""],
        ["Most requests in the system", f"{s.max_in_system:,}", "at one instant"],
        [
            "Batch",
            f"{limit_words(record, 'max_num_seqs')} sequences",
            f"{limit_words(record, 'max_num_batched_tokens')} tokens a step",
        ],
        ["KV cache", f"{limit_words(record, 'num_pages')} pages", f"of {record.page_tokens} tokens"],
    ]
    if s.perceived is not None:
        rows += [[name.rstrip(":"), value, note] for name, value, note in perceived_rows(s.perceived)]
    if record.drafts is not None:
        rows += [[name.rstrip(":"), value, note] for name, value, note in draft_rows(record.drafts)]
    if record.beams is not None:
        rows += [[name.rstrip(":"), value, note] for name, value, note in beam_rows(record.beams)]
    if record.candidates is not None:
        rows += [[name.rstrip(":"), value, note] for name, value, note in candidate_rows(record.candidates)]
    return table_section("Stages and engine", ["", "", ""], rows)


def _fleet_table(record: RunRecord) -> str:
    found = fleet_rows(record)
    return "" if found is None else table_section("Pools and replicas", *found)


def _footer(record: RunRecord) -> str:
    argv = meta_value(record, "argv")
    parts = [" ".join(["Made by TokenTwin", *_facts(record, "version")])]
    parts += [f"commit {commit}" for commit in _facts(record, "git_commit")]
    parts += [f"profile {profile}" for profile in _facts(record, "profile_hash")]
    parts += [f"all-reduce of {source}" for source in _facts(record, "all_reduce")]
    parts += [f"products {source}" for source in _facts(record, "products")]
    command = f"<br><code>{escape(' '.join(map(str, argv)))}</code>" if isinstance(argv, list | tuple) else ""
    return f"<footer>{escape(' · '.join(parts))}{command}</footer>"


def _facts(record: RunRecord, *keys: str) -> list[str]:
    found = (meta_value(record, key) for key in keys)
    return [str(value) for value in found if value is not None]


def _p95(stats: Any) -> float:
    return dict(stats.percentiles_s).get(95.0, stats.max_s) if stats.count else math.nan


def _ms(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    return f"{seconds:,.2f} s" if seconds >= 10 else f"{seconds * 1000:,.4g} ms"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
