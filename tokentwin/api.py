"""`tt.simulate`: the command from Python, with the same names; what its siblings share is here too.

A keyword is a flag with underscores for dashes, in the same unit; its alias (`isl`, `tp`) is one too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from serving.errors import UsageError
from sim.deployment import Deployment
from sim.hull import check_strict
from sim.slo import Goodput
from sim.workload import Workload, WorkloadSpec, read_workload_file
from tokentwin.config_file import typed
from tokentwin.flag_tables import DEPLOYMENT, OBSERVE, OUTPUT, PROMISES, RUN, TRAFFIC
from tokentwin.flags import Flag, find
from tokentwin.job import make_job, run_job
from tokentwin.progress import progress_bar
from tokentwin.run import Run

if TYPE_CHECKING:
    from typing import Unpack

    from tokentwin.keywords import SimulateFlags

Function = TypeVar("Function", bound=Callable[..., Any])

OF_THE_SHELL = ("config", "print_config", "fail_on_slo", "disable_tqdm", "json", "dry_run")
"""Flags that have no meaning for a function."""
KNOWN: dict[str, Flag] = {
    flag.name: flag
    for table in (DEPLOYMENT, TRAFFIC, PROMISES, RUN, OUTPUT, OBSERVE)
    for flag in table
    if flag.name not in OF_THE_SHELL
    and (flag not in (*OUTPUT, *OBSERVE) or flag.name in ("metric_percentiles", "alert"))
}
"""Keywords of `simulate`."""


def takes_flags(known: Mapping[str, Flag]) -> Callable[[Function], Function]:
    """Give a function of `**flags` the flags (and their aliases) as its signature, for completion and help."""

    def decorate(function: Function) -> Function:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        given = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=flag.kind | None)
            for flag in known.values()
            for name in keyword_names(flag)
        ]
        returns = inspect.signature(function).return_annotation
        signature = inspect.Signature([*own, *given], return_annotation=returns)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


def keyword_names(flag: Flag) -> list[str]:
    """The flag's name and its aliases but for single letters, as keywords."""
    names = (flag.name, *(alias.lstrip("-").replace("-", "_") for alias in flag.aliases))
    return [name for name in names if len(name) > 1]


@takes_flags(KNOWN)
def simulate(
    workload: Workload | WorkloadSpec | str | Path | None = None,
    *,
    deployment: Deployment | None = None,
    label: str | None = None,
    progress: bool = False,
    **flags: Unpack[SimulateFlags],
) -> Run:
    """Run a workload on a deployment and return what happened.

    Every flag of `tokentwin simulate` about deployment, traffic and promises is a keyword with underscores for dashes
    (`max_num_seqs=256`, `isl=1024`). `workload` stands in for the traffic flags: a workload, its spec, or the path of
    a YAML workload file. `deployment` is a base that deployment flags change. Limits are in ms as on the command line.

    `replications=8` adds 95 % intervals (`run.intervals()`); there are none by default, to keep loops fast.

    >>> run = simulate(model="llama-3.1-8b", gpu="h200", dataset_name="random", request_rate=4, num_prompts=20)
    >>> run.summary.completed
    20

    Raises `UsageError` for names, values and combinations that cannot be. An interrupt returns the partial run.
    """
    given = resolve(flags, KNOWN, "simulate()")
    check_deployment(deployment, "simulate()")
    traffic = given_workload(workload, (Workload, WorkloadSpec), "simulate()")
    given.setdefault("replications", 1)
    job = make_job(given, deployment=deployment, workload=traffic)
    with progress_bar(silent=not progress or not sys.stderr.isatty()) as bar:
        run = run_job(job, label=label, progress=bar)
    if job.strict:
        check_strict(run.certainty.extrapolations)
    return run


def given_workload(workload: object, kinds: tuple[type[Any], ...], where: str) -> Any:
    """A workload of one of `kinds`, that of the file at a path, or None. Raises UsageError that begins with `where`."""
    if isinstance(workload, str | Path):
        return read_workload_file(workload)
    if workload is None or isinstance(workload, kinds):
        return workload
    names = " or ".join(f"a {kind.__name__}" for kind in kinds)
    raise UsageError(
        f"{where}: workload must be {names}, or the path of a workload file, got {_kind(workload)}; flags such as "
        "dataset_name and request_rate do without one"
    )


def check_deployment(deployment: object, where: str) -> None:
    """Raises UsageError, beginning with `where`, for what is neither a Deployment nor None."""
    if deployment is not None and not isinstance(deployment, Deployment):
        raise UsageError(
            f"{where}: deployment must be a Deployment, such as Deployment(model='llama-3.1-8b', gpu='h200'), got "
            f"{_kind(deployment)}"
        )


def _kind(value: object) -> str:
    """`3 (int)`."""
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:39] + '…'} ({type(value).__name__})"


def resolve(flags: Mapping[str, Any], known: Mapping[str, Flag], where: str) -> dict[str, Any]:
    """Keywords by full names, with the types of the command line; None is not given.

    Raises UsageError, beginning with `where`, for an unknown name (with the nearest), one given twice, a wrong type.
    """
    given: dict[str, Any] = {}
    for name, value in flags.items():
        flag = find(name, known, where)
        if flag.name in given:
            raise UsageError(f"{where}: {flag.name} is given twice; keep one")
        if value is not None:
            given[flag.name] = value if isinstance(value, Goodput) else typed(flag, value, where)
    return given
