"""The tables of engine and twin in docs/validation.md: `python -m experiments.live_doc FOLDER… [--write FILE]`.

Each folder is what `tokentwin validate --live -o` saved. Tables go between the two marks of the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.results import writable
from serving.errors import TokenTwinError, UsageError

BEGIN, END = "<!-- live: made by experiments.live_doc -->", "<!-- end of live -->"
SHOWN = ("ttft mean", "ttft p95", "tpot mean", "tpot p95", "e2el mean", "e2el p95")


def read(folder: Path) -> dict[str, Any]:
    """One saved validation. Raises `UsageError` for anything else."""
    path = folder / "live.json" if folder.is_dir() else folder
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != "tokentwin-live/1":
            raise KeyError(found["schema"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: no result of tokentwin validate --live ({error})") from None
    return dict(found)


def tables(folders: Sequence[Path]) -> str:
    """Two Markdown tables: every load of every run, and every run's medians."""
    runs = [(folder.name, read(folder)) for folder in folders]
    loads = [_row(("run", "load", *SHOWN, "steps", "machine")), _row(["---"] * (len(SHOWN) + 4))]
    for name, run in runs:
        for load in run["loads"]:
            figures = {f"{f['metric']} {f['statistic']}": f for f in load["figures"]}
            cells = [f"{figures[s]['real_ms']:,.0f} ({figures[s]['error'] or 0.0:+.1%})" for s in SHOWN]
            loads.append(
                _row(
                    (
                        name,
                        f"{load['load']:g}",
                        *cells,
                        f"{load['step_bias']['all']:+.1%}",
                        f"{load['wander']:+.1%}",
                    )
                )
            )
    names = list(runs[0][1]["median_absolute_error_to_load_0.8"])
    medians = [_row(("run", *names, "covered", "wander")), _row(["---"] * (len(names) + 3))]
    for name, run in runs:
        errors = run["median_absolute_error_to_load_0.8"]
        covered = run["coverage"]
        medians.append(
            _row(
                (
                    name,
                    *(f"{errors[n]:.1%}" if errors[n] is not None else "" for n in names),
                    "" if covered is None else f"{covered:.0%}",
                    f"{run['wander']:.1%}",
                )
            )
        )
    return "\n".join([*medians, "", *loads])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def spliced(page: str, text: str) -> str:
    """`page` with `text` between the marks. Raises `UsageError` when it has no marks."""
    if BEGIN not in page or END not in page:
        raise UsageError(f"the page has no lines {BEGIN!r} and {END!r} to write between")
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}"


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.live_doc", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, help="put the tables into this page instead of printing them")
    options = parser.parse_args(arguments)
    try:
        text = tables(options.folders)
        if options.write is None:
            sys.stdout.write(text + "\n")
        else:
            with writable(options.write):
                page = options.write.read_text(encoding="utf-8")
                options.write.write_text(spliced(page, text), encoding="utf-8")
    except TokenTwinError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
