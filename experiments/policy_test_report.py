"""The outcome of a policy's test in lines and in keys."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.console import WIDTH
from experiments.policy_test import Conformance
from experiments.policy_test_bench import HIGHER_IS_BETTER, Cell, Comparison, StepCost

NO_DIFFERENCE = "no difference"


def conformance_lines(found: Conformance, saved: Mapping[str, Path]) -> list[str]:
    """Rule by rule; a broken one with what broke it and how to replay it."""
    lines = [" Conformance ".center(WIDTH, "=")]
    how = {True: "yes", False: "NO", None: "-"}
    for check in found.checks:
        words = f" ({check.words})" if check.words and check.passed is not False else ""
        lines += _wrap(f"{how[check.passed]:<4}{check.title}{words}", "    ")
        if check.passed is False:
            lines += _wrap(f"    {check.words}.", "    ")
            if check.case is not None:
                size = len(check.case.rows)
                lines += _wrap(f"    Smallest load found: {size} request{'s' if size > 1 else ''}.", "    ")
            if check.kind in saved:
                lines.append(f"    tokentwin simulate --config {saved[check.kind]}")
    verdict = "Passes" if found.passed else "Fails"
    queue = "" if found.queue_order == "fcfs" else f" with queue order {found.queue_order}"
    lines += _wrap(
        f"{verdict}: {found.policy}{queue}, {found.num_cases} random load{'s' if found.num_cases != 1 else ''}.",
        "",
    )
    return lines


def cost_lines(costs: Mapping[str, StepCost]) -> list[str]:
    """Microseconds a decision, side by side."""
    lines = [" Cost of a decision (µs, median) ".center(WIDTH, "=")]
    lines.append(f"{'':<40}{'decode only':>18}{'admitting':>18}")
    for name, cost in costs.items():
        lines.append(f"{name[:39]:<40}{_us(cost.decode_us):>18}{_us(cost.admit_us):>18}")
    return lines


def _us(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0f}"


def comparison_lines(found: Comparison) -> list[str]:
    """Every workload and figure with the winner, and what the candidate gains or loses against each built-in."""
    lines = [" Who wins where ".center(WIDTH, "=")]
    policies = list(found.cells[0].values)
    widths = [max(len(_short(policy)) + 2, 12) for policy in policies]
    head = "".join(f"{_short(p):>{w}}" for p, w in zip(policies, widths, strict=True))
    workload = ""
    for cell in found.cells:
        if cell.workload != workload:
            workload = cell.workload
            lines.append(f"{workload} ({found.rates[workload]:.3g} req/s)")
            lines.append(f"  {'':<20}{head}  winner")
        values = "".join(f"{_value(cell, p):>{w}}" for p, w in zip(policies, widths, strict=True))
        lines.append(f"  {_title(cell.figure):<20}{values}  {_short(cell.winner) or NO_DIFFERENCE}")
        for policy, difference in cell.differences.items():
            if difference.differs:
                better = (difference.value > 0) == (cell.figure in HIGHER_IS_BETTER)
                verdict = "better" if better else "worse"
                parts = (difference.value, difference.low, difference.high)
                value, low, high = (_signed(cell.figure, part) for part in parts)
                lines.append(f"    {verdict} than {_short(policy)}: {value} [{low}, {high}]")
    lines += _wrap(
        f"{found.num_prompts} requests a workload at {_LOAD}; {found.replications} replications, paired; all but static "
        "schedule asynchronously unless told otherwise; a winner is better than every other policy beyond the 95% "
        "interval of their difference.",
        "",
    )
    return [*lines, "=" * WIDTH]


_LOAD = "75% of what chunked serves at once"


def _short(policy: str) -> str:
    """`module:Class` by its class."""
    return policy.rpartition(":")[2]


def _title(figure: str) -> str:
    if figure == "output_throughput":
        return "Output (tok/s)"
    if figure == "slo_attainment":
        return "SLO attainment (%)"
    statistic, _, metric = figure.partition("_")
    return f"{statistic.capitalize()} {metric.upper()} (ms)"


def _scale(figure: str) -> float:
    return {"output_throughput": 1.0, "slo_attainment": 100.0}.get(figure, 1000.0)


def _value(cell: Cell, policy: str) -> str:
    return f"{cell.values[policy] * _scale(cell.figure):,.1f}"


def _signed(figure: str, value: float) -> str:
    return f"{value * _scale(figure):+,.1f}"


def _wrap(text: str, indent: str) -> list[str]:
    lead = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.strip(), WIDTH, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def policy_test_json(
    found: Conformance,
    saved: Mapping[str, Path],
    costs: Mapping[str, StepCost],
    comparison: Comparison | None,
) -> dict[str, Any]:
    """Strict JSON values: seconds, shares, tokens per second, microseconds."""
    return {
        "policy": found.policy,
        "scheduling_policy": found.queue_order,
        "passed": found.passed,
        "cases": found.num_cases,
        "checks": [
            {
                "check": check.kind,
                "title": check.title,
                "passed": check.passed,
                "words": check.words,
                "requests": None if check.case is None else len(check.case.rows),
                "replay": str(saved[check.kind]) if check.kind in saved else None,
            }
            for check in found.checks
        ],
        "step_cost_us": {
            name: {"decode": _number(cost.decode_us), "admit": _number(cost.admit_us)}
            for name, cost in costs.items()
        },
        "comparison": None if comparison is None else _comparison(comparison),
    }


def _comparison(found: Comparison) -> dict[str, Any]:
    return {
        "candidate": found.candidate,
        "num_prompts": found.num_prompts,
        "replications": found.replications,
        "request_rates": dict(found.rates),
        "cells": [
            {
                "workload": cell.workload,
                "figure": cell.figure,
                "values": {policy: _number(value) for policy, value in cell.values.items()},
                "differences": {
                    policy: {"value": d.value, "ci95_low": d.low, "ci95_high": d.high, "differs": d.differs}
                    for policy, d in cell.differences.items()
                },
                "winner": cell.winner or None,
            }
            for cell in found.cells
        ],
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
