"""`tt.capacity`, `tt.sweep` and `tt.plan`: the commands from Python, with the same names.

A keyword is a flag with underscores for dashes, in the same unit; its alias (`isl`, `tp`) is one too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from experiments.sweep_spec import SweepSpec, parse_sweep, read_sweep
from serving.errors import UsageError
from sim.deployment import Deployment
from sim.hull import check_strict
from sim.workload import WorkloadSpec
from tokentwin.api import OF_THE_SHELL, check_deployment, given_workload, resolve, takes_flags
from tokentwin.commands import capacity as capacity_command
from tokentwin.commands import plan as plan_command
from tokentwin.commands import sweep as sweep_command
from tokentwin.flags import Flag, find
from tokentwin.results_api import CapacityResult
from tokentwin.results_api_plan import PlanResult
from tokentwin.results_api_sweep import SweepResult

if TYPE_CHECKING:
    from typing import Unpack

    from tokentwin.keywords import CapacityFlags, PlanFlags, SweepFlags


def _without(known: Mapping[str, Flag], names: Iterable[str]) -> dict[str, Flag]:
    left_out = set(names)
    return {name: flag for name, flag in known.items() if name not in left_out}


CAPACITY = _without(capacity_command.KNOWN, (*OF_THE_SHELL, "output_dir"))
PLAN = _without(plan_command.KNOWN, (*OF_THE_SHELL, "output_dir"))
SWEEP = _without(sweep_command.KNOWN, OF_THE_SHELL)
"""Keywords of each function."""


@takes_flags(CAPACITY)
def capacity(
    workload: WorkloadSpec | str | Path | None = None,
    *,
    deployment: Deployment | None = None,
    progress: bool = False,
    **flags: Unpack[CapacityFlags],
) -> CapacityResult:
    """Find the highest load that a deployment sustains under its promises.

    Keywords are the flags of `tokentwin capacity`; `workload` and `deployment` as for `simulate`. `replications=1` leaves
    the interval out, which takes most of the time. `progress` says on stderr what is tested.

    >>> found = capacity(model="llama-3.1-8b", gpu="h200", dataset_name="random", slo="chat", replications=1)
    >>> found.load > 1
    True

    Raises `UsageError` for what cannot be, `InfeasibleError` where the model does not fit. A load that no promise
    survives is no error: see `infeasible` of the result.
    """
    given = resolve(flags, CAPACITY, "capacity()")
    check_deployment(deployment, "capacity()")
    traffic = given_workload(workload, (WorkloadSpec,), "capacity()")
    answer = capacity_command.answer_capacity(
        given, deployment=deployment, workload=traffic, told=_say if progress else None
    )
    if given.get("strict"):
        check_strict(answer.extrapolations)
    return CapacityResult(answer)


@takes_flags(PLAN)
def plan(
    *,
    deployment: Deployment | None = None,
    progress: bool = False,
    **flags: Unpack[PlanFlags],
) -> PlanResult:
    """Find the cheapest fleet for a traffic and its promises.

    Keywords are the flags of `tokentwin plan`; `price={"h200": 3.5, "l40s": 1.0}` are dollars per GPU and hour, and
    `quantizations=[None, "fp8"]` an axis. What is set in `deployment` holds for every candidate.

    Raises `UsageError` for what cannot be. No fleet that keeps the promises is no error: `winner` is then None.
    """
    given = resolve(flags, PLAN, "plan()")
    check_deployment(deployment, "plan()")
    if deployment is not None:
        base = deployment.model_dump(exclude_unset=True)
        for name in plan_command.NOT_HERE:
            if name in base:
                raise UsageError(
                    f"plan(): {name} of the deployment has no effect, because the plan chooses it"
                )
        given = base | given
    return PlanResult(plan_command.answer_plan(given, told=_say if progress else None))


@takes_flags(SWEEP)
def sweep(
    spec: Mapping[str, Any] | str | Path | None = None,
    /,
    *,
    progress: bool = False,
    **flags: Unpack[SweepFlags],
) -> SweepResult:
    """Run many points over any flags, in parallel, and return all of their figures.

    A keyword with a list of values is an axis, and the points are all combinations; one with a single value holds for
    all of them. Instead, `spec` is a sweep as a dictionary, or the path of a YAML file, with base and one of grid,
    points, random or optuna (docs/planning.md); keywords then override its base. For a flag that is itself a list, such
    as `slo`, an axis is a list of lists.

    With `output_dir` the results are kept there as they come (and `resume=True` continues); without, in memory alone.

    >>> swept = sweep(model="llama-3.1-8b", dataset_name="random", num_prompts=20, request_rate=[2, 4], jobs=1)
    >>> len(swept)
    2

    A point that fails does not end the sweep; `failed` counts them. Raises `UsageError` for names and values that cannot
    be.
    """
    named, axes = _axes(flags)
    given = resolve(named, SWEEP, "sweep()")
    if axes and spec is not None:
        raise UsageError(f"sweep(): {next(iter(axes))} is a list; put it into the grid of the spec")
    if spec is None and not axes:
        if not {"serve_params", "bench_params"} & set(given):
            raise UsageError(
                "sweep(): nothing varies; give a list of values, such as request_rate=[5, 10, 20]"
            )
        asked: SweepSpec = sweep_command.sweep_spec(None, given)
    elif isinstance(spec, str | Path):
        asked = sweep_command.check_sweep(read_sweep(Path(spec)), given, str(spec))
    else:
        content = spec if spec is not None else {"grid": axes}
        asked = sweep_command.check_sweep(parse_sweep(content, "sweep()"), given, "sweep()")
    told = _tell_sweep if progress else None
    if "output_dir" not in given:
        for name in ("resume", "experiment_name"):
            if given.get(name):
                raise UsageError(f"sweep(): {name} has no effect without output_dir; add it")
        with TemporaryDirectory(prefix="tokentwin-") as scratch:
            _, store = sweep_command.run_asked(asked, Path(scratch) / "sweep", given, told=told)
            rows = store.done()
    else:
        name = given.get("experiment_name") or asked.name or datetime.now().strftime("%Y%m%d_%H%M%S")
        _, store = sweep_command.run_asked(asked, Path(given["output_dir"]) / name, given, told=told)
        rows = store.done()
    columns = {key: store.column(key) for key in store.kinds}
    kept = store.root if "output_dir" in given else None
    return SweepResult(tuple(row for _, row in sorted(rows.items())), asked, columns, kept)


def _axes(flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Keywords with one value, and those with a list of them."""
    single = {flag.name for flag in sweep_command.SWEEP}
    named: dict[str, Any] = {}
    axes: dict[str, list[Any]] = {}
    for name, value in flags.items():
        flag = find(name, SWEEP, "sweep()")
        values = value.tolist() if hasattr(value, "tolist") else value
        listed = isinstance(values, list | tuple | range)
        if listed and (flag.several or flag.name == "pools"):
            listed = any(isinstance(each, list | tuple) for each in values)
        if listed and flag.name not in single:
            axes[name] = list(values)
        else:
            named[name] = values
    return named, axes


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _tell_sweep(done: int, total: int, failed: int) -> None:
    sys.stderr.write(f"\r{done} of {total} runs{f', {failed} failed' if failed else ''}")
    sys.stderr.write("\n" if done == total else "")
