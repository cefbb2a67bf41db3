"""What a sweep tries: points of a grid, a list, a random sample, or a search, as a file or as vLLM's parameter files.

A point is a set of overrides of the flags of `tokentwin simulate`. Keys are the flags' names, or
`tenants.NAME.field…` for what a workload file says of a tenant. What the values mean is the caller's business.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from serving.errors import UsageError, nearest
from sim.workload.yaml_lines import DuplicateKey, line_of, load_yaml, yaml_problem

NAME = "_benchmark_name"
"""vLLM's key for the name of a set of parameters."""
KEYS = ("name", "base", "grid", "points", "random", "optuna", "num_runs")
WAYS = ("grid", "points", "random", "optuna")

Params = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def ends(self) -> tuple[float, float]:
        """Both, as whole numbers where all of them are."""
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def draw(self, rng: np.random.Generator) -> float | int:
        """One of them, uniformly (or uniformly in the logarithm)."""
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = rng.uniform(self.low, self.high)
        return min(max(round(value), int(self.low)), int(self.high)) if self.whole else float(f"{value:.6g}")


Space = dict[str, "Range | list[Any]"]


@dataclass(frozen=True, slots=True)
class Search:
    """An Optuna search: batches of trials, each batch told to the sampler in order, so that workers do not matter."""

    trials: int
    space: Space
    goals: tuple[tuple[str, str], ...]
    """(result column, "minimize" or "maximize")."""
    limits: tuple[tuple[str, float], ...] = ()
    """(result column, most that it may be)."""
    batch: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """A sweep, before its flags are checked."""

    name: str | None = None
    base: Params = field(default_factory=dict)
    points: tuple[Params, ...] = ({},)
    search: Search | None = None
    num_runs: int = 1
    drawn_from: Space = field(default_factory=dict)
    """Of a random sample."""

    def varied(self) -> tuple[str, ...]:
        """Every key that a point may set, in order of first mention."""
        of_points = itertools.chain.from_iterable(self.points)
        space = self.search.space if self.search is not None else ()
        return tuple(dict.fromkeys(key for key in (*space, *of_points) if key != NAME))


def read_sweep(path: Path) -> SweepSpec:
    """The sweep in a YAML file. Raises UsageError naming file and key."""
    content = _yaml(path)
    for key in content if isinstance(content, dict) else ():
        if key not in KEYS:
            line = line_of(path.read_text(encoding="utf-8-sig"), (key,))
            raise UsageError(f"{path}: line {line}: {_unknown(key)}")
    return parse_sweep(content, str(path), path.stem)


def _unknown(key: object) -> str:
    return f"unknown key {key!r}; {nearest(str(key), KEYS)}; flags belong below base or grid"


def parse_sweep(content: Any, where: str, name: str | None = None) -> SweepSpec:
    """The sweep that `content` of a file describes, `name` where it has none. Errors begin with `where`."""
    if not isinstance(content, dict):
        raise UsageError(f"{where}: a sweep is a mapping with base and one of {', '.join(WAYS)}")
    for key in content:
        if key not in KEYS:
            raise UsageError(f"{where}: {_unknown(key)}")
    ways = [way for way in WAYS if content.get(way) is not None]
    if len(ways) != 1:
        raise UsageError(f"{where}: give exactly one of {', '.join(WAYS)}, not {', '.join(ways) or 'none'}")
    base = _mapping(content.get("base") or {}, f"{where}: base")
    num_runs = content.get("num_runs", 1)
    if not isinstance(num_runs, int) or isinstance(num_runs, bool) or num_runs < 1:
        raise UsageError(f"{where}: num_runs must be a whole number from 1, got {num_runs!r}")
    name = str(content["name"]) if content.get("name") is not None else name
    way, what = ways[0], content[ways[0]]
    place = f"{where}: {way}"
    if way == "optuna":
        return SweepSpec(name, base, (), _search(what, place), num_runs)
    if way == "random":
        points, space = _random(what, place)
        return SweepSpec(name, base, tuple(points), None, num_runs, space)
    points = {"grid": _grid, "points": _records}[way](what, place)
    return SweepSpec(name, base, tuple(points), None, num_runs)


def read_params(path: Path, flag: str) -> list[Params]:
    """A parameter file of `vllm bench sweep`: a list of objects, or an object of them by name (JSON or YAML)."""
    content = _yaml(path)
    if isinstance(content, dict):
        content = [
            {NAME: name, **_mapping(params, f"{flag} {path}: {name}")} for name, params in content.items()
        ]
    return _records(content, f"{flag} {path}")


def product(serve: Sequence[Params], bench: Sequence[Params], link_vars: str = "") -> list[Params]:
    """Every pair of serve and bench parameters whose linked variables (`max_num_seqs=max_concurrency,…`) are equal.

    Where one of them has a name, `NAME` becomes that of the pair's folder. Raises UsageError for a link that is no pair
    or that leaves nothing.
    """
    links = []
    for link in filter(None, (part.strip() for part in link_vars.split(","))):
        one, equals, other = link.partition("=")
        if not equals or not one.strip() or not other.strip():
            raise UsageError(f"--link-vars: {link!r} is not SERVE_PARAM=BENCH_PARAM")
        links.append((plain(one), plain(other)))
    out: list[Params] = []
    for one_set, other_set in itertools.product(serve, bench):
        if not all(a in one_set and b in other_set and one_set[a] == other_set[b] for a, b in links):
            continue
        both = set(one_set) & set(other_set) - {NAME}
        if both:
            raise UsageError(f"{min(both)} is in --serve-params and in --bench-params; keep one")
        named = {}
        if NAME in one_set or NAME in other_set:
            parts = (("SERVE--", one_set), ("BENCH--", other_set))
            named = {NAME: "-".join(lead + label(params) for lead, params in parts if params)}
        out.append({**one_set, **other_set, **named})
    if not out:
        raise UsageError(
            f"--link-vars {link_vars}: no pair of parameter sets has equal values; check both files"
        )
    return out


def label(params: Params) -> str:
    """The name of a set of parameters, as vLLM makes it: its own, or its keys and values."""
    return (
        str(params[NAME]) if NAME in params else "-".join(f"{key}={value}" for key, value in params.items())
    )


def plain(key: str) -> str:
    """A key with underscores and without leading dashes; `tenants.NAME.…` keeps the tenant's name."""
    if key.startswith("tenants."):
        return key
    return key.strip().lstrip("-").replace("-", "_")


def _yaml(path: Path) -> Any:
    try:
        return load_yaml(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a YAML or JSON file") from None
    except DuplicateKey as error:
        raise UsageError(f"{path}: {yaml_problem(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise UsageError(f"{path}: not YAML{where}; correct the file") from None


def _mapping(value: Any, where: str) -> Params:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected names and values, got {str(value)[:40]!r}")
    out: Params = {}
    for key, entry in value.items():
        name = plain(str(key)) if key != NAME else NAME
        if name in out:
            raise UsageError(f"{where}: {name} is given twice; keep one")
        out[name] = entry
    return out


def _records(value: Any, where: str) -> list[Params]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: expected a list of parameter sets, got {str(value)[:40]!r}")
    records = [_mapping(entry, where) for entry in value]
    names = [record[NAME] for record in records if NAME in record]
    if len(set(map(str, names))) < len(names):
        raise UsageError(f"{where}: two sets have the same name; names must differ")
    return records


def _grid(value: Any, where: str) -> list[Params]:
    axes = _mapping(value, where)
    if not axes:
        raise UsageError(f"{where}: no axis; write lines such as request_rate: [5, 10, 20]")
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"{where}: {key} needs a list of values, got {str(values)[:40]!r}")
    return [dict(zip(axes, choice, strict=True)) for choice in itertools.product(*axes.values())]


def _random(value: Any, where: str) -> tuple[list[Params], Space]:
    options = _options(value, where, ("points", "seed", "space"))
    space = _space(options.get("space"), where)
    count, seed = _count(options, "points", where), _count(options, "seed", where, default=0, least=0)
    rng = np.random.default_rng(seed)
    points = [
        {
            key: axis.draw(rng) if isinstance(axis, Range) else axis[int(rng.integers(len(axis)))]
            for key, axis in space.items()
        }
        for _ in range(count)
    ]
    return points, space


def _search(value: Any, where: str) -> Search:
    options = _options(
        value, where, ("trials", "seed", "space", "batch", "minimize", "maximize", "subject_to")
    )
    goals: list[tuple[str, str]] = []
    for direction in ("minimize", "maximize"):
        columns = options.get(direction) or []
        goals += [(str(c), direction) for c in ([columns] if isinstance(columns, str) else columns)]
    if not goals:
        raise UsageError(f"{where}: needs minimize or maximize, such as maximize: output_throughput")
    limits = _mapping(options.get("subject_to") or {}, f"{where}: subject_to")
    for column, most in limits.items():
        if not isinstance(most, int | float):
            raise UsageError(f"{where}: subject_to: {column} needs a number, got {str(most)[:40]!r}")
    return Search(
        _count(options, "trials", where),
        _space(options.get("space"), where),
        tuple(goals),
        tuple((column, float(most)) for column, most in limits.items()),
        _count(options, "batch", where, default=8),
        _count(options, "seed", where, default=0, least=0),
    )


def _options(value: Any, where: str, known: Sequence[str]) -> Params:
    options = _mapping(value, where)
    for key in options:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}; {nearest(key, known)}")
    return options


def _count(
    options: Mapping[str, Any], key: str, where: str, *, default: int | None = None, least: int = 1
) -> int:
    value = options.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{where}: {key} must be a whole number from {least}, got {value!r}")
    return value


def _space(value: Any, where: str) -> Space:
    axes = _mapping(value or {}, f"{where}: space")
    if not axes:
        raise UsageError(
            f"{where}: no space; write lines such as request_rate: {{low: 1, high: 50, log: true}}"
        )
    return {key: _axis(axis, f"{where}: {key}") for key, axis in axes.items()}


def _axis(value: Any, where: str) -> Range | list[Any]:
    if isinstance(value, list) and value:
        return value
    options = _options(value, where, ("low", "high", "log")) if isinstance(value, dict) else {}
    low, high = options.get("low"), options.get("high")
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        raise UsageError(f"{where}: needs a list of values, or low and high")
    log = options.get("log", False)
    if not low < high or not isinstance(log, bool) or (log and low <= 0):
        raise UsageError(f"{where}: low must be below high (and above 0 with log: true)")
    return Range(float(low), float(high), log, isinstance(low, int) and isinstance(high, int))


def canonical(value: Any) -> str:
    """JSON text that is the same for the same values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
