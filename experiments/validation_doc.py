"""All tables of docs/validation.md: `python -m experiments.validation_doc --write docs/validation.md`.

Replays every yardstick with the shipped profiles, and puts every table between its marks: real engines, kernels, models
left out, the spread of prices in an engine, and our own engine from the results that are kept beside the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from calibration import drain, engine_spread, kernel_errors, leave_model_out, step_times
from calibration.compare import METRICS, STATISTICS, Comparison
from calibration.compare_host import Gaps, fit_gaps, with_gaps
from calibration.doc_tables import between
from calibration.runs_vllm import read_runs
from calibration.validate import validate
from experiments import live_doc
from experiments.results import writable
from serving.errors import TokenTwinError, UsageError

RUNS = {"RTX 4090": "lss_rtx4090_llama31-8b_tp1", "RTX PRO 6000": "lss_rtxpro6000_llama31-8b_tp1"}
POINTS = "inferencex_llama70b_fp8_h200_vllm.csv"
BEGIN, END = "<!-- yardsticks: made by experiments.validation_doc -->", "<!-- end of yardsticks -->"


LIVE = ("smollm2-64", "smollm2-512", "random-64", "random-512")
"""Runs of our own engine whose results are kept, in the order of the page."""


def filled(page: str, data: Path, live: Path, *, models: bool = True) -> str:
    """`page` with all its tables made anew, from `data` (kernels/ and yardstick/) and the results in `live`.

    `models`: those of models left out as well, which take minutes. Raises `UsageError` for missing data or marks.
    """
    page = between(page, "kernel errors", kernel_errors.table())
    page = live_doc.spliced(page, live_doc.tables([live / name for name in LIVE]))
    page = between(page, "engine spread", engine_spread.table(data))
    page = between(page, "steps", step_times.table(data / "yardstick"))
    page = between(page, "drain", drain.table(data / "yardstick"))
    page = spliced(page, tables(data / "yardstick"))
    if models:
        left = [
            row for d in leave_model_out.DEVICES for row in leave_model_out.leave_out(d, data / "kernels")
        ]
        page = between(page, "models left out", leave_model_out.table(left))
    return page


def tables(folder: Path, *, fits: bool = True) -> str:
    """The tables of real engines as Markdown; `fits` False leaves out the host gaps, which are fitted.

    Raises `UsageError` when a yardstick cannot be read.
    """
    predicted = {name: validate(None, folder, run=run) for name, run in RUNS.items()}
    recorded = validate(None, folder, run=RUNS["RTX 4090"], recorded_pages=True)
    runs = {**predicted, "RTX 4090, recorded page count": recorded}
    points = validate(None, folder / POINTS)
    parts = [
        _summary(runs),
        _figures(runs),
        _series(runs),
        *([_gaps(folder)] if fits else []),
        _points_summary(points),
        _points(points),
    ]
    return "\n\n".join(parts)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([_row(head), _row(["---"] * len(head)), *(_row(row) for row in rows)])


def _summary(runs: dict[str, Comparison]) -> str:
    rows = []
    for name, found in runs.items():
        worst, pages = found.worst(), found.pages
        assert pages is not None
        counted = f"{pages.predicted:,}" + (
            f" of {pages.recorded:,} ({pages.error:+.1%})" if pages.recorded else ""
        )
        mean = f"{found.mean_error():.2%} ({found.bias():+.2%})"
        rows.append([name, mean, f"{worst.error:+.2%} ({worst.metric} {worst.statistic})", counted])
    return _table(["run", "mean absolute error (bias)", "largest", "KV pages predicted"], rows)


def _figures(runs: dict[str, Comparison]) -> str:
    rows = []
    for metric in METRICS:
        for statistic in STATISTICS:
            row = [f"{metric} {statistic}"]
            for found in runs.values():
                f = next(f for f in found.figures if (f.metric, f.statistic) == (metric, statistic))
                row += [f"{f.real_ms:,.1f}", f"{f.twin_ms:,.1f}", f"{f.error:+.2%}"]
            rows.append(row)
    head = [" "] + [f"{name}: {what}" for name in runs for what in ("real ms", "twin ms", "error")]
    return _table(head, rows)


def _series(runs: dict[str, Comparison]) -> str:
    rows = []
    for name, found in runs.items():
        rms = {s.name: s.rms for s in found.series}
        kv = f"{rms['kv'] * 100:.1f}" if "kv" in rms else "not recorded"
        rows.append([name, f"{rms['running']:.2f}", f"{rms['waiting']:.2f}", kv])
    return _table(
        ["RMS difference of the 1 Hz series", "running", "waiting", "KV pages (points of a percent)"], rows
    )


def _gaps(folder: Path) -> str:
    cases = {name: read_runs(folder, run, None, None) for name, run in RUNS.items()}
    fitted = {"none": Gaps()} | {
        f"fitted on {name}": fit_gaps(case, per_seq=True) for name, case in cases.items()
    }
    fitted["fitted on both"] = fit_gaps(*cases.values(), per_seq=True)
    rows = []
    for name, gaps in fitted.items():
        row = [name, f"{gaps.step_s * 1e3:.2f} ms", f"{gaps.prefill_s * 1e3:.2f} ms"]
        row.append(f"{gaps.per_seq_s * 1e6:.1f} µs")
        for case in cases.values():
            found = with_gaps(case, gaps)
            row.append(f"{found.mean_error():.2%} / {found.worst().error:+.2%}")
        rows.append(row)
    return _table(
        [
            "host gaps",
            "a step",
            "a step with prompts",
            "a sequence",
            *(f"{n}: mean / largest" for n in cases),
        ],
        rows,
    )


def _points_summary(found: Comparison) -> str:
    rows = []
    for metric in ("tpot", "ttft"):
        worst = found.worst(metric)
        apart = [f for f in found.excluded() if f.metric == metric]
        words = "; ".join(f"{f.label} {f.error:+.1%}" for f in apart)
        mean = f"{found.mean_error(metric):.1%} ({found.bias(metric):+.1%})"
        rows.append(
            [metric, str(len(found.counted(metric))), mean, f"{worst.error:+.1%} ({worst.label})", words]
        )
    return _table(
        ["InferenceX", "points", "mean absolute error (bias)", "largest", "KV-saturated, apart"], rows
    )


def _points(found: Comparison) -> str:
    by_label: dict[str, dict[str, str]] = {}
    for f in found.figures:
        cell = f"{f.real_ms:,.1f} → {f.twin_ms:,.1f} ({f.error:+.1%})"
        by_label.setdefault(f.label + (" *" if f.excluded else ""), {})[f.metric] = cell
    rows = [[label, cells["ttft"], cells["tpot"]] for label, cells in by_label.items()]
    return _table(["ISL/OSL, devices, clients", "TTFT, ms: real → twin", "TPOT, ms: real → twin"], rows)


def spliced(page: str, text: str) -> str:
    """`page` with `text` between its marks. Raises `UsageError` when it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"the page lacks the lines {BEGIN!r} and {END!r}; put them where the tables belong")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(prog="python -m experiments.validation_doc", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--write", type=Path, metavar="FILE", help="page to put all tables into")
    parser.add_argument(
        "--quick", action="store_true", help="without the models left out, which take minutes"
    )
    given = parser.parse_args(arguments)
    try:
        if given.quick and given.write is None:
            raise UsageError("--quick leaves tables out of a page; give --write FILE too")
        if given.write is None:
            sys.stdout.write(tables(given.data / "yardstick") + "\n")
        else:
            with writable(given.write):
                page = given.write.read_text(encoding="utf-8")
                live = given.write.parent / "validation" / "live"
                made = filled(page, given.data, live, models=not given.quick)
                given.write.write_text(made, encoding="utf-8")
    except TokenTwinError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
