"""Workloads: who sends what, when. `load_workload` turns a `WorkloadSpec` into the columns of a
`Workload`."""

from __future__ import annotations

from sim.workload.load import load_workload
from sim.workload.spec import TenantSpec, WorkloadSpec
from sim.workload.types import ClosedLoop, Workload

__all__ = ["ClosedLoop", "TenantSpec", "Workload", "WorkloadSpec", "load_workload"]
