"""Experts shared among data-parallel replicas: when a deployment's are, and what does not go together with that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodel.lockstep import UNVALIDATED
from costmodel.model import ModelShape
from serving.errors import UsageError
from sim.fleet.build import is_fleet
from sim.router import InternalLb

if TYPE_CHECKING:
    from sim.deployment import Deployment
    from sim.workload.types import Workload


def sharing_replicas(d: Deployment, model: ModelShape) -> int:
    """Replicas that share their experts: all of a mixture's, as vLLM has it; 1 where each is on its own."""
    return d.data_parallel_size if model.num_experts and not d.pools else 1


def with_internal_lb(d: Deployment) -> Deployment:
    """The deployment with vLLM's balancing among its ranks, unless a router is named."""
    return d if "router" in d.model_fields_set else d.model_copy(update={"router": InternalLb.name})


def check_sharing(d: Deployment, model: ModelShape) -> list[str]:
    """Warnings of replicas that share their experts. Raises `UsageError` for what cannot be together with that."""
    if sharing_replicas(d, model) == 1:
        return []
    beside = None
    if is_fleet(d):
        fields = ("autoscaler", "failures", "admission")
        beside = " and ".join(f"--{name}" for name in fields if getattr(d, name) is not None)
    elif d.pipeline_parallel_size > 1:
        beside = "--pipeline-parallel-size"
    elif d.speculative_config is not None:
        beside = "--speculative-config"
    if beside:
        raise UsageError(
            f"{beside} and --data-parallel-size {d.data_parallel_size}: replicas of {model.name} share their experts and "
            "step together, which is not modelled beside that; replicas in pools are on their own, as several servers are"
        )
    return [UNVALIDATED]


def check_workload(workload: Workload) -> None:
    """Raise `UsageError` for a workload that replicas which share their experts cannot serve in the twin."""
    for name, field in (("beam searches", workload.beam_width), ("best-of", workload.best_of)):
        if field is not None:
            raise UsageError(
                f"{name}: not modelled for replicas that share their experts; use --data-parallel-size 1 or pools"
            )
