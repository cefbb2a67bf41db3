"""TokenTwin: a discrete-event twin of LLM serving. `import tokentwin as tt`.

Names load when they are first used, so that `import tokentwin` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodel.memory import MemoryPlan as MemoryPlan
    from costmodel.memory import plan_memory as plan_memory
    from costmodel.model import load_model as load_model
    from costmodel.profile import load_profile as load_profile
    from serving.errors import InfeasibleError as InfeasibleError
    from serving.errors import TokenTwinError as TokenTwinError
    from serving.errors import UsageError as UsageError
    from sim.deployment import Deployment as Deployment
    from sim.intervals import compare as compare
    from sim.record import RunRecord as RunRecord
    from sim.replications import replicate as replicate
    from sim.slo import Goodput as Goodput
    from sim.slo import Slo as Slo
    from sim.workload import TenantSpec as TenantSpec
    from sim.workload import Workload as Workload
    from sim.workload import WorkloadSpec as WorkloadSpec
    from sim.workload import describe as describe
    from sim.workload import load_workload as load_workload
    from sim.workload import read_workload_file as read_workload_file
    from sim.workload import spec_from_flags as spec_from_flags
    from tokentwin.api import simulate as simulate
    from tokentwin.api_planning import capacity as capacity
    from tokentwin.api_planning import plan as plan
    from tokentwin.api_planning import sweep as sweep
    from tokentwin.results_api import CapacityResult as CapacityResult
    from tokentwin.results_api_plan import PlanResult as PlanResult
    from tokentwin.results_api_sweep import SweepResult as SweepResult
    from tokentwin.run import Run as Run

__version__ = "0.1.0"

_WHERE = {
    "CapacityResult": "tokentwin.results_api",
    "Deployment": "sim.deployment",
    "Goodput": "sim.slo",
    "InfeasibleError": "serving.errors",
    "MemoryPlan": "costmodel.memory",
    "PlanResult": "tokentwin.results_api_plan",
    "Run": "tokentwin.run",
    "RunRecord": "sim.record",
    "Slo": "sim.slo",
    "SweepResult": "tokentwin.results_api_sweep",
    "TenantSpec": "sim.workload",
    "TokenTwinError": "serving.errors",
    "UsageError": "serving.errors",
    "Workload": "sim.workload",
    "WorkloadSpec": "sim.workload",
    "capacity": "tokentwin.api_planning",
    "compare": "sim.intervals",
    "describe": "sim.workload",
    "load_model": "costmodel.model",
    "load_profile": "costmodel.profile",
    "load_workload": "sim.workload",
    "plan": "tokentwin.api_planning",
    "plan_memory": "costmodel.memory",
    "read_workload_file": "sim.workload",
    "replicate": "sim.replications",
    "simulate": "tokentwin.api",
    "spec_from_flags": "sim.workload",
    "sweep": "tokentwin.api_planning",
}

__all__ = [
    "CapacityResult",
    "Deployment",
    "Goodput",
    "InfeasibleError",
    "MemoryPlan",
    "PlanResult",
    "Run",
    "RunRecord",
    "Slo",
    "SweepResult",
    "TenantSpec",
    "TokenTwinError",
    "UsageError",
    "Workload",
    "WorkloadSpec",
    "__version__",
    "capacity",
    "compare",
    "describe",
    "load_model",
    "load_profile",
    "load_workload",
    "plan",
    "plan_memory",
    "read_workload_file",
    "replicate",
    "simulate",
    "spec_from_flags",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'tokentwin' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
