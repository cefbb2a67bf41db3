"""Run a sweep: what is not done yet goes to a backend, what comes back is kept at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from experiments.sweep_backends import Backend, Runner
from experiments.sweep_spec import Params, Range, Search, SweepSpec, canonical
from experiments.sweep_store import COLUMNS, Store, Task, folder_name
from serving.errors import TokenTwinError, UsageError, nearest

Told = Callable[[int, int, int], None]
"""(done, of how many, failed)"""


@dataclass(frozen=True, slots=True)
class SweepEnd:
    """How a sweep ended: runs by what became of them."""

    total: int
    failed: int
    found: int
    """Runs that an earlier sweep had done."""
    first_error: str = ""


def make_tasks(spec: SweepSpec, serving: Sequence[str]) -> list[Task]:
    """Every run of every point; equal points once. Empty for a search, whose points come as it goes."""
    points: dict[str, Params] = {}
    for point in spec.points:
        points.setdefault(canonical(point), point)
    return [
        Task(number, run, params, folder_name(params, serving))
        for number, (params, run) in enumerate(
            (params, run) for params in points.values() for run in range(spec.num_runs)
        )
    ]


def run_sweep(
    spec: SweepSpec,
    store: Store,
    runner: Runner,
    backend: Backend,
    *,
    continue_on_error: bool = True,
    told: Told | None = None,
) -> SweepEnd:
    """Run what is not done yet. The store must be open.

    Raises TokenTwinError at the first failing run where `continue_on_error` is not set; what was done is kept.
    """
    done = store.done()
    found = len(done)
    total = spec.num_runs * spec.search.trials if spec.search else len(make_tasks(spec, store.serving))
    failed = sum(row["status"] == "failed" for row in done.values())
    folders: dict[str, None] = {}

    def complete(tasks: Sequence[Task]) -> None:
        nonlocal failed
        folders.update(dict.fromkeys(task.folder for task in tasks))
        missing = [task for task in tasks if task.index not in done]
        with closing(_generator(backend.run(runner, spec.base, missing))) as outcomes:
            for task, outcome in outcomes:
                done[task.index] = store.write(task, outcome)
                if outcome.result is None:
                    failed += 1
                    if not continue_on_error:
                        raise TokenTwinError(
                            f"{task.folder}, run {task.run}: {outcome.error}; fix it and continue with --resume, or "
                            "leave --no-continue-on-error out"
                        )
                if told is not None:
                    told(len(done), total, failed)

    if told is not None:
        told(len(done), total, failed)
    if spec.search is None:
        complete(make_tasks(spec, store.serving))
    else:
        _search(spec, spec.search, store, complete, done)
    store.finish(folders)
    errors = [row["error"] for _, row in sorted(done.items()) if row["status"] == "failed"]
    return SweepEnd(total, failed, found, errors[0] if errors else "")


def _generator(iterator: Iterator[Any]) -> Any:
    """A generator of an iterator, which can be closed."""
    yield from iterator


def _search(
    spec: SweepSpec,
    search: Search,
    store: Store,
    complete: Callable[[Sequence[Task]], None],
    done: dict[int, dict[str, Any]],
) -> None:
    """Ask Optuna for a batch, run it, tell the results in order, and so on.

    The sampler sees the same history whoever runs the batch and however often the sweep was interrupted, so that it asks
    for the same points again.
    """
    optuna = _optuna()
    sampler = optuna.samplers.TPESampler(seed=search.seed)
    study = optuna.create_study(sampler=sampler, directions=[direction for _, direction in search.goals])
    space = {key: _distribution(optuna, axis) for key, axis in search.space.items()}
    for first in range(0, search.trials, search.batch):
        trials = [study.ask(space) for _ in range(min(search.batch, search.trials - first))]
        batch = [
            (trial, _tasks(spec, search, store, first + i, trial.params)) for i, trial in enumerate(trials)
        ]
        complete([task for _, tasks in batch for task in tasks])
        if not first:
            _check_figures(search, [done[task.index] for _, tasks in batch for task in tasks])
        for trial, tasks in batch:
            rows = [done[task.index] for task in tasks]
            values = [_mean(rows, column) for column, _ in search.goals]
            over = {column: _mean(rows, column) - most for column, most in search.limits}
            if all(map(math.isfinite, (*values, *over.values()))):
                for column, excess in over.items():
                    trial.set_constraint(column, excess)
                study.tell(trial, values)
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)


def _check_figures(search: Search, rows: Sequence[dict[str, Any]]) -> None:
    """Raises UsageError for a goal that no run of the first batch has, so that nothing could be learnt."""
    ended = [row for row in rows if row["status"] == "done"]
    for column in (*(c for c, _ in search.goals), *(c for c, _ in search.limits)):
        if ended and all(row.get(column) is None for row in ended):
            raise UsageError(
                f"optuna: {column}: none of the first {len(ended)} runs has such a figure; where answers come whole, "
                "limit p95_e2el_ms"
            )


def _tasks(spec: SweepSpec, search: Search, store: Store, number: int, chosen: Params) -> list[Task]:
    params = {key: _value(search.space[key], chosen[key]) for key in search.space}
    folder = folder_name(params, store.serving)
    return [Task(number * spec.num_runs + run, run, params, folder) for run in range(spec.num_runs)]


def _value(axis: Range | list[Any], chosen: Any) -> Any:
    if not isinstance(axis, Range):
        return axis[int(chosen)]
    return int(chosen) if axis.whole else float(f"{chosen:.6g}")


def _distribution(optuna: Any, axis: Range | list[Any]) -> Any:
    make = optuna.distributions
    if not isinstance(axis, Range):
        return make.CategoricalDistribution(list(range(len(axis))))
    if axis.whole:
        return make.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return make.FloatDistribution(axis.low, axis.high, log=axis.log)


def _mean(rows: Sequence[dict[str, Any]], column: str) -> float:
    values = [row.get(column) for row in rows]
    if any(value is None for value in values):
        return math.nan
    return math.fsum(float(value) for value in values if value is not None) / len(values)


def _optuna() -> Any:
    try:
        optuna: Any = import_module("optuna")
    except ImportError:
        raise UsageError("a sweep with optuna needs it: pip install 'tokentwin[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def check_search(search: Search) -> None:
    """Raises UsageError where Optuna is missing or a goal is not a figure of a run."""
    for column in (*(c for c, _ in search.goals), *(c for c, _ in search.limits)):
        if COLUMNS.get(column) not in ("int", "float"):
            numbers = [name for name, kind in COLUMNS.items() if kind in ("int", "float")]
            raise UsageError(f"optuna: {column!r} is not a figure of a run; {nearest(column, numbers)}")
    _optuna()
