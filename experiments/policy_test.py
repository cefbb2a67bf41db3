"""Does a batch policy keep the rules? Each rule has a check; a check that fails leaves the smallest load that breaks it.

The rules: every request ends, none is lost, no page leaks, limits are kept, nobody starves while later requests are
served, the device never idles with work at hand (unless the policy says so), and the same load gives the same schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.policy_test_cases import Case, random_case, shrink, starving_cases
from experiments.policy_test_watch import MOST_OVERTAKEN, Problem, differs, overtaken, run, watch
from serving.errors import UsageError
from serving.policies import BatchPolicy, load_policy
from sim.deployment_limits import policy_options

CASES = 40
MORE_CASES = 10
"""Random loads after the first that breaks a rule, to see whether others are broken too."""
MOST_SHRINKS = 400

CHECKS = {
    "raises": "no exception in the policy",
    "ends": "every request ends",
    "loses": "no request is lost",
    "leaks": "no page leaks",
    "limits": "seats are kept",
    "starves": "nobody starves",
    "idles": "work conserving, or declared not",
    "differs": "the same load gives the same schedule",
    "steady": "leaping over steady steps changes nothing",
}
"""By kind of problem."""


@dataclass(frozen=True, slots=True)
class Check:
    """One rule: kept, broken (with a counterexample), or not asked."""

    kind: str
    passed: bool | None
    words: str
    case: Case | None = None

    @property
    def title(self) -> str:
        return CHECKS[self.kind]


@dataclass(frozen=True, slots=True)
class Conformance:
    """What was checked for one policy."""

    policy: str
    queue_order: str
    num_cases: int
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)


def check_policy(
    settings: Mapping[str, Any],
    *,
    cases: int = CASES,
    seed: int = 0,
    told: Callable[[str], None] = lambda words: None,
) -> Conformance:
    """Put the policy in `settings` (fields of a deployment: policy, scheduling_policy, options) through every check.

    Raises `UsageError` when there is no such policy.
    """
    name, order = settings.get("policy", "chunked"), settings.get("scheduling_policy", "fcfs")
    made = load_policy(name, **_options(settings))
    found: dict[str, tuple[Problem, Case]] = {}
    tried = cases_to_first = 0
    for number in range(cases):
        told(f"case {number + 1} of {cases}")
        case = random_case(seed + number, settings)
        for finder in (_rules, _determinism, _leaps):
            problem = finder(case)
            if problem is not None:
                found.setdefault(problem.kind, (problem, case))
                break
        tried = number + 1
        if "raises" in found or (found and tried >= cases_to_first + MORE_CASES):
            break
        cases_to_first = cases_to_first if found else tried
    starving = (
        "" if order == "fcfs" else f"queue order {order} puts some behind others for as long as these arrive"
    )
    if order == "fcfs" and not found:
        for _, victim, case in starving_cases(settings):
            problem = _starvation(case, victim)
            if problem is not None:
                found.setdefault(problem.kind, (problem, case))
    checks = [_check(kind, found, told, made, starving) for kind in CHECKS]
    return Conformance(name, order, tried, tuple(checks))


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    from experiments.policy_test_cases import GPU, MODEL
    from sim.deployment import Deployment

    return policy_options(Deployment(model=MODEL, gpu=GPU, **settings))


def _check(
    kind: str,
    found: Mapping[str, tuple[Problem, Case]],
    told: Callable[[str], None],
    policy: BatchPolicy,
    starving: str,
) -> Check:
    if kind in found:
        problem, case = found[kind]
        told(f"looking for a smaller case in which: {CHECKS[kind]}")
        if kind == "starves":
            return Check(kind, False, problem.words, case)
        finder = {"differs": _determinism, "steady": _leaps}.get(kind, _rules)

        def breaks(smaller: Case) -> bool:
            found = finder(smaller)
            return found is not None and found.kind == kind

        case = shrink(case, breaks, MOST_SHRINKS)
        return Check(kind, False, (finder(case) or problem).words, case)
    if kind == "starves" and starving:
        return Check(kind, None, starving)
    if kind == "starves" and found:
        return Check(kind, None, "not asked of a policy that breaks other rules")
    if kind == "idles" and not conserves_work(policy):
        return Check(kind, True, "declared not to be")
    if kind == "steady" and not policy.steady:
        return Check(
            kind, None, "does not promise steady steps: the twin steps through them all, which is slower"
        )
    return Check(kind, True, "")


def conserves_work(policy: BatchPolicy) -> bool:
    """What the policy declares; `work_conserving = False` in its class says that it may wait with work at hand."""
    return bool(policy.work_conserving)


def _rules(case: Case) -> Problem | None:
    built = case.build()
    _, watched, problem = watch(case, built, case.workload())
    if problem is None and watched.idle and conserves_work(watched.inner):
        return Problem(
            "idles", f"{watched.idle}; a policy that waits on purpose says work_conserving = False"
        )
    return problem


def _determinism(case: Case) -> Problem | None:
    """A second run with a new policy object must be the first one."""
    built, workload = case.build(), case.workload()
    first, again = (watch(case, built, workload)[0] for _ in range(2))
    if first is None or again is None:
        return None
    how = differs(first, again)
    return Problem("differs", f"two runs of the same load: {how}") if how else None


def _leaps(case: Case) -> Problem | None:
    """A policy that promises steady steps is leapt over; that must give what stepping gives."""
    built, workload = case.build(), case.workload()
    options = policy_options(built.deployment)

    def made() -> BatchPolicy:
        return load_policy(built.deployment.policy, **options)

    if not made().steady:
        return None
    try:
        how = differs(*(run(built, workload, made(), fast_forward=leap) for leap in (False, True)))
    except UsageError:
        return None
    return Problem("steady", f"stepping and leaping: {how}") if how else None


def _starvation(case: Case, victim: int) -> Problem | None:
    built, workload = case.build(), case.workload()
    record, _, problem = watch(case, built, workload)
    if record is None or problem is not None:
        return problem
    count = overtaken(record, victim)
    if count <= MOST_OVERTAKEN:
        return None
    row = case.rows[victim]
    return Problem(
        "starves",
        f"{count} later requests ended before request {victim} (prompt {row.prompt}, answer {row.output} tokens)",
    )
