"""Workloads: who sends what, when. `load_workload` turns a `WorkloadSpec` into a `Workload` of columns."""

from __future__ import annotations

from sim.workload.describe import describe, shared_prefix_tokens
from sim.workload.files import SAMPLES, detect_format, parse_spec, read_workload_file, sample_path
from sim.workload.flags import spec_from_flags
from sim.workload.load import load_workload
from sim.workload.spec import TenantSpec, WorkloadSpec
from sim.workload.types import ClosedLoop, Workload

__all__ = [
    "SAMPLES",
    "ClosedLoop",
    "TenantSpec",
    "Workload",
    "WorkloadSpec",
    "describe",
    "detect_format",
    "load_workload",
    "parse_spec",
    "read_workload_file",
    "sample_path",
    "shared_prefix_tokens",
    "spec_from_flags",
]
