"""`tokentwin validate`: a real run beside its twin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from calibration.runs_inferencex import is_inferencex
from calibration.runs_vllm import is_folder_of_runs
from calibration.validate import validate as compare
from experiments.validation_report import save_validation, validation_lines
from serving.errors import UsageError
from sim.deployment import Deployment
from tokentwin.commands.validate_live import LIVE, WORKLOAD, run_live
from tokentwin.config_file import print_config, with_config
from tokentwin.flag_tables import CONFIG_FLAGS, DEPLOYMENT
from tokentwin.flags import Flag, as_text, takes
from tokentwin.job import make_deployment
from tokentwin.outputs import check_folder

RUN = (
    Flag(
        "against",
        Path,
        "The real run: a folder with X_requests.csv and X_runs.csv, an InferenceX CSV, a run folder, or a "
        "JSON of vllm bench serve --save-detailed.",
    ),
    Flag("profile", str, "Device profile of the twin.", default="the device of the run"),
    Flag("run", str, "Which run of a folder, by a part of its name; or part of the labels of points."),
    Flag("prefixes", Path, "Trace (JSON lines) with the block ids of the run's prompts."),
    Flag(
        "recorded_pages", bool, "Give the twin the page count that the real engine recorded.", negative=False
    ),
    Flag("tolerance", float, "Exit 1 when the mean absolute error is above this many percent."),
    Flag("output", Path, "Folder for validation.json and validation.html.", aliases=("-o",)),
    Flag("seed", int, "Seed of the lengths drawn for InferenceX points.", default="0"),
)
SERVED = tuple(flag for flag in DEPLOYMENT if flag.name not in {f.name for f in RUN})


_NAMES = {f.name for f in (*RUN, *SERVED, *LIVE)}
SENT = tuple(flag for flag in WORKLOAD if flag.name not in _NAMES)
KNOWN = {flag.name: flag for flag in (*RUN, *SERVED, *LIVE, *SENT, *CONFIG_FLAGS)}


@takes(RUN, SERVED, LIVE, SENT, CONFIG_FLAGS)
def validate(
    profile_file: Annotated[str | None, Parameter(converter=as_text)] = None, /, **flags: Any
) -> int:
    """Replay a real run in the twin and print the two side by side, with signed errors.

    The engine's settings come from the run; deployment flags say how a vllm bench serve result was served.
    With --live the engine runs here, and PROFILE_FILE is what prices its twin (docs/live.md).
    Example: tokentwin validate --against ../shared/data/yardstick --run rtx4090 --tolerance 1.5 -o runs/v
    """
    given = with_config(flags, KNOWN)
    if given.pop("print_config", False):
        return print_config(given, known=KNOWN)
    given.pop("config", None)
    if given.get("live"):
        return run_live(profile_file, given)
    if profile_file is not None:
        if "profile" in given:
            raise UsageError("PROFILE_FILE and --profile are both given; keep one")
        given["profile"] = profile_file
    if useless := sorted(
        {f.name for f in (*LIVE, *WORKLOAD)} & set(given) - {f.name for f in (*RUN, *SERVED)}
    ):
        raise UsageError(f"--{useless[0].replace('_', '-')} has no effect without --live; leave it out")
    if "against" not in given:
        raise UsageError("--against is missing; name the real run to compare with")
    tolerance = given.get("tolerance")
    if tolerance is not None and not tolerance > 0:
        raise UsageError(f"--tolerance must be a percentage above 0, got {tolerance:g}")
    _check_use(given)
    if "output" in given:
        check_folder(given["output"])
    found = compare(
        given.get("profile"),
        given["against"],
        run=given.get("run"),
        deployment=_deployment(given),
        prefixes=given.get("prefixes"),
        recorded_pages=bool(given.get("recorded_pages")),
        seed=int(given.get("seed", 0)),
        progress=_say if sys.stderr.isatty() else lambda line: None,
    )
    limit = None if tolerance is None else tolerance / 100
    sys.stdout.write("\n".join(validation_lines(found, limit)) + "\n")
    if "output" in given:
        for path in save_validation(found, given["output"]):
            sys.stdout.write(f"wrote {path}\n")
    return 0 if limit is None or found.within(limit) else 1


def _check_use(given: dict[str, Any]) -> None:
    """Raise UsageError for an option that means nothing for this kind of run."""
    path = Path(given["against"])
    points, folder = is_inferencex(path), is_folder_of_runs(path)
    used = {"run": points or folder, "prefixes": folder, "recorded_pages": not points, "seed": points}
    of = {
        "run": "a folder of runs or InferenceX points",
        "prefixes": "a folder of runs",
        "seed": "InferenceX points",
    }
    for name, has in used.items():
        if name in given and not has:
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect on {path}; it is for {of.get(name, 'a run of an engine')}"
            )


def _deployment(given: dict[str, Any]) -> Deployment | None:
    """How a bench result was served, where the flags say so; every other run says it itself."""
    named = sorted({flag.name for flag in SERVED} & set(given))
    if not named:
        return None
    if Path(given["against"]).suffix.lower() != ".json":
        option = "--" + named[0].replace("_", "-")
        raise UsageError(f"{option} has no effect: the run says how it was served; leave it out")
    return make_deployment(given)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
