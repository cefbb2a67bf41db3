"""Replications of a run: the same traffic and deployment under other calibration errors, other noise, other requests.

Common random numbers: replication i of two deployments under one seed meets the same workload, the same noise per
step number and, where both are priced by the same fit, the same calibration error. A generated workload (drawn lengths
or arrival times) is drawn anew; a trace that is sent at its own times is kept: its interval is of that very traffic.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from costmodel.uncertainty import PerturbedPricer, Spread, spread_of
from serving.errors import UsageError
from sim.deployment import Built, Deployment, build, simulate
from sim.intervals import Draw, Figures, Replicated, gather, plan_draws
from sim.latency import DEFAULT_PERCENTILES, LatencyStats
from sim.metrics import Summary, summarise
from sim.noise import StepNoise
from sim.record import RunRecord
from sim.slo import METRICS, Goodput, Slo
from sim.workload import Workload, WorkloadSpec, load_workload
from sim.workload.spec import PrefixRepetitionSpec, RandomSpec

REPLICATIONS = 8
RATES = ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput")
SHARES = ("slo_attainment",)
_WORTH_FORKING_S = 2.0

Evaluate = Callable[[Draw], Figures]


def figures(summary: Summary) -> dict[str, float]:
    """What gets an interval, by name: `p95_ttft` and the like in seconds, rates per second, shares in 0 to 1.

    Names that begin with `_` are percentiles that only bound the others (`ladders`).
    """
    out: dict[str, float] = {}
    for metric in METRICS:
        stats: LatencyStats = getattr(summary, metric)
        out |= {f"mean_{metric}": stats.mean_s, f"median_{metric}": stats.median_s}
        out |= {f"p{p:g}_{metric}": value_s for p, value_s in stats.percentiles_s}
        out |= {f"_p{p:g}_{metric}": value_s for p, value_s in stats.rungs_s}
    for name in (*RATES, *SHARES):
        value = getattr(summary, name)
        if value is not None:
            out[name] = value
    out |= {f"slo_{outcome.slo.name}": outcome.value_s for outcome in summary.slos}
    return out


def ladders(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Of `figures`, the names of each latency's percentiles in ascending order."""
    found: dict[str, list[tuple[float, str]]] = {metric: [] for metric in METRICS}
    for name in names:
        statistic, _, metric = name.removeprefix("_").partition("_")
        if metric in METRICS and (percentile := Slo(statistic, metric, math.inf).percentile) is not None:
            found[metric].append((percentile, name))
    return tuple(tuple(name for _, name in sorted(rungs)) for rungs in found.values())


def deployment_spread(built: Built) -> Spread:
    """The uncertainty of a deployment's prices; of all its pools, those that share a fit once."""
    if built.pools:
        parts = [deployment_spread(pool) for pool in built.pools]
        groups = {group.key: group for part in parts for group in part.groups}
        return Spread(tuple(groups.values()), max(part.step_log_std for part in parts))
    d = built.deployment
    return spread_of(
        built.model,
        built.profile,
        tensor_parallel_size=d.tensor_parallel_size,
        dtype=d.dtype,
        quantization=d.quantization,
        kv_cache_dtype=d.kv_cache_dtype,
    )


def perturbed(
    built: Built, spread: Spread, normals: Mapping[str, float]
) -> PerturbedPricer | tuple[PerturbedPricer, ...] | None:
    """Prices under calibration errors, one list for each pool; None where there are none."""
    if not normals:
        return None
    if built.pools:
        return tuple(PerturbedPricer(p.pricer, deployment_spread(p).factors(normals)) for p in built.pools)
    return PerturbedPricer(built.pricer, spread.factors(normals))


def is_drawn(workload: WorkloadSpec | Workload) -> bool:
    """Whether another seed gives other requests or times."""
    if isinstance(workload, Workload):
        return False
    return any(
        isinstance(t.dataset, RandomSpec | PrefixRepetitionSpec) or not t.arrivals.from_trace
        for t in workload.tenants
    )


def simulate_draw(
    draw: Draw,
    built: Built,
    spread: Spread,
    workload: WorkloadSpec | Workload,
    nominal: Workload,
    *,
    fast_forward: bool = True,
    until_s: float = float("inf"),
    seed: int = 0,
) -> RunRecord:
    """The run in one state of the world. Raises KeyboardInterrupt when the user interrupts it."""
    if draw.sample_seed is not None and isinstance(workload, WorkloadSpec):
        nominal = load_workload(workload, seed=draw.sample_seed)
    record = simulate(
        nominal,
        built,
        fast_forward=fast_forward,
        until_s=until_s,
        pricer=perturbed(built, spread, draw.normals),
        noise=None if draw.noise_seed is None else StepNoise(spread.step_log_std, draw.noise_seed),
        seed=seed if draw.noise_seed is None else draw.noise_seed,
    )
    if record.interrupted:
        raise KeyboardInterrupt
    return record


def replicate(
    workload: WorkloadSpec | Workload,
    deployment: Deployment | Built,
    *,
    seed: int = 0,
    replications: int = REPLICATIONS,
    goodput: Goodput | None = None,
    slos: Sequence[Slo] = (),
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    fast_forward: bool = True,
    until_s: float = float("inf"),
    jobs: int | None = None,
    nominal: Summary | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Replicated:
    """Every figure of a run with its 95 % interval (`Replicated.interval`).

    `replications` 1 gives the nominal run alone, without intervals. `nominal` saves that run when it is at hand; `jobs`
    processes share the rest (all cores by default; the result does not depend on it). Raises `UsageError` as
    `sim.deployment.simulate` does.
    """
    if replications < 1:
        raise UsageError(f"--replications must be at least 1 (no intervals), got {replications}")
    built = deployment if isinstance(deployment, Built) else build(deployment)
    spread = deployment_spread(built)
    requests = load_workload(workload, seed=seed) if isinstance(workload, WorkloadSpec) else workload

    def evaluate(draw: Draw) -> Figures:
        record = simulate_draw(
            draw, built, spread, workload, requests, fast_forward=fast_forward, until_s=until_s, seed=seed
        )
        return figures(summarise(record, percentiles=percentiles, goodput=goodput, slos=slos))

    draws = plan_draws(spread, seed=seed, replications=replications, resample=is_drawn(workload))
    known = [] if nominal is None else [figures(nominal)]
    results = known + run_draws(evaluate, draws[len(known) :], jobs=jobs, progress=progress)
    return gather(spread, draws, results, shares=SHARES, ladders=ladders(results[0]))


_evaluate: Evaluate | None = None
"""What forked workers run; set for them before they are forked, so that it need not be picklable."""


def run_draws(
    evaluate: Evaluate,
    draws: Sequence[Draw],
    *,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Figures]:
    """`evaluate` of every draw, in order. Short work stays in this process; long work is shared among `jobs`."""
    global _evaluate
    workers = jobs or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (jobs or 1)
    started_s, out = time.perf_counter(), list[Figures]()
    for done, draw in enumerate(draws):
        left = len(draws) - done
        each_s = (time.perf_counter() - started_s) / max(done, 1)
        if done and workers > 1 and left > 1 and each_s * left > _WORTH_FORKING_S and _can_fork():
            break
        out.append(evaluate(draw))
        if progress is not None:
            progress(len(out), len(draws))
    if len(out) == len(draws):
        return out
    _evaluate = evaluate
    pool = ProcessPoolExecutor(min(workers, len(draws) - len(out)), multiprocessing.get_context("fork"))
    try:
        with warnings.catch_warnings():
            # From Python 3.12 on forking beside threads warns; the workers touch none of what those hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            for figures_of in pool.map(_work, draws[len(out) :]):
                out.append(figures_of)
                if progress is not None:
                    progress(len(out), len(draws))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        _evaluate = None
    return out


def _can_fork() -> bool:
    return "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.parent_process()


def _work(draw: Draw) -> Mapping[str, float]:
    assert _evaluate is not None
    return _evaluate(replace(draw))
