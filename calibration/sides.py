"""Recorded runs taken apart into what can be swapped between them, and worlds put together of their parts.

A twin's run whose deployment is at hand is made again from it, to the bit (`Side.made_again`); any other is replayed
from the times of its steps. Replicas are matched pool by pool: by name, else by position, else the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from calibration.model_prices import ModelPrices, WorldPrices
from calibration.recorded import RecordedPrices, built_of, frontend_of, rules_of, workload_of
from calibration.recorded_drafts import Drafting, RecordedAcceptance, stated_acceptance
from costmodel.pricer import StepPricer
from serving.config import SchedulerConfig
from serving.errors import TokenTwinError, UsageError
from serving.policies import load_policy
from serving.speculative_config import SpeculativeConfig, parse_speculative_config
from sim.acceptance import Acceptance, Rates
from sim.deployment import Built, Deployment, build, policy_options
from sim.fleet.build import fleet_plan, is_fleet
from sim.fleet.plan import FleetPlan, PoolPlan
from sim.fleet.spec import KvTransfer
from sim.jitter import step_noise
from sim.meta import meta_value
from sim.network import Delivering, Network, delivering
from sim.noise import StepNoise
from sim.record import RunRecord
from sim.router import RouterOptions
from sim.speculation import Speculation
from sim.workload import Workload
from sim.world import Frontend, run_world

AT_ONCE = KvTransfer(latency_ms=0.0)
"""The way of KV in a run that sends none, and no bytes go."""
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

    @classmethod
    def of(cls, record: RunRecord, name: str) -> Side:
        """Take a run apart. Raises `UsageError` for what no replay can repeat."""
        workload, notes = workload_of(record)
        built = built_of(record)
        if built is not None and not notes:
            side = cls._of_deployment(record, name, workload, built, recorded=False)
            again = world(dict.fromkeys(PARTS, side))
            if _same_run(record, again):
                return replace(side, made_again=again)
        if built is None and record.fleet is not None:
            built = _layout(record, name)
        if built is None and _depth(record) > 1:
            raise UsageError(
                f"{name} ran in a pipeline, and its deployment or profile is not at hand as it was: a record has the "
                f"mean of the stages' times and not each; {INSTEAD}"
            )
        if built is not None:
            side = cls._of_deployment(record, name, workload, built, recorded=True)
        else:
            side = cls._of_record(record, name, workload)
        return replace(side, notes=(*(f"{name}: {note}" for note in notes), *side.notes))

    @classmethod
    def _of_deployment(
        cls, record: RunRecord, name: str, workload: Workload, built: Built, *, recorded: bool
    ) -> Side:
        """From the deployment; `recorded`: with the times that steps took."""
        d, seed = built.deployment, int(meta_value(record, "seed", 0))
        options = policy_options(d)
        known = bool(record.meta.get("profile_hash")) and built_of(record) is not None
        plan = fleet_plan(built, workload, load_policy, seed=seed) if is_fleet(d) else None
        pools = []
        for index, member in enumerate(built.pools or (built,)):
            model = ModelPrices(member)
            own = member.deployment
            kernels: ModelPrices | RecordedPrices = model
            if recorded:
                rows = None if record.fleet is None else record.fleet.pool_of[record.steps.replica] == index
                kernels = RecordedPrices(record, member.pricer if known else None, rows)
            pools.append(
                Pool(
                    "default" if plan is None else plan.pools[index].name,
                    member.limits,
                    own.policy,
                    tuple(options.items()) if own.policy == d.policy else (),
                    kernels,
                    model if known or not recorded else kernels,
                    model,
                    0.0 if plan is None else plan.pools[index].kv_bytes_per_token,
                )
            )
        return cls(
            name,
            record,
            workload,
            tuple(pools),
            Routing(
                d.data_parallel_size,
                d.router,
                RouterOptions(seed, d.router_prefix_tokens, d.router_load_factor),
                plan,
                d.response_cache is not None,
            ),
            _frontend(record, d),
            None if recorded else step_noise(built, None, seed),
            None if d.speculative_config is None else parse_speculative_config(d.speculative_config),
            d.kv_transfer or KvTransfer() if plan is not None and _disaggregated(plan) else None,
            Ways(d.network, d.stream_interval, d.stream_slice_ms / 1e3),
            seed,
            float(meta_value(record, "until_s", math.inf)),
        )

    @classmethod
    def _of_record(cls, record: RunRecord, name: str, workload: Workload) -> Side:
        """From the tables alone: real runs, and twins' whose deployment is not at hand."""
        rules, notes = rules_of(record)
        prices = RecordedPrices(record, None)
        pool = Pool("default", rules.limits, rules.policy, rules.policy_options, prices, prices, None)
        stated = (record.meta.get("deployment") or {}).get("speculative_config")
        return cls(
            name,
            record,
            workload,
            (pool,),
            Routing(rules.num_replicas, rules.router),
            frontend_of(record),
            drafts=None if not stated else parse_speculative_config(stated),
            seed=int(meta_value(record, "seed", 0)),
            until_s=float(meta_value(record, "until_s", math.inf)),
            notes=tuple(f"{name}: {note}" for note in notes),
        )

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


def world(of: Mapping[str, Side]) -> RunRecord:
    """The run whose every part is that of the side named for it."""
    routing, kernel = of["routing"].routing, of["kernel"]
    places: Sequence[PoolPlan | None] = routing.fleet.pools if routing.fleet is not None else (None,)
    pools = [_pool(of, place, index) for index, place in enumerate(places)]
    for side in set(map(id, of.values())):
        for pool in next(s for s in of.values() if id(s) == side).pools:
            if isinstance(pool.kernels, RecordedPrices):
                pool.kernels.rewind()
    recorded = [p.kernels for p in kernel.pools if isinstance(p.kernels, RecordedPrices)]
    fleet = None
    if routing.fleet is not None:
        sent = of["transfer"].kv_transfer or AT_ONCE
        fleet = replace(routing.fleet, pools=tuple(pools), kv_transfer=sent)
        if not _disaggregated(fleet):
            fleet = replace(fleet, kv_transfer=None)
    first = pools[0]
    workload, followed = of["network"].ways.delivering(of["workload"].workload)
    record = run_world(
        workload,
        first.config,
        first.pricer,
        make_policy=first.make_policy,
        num_replicas=routing.num_replicas,
        router=routing.router,
        options=routing.options,
        frontend=of["host"].frontend,
        # Leaping prices more steps than it takes, which would use up the times of steps that look alike.
        fast_forward=not any(prices.ambiguous for prices in recorded),
        until_s=of["workload"].until_s,
        noise=kernel.noise,
        fleet=fleet,
        speculation=first.speculation,
        response_cache=routing.response_cache,
        delivering=followed,
    )
    if record.interrupted:
        raise KeyboardInterrupt
    return record


def _pool(of: Mapping[str, Side], place: PoolPlan | None, index: int) -> PoolPlan:
    """A pool of the routing's side, with everything else from the sides that it belongs to."""
    name = "default" if place is None else place.name
    own = {part: _match(side.pools, name, index) for part, side in of.items()}
    rules, stages = own["schedule"], own["pipeline"]
    depth, limits = stages.limits.pipeline_parallel_size, rules.limits
    if depth != limits.pipeline_parallel_size:
        limits = replace(limits, async_scheduling=False, pipeline_parallel_size=depth)
        if depth == 1:
            limits = replace(limits, async_scheduling=stages.limits.async_scheduling)
    prices = WorldPrices(
        _kernels(own["kernel"].kernels, limits, rules.policy),
        _kernels(own["host"].host, limits, rules.policy),
        _link(own["transfer"], limits, rules.policy),
        depth,
    )
    return replace(
        place or PoolPlan(limits, prices),
        config=limits,
        pricer=prices,
        make_policy=lambda: load_policy(rules.policy, **dict(rules.policy_options)),
        speculation=_drafting(of, own, limits) if limits.num_speculative_tokens else None,
        kv_bytes_per_token=own["transfer"].kv_bytes_per_token if of["transfer"].kv_transfer else 0.0,
    )


def _drafting(of: Mapping[str, Side], own: Mapping[str, Pool], limits: SchedulerConfig) -> Speculation:
    kernels, host = own["kernel"], own["host"]
    priced = None if kernels.known is None else kernels.known.speculation(limits)
    config = SpeculativeConfig("ngram", limits.num_speculative_tokens)
    return Drafting(
        config if priced is None else priced.config,
        1 if priced is None else priced.queries_per_kv_head,
        None if priced is None else priced.draft,
        acceptance=of["acceptance"].acceptance(limits.num_speculative_tokens),
        lookups=isinstance(host.host, ModelPrices) and host.host.looks_up,
        recorded=kernels.kernels if isinstance(kernels.kernels, RecordedPrices) else None,
    )


def _kernels(
    prices: ModelPrices | RecordedPrices, limits: SchedulerConfig, policy: str
) -> StepPricer | RecordedPrices:
    return prices.pricer(limits, policy) if isinstance(prices, ModelPrices) else prices


def _link(pool: Pool, limits: SchedulerConfig, policy: str) -> StepPricer | None:
    return None if pool.known is None else pool.known.pricer(limits, policy)


def _match(pools: Sequence[Pool], name: str, index: int) -> Pool:
    """The pool of another side that stands for one called `name`, at place `index`."""
    named = [pool for pool in pools if pool.name == name]
    return named[0] if named else pools[min(index, len(pools) - 1)]


def _frontend(record: RunRecord, d: Deployment) -> Frontend:
    """As recorded; no gateway where a network says that it is not there."""
    if d.network is not None and "gateway" in d.network.without:
        return replace(frontend_of(record), overhead_s=0.0)
    return frontend_of(record)


def _disaggregated(plan: FleetPlan) -> bool:
    return any(pool.role == "decode" for pool in plan.pools)


def _depth(record: RunRecord) -> int:
    return int((record.meta.get("deployment") or {}).get("pipeline_parallel_size", 1))


def _layout(record: RunRecord, name: str) -> Built:
    """The deployment of a fleet, for its pools and limits. Raises `UsageError` where it cannot be worked out."""
    try:
        return build(Deployment.model_validate(record.meta.get("deployment")))
    except (TokenTwinError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise UsageError(
            f"{name} ran on a fleet whose deployment cannot be worked out here ({why}), and its tables do not say how "
            f"requests were routed; {INSTEAD}"
        ) from None


def _same_run(a: RunRecord, b: RunRecord) -> bool:
    """Whether every step and every request is the same, to the bit."""
    for mine, theirs in ((a.steps, b.steps), (a.requests, b.requests)):
        if len(mine) != len(theirs):
            return False
        others = theirs.columns()
        for column, values in mine.columns().items():
            if not np.array_equal(values, others[column], equal_nan=values.dtype.kind == "f"):
                return False
    return True
