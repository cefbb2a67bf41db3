"""Replay a real run in the twin and set the two side by side: what `tokentwin validate` does.

`against` is a folder with `*_requests.csv` and `*_runs.csv`, an InferenceX CSV, a run folder of ours, or a JSON
of `vllm bench serve --save-detailed`; it is recognised by what is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from calibration.compare import Comparison, Figure, Pages, SeriesPair, at_times, figures_of
from calibration.observed import Case, graphs_in_budget
from calibration.runs_inferencex import is_inferencex, read_points
from calibration.runs_saved import is_bench_json, is_saved_run, read_bench, read_saved_run
from calibration.runs_vllm import is_folder_of_runs, read_runs
from costmodel.memory import MemoryPlan, plan_memory
from costmodel.model import load_model
from costmodel.pricer import StepPricer
from costmodel.prices import Prices
from costmodel.profile import load_profile
from serving.errors import UsageError
from sim.deployment import Built, Deployment, build, simulate
from sim.latency import latencies
from sim.lockstep_build import sharing_replicas
from sim.pipeline_build import of_version
from sim.record import Floats, RunRecord, Status

Repricer = Callable[[StepPricer], Prices]
"""From the prices of a deployment to those the twin shall use: for experiments on the cost model."""

SATURATED = "kv-saturated"


def validate(
    profile: str | None,
    against: str | Path,
    *,
    run: str | None = None,
    deployment: Deployment | None = None,
    prefixes: str | Path | None = None,
    recorded_pages: bool = False,
    seed: int = 0,
    reprice: Repricer | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Replay the run at `against` and compare.

    `profile`: device profile of the twin; None takes the shipped one of the device that the run names.
    `run`: which run of a folder, or part of the labels of InferenceX points. `deployment`: how a
    `vllm bench serve` result was served. `prefixes`: trace with the block ids of a folder's run.
    `recorded_pages`: give the twin the real run's page count instead of the predicted one. `seed`: lengths
    drawn for InferenceX points. Raises `UsageError` for anything that cannot be read or cannot be.
    """
    path = Path(against)
    if is_inferencex(path):
        return _points(read_points(path, run, profile, seed), path, reprice, progress)
    if is_folder_of_runs(path):
        case = read_runs(path, run, profile, Path(prefixes) if prefixes else None)
    elif is_saved_run(path):
        case = read_saved_run(path, profile)
    elif is_bench_json(path):
        case = read_bench(path, deployment)
    else:
        raise UsageError(
            f"{path} is no run to compare with: give a folder with X_requests.csv and X_runs.csv, an InferenceX CSV, "
            "a run folder, or a JSON of vllm bench serve --save-detailed"
        )
    return compare_case(case, path, recorded_pages=recorded_pages, reprice=reprice)


def compare_case(
    case: Case, source: Path | str = "", *, recorded_pages: bool = False, reprice: Repricer | None = None
) -> Comparison:
    """Replay one case with per-request latencies and compare everything that was observed."""
    plan = memory_of(case)
    recorded = case.observed.num_pages
    if recorded_pages and recorded is None:
        raise UsageError(f"{source}: the run did not record its page count; leave out --recorded-pages")
    used = recorded if recorded_pages and recorded is not None else plan.num_blocks
    record, built = replay(case, used, reprice)
    twin = twin_samples(record, at_engine=case.at_engine)
    samples = {metric: (real, twin[metric]) for metric, real in case.observed.samples.items()}
    return Comparison(
        title=case.name,
        settings=_settings(built, source),
        figures=figures_of(samples),
        samples=samples,
        series=_series(case, record),
        pages=Pages(plan.num_blocks, recorded, used),
        notes=(*case.notes, *_exchange(built), *record.warnings),
    )


def memory_of(case: Case) -> MemoryPlan:
    """The memory plan of the case's deployment under the rules of its engine version."""
    d = case.deployment
    model = load_model(d.model)
    built = build(d)
    return plan_memory(
        model,
        load_profile(d.gpu),
        tensor_parallel_size=d.tensor_parallel_size,
        data_parallel_size=sharing_replicas(d, model),
        enable_expert_parallel=d.enable_expert_parallel,
        gpu_memory_utilization=d.gpu_memory_utilization,
        max_num_batched_tokens=built.limits.max_num_batched_tokens,
        max_num_seqs=built.limits.max_num_seqs,
        max_model_len=d.max_model_len or model.max_position_embeddings,
        block_size=d.block_size,
        dtype=d.dtype,
        quantization=d.quantization,
        kv_cache_dtype=d.kv_cache_dtype,
        cuda_graphs=not d.enforce_eager,
        graphs_in_budget=graphs_in_budget(case.engine_version),
    )


def replay(case: Case, num_pages: int, reprice: Repricer | None = None) -> tuple[RunRecord, Built]:
    """Run the case in the twin with `num_pages` KV pages per replica (the engine's reserved one included)."""
    override = case.deployment.num_gpu_blocks_override or num_pages
    built = build(case.deployment.model_copy(update={"num_gpu_blocks_override": override}))
    if reprice is not None:
        built = replace(built, pricer=reprice(built.pricer))  # type: ignore[arg-type]
    return simulate(case.workload, built), built


def twin_samples(record: RunRecord, *, at_engine: bool) -> dict[str, Floats]:
    """Latencies of the twin's finished requests in seconds, seen from the engine's queue or from the client."""
    r = record.requests
    done = r.status == Status.FINISHED
    several = done & (r.output_tokens > 1)
    if not at_engine:
        seen = latencies(record)
        return {"ttft": seen.ttft_s[done], "tpot": seen.tpot_s[several], "e2el": seen.e2el_s[done]}
    ttft_s, e2el_s = r.prefill_done_s - r.queued_s, r.engine_done_s - r.queued_s
    tpot_s = (e2el_s - ttft_s)[several] / (r.output_tokens[several] - 1)
    return {"ttft": ttft_s[done], "tpot": tpot_s, "e2el": e2el_s[done]}


def _series(case: Case, record: RunRecord) -> tuple[SeriesPair, ...]:
    steps, time_s = record.steps, case.observed.time_s
    columns: dict[str, tuple[Floats, str]] = {
        "running": (steps.num_running.astype(np.float64), "requests"),
        "waiting": (steps.num_waiting.astype(np.float64), "requests"),
        "kv": (steps.used_pages / record.num_pages, "share of pages"),
    }
    return tuple(
        SeriesPair(
            name,
            columns[name][1],
            time_s,
            real,
            at_times(time_s, steps.start_s, steps.end_s, columns[name][0]),
        )
        for name, real in case.observed.series.items()
    )


def _points(
    cases: list[Case], source: Path, reprice: Repricer | None, progress: Callable[[str], None]
) -> Comparison:
    """Points of a sweep: means only, and the points whose sequences do not fit the KV cache set apart."""
    figures: list[Figure] = []
    exchange: dict[str, None] = {}
    for case in cases:
        pages = memory_of(case).num_blocks
        excluded = SATURATED if saturated(case, pages) else ""
        record, built = replay(case, pages, reprice)
        exchange |= dict.fromkeys(_exchange(built))
        twin = twin_samples(record, at_engine=False)
        for metric, real_ms in case.observed.means_ms.items():
            twin_ms = float(np.mean(twin[metric])) * 1e3
            figures.append(Figure(metric, "mean", real_ms, twin_ms, case.name, excluded))
        progress(f"{case.name}: " + ", ".join(f"{f.metric} {f.error:+.1%}" for f in figures[-2:]))
    first = cases[0]
    settings = _settings(build(first.deployment), source) | {"points": len(cases)}
    notes = (
        f"scheduler semantics {first.deployment.semantics} for engine version "
        + ".".join(map(str, first.engine_version)),
        *exchange,
        f"{SATURATED}: the mean final length of all clients' sequences exceeds the predicted KV cache",
        "settings are those of the first point; lengths, concurrency and devices are in the labels",
    )
    return Comparison(source.stem, settings, tuple(figures), notes=notes)


def _exchange(built: Built) -> list[str]:
    """Whose products and all-reduces price a replay, where the run's engine version chose them."""
    version = built.deployment.engine_version
    names = {"all_reduce": "all-reduces", "products": "products"}
    return [
        f"{names[name]} for engine version {version}: {source}" for name, source in of_version(built).items()
    ]


def saturated(case: Case, num_pages: int) -> bool:
    """Whether a closed loop's clients want more KV than there is, at the mean final length of a sequence."""
    assert case.workload.closed_loop is not None
    mean_tokens = float(np.mean(case.workload.prompt_tokens + case.workload.output_tokens))
    return case.workload.closed_loop.max_concurrency * mean_tokens > num_pages * case.deployment.block_size


def _settings(built: Built, source: Path | str) -> dict[str, Any]:
    return {
        "real_run": str(source),
        "profile": built.profile.name,
        "profile_hash": built.profile.content_hash,
        **of_version(built),
        "deployment": built.deployment.model_dump(mode="json"),
    }
