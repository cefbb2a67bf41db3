"""What `tokentwin explore` shows: the points of a sweep, or the fleets of a plan, in one form.

A point is one setting of the knobs (what varies) and its figures; several runs of one point are averaged.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.plan_report import SCHEMA as PLAN
from experiments.sweep_spec import NAME, Params, canonical
from experiments.sweep_store import COLUMNS, FIXED, POINTS, RESULTS, SWEEP, folder_name
from serving.errors import UsageError
from sim.deployment import Deployment
from sim.slo import parse_slo

PLAN_FILE, REPORT = "plan.json", "report.html"
WORDS = {"sim_load": "load", "sim_bound": "bound"}


@dataclass(frozen=True, slots=True)
class Point:
    """One setting and what came of it."""

    number: int
    params: Params
    """Its values of the knobs, by column of the results."""
    figures: dict[str, float | None]
    """Means over the runs, by column of the results."""
    words: dict[str, str] = field(default_factory=dict)
    """What is no number: saturated or not, and the bound."""
    runs: int = 1
    error: str = ""
    gpu: str = ""
    asked: Params = field(default_factory=dict)
    """What the sweep set, by flag."""
    folder: Path | None = None
    """Where its run is saved, or would be."""
    command: str = ""
    """Runs it by itself; empty where flags cannot say it."""

    @property
    def report(self) -> Path | None:
        """Its report, whether or not it is there."""
        return None if self.folder is None else self.folder / REPORT


@dataclass(frozen=True, slots=True)
class Space:
    """All points, and what they have in common."""

    kind: str
    """sweep or plan"""
    title: str
    subtitle: str
    root: Path
    knobs: tuple[str, ...]
    points: tuple[Point, ...]
    limits_ms: dict[str, float] = field(default_factory=dict)
    """Promises that were asked for, such as p95_ttft."""
    base: Params = field(default_factory=dict)
    prices: dict[str, float] = field(default_factory=dict)
    """Dollars per GPU and hour that the results were made with."""
    unit: str = ""
    """Of the capacity of a plan's fleets."""
    notes: tuple[str, ...] = ()
    flips: tuple[str, ...] = ()
    """What would flip the choice."""
    serve: str = ""
    """Serves the first fleet."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Candidates that are no points, and why."""


def load_space(path: str | Path, *, serving: Sequence[str] = ()) -> Space:
    """A sweep's folder or Parquet file, or a plan's folder or JSON. Raises UsageError naming what is missing or broken.

    `serving` are the flags of the deployment, from which a sweep names its folders.
    """
    place = Path(path)
    if place.is_dir():
        place = _inside(place)
    if place.name == SWEEP:
        place = place.parent
    if place.is_dir() and (place / SWEEP).is_file():
        return _sweep(place, place / RESULTS, serving)
    if place.suffix == ".parquet":
        return _sweep(place.parent, place, serving)
    if place.suffix == ".json":
        return _plan(place)
    raise UsageError(f"{path}: neither a sweep's folder or results.parquet, nor a plan's folder or plan.json")


def _inside(folder: Path) -> Path:
    """The folder itself, or the one sweep or plan in it."""
    if (folder / SWEEP).is_file():
        return folder
    if (folder / PLAN_FILE).is_file():
        return folder / PLAN_FILE
    inner = sorted(path.parent for name in (SWEEP, PLAN_FILE) for path in folder.glob(f"*/{name}"))
    if len(inner) == 1:
        return _inside(inner[0])
    if inner:
        raise UsageError(
            f"{folder} holds {len(inner)} sweeps and plans; name one: {', '.join(map(str, inner))}"
        )
    if (folder / RESULTS).is_file():
        return folder / RESULTS
    raise UsageError(
        f"{folder}: no {SWEEP} and no {PLAN_FILE}; make one with tokentwin sweep or tokentwin plan -o"
    )


def _sweep(root: Path, results: Path, serving: Sequence[str]) -> Space:
    asked = _json(root / SWEEP) if (root / SWEEP).is_file() else {}
    rows = _rows(root, results)
    if not rows:
        raise UsageError(f"{root}: no run of the sweep is done yet; start it, or continue it with --resume")
    base, num_runs = dict(asked.get("base") or {}), int(asked.get("num_runs") or 1)
    knobs = tuple(name for name in rows[0] if name not in COLUMNS and name not in FIXED)
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
    notes = [
        f"{expected - len(rows)} of {expected} runs are not done yet: tokentwin sweep … --resume continues."
    ]
    return Space(
        "sweep",
        f"Sweep {root.resolve().name}",
        " · ".join(facts),
        root,
        tuple(k for k in names if len({canonical(p.params[k]) for p in points}) > 1) or names,
        tuple(points),
        _limits(base),
        base,
        notes=tuple(notes) if expected > len(rows) else (),
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
    return {"figures": figures, "words": words, "runs": len(done)}


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


def _plan(path: Path) -> Space:
    plan = _json(path)
    if plan.get("schema") != PLAN:
        raise UsageError(
            f"{path}: not a plan of this version (schema {plan.get('schema')!r}, expected {PLAN})"
        )
    fleets = plan["fleets"]
    fields = list(fleets[0]["deployment"]) if fleets else []
    every = [{"replicas": f["replicas"], **f["deployment"]} for f in fleets]
    every = [{k: v for k, v in params.items() if k != "data_parallel_size"} for params in every]
    knobs = tuple(
        key
        for key in dict.fromkeys(("gpu", "tensor_parallel_size", "replicas", *fields))
        if key in (every[0] if every else ()) and len({canonical(p[key]) for p in every}) > 1
    )
    points = []
    for rank, (fleet, params) in enumerate(zip(fleets, every, strict=True)):
        folders = sorted(path.parent.glob(f"{rank + 1}-*/{REPORT}"))
        figures = {
            name: fleet.get(name)
            for name in ("p95_ttft_ms", "p95_tpot_ms", "p95_e2el_ms", "request_throughput", "output_throughput",
                         "slo_attainment", "capacity", "headroom", "usd_per_month")
        }  # fmt: skip
        figures |= {
            "num_gpus": fleet["gpus"],
            "output_throughput_per_gpu": fleet["output_throughput"] / fleet["gpus"],
            "sim_gpu_busy_share": fleet.get("gpu_busy_share"),
            "joules_per_output_token": fleet.get("joules_per_output_token_estimate"),
        }
        points.append(
            Point(
                rank + 1,
                {key: params[key] for key in knobs},
                figures,
                {"bound": str(fleet.get("bound") or ""), "label": f"{fleet['replicas']} x {fleet['label']}"},
                gpu=params["gpu"],
                folder=folders[0].parent if folders else None,
            )
        )
    prices = {f["deployment"]["gpu"]: f["usd_per_gpu_hour"] for f in fleets}
    return Space(
        "plan",
        f"Plan for {plan['load']:.4g} {plan['unit']}",
        f"{len(fleets)} fleets keep the promises, cheapest first; {len(plan['pruned'])} candidates left out",
        path.parent,
        knobs,
        tuple(points),
        dict(plan["promises"]["slos_ms"]),
        prices=prices,
        unit=str(plan["unit"]),
        notes=(*plan.get("notes", ()), *plan.get("remarks", ())),
        flips=tuple(plan.get("flips", ())),
        serve=plan.get("vllm_serve") or "",
        left_out=tuple((p["candidate"], p["reason"]) for p in plan["pruned"]),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected a JSON object")
    return content
