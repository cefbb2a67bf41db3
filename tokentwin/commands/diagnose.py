"""`tokentwin diagnose RUN`: what governs a promise, what the run shows, and which simulated change would help."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from calibration.runs_saved import is_saved_run
from experiments.diagnose import diagnose as examine
from experiments.diagnose_report import diagnosis_json, diagnosis_lines
from experiments.diagnose_run import is_engines, read_measured
from serving.errors import UsageError
from sim.slo import parse_slo
from tokentwin.config_file import configurable
from tokentwin.flag_tables import DEPLOYMENT, JSON, PROMISES, RUN
from tokentwin.flags import Flag, as_path, at_least, takes
from tokentwin.job import DEPLOYMENT_NAMES, make_deployment, words

if TYPE_CHECKING:
    from collections.abc import Callable

SLO_MISSED = 3
_HELP = {
    "replications": "Runs of each change with other calibration errors, step noise and requests, for 95% intervals.",
    "fail_on_slo": "Exit with code 3 when the run misses an SLO or has nothing to judge it by.",
}


def _kept(table: tuple[Flag, ...], *names: str) -> tuple[Flag, ...]:
    from dataclasses import replace

    return tuple(replace(f, help=_HELP.get(f.name, f.help)) for f in table if f.name in names)


TABLES = (
    DEPLOYMENT,
    _kept(PROMISES, "slo", "fail_on_slo"),
    _kept(RUN, "replications", "disable_tqdm"),
    (Flag("jobs", int, "Processes that share the runs of an interval.", "Run", (), "all cores"),),
    (JSON,),
)


@configurable
@takes(*TABLES)
def diagnose(
    run: Annotated[
        Path,
        Parameter(
            help="A run folder (-o of simulate or run), a JSON of vllm bench serve --save-detailed, or an export of "
            "production requests: OTLP JSON with vLLM's span attributes, or CSV (docs/diagnose.md).",
            converter=as_path,
        ),
    ],
    /,
    **flags: Any,
) -> int:
    """Say which stage governs a run's SLO and what it shows, and propose at most three changes, each simulated first.

    Deployment flags say how a run was served that does not say so itself.
    Example: tokentwin diagnose runs/demo --slo p95_ttft:300
    """
    given = {name: value for name, value in flags.items() if value is not None}
    jobs = at_least(given, "jobs")
    measured = read_measured(run, **_served(run, given))
    slos = parse_slo(words(given.get("slo")))
    if given.get("fail_on_slo") and not slos and not measured.slos:
        raise UsageError("--fail-on-slo has no effect without an SLO; add one such as --slo p95_ttft:500")
    with _status(silent=bool(given.get("disable_tqdm") or given.get("json"))) as told:
        found = examine(measured, slos, replications=given.get("replications"), jobs=jobs, told=told)
    if given.get("json"):
        sys.stdout.write(json.dumps(diagnosis_json(found), indent=1, allow_nan=False) + "\n")
    else:
        sys.stdout.write("\n".join(diagnosis_lines(found)) + "\n")
    return SLO_MISSED if given.get("fail_on_slo") and not all(j.met for j in found.judged) else 0


def _served(run: Path, given: dict[str, Any]) -> dict[str, Any]:
    """What the flags say of the deployment, for `read_measured`. Raises UsageError where the run says it itself."""
    names = [name for name in DEPLOYMENT_NAMES if name in given]
    if is_saved_run(run):
        real = is_engines(run)
        for name in names:
            if not real or name != "gpu":
                more = "; a run of the engine takes --gpu alone" if real else ""
                raise UsageError(
                    f"{_option(name)} has no effect: {run} says how it was served{more}; leave it out"
                )
        return {"gpu": given.get("gpu")}
    if names and "model" not in given:
        raise UsageError(f"{_option(names[0])} has no effect without --model; say what was served")
    return {"deployment": make_deployment(given) if names else None}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@contextmanager
def _status(*, silent: bool) -> Iterator[Callable[[str], None] | None]:
    """A line on standard error that says what is being simulated, or None where nobody would see it."""
    from rich.console import Console

    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield None
        return
    with console.status("Reading") as status:
        yield lambda what: status.update(f"Simulating {what}")
