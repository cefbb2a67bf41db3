"""`tokentwin diff A B`: which part of the difference of two saved runs is workload, schedule, kernels, host and so on."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from calibration.diff import METRICS
from calibration.diff import diff as split_difference
from experiments.diff_report import diff_lines, save_diff, sentences
from experiments.saved import load_record
from sim.world import Progress
from tokentwin.config_file import configurable
from tokentwin.flags import as_path
from tokentwin.outputs import check_folder
from tokentwin.progress import progress_bar

_WIDTH = 80


@configurable
def diff(
    a: Annotated[Path, Parameter(help="Folder of a saved run (-o of simulate).", converter=as_path)],
    b: Annotated[Path, Parameter(help="Folder of the run to compare with it.", converter=as_path)],
    /,
    *,
    metric: Annotated[
        list[str] | None,
        Parameter(
            help=f"What to split, such as p95_ttft or output_throughput; by default {', '.join(METRICS)}.",
            consume_multiple=True,
            negative_iterable=(),
        ),
    ] = None,
    output_dir: Annotated[
        Path | None, Parameter(alias="-o", help="Folder for diff.json and diff.html (waterfalls).")
    ] = None,
) -> int:
    """Replay both runs with one part of the other at a time and say what each part does to each metric."""
    if output_dir is not None:
        check_folder(output_dir)
    names = (str(a), str(b))
    records = (load_record(a), load_record(b))
    with progress_bar(doing="Replaying", clock="replays") as bar:
        told = None
        if bar is not None:
            told = lambda done, total: bar(Progress(float(done), done, total, 0.0))  # noqa: E731
        found = split_difference(*records, metrics=metric or METRICS, names=names, progress=told)
    said = set(sentences(found))
    for line in diff_lines(found, names):
        text = textwrap.fill(line, _WIDTH, subsequent_indent="  ") if line in said else line
        sys.stdout.write(text + "\n")
    if output_dir is not None:
        paths = save_diff(found, output_dir, names)
        sys.stdout.write(f"Wrote to {output_dir}: {', '.join(path.name for path in paths)}\n")
    return 0
