"""`tokentwin diagnose RUN`: what governs a promise, what the run shows, and which simulated change would help."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from experiments.diagnose import diagnose as examine
from experiments.diagnose_report import diagnosis_json, diagnosis_lines
from experiments.diagnose_run import read_measured
from serving.errors import UsageError
from sim.deployment import Deployment
from sim.slo import parse_slo
from tokentwin.config_file import configurable
from tokentwin.flag_tables import DEPLOYMENT, JSON, PROMISES, RUN
from tokentwin.flags import Flag, takes
from tokentwin.job import DEPLOYMENT_NAMES, make_deployment, words

if TYPE_CHECKING:
    from collections.abc import Callable

SLO_MISSED = 3
_HELP = {
    "replications": "Runs of each change with other calibration errors, step noise and requests, for 95% intervals.",
    "fail_on_slo": "Exit with code 3 when the run misses an SLO.",
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
            "production requests: OTLP JSON with vLLM's span attributes, or CSV (docs/diagnose.md)."
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
    measured = read_measured(run, _deployment(run, given))
    slos = parse_slo(words(given.get("slo")))
    if given.get("fail_on_slo") and not slos and not measured.slos:
        raise UsageError("--fail-on-slo has no effect without an SLO; add one such as --slo p95_ttft:500")
    with _status(silent=bool(given.get("disable_tqdm") or given.get("json"))) as told:
        found = examine(
            measured, slos, replications=given.get("replications"), jobs=given.get("jobs"), told=told
        )
    if given.get("json"):
        sys.stdout.write(json.dumps(diagnosis_json(found), indent=1, allow_nan=False) + "\n")
    else:
        sys.stdout.write("\n".join(diagnosis_lines(found)) + "\n")
    return SLO_MISSED if given.get("fail_on_slo") and not all(j.met for j in found.judged) else 0


def _deployment(run: Path, given: dict[str, Any]) -> Deployment | None:
    """What the flags say was deployed; None without any. Raises UsageError where the run says it itself."""
    names = [name for name in DEPLOYMENT_NAMES if name in given]
    if not names:
        return None
    option = "--" + names[0].replace("_", "-")
    if (run / "run.json").is_file():
        meta = json.loads((run / "run.json").read_text(encoding="utf-8"))
        if isinstance(meta, dict) and meta.get("deployment"):
            raise UsageError(f"{option} has no effect: {run} says how it was served; leave it out")
    if "model" not in given:
        raise UsageError(f"{option} has no effect without --model; say what was served")
    return make_deployment(given)


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
