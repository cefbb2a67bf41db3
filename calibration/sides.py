"""What of a recorded run can be swapped with another's, part by part.

A twin's run whose deployment is at hand is made again from it, to the bit (`Side.made_again`); any other is replayed
from the times of its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from calibration.model_prices import ModelPrices
from calibration.recorded import RecordedPrices
from calibration.recorded_drafts import RecordedAcceptance, stated_acceptance
from serving.config import SchedulerConfig
from serving.speculative_config import SpeculativeConfig
from sim.acceptance import Acceptance, Rates
from sim.fleet.plan import FleetPlan
from sim.fleet.spec import KvTransfer
from sim.network import Delivering, Network, delivering
from sim.noise import StepNoise
from sim.record import RunRecord
from sim.router import RouterOptions
from sim.workload import Workload
from sim.world import Frontend

INSTEAD = "tokentwin compare sets two deployments side by side"


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool of a run."""

    name: str
    limits: SchedulerConfig
    policy: str
    policy_options: tuple[tuple[str, object], ...]
    kernels: ModelPrices | RecordedPrices
    host: ModelPrices | RecordedPrices
    known: ModelPrices | None
    """Its price list, where the run's deployment is at hand."""
    kv_bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Routing:
    """Which replicas there are, and who goes where."""

    num_replicas: int = 1
    router: str = "round_robin"
    options: RouterOptions = field(default_factory=RouterOptions)
    fleet: FleetPlan | None = None
    response_cache: bool = False

    def facts(self) -> tuple[object, ...]:
        """Equal for runs that spread requests alike."""
        o, f = self.options, self.fleet
        kept = (self.router, o.seed, o.prefix_tokens, o.load_factor, self.response_cache)
        if f is None:
            return (*kept, self.num_replicas)
        pools = [
            (p.name, p.role, p.replicas, p.weight, p.autoscaler, p.autoscaler and p.cold_start_s)
            for p in f.pools
        ]
        failing = [p.cold_start_s for p in f.pools] if f.failures else None
        return (*kept, tuple(pools), f.failures, failing, f.admission)


@dataclass(frozen=True, slots=True)
class Ways:
    """How answers get to clients, where streams are followed over a network."""

    network: Network | None = None
    stream_interval: int = 1
    stream_slice_s: float = 0.0

    def delivering(self, workload: Workload) -> tuple[Workload, Delivering | None]:
        """The workload with the round trips of the network, and what a run needs to follow its streams."""
        found = delivering(
            self.network, workload.tenants, interval=self.stream_interval, slice_s=self.stream_slice_s
        )
        if found is None:
            return workload, None
        lines = zip(workload.tenants, found.lines, strict=True)
        return replace(workload, tenants=tuple(replace(t, rtt_s=line.rtt_s) for t, line in lines)), found


@dataclass(frozen=True, slots=True)
class Side:
    """One run taken apart. `made_again` is None where it is replayed from its recorded times."""

    name: str
    record: RunRecord
    workload: Workload
    pools: tuple[Pool, ...]
    routing: Routing
    frontend: Frontend
    noise: StepNoise | None = None
    drafts: SpeculativeConfig | None = None
    kv_transfer: KvTransfer | None = None
    ways: Ways = field(default_factory=Ways)
    seed: int = 0
    until_s: float = math.inf
    notes: tuple[str, ...] = ()
    made_again: RunRecord | None = None

    # ---- what a run has ------------------------------------------------------------------------------------

    @property
    def speculates(self) -> bool:
        """Whether drafts are verified."""
        return self.pools[0].limits.num_speculative_tokens > 0

    @property
    def depths(self) -> tuple[int, ...]:
        """Stages of each pool's replicas."""
        return tuple(pool.limits.pipeline_parallel_size for pool in self.pools)

    def facts(self, part: str) -> object:
        """Equal for two sides, both made from deployments, that are alike in a part."""
        if part == "routing":
            return self.routing.facts()
        if part == "network":
            return self.ways
        if part == "acceptance":
            d = self.drafts
            return None if d is None else (d.acceptance, d.num_speculative_tokens, self.seed)
        if part == "pipeline":
            return self.depths, [pool.limits.async_scheduling for pool in self.pools if max(self.depths) > 1]
        if part == "transfer":
            links = [pool.known.link_facts() if pool.known is not None else None for pool in self.pools]
            sent = [pool.kv_bytes_per_token for pool in self.pools] if self.kv_transfer else None
            return self.kv_transfer, sent, links if max(self.depths) > 1 else None
        if part == "schedule":
            return [
                (
                    replace(p.limits, pipeline_parallel_size=1, async_scheduling=False),
                    p.policy,
                    p.policy_options,
                )
                for p in self.pools
            ]
        raise AssertionError(part)

    def acceptance(self, most: int) -> Callable[[], Acceptance]:
        """What becomes of drafts of up to `most` tokens; of a run without drafts, none stands."""
        if not self.speculates:
            return lambda: Rates([0.0] * most, 0)
        own, stated = self.pools[0].limits.num_speculative_tokens, self.drafts
        if stated is not None and stated.acceptance is not None:
            return lambda: stated_acceptance(stated.acceptance, own, most, self.seed)
        recorded = RecordedAcceptance(self.record, own)
        return lambda: recorded


PARTS = (
    "workload",
    "schedule",
    "kernel",
    "host",
    "acceptance",
    "routing",
    "pipeline",
    "transfer",
    "network",
)
