"""A sweep's base, tried before the first point: what is wrong with it would fail once per point."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from experiments.sweep_spec import Params, Range, SweepSpec
from serving.errors import TokenTwinError, UsageError
from serving.policies import load_policy
from sim.deployment_limits import policy_options
from sim.workload import WorkloadSpec
from sim.workload.yaml_lines import line_of
from tokentwin.flags import Flag, find
from tokentwin.sweep_point import loaded, point_job

TRIED = 64
"""Points that are looked at before their common fault is blamed on the base."""


def check_base(asked: SweepSpec, given: Mapping[str, Any], where: str, flags: Mapping[str, Flag]) -> None:
    """Raise UsageError where no point can run for a reason that lies in the base; it names file, line and key.

    `given` are flags that were given over the base, `flags` all that it may have. What is wrong with single points is
    their own affair.
    """
    points = _points(asked)
    problem = _problem(asked.base, points[0])
    if problem is None or any(_problem(asked.base, point) != problem for point in points[1:]):
        return
    key = _culprit(problem, asked.base)
    if key is None or any(key in point for point in points):
        return
    if key in given:
        raise UsageError(problem)
    raise UsageError(f"{_place(where, key, flags)}: {problem.removeprefix(_option(key)).lstrip(': ')}")


def _points(asked: SweepSpec) -> list[Params]:
    """Points to try: some of the sweep's own, or two corners of its space."""
    if asked.search is None:
        return list(asked.points[:: -(-len(asked.points) // TRIED)])
    low, high = {}, {}
    for key, axis in asked.search.space.items():
        low[key], high[key] = (axis.low, axis.high) if isinstance(axis, Range) else (axis[0], axis[-1])
        if isinstance(axis, Range) and axis.whole:
            low[key], high[key] = int(axis.low), int(axis.high)
    return [low, high]


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


def _culprit(problem: str, base: Params) -> str | None:
    """The key of the base that a message speaks of: by its flag first, else by its value."""
    for option in re.findall(r"--[a-z][a-z0-9-]*", problem):
        key: str = option[2:].replace("-", "_")
        if key in base:
            return key
    names = {key: str(value) for key, value in base.items() if isinstance(value, str | Path)}
    return next((key for key, name in names.items() if len(name) > 2 and name in problem), None)


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


def _place(where: str, key: str, flags: Mapping[str, Flag]) -> str:
    """File, line and key as it is written there; `where` itself for what is no file."""
    path = Path(where)
    if not path.is_file():
        return f"{where}: base.{key}"
    text = path.read_text(encoding="utf-8-sig")
    keys = yaml.safe_load(text)["base"]
    written = next(each for each in keys if find(str(each), flags, where).name == key)
    return f"{where}: line {line_of(text, ('base', written))}: base.{written}"
