"""Small loads that a policy must survive, drawn at random or made to starve somebody; saved as files of `simulate`."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from costmodel.pricer import StepPricer
from serving.policies import CHUNKING
from sim.deployment import Built, Deployment, build
from sim.workload import Workload, WorkloadSpec, load_workload
from sim.workload.spec import CustomSpec, GoodputSpec, TenantSpec

MODEL, GPU, PAGE = "llama-3.1-8b", "h200", 16
LIMITS = ((1, 32, 8), (2, 64, 12), (4, 64, 24), (6, 256, 60))
"""Seats, tokens of a step and KV pages; few, because working out prices is what takes time."""
SETTINGS = {"tokenize_us_per_token": 0.0}
"""A long prompt joins the queue no later than a short one sent at the same time."""
DEADLINE_MS = 500.0
"""Promise on TTFT of every request, so that the deadline queue has deadlines."""
CASE, WORKLOAD = "case.yaml", "workload.yaml"


_PRICERS: dict[tuple[int, int], StepPricer] = {}
"""By what prices depend on here, so that their tables are made once."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a case."""

    arrival_s: float
    prompt: int
    output: int
    priority: int = 0
    group: int | None = None
    """Requests of one group begin with the same `prompt`-limited prefix."""


@dataclass(frozen=True, slots=True)
class Case:
    """A deployment with tight limits and a few requests."""

    settings: Mapping[str, Any]
    """Fields of `sim.deployment.Deployment`, the policy among them."""
    rows: tuple[Row, ...]

    def build(self) -> Built:
        """The deployment worked out. Raises `UsageError` where the policy cannot have these settings."""
        built = build(Deployment(model=MODEL, gpu=GPU, **self.settings))
        limits = built.limits
        longest = limits.max_model_len if built.deployment.policy not in CHUNKING else 0
        key = (limits.max_num_seqs, max(limits.max_num_batched_tokens, longest))
        return replace(built, pricer=_PRICERS.setdefault(key, built.pricer))

    def workload(self) -> Workload:
        """The requests, read from the files that `write` makes."""
        with tempfile.TemporaryDirectory() as folder:
            return load_workload(self._spec(Path(folder)), seed=0)

    def write(self, folder: Path) -> Path:
        """Files that `tokentwin simulate --config` replays; returns the config's path."""
        folder.mkdir(parents=True, exist_ok=True)
        tenants = [
            {
                "name": tenant.name,
                "dataset": {"name": "custom", "path": f"{tenant.name}.jsonl"},
                "priority": tenant.priority,
                "goodput": {"ttft": DEADLINE_MS},
            }
            for tenant in self._spec(folder).tenants
        ]
        text = yaml.safe_dump({"name": "case", "tenants": tenants}, sort_keys=False)
        (folder / WORKLOAD).write_text(text, encoding="utf-8")
        flags = {
            "model": MODEL,
            "gpu": GPU,
            **{name: value for name, value in self.settings.items() if value is not None},
            "dataset_name": "workload",
            "dataset_path": str(folder / WORKLOAD),
            "replications": 1,
        }
        path = folder / CASE
        path.write_text(yaml.safe_dump(flags, sort_keys=False), encoding="utf-8")
        return path

    def _spec(self, folder: Path) -> WorkloadSpec:
        """One tenant per priority, each with a file of its own."""
        tenants = []
        for priority in sorted({row.priority for row in self.rows}):
            mine = [row for row in self.rows if row.priority == priority]
            path = folder / f"priority{priority}.jsonl"
            path.write_text("".join(json.dumps(_line(row)) + "\n" for row in mine), encoding="utf-8")
            tenants.append(
                TenantSpec(
                    name=f"priority{priority}",
                    dataset=CustomSpec(path=path),
                    priority=priority,
                    goodput=GoodputSpec(ttft=DEADLINE_MS),
                )
            )
        return WorkloadSpec(name="case", tenants=tuple(tenants))


def _line(row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {
        "prompt_tokens": row.prompt,
        "output_tokens": row.output,
        "arrival_s": row.arrival_s,
    }
    if row.group is not None:
        line |= {"prefix_group": f"group{row.group}", "prefix_tokens": max(row.prompt // 2, 1)}
    return line


def random_case(seed: int, policy: Mapping[str, Any]) -> Case:
    """Limits so small that seats, tokens and pages all run out, and requests of every length that they allow."""
    rng = random.Random(seed)
    seqs, tokens, pages = rng.choice(LIMITS)
    settings = {
        **policy,
        **SETTINGS,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "num_gpu_blocks_override": pages + 1,
        "enable_prefix_caching": rng.random() < 0.7,
        "long_prefill_token_threshold": rng.choice([0, 0, 24]),
    }
    if policy.get("policy") != "static":
        settings["async_scheduling"] = rng.random() < 0.5
    longest = pages * PAGE
    rows = []
    time_s = 0.0
    for _ in range(rng.randint(4, 24)):
        time_s += rng.choice([0.0, 0.0, 0.0, 0.004, 0.02, 0.1])
        prompt = rng.choice([1, 5, PAGE, PAGE + 1, 40, rng.randint(1, longest * 2 // 3)])
        output = rng.choice([1, 2, 10, rng.randint(1, 48)])
        prompt = min(prompt, longest - 2)
        rows.append(
            Row(
                round(time_s, 3),
                prompt,
                min(output, longest - prompt),
                rng.randrange(3) if policy.get("scheduling_policy") == "priority" else 0,
                rng.randrange(2) if rng.random() < 0.4 else None,
            )
        )
    return Case(settings, tuple(rows))


STREAM = 240
"""Short requests behind the one that may starve, as many as an overload would keep sending."""


def starving_cases(policy: Mapping[str, Any]) -> Iterator[tuple[str, int, Case]]:
    """Name, row of the victim, and case: one unusual request before an endless stream of small ones."""
    settings = {
        **policy,
        **SETTINGS,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 129,
    }
    small = Row(0.0, PAGE, PAGE)
    victims = {
        "a long prompt": Row(0.0, 1500, 4),
        "a long answer": Row(0.0, PAGE, 64),
        "a small request": small,
    }
    for name, victim in victims.items():
        yield name, 8, Case(settings, (*[small] * 8, victim, *[small] * STREAM))


def shrink(case: Case, breaks: Callable[[Case], bool], most_tries: int) -> Case:
    """A smaller case that still `breaks` a rule: all at once, rows left out, then each row made simpler."""
    tries = 0

    def still(rows: tuple[Row, ...]) -> bool:
        nonlocal tries
        tries += 1
        return bool(rows) and tries <= most_tries and breaks(replace(case, rows=rows))

    rows = case.rows
    if still(at_once := tuple(replace(row, arrival_s=0.0) for row in rows)):
        rows = at_once
    before: tuple[Row, ...] = ()
    while rows != before:
        before = rows
        size = max(len(rows) // 2, 1)
        while size:
            start = 0
            while start < len(rows):
                if still(left := (*rows[:start], *rows[start + size :])):
                    rows = left
                else:
                    start += size
            size //= 2
        for i in range(len(rows)):
            while changed := next(
                (r for r in _simpler(rows[i]) if still((*rows[:i], r, *rows[i + 1 :]))), None
            ):
                rows = (*rows[:i], changed, *rows[i + 1 :])
    return replace(case, rows=rows)


def _simpler(row: Row) -> Iterator[Row]:
    if row.group is not None:
        yield replace(row, group=None)
    if row.arrival_s:
        yield replace(row, arrival_s=0.0)
    for name in ("prompt", "output"):
        value = getattr(row, name)
        for less in dict.fromkeys((1, value // 2, value - 1)):
            if 1 <= less < value:
                yield replace(row, **{name: less})
