"""`tokentwin report RUN…`: the page of a saved run again, or several runs side by side on one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from serving.errors import UsageError
from tokentwin.config_file import configurable
from tokentwin.flags import as_path
from tokentwin.outputs import check_file

SEVERAL = Path("runs.html")


@configurable
def report(
    runs: Annotated[
        list[Path], Parameter(help="Folders of saved runs (-o of simulate or run).", converter=as_path)
    ],
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(
            alias="-o",
            help=f"The page's file. [default: report.html in the run's folder; {SEVERAL} of several runs]",
            show_default=False,
        ),
    ] = None,
    plot_timeline: Annotated[
        bool, Parameter(help="Add a page of each request's tokens over time, beside it.", negative="")
    ] = False,
) -> int:
    """Make a run's report again, or set several runs side by side: overlaid distributions, a table of differences.

    Example: tokentwin report runs/chunk-2048 runs/chunk-8192 -o chunks.html
    """
    from experiments.report_several import write_several
    from experiments.saved import open_run

    if not runs:
        raise UsageError("name the folder of a saved run, such as tokentwin report runs/demo")
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"-o {output}: a page is one file; name it, such as -o {output / 'report.html'}")
    if len(set(runs)) < len(runs):
        again = next(run for run in runs if runs.count(run) > 1)
        raise UsageError(f"{again} is given twice; name each run once")
    if plot_timeline and len(runs) > 1:
        raise UsageError("--plot-timeline shows one run; name one folder")
    opened = [open_run(folder) for folder in runs]
    if output is not None:
        check_file(output)
    if len(opened) > 1:
        sys.stdout.write(f"Wrote {write_several(opened, output or SEVERAL)}\n")
        return 0
    (only,) = opened
    for line in only.missing:
        sys.stdout.write(f"Note: {line}\n")
    path = only.report(output)
    sys.stdout.write(f"Wrote {path}\n")
    if plot_timeline:
        from experiments.timeline import write_timeline

        if not len(only.record.tokens.first_step):
            raise UsageError(f"{only.folder}: no times of tokens were saved, so there is no timeline")
        sys.stdout.write(f"Wrote {write_timeline(only.record, path.with_suffix('.timeline.html'))}\n")
    return 0
