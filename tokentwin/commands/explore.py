"""`tokentwin explore SWEEP`: one page to find out what a sweep or a plan says, down to the report of each point."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from experiments.explore_data import load_space
from experiments.explore_space import Point, Space
from serving.errors import UsageError
from tokentwin.commands.sweep import BASE_FLAGS, SERVING
from tokentwin.config_file import configurable, typed
from tokentwin.flags import as_path
from tokentwin.outputs import check_file

PAGE = "explore.html"
MOST_REPORTS = 50


@configurable
def explore(
    results: Annotated[
        Path,
        Parameter(
            help="Folder of a sweep (or its results.parquet), or of a plan (or its plan.json).",
            converter=as_path,
        ),
    ],
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(alias="-o", help=f"The page's file. [default: {PAGE} in the folder]", show_default=False),
    ] = None,
    reports: Annotated[
        list[str] | None,
        Parameter(
            help="Run these points again and save them with their reports: numbers, or front for those on the front.",
            consume_multiple=True,
            negative_iterable=(),
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        Parameter(
            help="Dollars per GPU and hour: h200=3.5 h100=2.9. [default: examples, which are no quotes]",
            consume_multiple=True,
            negative_iterable=(),
            show_default=False,
        ),
    ] = None,
    prices: Annotated[Path | None, Parameter(help="YAML file of prices.")] = None,
) -> int:
    """Make a page of a sweep or a plan: which points keep the limits, trade-offs, heatmaps, capacity for money.

    Example: tokentwin explore results/chunk --reports front
    """
    from experiments.explore import explore_html, front_numbers
    from experiments.page import write_page
    from experiments.prices import load_prices

    space = load_space(results, serving=SERVING)
    if space.kind == "plan" and (price or prices):
        raise UsageError(
            "--price and --prices have no effect on a plan, which has its own; move them on the page"
        )
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"-o {output}: a page is one file; name it, such as -o {output / PAGE}")
    known = load_prices(prices, price or ())
    there = {point.gpu for point in space.points}
    if price and (
        unused := [gpu for gpu in (item.partition("=")[0].strip() for item in price) if gpu not in there]
    ):
        raise UsageError(
            f"--price {unused[0]}: no point of {results} is on it; price {', '.join(sorted(there))}"
        )
    page = output or space.root / PAGE
    check_file(page)
    if reports:
        if space.kind == "plan":
            raise UsageError(
                "--reports has no effect on a plan: tokentwin plan -o saved a report of each fleet"
            )
        for point in _chosen(space, reports, front_numbers(space, known)):
            _save(space, point)
    make = ""
    if space.kind == "sweep" and space.points[0].folder is not None:
        given = [*(["-o", str(output)] if output else []), *(["--price", *price] if price else [])]
        given += ["--prices", str(prices)] if prices else []
        make = shlex.join(["tokentwin", "explore", str(results), *given, "--reports"]) + " NUMBER"
    write_page(explore_html(space, page.parent, known, make=make), page)
    for note in space.notes if space.kind == "sweep" else ():
        sys.stdout.write(f"Note: {note}\n")
    sys.stdout.write(f"Wrote {page}\n")
    return 0


def _chosen(space: Space, asked: Sequence[str], front: Sequence[int]) -> list[Point]:
    by_number = {point.number: point for point in space.points}
    numbers: dict[int, None] = {}
    for word in asked:
        if word == "front":
            if not front:
                raise UsageError("--reports front: no point keeps the promises; name points by number")
            numbers |= dict.fromkeys(front)
        elif word.isdigit() and int(word) in by_number:
            numbers[int(word)] = None
        else:
            raise UsageError(
                f"--reports {word}: not a point; they are numbered {min(by_number)} to {max(by_number)}, or say front"
            )
    failed = [number for number in numbers if by_number[number].error]
    if failed:
        raise UsageError(f"--reports {failed[0]}: that point failed: {by_number[failed[0]].error}")
    if len(numbers) > MOST_REPORTS:
        raise UsageError(
            f"--reports: {len(numbers)} reports of 5 MB each are too many; name up to {MOST_REPORTS}"
        )
    return [by_number[number] for number in numbers]


def _save(space: Space, point: Point) -> None:
    """Run a point again, as the sweep did, and save everything about it."""
    from tokentwin.job import run_job
    from tokentwin.sweep_point import point_job

    if point.folder is None:
        raise UsageError(f"{space.root}: no sweep.json beside the results, so its points cannot be run again")
    base: dict[str, Any] = {
        name: typed(BASE_FLAGS[name], value, "sweep.json: base") for name, value in space.base.items()
    }
    run = int(point.folder.name.partition("=")[2])
    seed = int(point.params.get("seed", base.get("seed", 0))) + run
    label = f"{space.root.resolve().name} #{point.number}"
    done = run_job(point_job({**base, "seed": seed}, point.asked), label=label)
    if done.record.interrupted:
        raise KeyboardInterrupt
    if point.command:
        meta = {**done.record.meta, "argv": shlex.split(point.command)}
        done = replace(done, record=replace(done.record, meta=meta))
    done.save(point.folder)
    sys.stdout.write(f"Wrote {point.report}\n")
