"""`tokentwin policy-test NAME`: does a batch policy keep the rules, and where does it beat the built-in ones?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from experiments.policy_test import CASES, Conformance, check_policy
from experiments.policy_test_bench import (
    BUILT_IN,
    NUM_PROMPTS,
    OPTIONS,
    REPLICATIONS,
    WORKLOADS,
    StepCost,
    compare_policies,
    label,
    step_cost,
)
from experiments.policy_test_report import comparison_lines, conformance_lines, cost_lines, policy_test_json
from experiments.results import writable
from serving.errors import UsageError, nearest
from serving.policies import policy_names
from sim.deployment import Deployment, build
from tokentwin.config_file import configurable
from tokentwin.flag_tables import DEPLOYMENT, JSON, RUN
from tokentwin.flags import Flag, as_text, at_least, takes
from tokentwin.job import DEPLOYMENT_NAMES, make_deployment

if TYPE_CHECKING:
    from collections.abc import Callable

FAILED = 1
MODEL = "llama-3.1-8b"
CANDIDATE = ("scheduling_policy", *OPTIONS)
"""Deployment fields that belong to the policy under test and not to those it is compared with."""


def _kept(table: tuple[Flag, ...], *names: str, **changes: Any) -> tuple[Flag, ...]:
    return tuple(replace(flag, **changes) for flag in table if flag.name in names)


TESTS = (
    Flag("cases", int, "Random loads for the rules.", "Run", (), str(CASES)),
    Flag("compare", bool, "Set it beside the built-in policies.", "Run", (), "true"),
    Flag("workloads", list[str], f"Of the comparison: {', '.join(w.replace(' ', '-') for w in WORKLOADS)}.",
         "Run", (), "all"),
    Flag("num_prompts", int, "Requests of each workload.", "Run", (), str(NUM_PROMPTS)),
    *_kept(RUN, "replications", help="Runs of each policy and workload, for paired 95% intervals.",
           default=str(REPLICATIONS)),
    *_kept(RUN, "seed", "disable_tqdm"),
    Flag("jobs", int, "Processes that share the replications.", "Run", (), "all cores"),
    Flag("output_dir", Path, "Folder for counterexamples.", "Output", ("-o",), "policy-test"),
    JSON,
)  # fmt: skip
SERVED = tuple(
    replace(flag, default=MODEL) if flag.name == "model" else flag
    for flag in DEPLOYMENT
    if flag.name != "policy"
)


@configurable
@takes(SERVED, TESTS)
def policy_test(
    policy: Annotated[
        str,
        Parameter(
            help=f"{', '.join(policy_names())}, or my_module:MyPolicy, looked up in the current folder first.",
            converter=as_text,
        ),
    ] = "chunked",
    /,
    **flags: Any,
) -> int:
    """Check that a batch policy keeps the rules, and say where it wins against chunked, continuous and static.

    The rules are checked on random small loads; a broken one exits with code 1 and leaves the smallest load that breaks
    it, which tokentwin simulate replays. Deployment flags are those of the comparison.
    Example: tokentwin policy-test my_module:MyPolicy
    """
    given = {name: value for name, value in flags.items() if value is not None}
    settings = {"policy": policy, **{name: given[name] for name in CANDIDATE if name in given}}
    workloads = _workloads(given.get("workloads"))
    for name in ("cases", "num_prompts"):
        if given.get(name, 1) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {given[name]}")
    compared = bool(given.get("compare", True))
    _refuse_unused(given, compared)
    base = make_deployment(
        {"model": MODEL, **{n: given[n] for n in DEPLOYMENT_NAMES if n in given and n not in CANDIDATE}}
    )
    build(base)  # what is wrong with it fails before the rules are checked
    folder = given.get("output_dir", Path("policy-test"))
    for place in (folder, *folder.parents):  # made only where there is something to save
        if place.exists() and not place.is_dir():
            raise UsageError(f"-o: cannot write to {folder}: {place} is a file; choose another folder")
    seed = at_least(given, "seed", 0, default=0)
    cases = at_least(given, "cases", default=CASES)
    num_prompts = at_least(given, "num_prompts", default=NUM_PROMPTS)
    replications = given.get("replications", REPLICATIONS)
    if replications < 2:
        raise UsageError(
            f"--replications must be at least 2 for intervals of a difference, got {replications}"
        )
    jobs = at_least(given, "jobs")
    with _status(silent=bool(given.get("disable_tqdm") or given.get("json"))) as told:
        tell = told or (lambda words: None)
        found = check_policy(settings, cases=cases, seed=seed, told=tell)
        saved = _save(found, folder)
        costs, comparison = dict[str, StepCost](), None
        if found.passed:
            costs = _costs(base, settings)
            if compared:
                comparison = compare_policies(
                    base,
                    settings,
                    workloads=workloads,
                    num_prompts=num_prompts,
                    replications=replications,
                    seed=seed,
                    jobs=jobs,
                    told=tell,
                )
    if given.get("json"):
        answer = policy_test_json(found, saved, costs, comparison)
        sys.stdout.write(json.dumps(answer, indent=1, allow_nan=False) + "\n")
    else:
        lines = conformance_lines(found, saved)
        lines += cost_lines(costs) if costs else []
        lines += comparison_lines(comparison) if comparison is not None else []
        sys.stdout.write("\n".join(lines) + "\n")
    return 0 if found.passed else FAILED


def _refuse_unused(given: Mapping[str, Any], compared: bool) -> None:
    if compared:
        return
    for name in ("workloads", "num_prompts", "replications", "jobs"):
        if name in given:
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect with --no-compare; leave one of them out"
            )


def _workloads(names: list[str] | None) -> tuple[str, ...]:
    known = {name.replace(" ", "-"): name for name in WORKLOADS}
    chosen = names if names is not None else list(known)
    for name in chosen:
        if name not in known:
            raise UsageError(f"--workloads: unknown workload {name!r}; {nearest(name, known)}")
    return tuple(known[name] for name in dict.fromkeys(chosen))


def _costs(base: Deployment, settings: Mapping[str, Any]) -> dict[str, StepCost]:
    variants = {label(settings): settings, **{name: {"policy": name} for name in BUILT_IN}}
    return {name: step_cost(base, fields) for name, fields in variants.items()}


def _save(found: Conformance, folder: Path) -> dict[str, Path]:
    """Write the counterexamples, each into a folder of its own."""
    saved = {}
    for check in found.checks:
        if check.case is not None:
            with writable(folder):
                saved[check.kind] = check.case.write(folder / check.kind)
    return saved


@contextmanager
def _status(*, silent: bool) -> Iterator[Callable[[str], None] | None]:
    """A line on standard error that says what is tested, or None where nobody would see it."""
    from rich.console import Console

    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield None
        return
    with console.status("Testing") as status:
        yield lambda words: status.update(f"Testing: {words}")
