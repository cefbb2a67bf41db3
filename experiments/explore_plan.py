"""A plan's fleets as points to explore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.explore_notes import unjudged_notes, unmeasured_notes
from experiments.explore_space import REPORT, Point, Space, read_object
from experiments.plan_report import SCHEMA
from experiments.sweep_spec import canonical
from serving.errors import UsageError


def plan_space(path: Path) -> Space:
    """The plan in a JSON file; reports are looked for beside it. Raises UsageError."""
    plan = read_object(path)
    if plan.get("schema") != SCHEMA:
        raise UsageError(
            f"{path}: not a plan of this version (schema {plan.get('schema')!r}, expected {SCHEMA})"
        )
    fleets = plan["fleets"]
    fields = list(fleets[0]["deployment"]) if fleets else []
    every = [{"replicas": f["replicas"], **f["deployment"]} for f in fleets]
    every = [
        {k: v for k, v in params.items() if k not in ("data_parallel_size", "pools")} for params in every
    ]
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
                intervals={
                    key.removesuffix("_ci95"): (float(ends[0]), float(ends[1]))
                    for key, ends in fleet.items()
                    if key.endswith("_ms_ci95")
                },
                gpu=params["gpu"],
                folder=folders[0].parent if folders else None,
            )
        )
    numbered = {number: fleet.get("not_measured", ()) for number, fleet in enumerate(fleets, 1)}
    unmeasured = unmeasured_notes(numbered, numbered, "fleets")
    limits_ms = dict(plan["promises"]["slos_ms"])
    unjudged = unjudged_notes(points, limits_ms, "fleets")
    prices = {f["deployment"]["gpu"]: f["usd_per_gpu_hour"] for f in fleets}
    return Space(
        "plan",
        f"Plan for {plan['load']:.4g} {plan['unit']}",
        f"{len(fleets)} fleets keep the promises, cheapest first; {len(plan['pruned'])} candidates left out",
        path.parent,
        knobs,
        tuple(points),
        limits_ms,
        prices=prices,
        unit=str(plan["unit"]),
        notes=(*plan.get("notes", ()), *plan.get("remarks", ()), *unjudged, *_doubts(fleets), *unmeasured),
        flips=tuple(plan.get("flips", ())),
        serve=plan.get("vllm_serve") or "",
        left_out=tuple((p["candidate"], p["reason"]) for p in plan["pruned"]),
    )


def _doubts(fleets: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the plan marks as not certain."""
    return [
        f"Not certain: fleet {number}, {fleet['replicas']} x {fleet['label']}: the interval of "
        f"{' and '.join(fleet['doubtful'])} reaches beyond the limit."
        for number, fleet in enumerate(fleets, 1)
        if fleet.get("doubtful")
    ]
