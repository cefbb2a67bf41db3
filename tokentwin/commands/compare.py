"""`tokentwin compare BASE VARIANT…`: what a change gains and what it costs, paired, with intervals."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from experiments.compare import SEARCHES, Comparison, Question, compare_deployments
from experiments.compare_report import comparison_json, comparison_lines, comparison_page
from experiments.results import writable
from serving.errors import TokenTwinError, UsageError
from sim.workload import WorkloadSpec
from sim.world import Progress
from tokentwin.config_file import configurable, read_config
from tokentwin.flag_tables import DEPLOYMENT, JSON, OBSERVE, OUTPUT, PROMISES, RUN, SIMULATE, TRAFFIC
from tokentwin.flags import Flag, as_path, takes
from tokentwin.job import Job, make_job
from tokentwin.outputs import check_folder
from tokentwin.progress import progress_bar

LOST, INTERRUPTED = 1, 130
JSON_FILE, PAGE = "compare.json", "compare.html"
OWN = (
    Flag(
        "output_dir",
        Path,
        f"Folder for {JSON_FILE} and {PAGE} (a picture of every change).",
        "Output",
        ("-o",),
    ),
    JSON,
)
_RUN = tuple(flag for flag in RUN if flag.name not in ("config", "print_config", "strict"))
_PROMISES = tuple(flag for flag in PROMISES if flag.name != "fail_on_slo")
_PERCENTILES = tuple(flag for flag in OUTPUT if flag.name == "metric_percentiles")
COMPARE = {
    flag.name: flag for table in (DEPLOYMENT, TRAFFIC, _PROMISES, _RUN, _PERCENTILES, OWN) for flag in table
}
"""Every flag of `compare` by name."""
_OF_FOLDERS = ("output_dir", "json", "seed")
"""Flags that mean something for runs that already happened."""
_SHAPE = {*(flag.name for flag in DEPLOYMENT)}
_NOT_COMPARED = {
    *(flag.name for flag in (*OUTPUT, *OBSERVE) if flag.name != "metric_percentiles"),
    *("strict", "fail_on_slo", "disable_tqdm", "config", "print_config", "json"),
}
"""Keys of a config file that `simulate` reads and that do not matter here."""


@configurable
@takes(DEPLOYMENT, TRAFFIC, _PROMISES, _RUN, _PERCENTILES, OWN)
def compare(
    base: Annotated[
        Path,
        Parameter(
            help="YAML file as for simulate --config, or the folder of a saved run.", converter=as_path
        ),
    ],
    /,
    *variants: Annotated[
        Path,
        Parameter(help="What to compare with it: files, or folders of the same workload.", converter=as_path),
    ],
    **flags: Any,
) -> int:
    """Run deployments on the same workload and say what each variant gains and what it costs.

    Flags apply to every file. Files are simulated in pairs, with the same requests, noise and calibration errors;
    folders of runs that happened are paired request by request.

    Example: tokentwin compare base.yaml chunk512.yaml --dataset-name random --request-rate 4 --num-prompts 300
    """
    given = {name: value for name, value in flags.items() if value is not None}
    paths = named((base, *variants))
    if len(paths) < 2:
        if not base.exists():
            raise UsageError(
                f"{base}: there is no such file or folder; compare needs a base and at least one variant"
            )
        raise UsageError("compare needs a base and at least one variant, such as base.yaml chunk512.yaml")
    folder = given.get("output_dir")
    if folder is not None:
        check_folder(folder)
    try:
        found = of_folders(paths, given) if base.is_dir() else of_files(paths, given)
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted; there is nothing to compare yet\n")
        return INTERRUPTED
    if given.get("json"):
        sys.stdout.write(json.dumps(comparison_json(found), indent=1, allow_nan=False) + "\n")
    else:
        sys.stdout.write("\n".join(comparison_lines(found)) + "\n")
    if folder is not None:
        save(found, folder)
        if not given.get("json"):
            sys.stdout.write(f"Wrote to {folder}: {JSON_FILE}, {PAGE}\n")
    if found.lost and "until" not in given and not base.is_dir():
        sys.stderr.write(f"error: {found.lost} requests never ended\n")
        return LOST
    return 0


def save(found: Comparison, folder: Path) -> None:
    """Write the JSON and the page."""
    text = json.dumps(comparison_json(found), indent=1, allow_nan=False) + "\n"
    with writable(folder):
        (folder / JSON_FILE).write_text(text, encoding="utf-8")
        (folder / PAGE).write_text(comparison_page(found), encoding="utf-8")


def named(paths: tuple[Path, ...]) -> dict[str, Path]:
    """Paths by the names under which they are shown: file names, or whole paths where those are alike."""
    short = [path.stem if path.suffix else path.name for path in paths]
    long = [str(path) for path in paths]
    names = short if len(set(short)) == len(paths) else long
    if len(set(names)) < len(paths):
        again = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{again} is given twice; name each file or folder once")
    return dict(zip(names, paths, strict=True))


def of_folders(paths: Mapping[str, Path], given: Mapping[str, Any]) -> Comparison:
    """Saved runs, paired request by request. Raises UsageError for a file among them, or a flag without effect."""
    from experiments.compare_saved import compare_saved

    for name, path in paths.items():
        if not path.is_dir():
            raise UsageError(f"{name} is no folder of a saved run, and the base is; compare like with like")
    for name in given:
        if name not in _OF_FOLDERS:
            raise UsageError(
                f"{COMPARE[name].option} has no effect on runs that already happened; leave it out"
            )
    return compare_saved(paths, seed=int(given.get("seed", 0)))


def of_files(paths: Mapping[str, Path], given: Mapping[str, Any]) -> Comparison:
    """Deployments of YAML files on one workload with `SEARCHES` of their own. UsageError where more of it differs."""
    jobs: dict[str, Job] = {}
    common: dict[str, Any] = {}
    for path in paths.values():
        if path.is_dir():
            raise UsageError(f"{path} is a folder, and the base is a file; compare like with like")
    for name, path in paths.items():
        try:
            content = read_config(path, SIMULATE)
        except UsageError as error:
            raise UsageError(str(error).removeprefix("--config ")) from None
        merged = {**content, **given}
        keys = {k: v for k, v in merged.items() if k not in _SHAPE | _NOT_COMPARED}
        alike = {key: value for key, value in keys.items() if key not in SEARCHES}
        if jobs:
            _same(common, alike, next(iter(paths)), name)
        common = alike
        try:
            jobs[name] = make_job({**keys, **{k: v for k, v in merged.items() if k in _SHAPE}})
        except TokenTwinError as error:
            raise type(error)(f"{path}: {error}") from None
    first = next(iter(jobs.values()))
    if first.replications is not None and first.replications < 2:
        raise UsageError(f"--replications must be at least 2 to compare, got {first.replications}")
    assert isinstance(first.workload, WorkloadSpec)
    plain = first.workload.model_dump()
    question = Question(
        first.workload,
        otherwise={
            name: job.workload
            for name, job in jobs.items()
            if isinstance(job.workload, WorkloadSpec) and job.workload.model_dump() != plain
        },
        seed=first.seed,
        replications=first.replications,
        goodput=first.goodput,
        slos=first.slos,
        percentiles=first.percentiles,
        fast_forward=first.fast_forward,
        until_s=first.until_s,
    )
    with progress_bar(silent=bool(given.get("disable_tqdm")), doing="Comparing", clock="runs") as bar:
        told = None
        if bar is not None:
            told = lambda done, total: bar(Progress(float(done), done, total, 0.0))  # noqa: E731
        return compare_deployments({n: job.built for n, job in jobs.items()}, question, progress=told)


def _same(first: Mapping[str, Any], other: Mapping[str, Any], a: str, b: str) -> None:
    """Raise UsageError for the first key that is not of a deployment and differs."""
    for key in dict.fromkeys([*first, *other]):
        if first.get(key) != other.get(key):
            raise UsageError(
                f"{a} and {b} must have one workload, and {key} is {_said(first.get(key))} in {a} and "
                f"{_said(other.get(key))} in {b}; take it out of the files and give it as a flag"
            )


def _said(value: Any) -> str:
    return "not set" if value is None else str(value)
