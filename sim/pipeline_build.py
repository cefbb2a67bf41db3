"""Parallelism of one replica worked out: what goes together, what a step costs, what nobody has measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costmodel.engine_version import is_newer, parse_version
from costmodel.formats import gemm_format
from costmodel.lockstep import LockstepPricer
from costmodel.model import ModelShape
from costmodel.pipeline import UNVALIDATED, PipelinePricer, layers_per_stage
from costmodel.pricer import StepPricer
from costmodel.profile import DeviceProfile
from serving.errors import UsageError
from serving.speculative_config import parse_speculative_config
from sim.lockstep_build import check_sharing, sharing_replicas

if TYPE_CHECKING:
    from sim.deployment import Built, Deployment


def check_parallel(d: Deployment, model: ModelShape) -> list[str]:
    """Warnings of what is not validated. Raises `UsageError` for what cannot be together or has no effect."""
    warnings = []
    if d.collective_overlap:
        if d.tensor_parallel_size == 1:
            raise UsageError("--collective-overlap has an effect only with --tensor-parallel-size 2 or more")
        warnings.append("an overlap of collectives is an assumption: no measurement stands behind it")
    if not model.num_experts:
        for option, is_set in (
            ("--enable-expert-parallel", d.enable_expert_parallel),
            ("--expert-load-imbalance", d.expert_load_imbalance != 1.0),
        ):
            if is_set:
                raise UsageError(f"{option} has no effect: {model.name} has no experts; leave it out")
    if d.enable_expert_parallel and d.tensor_parallel_size == 1 and sharing_replicas(d, model) == 1:
        raise UsageError(
            "--enable-expert-parallel has an effect only with --tensor-parallel-size 2 or more (or with "
            "--data-parallel-size), over whose ranks the experts are dealt out"
        )
    if d.enable_expert_parallel or d.expert_load_imbalance != 1.0:
        warnings.append(
            "expert parallelism and expert load imbalance are not validated against measurements: loads follow a Zipf "
            "law, and the busiest rank's are worked out"
        )
    warnings += check_sharing(d, model)
    if d.pipeline_parallel_size == 1:
        return warnings
    layers_per_stage(model.num_layers, d.pipeline_parallel_size)
    why = "steps of a pipeline are planned while others are in flight"
    if d.async_scheduling:
        raise UsageError(f"--async-scheduling: {why} anyway; leave it out with --pipeline-parallel-size")
    if d.speculative_config is not None:
        raise UsageError(
            "--pipeline-parallel-size: drafts in a pipeline are not modelled; leave one of the two out"
        )
    if d.policy == "static":
        raise UsageError(f"--policy static: {why}, and a static batch is one; use another policy")
    if d.preemption_mode != "recompute" or d.kv_offloading_size is not None:
        option = "--kv-offloading-size" if d.kv_offloading_size is not None else "--preemption-mode"
        raise UsageError(
            f"{option}: copies to the host are not modelled for --pipeline-parallel-size above 1"
        )
    return [*warnings, UNVALIDATED]


def reducing(d: Deployment) -> int:
    """Devices of a replica that exchange with each other at prices of an all-reduce; 1 where none do."""
    return max(d.tensor_parallel_size, min(d.pipeline_parallel_size, 2))


def of_engine(d: Deployment, profile: DeviceProfile, sharing: int = 1) -> tuple[DeviceProfile, list[str]]:
    """The profile for the deployment's engine version, and warnings where that says nothing or something else.

    `sharing` replicas share their experts; a profile without prices of that exchange takes an all-reduce's for it.
    Raises `UsageError` where NCCL's all-reduce is asked for and its prices are not known.
    """
    warnings = []
    if d.disable_custom_all_reduce and d.tensor_parallel_size > 1:
        if profile.nccl_all_reduce is None:
            raise UsageError(
                f"--disable-custom-all-reduce: {profile.name} has no prices of NCCL's all-reduce; drop the option"
            )
        profile = profile.with_nccl()
    elif d.disable_custom_all_reduce:
        warnings.append("--disable-custom-all-reduce has no effect: --tensor-parallel-size 1 reduces nothing")
    if (version := d.engine_version) is None:
        return profile, warnings
    option = f"--engine-version {version}"
    instead = sharing > 1 and profile.expert_exchange is None and profile.all_reduce is not None
    num_gpus = sharing if reducing(d) == 1 and instead else reducing(d)
    reduces = num_gpus > 1 and bool(profile.other_all_reduces)
    formats = product_formats(d)
    if not reduces and not any(map(profile.versioned_gemm, formats)):
        if num_gpus == 1:
            of_one = "products of one version only, and one GPU a replica has no all-reduces"
        else:
            of_one = "products and all-reduces of one version only"
        return profile, [*warnings, f"{option} has no effect: {profile.name} has {formats[0]} {of_one}"]
    chosen = profile.for_engine(version, num_gpus)
    if reduces and is_newer(chosen.all_reduce_version, version):
        warnings.append(
            f"{option}: all-reduces are those of {chosen.all_reduce_version}, the oldest version that was measured over "
            f"so many {profile.name}"
        )
    if reduces and instead:
        warnings.append(
            f"{option}: {profile.name} has no expert_exchange, so that what replicas which share experts exchange is "
            f"priced as an all-reduce of {chosen.all_reduce_version}; calibrate one to have its own price"
        )
    return chosen, warnings


def of_version(built: Built) -> dict[str, str]:
    """What a run's results say of the tables behind its prices, where its options chose them."""
    members = built.pools or (built,)
    versioned = [b for b in members if b.deployment.engine_version]
    reduces = dict.fromkeys(
        b.profile.all_reduce.source
        for b in members
        if (b.deployment.engine_version or b.deployment.disable_custom_all_reduce)
        and (reducing(b.deployment) > 1 or _instead(b))
        and b.profile.all_reduce
    )
    products = dict.fromkeys(
        f"of engines {_engines(b.profile)}: {fit.source}"
        for b in versioned
        for fit in map(b.profile.versioned_gemm, product_formats(b.deployment))
        if fit
    )
    found = {"products": "; ".join(products), "all_reduce": "; ".join(reduces)}
    return {name: sources for name, sources in found.items() if sources}


def product_formats(d: Deployment) -> list[str]:
    """Number formats of a deployment's products: its layers', and those of a draft model of its own, which has 16 bit."""
    drafting = None if d.speculative_config is None else parse_speculative_config(d.speculative_config)
    drafted = drafting is not None and drafting.method == "draft_model"
    return [gemm_format(d.dtype, weights).name for weights in (d.quantization, *([None] if drafted else []))]


def _engines(profile: DeviceProfile) -> str:
    """Whose library multiplies as in the profile's own products: `before 0.20`, `from 0.20 on`."""
    older = [v for v in profile.other_gemms if is_newer(profile.gemm_version, v)]
    newer = [v for v in profile.other_gemms if v not in older]
    since = [f"from {profile.gemm_version} on"] if older else []
    until = [f"before {min(newer, key=parse_version)}"] if newer else []
    return " and ".join(since + until)


def _instead(built: Built) -> bool:
    """Whether all-reduces stand for what replicas that share experts exchange."""
    return sharing_replicas(built.deployment, built.model) > 1 and built.profile.expert_exchange is None


def make_pricer(
    d: Deployment, model: ModelShape, profile: DeviceProfile, **limits: Any
) -> StepPricer | PipelinePricer:
    """The prices of a deployment's steps; `limits` are those of `StepPricer`."""
    limits |= {
        "tensor_parallel_size": d.tensor_parallel_size,
        "dtype": d.dtype,
        "quantization": d.quantization,
        "kv_cache_dtype": d.kv_cache_dtype,
        "kv_recent_tokens": d.kv_cache_recent_tokens,
        "cuda_graphs": not d.enforce_eager,
        "collective_overlap": d.collective_overlap,
        "expert_load_imbalance": d.expert_load_imbalance,
        "enable_expert_parallel": d.enable_expert_parallel,
    }
    if (sharing := sharing_replicas(d, model)) > 1:
        return LockstepPricer(model, profile, data_parallel_size=sharing, **limits)
    if d.pipeline_parallel_size == 1:
        return StepPricer(model, profile, **limits)
    return PipelinePricer(
        model,
        profile,
        d.pipeline_parallel_size,
        lambda stage, first, last: StepPricer(stage, profile, first_stage=first, last_stage=last, **limits),
        tensor_parallel_size=d.tensor_parallel_size,
    )
