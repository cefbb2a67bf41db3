"""A sweep, tried before its first point: values that cannot be, and what is wrong with all points alike."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from experiments.sweep_spec import NAME, Params, Range, SweepSpec, canonical
from serving.errors import TokenTwinError, UsageError
from serving.policies import load_policy
from sim.deployment_limits import policy_options
from sim.workload import WorkloadSpec
from sim.workload.yaml_lines import line_of
from tokentwin.flags import Flag, find
from tokentwin.job import make_spec
from tokentwin.sweep_point import TENANTS, check_tenant, loaded, point_job
from tokentwin.value_checks import check_value

TRIED = 64
"""Points that are looked at before a fault of all of them is looked for."""
PARAMETERS = "parameters"
"""Where the points of --serve-params and --bench-params are from."""


def check_sweep_values(
    asked: SweepSpec, given: Mapping[str, Any], where: str, flags: Mapping[str, Flag]
) -> None:
    """Raise UsageError for a value that cannot be, and where no point can run for one and the same reason.

    It names file, line and key. `given` are flags that were given over the base, `flags` all that there are. What is
    wrong with values only together is the affair of each point.
    """
    _check_points(asked, where, flags)
    axes = asked.search.space if asked.search is not None else ()
    for name in given:
        if name in axes or (asked.points and all(name in point for point in asked.points)):
            raise UsageError(
                f"{flags[name].option} has no effect: every point has its own {name}; leave it out"
            )
    problem = _common_problem(asked)
    varied = asked.varied()
    key = None if problem is None else _culprit(problem, asked.base, varied)
    if problem is not None and (key is None or key in varied):
        if asked.search is None and all(_problem(asked.base, point) == problem for point in asked.points):
            raise UsageError(f"{where}: no point can run: {problem}")
        problem = None
    if problem is None:
        points = _points(asked) if asked.search is not None else asked.points
        kept = [each for each in asked.base if not all(each in point for point in points)]
        refused = ((each, _refusal(check_value, each, asked.base[each])) for each in kept)
        key, problem = next(((k, p) for k, p in refused if p is not None), (None, None))
    if key is not None and problem is not None:
        raise UsageError(problem if key in given else placed(where, key, flags, problem))


def _check_points(asked: SweepSpec, where: str, flags: Mapping[str, Flag]) -> None:
    """Raise UsageError for a value of a point that cannot be, whatever the others are."""
    varied = asked.varied()
    spec = None
    if any(key.startswith(TENANTS) for key in varied) and not {"dataset_name", "dataset_path"} & set(varied):
        spec = _spec(asked.base)
    seen = set()
    for index, key, value in _values(asked):
        if (same := (key, canonical(value))) in seen:
            continue
        seen.add(same)
        if not key.startswith(TENANTS):
            problem = _refusal(check_value, key, value)
        else:
            problem = None if spec is None else _refusal(check_tenant, spec, key, value)
        if problem is not None:
            raise UsageError(placed(where, key, flags, problem, index))


def _common_problem(asked: SweepSpec) -> str | None:
    """Why no point that is tried can run; None where one can, or they have different reasons."""
    points = _points(asked)
    problem = _problem(asked.base, points[0])
    same = problem is not None and all(_problem(asked.base, point) == problem for point in points[1:])
    return problem if same else None


def _values(asked: SweepSpec) -> Iterator[tuple[int, str, Any]]:
    """Every value that a point may have, with the point's number; of a range, its ends."""
    for key, axis in (asked.drawn_from if asked.search is None else asked.search.space).items():
        for value in axis.ends() if isinstance(axis, Range) else axis:
            if value is not None:
                yield 0, key, value
    for index, point in enumerate(asked.points):
        for key, value in point.items():
            if key != NAME and value is not None:
                yield index, key, value


def _points(asked: SweepSpec) -> list[Params]:
    """Points to try: some of the sweep's own, or two corners of its space."""
    if asked.search is None:
        return list(asked.points[:: -(-len(asked.points) // TRIED)])
    low, high = {}, {}
    for key, axis in asked.search.space.items():
        low[key], high[key] = axis.ends() if isinstance(axis, Range) else (axis[0], axis[-1])
    return [low, high]


def _refusal(check: Any, *what: Any) -> str | None:
    try:
        check(*what)
    except UsageError as error:
        return str(error)
    return None


def _spec(base: Params) -> WorkloadSpec | None:
    try:
        return make_spec(base)
    except UsageError:
        return None  # found with the points


def _problem(base: Params, point: Params) -> str | None:
    """Why a point cannot run, as far as can be told without running it."""
    try:
        job = point_job(base, point)
        deployment = job.built.deployment
        load_policy(deployment.policy, **policy_options(deployment))
        if isinstance(job.workload, WorkloadSpec):
            loaded(job.workload, job.seed)
    except TokenTwinError as error:
        return str(error)
    return None


def _culprit(problem: str, base: Params, varied: Collection[str]) -> str | None:
    """The key of the base that a message speaks of: by its flag first, else by its value; none where it is a point's."""
    options: list[str] = [each[2:].replace("-", "_") for each in re.findall(r"--[a-z][a-z0-9-]*", problem)]
    if any(option in varied for option in options):
        return None
    for option in options:
        if option in base:
            return option
    names = {key: str(value) for key, value in base.items() if isinstance(value, str | Path)}
    return next((key for key, name in names.items() if len(name) > 2 and name in problem), None)


def placed(where: str, key: str, flags: Mapping[str, Flag], problem: str, point: int | None = None) -> str:
    """A message about a key of the base, or of a point, that begins with its place instead of the key or flag."""
    for name in (key, "--" + key.replace("_", "-")):
        problem = problem.removeprefix(name)
    inner = problem.startswith((".", "["))
    return _place(where, key, flags, point) + (problem if inner else f": {problem.lstrip(': ')}")


def _place(where: str, key: str, flags: Mapping[str, Flag], point: int | None = None) -> str:
    """File, line and key as it is written there, of the base or of a point; `where` itself for what is no file."""
    path = Path(where)
    if where == PARAMETERS and point is not None:
        return f"--{'serve' if flags[key].group == 'Deployment' else 'bench'}-params: {key}"
    if not path.is_file():
        return f"{where}: {'base.' if point is None else ''}{key}"
    text = path.read_text(encoding="utf-8-sig")
    content = yaml.safe_load(text)
    spots: list[tuple[str | int, ...]] = [("base",)]
    if point is not None:
        spots = [("grid",), ("points", point), ("random", "space"), ("optuna", "space")]
    for spot in spots:
        for written in _inside(content, spot):
            same = written == key if key.startswith(TENANTS) else _means(written, flags) == key
            if same:
                line = line_of(text, (*spot, written))
                return f"{where}: line {line}: {'.'.join(map(str, spot))}.{written}"
    return f"{where}: {key}"


def _inside(content: Any, spot: tuple[str | int, ...]) -> list[str]:
    for part in spot:
        if isinstance(content, dict):
            content = content.get(part)
        else:
            content = content[part] if isinstance(content, list) and isinstance(part, int) else None
    return list(map(str, content)) if isinstance(content, dict) else []


def _means(written: str, flags: Mapping[str, Flag]) -> str:
    return "" if written == NAME or written.startswith(TENANTS) else find(written, flags, "").name
