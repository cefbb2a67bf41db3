"""A fleet worked out: what a run needs to know of its pools and of what happens to them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from costmodel.prices import Prices
from serving.config import SchedulerConfig
from serving.policies import BatchPolicy
from serving.request import Request
from sim.admission import Admission
from sim.fleet.record import PoolFacts
from sim.fleet.spec import Autoscaler, Failures, KvTransfer, Role
from sim.speculation import Speculation


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Replicas alike."""

    config: SchedulerConfig
    pricer: Prices
    replicas: int = 1
    name: str = "default"
    role: Role = "both"
    make_policy: Callable[[], BatchPolicy] | None = None
    speculation: Speculation | None = None
    weight: float = 1.0
    cold_start_s: float = 0.0
    autoscaler: Autoscaler | None = None
    gpu: str = ""
    gpus_per_replica: int = 1
    kv_bytes_per_token: float = 0.0
    """Over all devices of a replica."""

    def facts(self) -> PoolFacts:
        """What the record says of it."""
        c = self.config
        return PoolFacts(
            self.name,
            self.role,
            self.gpu,
            self.gpus_per_replica,
            self.weight,
            c.num_pages,
            c.max_num_seqs,
            c.max_num_batched_tokens,
            self.cold_start_s,
            c.pipeline_parallel_size,
        )


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Pools behind one router; with roles, a router in front of each role."""

    pools: tuple[PoolPlan, ...]
    router: str = "round_robin"
    prefix_tokens: int = 256
    load_factor: float = 1.25
    session_of: Callable[[Request], Hashable | None] = lambda request: None
    failures: Failures | None = None
    admission: Admission | None = None
    kv_transfer: KvTransfer | None = None
    seed: int = 0
