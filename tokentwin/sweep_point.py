"""One run of a sweep, in a worker: flags and overrides in, result JSON out.

What points have in common is worked out once in a process: deployments, tables of prices, workloads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from costmodel.pricer import StepPricer
from experiments.results import result_json
from experiments.sweep_spec import NAME
from serving.errors import UsageError, nearest
from serving.policies import CHUNKING
from sim.deployment import Built, Deployment, build
from sim.workload import Workload, WorkloadSpec, load_workload
from sim.workload.files import dotted, explain, first_problem, parse_spec
from tokentwin.job import Job, make_job, make_spec, run_job

TENANTS = "tenants."


def run_point(base: Mapping[str, Any], params: Mapping[str, Any], run: int) -> dict[str, Any]:
    """The result JSON of run `run` of a point; run n has the n-th seed from that of the flags on.

    Raises as `make_job` does.
    """
    job = point_job({**base, "seed": int(params.get("seed", base.get("seed", 0))) + run}, params)
    if job.replications == 1 and isinstance(job.workload, WorkloadSpec):
        job = replace(job, workload=loaded(job.workload, job.seed))
    done = run_job(job)
    if done.record.interrupted:
        raise KeyboardInterrupt
    return result_json(
        done.record,
        done.summary,
        verdict=done.verdict,
        certainty=done.certainty,
        date=base.get("date"),
        metadata=base.get("metadata") or (),
    )


def point_job(base: Mapping[str, Any], params: Mapping[str, Any]) -> Job:
    """The job of a point, worked out but not run. Raises UsageError."""
    flags = {name: value for name, value in base.items() if name not in ("date", "metadata")}
    seed = flags.pop("seed", 0)
    own = {name: value for name, value in params.items() if name != NAME and not name.startswith(TENANTS)}
    flags |= {**own, "seed": seed}
    flags.setdefault("replications", 1)
    tenants = {name: value for name, value in params.items() if name.startswith(TENANTS)}
    job = make_job(flags, builder=_built)
    if not tenants:
        return job
    return replace(job, workload=with_tenants(make_spec(flags), tenants))


def with_tenants(spec: WorkloadSpec, overrides: Mapping[str, Any]) -> WorkloadSpec:
    """The workload with `tenants.NAME.field…` set. Raises UsageError for a tenant or a field that is not there."""
    return parse_spec(_overridden(spec, overrides), "tenants")


def check_tenant(spec: WorkloadSpec, key: str, value: Any) -> None:
    """Raise UsageError for a `tenants.NAME.field…` that is not there, or a value that it cannot have."""
    content = _overridden(spec, {key: value})
    name, _, path = key.removeprefix(TENANTS).partition(".")
    index = [tenant.name for tenant in spec.tenants].index(name)
    try:
        WorkloadSpec.model_validate(content)
    except ValidationError as error:
        if dotted(first_problem(error)["loc"]).startswith(f"tenants[{index}].{path}"):  # else in combination
            problem = explain(error).replace(f"tenants[{index}]", f"{TENANTS}{name}", 1)
            raise UsageError(problem) from None


def _overridden(spec: WorkloadSpec, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What describes the workload with overrides by `tenants.NAME.field…`."""
    content = spec.model_dump(exclude_unset=True)
    content["tenants"] = list(content["tenants"])
    for key, value in overrides.items():
        name, *path = key.removeprefix(TENANTS).split(".")
        names = [tenant.name for tenant in spec.tenants]
        if name not in names:
            raise UsageError(f"{key}: no such tenant; {nearest(name, names)}")
        if not path:
            raise UsageError(f"{key}: name a field, such as {TENANTS}{name}.num_prompts")
        place = content["tenants"][names.index(name)]
        for part in path[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise UsageError(f"{key}: {part} has no fields")
        place[path[-1]] = value
    return content


@lru_cache(maxsize=64)
def _built(deployment: Deployment) -> Built:
    """A deployment worked out, with the price tables of another one that has the same prices."""
    built = build(deployment)
    if built.pools:
        return built
    d, limits = deployment, built.limits
    key = (
        *(
            d.model,
            d.gpu,
            d.engine_version,
            d.disable_custom_all_reduce,
            d.tensor_parallel_size,
            d.dtype,
            d.quantization,
            d.enforce_eager,
        ),
        *(d.kv_cache_dtype, d.kv_cache_recent_tokens),
        *(d.pipeline_parallel_size, d.collective_overlap, d.enable_expert_parallel, d.expert_load_imbalance),
        d.data_parallel_size if built.in_lockstep else 1,
        *(limits.max_num_batched_tokens, limits.max_num_seqs),
        limits.max_model_len if d.policy not in CHUNKING else None,
    )
    return replace(built, pricer=_pricers.setdefault(key, built.pricer))


_pricers: dict[tuple[Any, ...], StepPricer] = {}


@lru_cache(maxsize=8)
def loaded(spec: WorkloadSpec, seed: int) -> Workload:
    """A workload, kept for the points that share it."""
    return load_workload(spec, seed=seed)
