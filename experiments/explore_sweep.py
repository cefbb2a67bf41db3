"""A sweep's Parquet rows as points to explore."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.explore_notes import certainty_notes, unjudged_notes
from experiments.explore_space import Point, Space, read_object
from experiments.sweep_spec import NAME, Params, canonical
from experiments.sweep_store import COLUMNS, ENDS, FIXED, INTERVALS, POINTS, SWEEP, folder_name
from serving.errors import UsageError
from sim.deployment import Deployment
from sim.slo import parse_slo

WORDS = {"sim_load": "load", "sim_bound": "bound"}


def sweep_space(root: Path, results: Path, serving: Sequence[str]) -> Space:
    """The sweep in folder `root` with all rows in `results`, or those of its points so far. Raises UsageError."""
    asked = read_object(root / SWEEP) if (root / SWEEP).is_file() else {}
    rows = _rows(root, results)
    if not rows:
        raise UsageError(f"{root}: no run of the sweep is done yet; start it, or continue it with --resume")
    base, num_runs = dict(asked.get("base") or {}), int(asked.get("num_runs") or 1)
    knobs = tuple(name for name in rows[0] if name not in {*COLUMNS, *FIXED, *INTERVALS})
    given = list({canonical(p): p for p in asked.get("points") or []}.values())
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(int(row["index"]) // num_runs, []).append(row)
    gpu = base.get("gpu", Deployment.model_fields["gpu"].default)
    points = []
    for number, runs in sorted(groups.items()):
        shown = _spread({knob: runs[0][knob] for knob in knobs})
        params = given[number] if number < len(given) and not asked.get("search") else _params(runs[0], knobs)
        folder = root / folder_name(params, serving) / f"run={runs[0]['run']}" if asked else None
        command = _command(base, params, folder) if folder is not None else ""
        points.append(
            Point(
                number,
                shown,
                gpu=str(shown.get("gpu") or gpu),
                asked=params,
                folder=folder,
                command=command,
                **_mean(runs),
            )
        )
    names = tuple(dict.fromkeys(name for p in points for name in p.params))
    points = [replace(p, params={name: p.params.get(name) for name in names}) for p in points]
    done = sum(not p.error for p in points)
    facts = [f"{len(points):,} points" if done == len(points) else f"{done:,} of {len(points):,} points done"]
    facts += [f"{num_runs} runs each, averaged"] if num_runs > 1 else []
    facts += [
        str(base[name]) for name in ("model", "gpu", "dataset_name") if name in base and name not in knobs
    ]
    expected = len(given) * num_runs or int((asked.get("search") or {}).get("trials") or 0) * num_runs
    notes = []
    if expected > len(rows):
        notes.append(
            f"{expected - len(rows)} of {expected} runs are not done yet: tokentwin sweep … --resume continues."
        )
    limits = _limits(base)
    notes += [*unjudged_notes(points, limits), *certainty_notes(points, limits)]
    return Space(
        "sweep",
        f"Sweep {root.resolve().name}",
        " · ".join(facts),
        root,
        tuple(k for k in names if len({canonical(p.params[k]) for p in points}) > 1) or names,
        tuple(points),
        limits,
        base,
        notes=tuple(notes),
    )


def _spread(params: Params) -> Params:
    """A flag whose value is an object is a knob per field of it: speculative_config.acceptance."""
    out: Params = {}
    for key, value in params.items():
        inner = _object(value) if isinstance(value, str) and value.startswith("{") else value
        if isinstance(inner, dict):
            out |= _spread({f"{key}.{name}": v for name, v in inner.items()})
        else:
            out[key] = canonical(inner) if isinstance(inner, list) else inner
    return out


def _object(text: str) -> Any:
    """JSON's value, or the text where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _rows(root: Path, results: Path) -> list[dict[str, Any]]:
    pq: Any = import_module("pyarrow.parquet")
    pieces = sorted((root / POINTS).glob("[0-9]*.parquet"))
    try:
        if results.is_file():
            table = pq.read_table(results)
            if len(table) >= len(pieces):
                missing = [name for name in ("index", "run", "status") if name not in table.column_names]
                if missing:
                    raise UsageError(f"{results}: no column {missing[0]}; not the results of a sweep")
                found: list[dict[str, Any]] = table.to_pylist()
                return found
        return [row for piece in pieces for row in pq.read_table(piece).to_pylist()]
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {results}: {error}") from None


def _params(row: Mapping[str, Any], knobs: Sequence[str]) -> Params:
    return {knob.removeprefix("param_"): row[knob] for knob in knobs if row[knob] is not None}


def _mean(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a point's runs say, as fields of it."""
    done = [row for row in runs if row["status"] == "done"]
    if not done:
        return {"figures": {}, "runs": 0, "error": str(runs[0].get("error") or "failed")}
    figures: dict[str, float | None] = {}
    for name, kind in COLUMNS.items():
        if kind in ("int", "float"):
            values = [row[name] for row in done if row.get(name) is not None]
            figures[name] = sum(values) / len(values) if values else None
    words = {"label": str(done[0].get("name") or "")}
    for name, short in WORDS.items():
        seen = list(dict.fromkeys(str(row[name]) for row in done if row.get(name)))
        words[short] = " or ".join(seen)
    intervals = {
        name: _interval(done, *ends) for name, ends in ENDS.items() if done[0].get(ends[0]) is not None
    }
    return {"figures": figures, "intervals": intervals, "words": words, "runs": len(done)}


def _interval(runs: Sequence[Mapping[str, Any]], *ends: str) -> tuple[float, float]:
    """The mean of the runs' intervals, each of which is that of one run; an end that is no number has none."""
    low, high = ([math.inf if run.get(end) is None else float(run[end]) for run in runs] for end in ends)
    return sum(low) / len(low), sum(high) / len(high)


def _limits(base: Mapping[str, Any]) -> dict[str, float]:
    asked = base.get("slo") or []
    slos = parse_slo([asked] if isinstance(asked, str) else list(asked))
    return {slo.name: slo.limit_s * 1000 for slo in slos}


def _command(base: Mapping[str, Any], params: Params, folder: Path) -> str:
    """`tokentwin simulate …` of one point; empty where a tenant's field is changed, for which there is no flag."""
    flags = {**base, **{k: v for k, v in params.items() if k != NAME}}
    if any("." in name for name in flags):
        return ""
    words = ["tokentwin", "simulate"]
    for name, value in flags.items():
        option = name.replace("_", "-")
        if value is None or name in ("date", "metadata"):
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{option}")
        elif isinstance(value, list):
            words += [f"--{option}", *map(str, value)]
        elif isinstance(value, dict):
            words += [f"--{option}", json.dumps(value)]
        else:
            words += [f"--{option}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join([*words, "-o", str(folder)])
