"""Measuring under a time budget: which point next, drift of a reference step, a file that a later run goes on from.

Every step measured is a line of JSON in the store. Rounds go over all points; a budget that ends early leaves the most
telling points measured and the others out.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from calibration.microbench_points import Bounds, next_cut, plan_points, reference
from calibration.microbench_steps import Composition, StepBench, repeated
from serving.errors import UsageError

SCHEMA = "tokentwin-steps/1"
REFERENCE_EVERY = 3
DRIFT_LIMIT = 0.15
SHARED_LIMIT = 1.1


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one step."""

    what: Composition
    parts: Mapping[str, float]
    wall_s: float
    round: int


@dataclass(slots=True)
class Store:
    """All runs so far, and what they were of. With a path every one is appended to it at once."""

    header: dict[str, Any]
    path: Path | None = None
    runs: list[Measured] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    """Measurements that are no steps: bandwidths, load time, host time."""

    def add(self, run: Measured) -> None:
        """Keep a run."""
        self.runs.append(run)
        self._write({**asdict(run), "what": _json(run.what)})

    def note(self, name: str, value: Any) -> None:
        """Keep a measurement that is no step."""
        self.extras[name] = value
        self._write({"extra": name, "value": value})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def totals(self, key: str, rounds: set[int] | None = None) -> list[float]:
        """Total seconds of every run of one composition."""
        return [
            run.parts["total"]
            for run in self.runs
            if run.what.key == key and (rounds is None or run.round in rounds)
        ]

    def count(self, what: Composition, round_: int) -> int:
        return sum(run.what == what and run.round == round_ for run in self.runs)


def open_store(path: Path, header: dict[str, Any]) -> Store:
    """The store at `path`, continued when it is of the same model, device and limits, else begun anew."""
    store = Store(header, path)
    if path.is_file():
        kept = _read(path)
        if kept is not None and kept.header == {"schema": SCHEMA, **header}:
            store.runs, store.extras = kept.runs, kept.extras
            return store
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": SCHEMA, **header}) + "\n", encoding="utf-8")
    return store


def read_store(path: Path) -> Store:
    """A store written before. Raises `UsageError` when it is none."""
    found = _read(path)
    if found is None:
        raise UsageError(f"{path}: holds no measured steps; run tokentwin calibrate --device first")
    found.header.pop("schema")
    return found


def _read(path: Path) -> Store | None:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, ValueError):
        return None
    if not lines or lines[0].get("schema") != SCHEMA:
        return None
    store = Store(lines[0])
    for line in lines[1:]:
        if "extra" in line:
            store.extras[line["extra"]] = line["value"]
        else:
            what = line["what"]
            composition = Composition(
                tuple(what["decodes"]), tuple((t, b) for t, b in what["chunks"]), what["sampled"]
            )
            store.runs.append(Measured(composition, line["parts"], line["wall_s"], line["round"]))
    return store


def _json(what: Composition) -> dict[str, Any]:
    return {"decodes": what.decodes, "chunks": what.chunks, "sampled": what.sampled}


@dataclass(frozen=True, slots=True)
class Drift:
    """How the reference step wandered while everything else was measured."""

    low_s: float
    median_s: float
    high_s: float
    log_spread: float
    trend: float
    """Last third over first third, less one."""
    wall_over_cpu: float

    @property
    def flags(self) -> list[str]:
        """What to warn of, in words."""
        found = []
        if self.log_spread > DRIFT_LIMIT or abs(self.trend) > DRIFT_LIMIT:
            found.append(
                f"the reference step wandered: spread {self.log_spread:.0%}, last third {self.trend:+.0%} "
                "(throttling, or neighbours in the caches); measure again on a quieter machine"
            )
        if self.wall_over_cpu > SHARED_LIMIT:
            found.append(
                f"the machine is shared: {self.wall_over_cpu:.1f} s passed for each second of CPU time "
                "(times are CPU time)"
            )
        return found


def drift(store: Store, bounds: Bounds) -> Drift | None:
    """The wander of the reference step over the store's runs; None when it was never measured twice."""
    key = reference(bounds).key
    runs = [run for run in store.runs if run.what.key == key]
    if len(runs) < 2:
        return None
    seconds = np.array([run.parts["total"] for run in runs])
    third = max(1, len(seconds) // 3)
    _, spread = repeated(seconds.tolist())
    cpu_s = sum(run.parts["total"] for run in store.runs)
    return Drift(
        float(np.quantile(seconds, 0.1)),
        float(np.median(seconds)),
        float(np.quantile(seconds, 0.9)),
        spread,
        float(np.median(seconds[-third:]) / np.median(seconds[:third]) - 1.0),
        sum(run.wall_s for run in store.runs) / cpu_s if store.header.get("device") == "cpu" else 1.0,
    )


def steadied(runs: Sequence[Measured], key: str) -> list[Measured]:
    """The runs at one speed of the machine: each divided by how slow the reference step was around it.

    The speed between two references is interpolated; a reference is the mean of two runs in a row.
    """
    marks = [i for i, run in enumerate(runs) if run.what.key == key]
    if len(marks) < 2:
        return list(runs)
    at: list[int] = []
    seconds: list[float] = []
    for i in marks:
        total = runs[i].parts["total"]
        if at and at[-1] == i - 1:
            at[-1], seconds[-1] = i, (seconds[-1] + total) / 2
        else:
            at.append(i)
            seconds.append(total)
    smooth = np.log(seconds) - np.log(np.mean(seconds))
    factors = np.exp(np.interp(np.arange(len(runs)), at, smooth))
    return [
        replace(run, parts={name: value / factor for name, value in run.parts.items()})
        for run, factor in zip(runs, factors.tolist(), strict=True)
    ]


def token_times(store: Store) -> dict[int, float]:
    """Seconds of all linear layers by tokens in the step, mean of what was measured."""
    found: dict[int, list[float]] = {}
    for run in store.runs:
        linear = sum(run.parts[name] for name in ("qkv", "o", "gate_up", "down"))
        found.setdefault(run.what.num_tokens, []).append(linear)
    return {tokens: repeated(values)[0] for tokens, values in found.items()}


Progress = Callable[[int, int, str], None]
"""Points done, points in all, what is being measured."""


def measure_round(
    bench: StepBench,
    store: Store,
    bounds: Bounds,
    *,
    round_: int = 0,
    repeats: int = 3,
    until_s: float = math.inf,
    points: list[Composition] | None = None,
    cuts: int = 12,
    progress: Progress | None = None,
) -> int:
    """Measure every point `repeats` times, then cut intervals where the curve over tokens bends; points done.

    Stops at the monotonic time `until_s`, but not before the first few points. Points that the store has of this round
    are not measured again.
    """
    wanted = [what for what in (points or plan_points(bounds)) if bench.fits(what)]
    mark = reference(bounds)
    done = 0
    for index, what in enumerate(_with_cuts(wanted, store, bounds, cuts if points is None else 0)):
        if time.monotonic() > until_s and index >= _MUST:
            break
        missing = repeats - store.count(what, round_)
        if missing > 0:
            if progress is not None:
                progress(index, len(wanted) + (cuts if points is None else 0), what.key)
            if index % REFERENCE_EVERY == 0:
                _run(bench, store, mark, round_, 2)
            if store.count(what, round_) == 0:
                bench.run(what)  # the first of a shape prepares kernels and buffers
            _run(bench, store, what, round_, missing)
        done += 1
    _run(bench, store, mark, round_, 2)
    return done


_MUST = 8
"""Points that are measured whatever the budget: fewer make no profile."""


def _with_cuts(wanted: list[Composition], store: Store, bounds: Bounds, cuts: int) -> Iterator[Composition]:
    yield from wanted
    for _ in range(cuts):
        tokens = next_cut(token_times(store))
        if tokens is None:
            return
        decodes = tokens <= bounds.max_num_seqs
        what = Composition((16,) * tokens) if decodes else Composition(chunks=((tokens, 0),))
        if not bounds.allows(what):
            return
        yield what


def _run(bench: StepBench, store: Store, what: Composition, round_: int, times: int) -> None:
    for _ in range(times):
        begun_s = time.perf_counter()
        parts = bench.run(what)
        store.add(Measured(what, parts, time.perf_counter() - begun_s, round_))
