"""A world put together of the parts of several runs, and run.

Replicas are matched pool by pool: by name, else by position, else the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from calibration.model_prices import ModelPrices, WorldPrices
from calibration.recorded import RecordedPrices
from calibration.recorded_drafts import Drafting
from calibration.sides import Pool, Side
from costmodel.pricer import StepPricer
from serving.config import SchedulerConfig
from serving.policies import load_policy
from serving.speculative_config import SpeculativeConfig
from sim.fleet.plan import FleetPlan, PoolPlan
from sim.fleet.spec import KvTransfer
from sim.record import RunRecord
from sim.speculation import Speculation
from sim.world import run_world

AT_ONCE = KvTransfer(latency_ms=0.0)
"""The way of KV in a run that sends none, and no bytes go."""


def world(of: Mapping[str, Side]) -> RunRecord:
    """The run whose every part is that of the side named for it."""
    routing, kernel = of["routing"].routing, of["kernel"]
    places: Sequence[PoolPlan | None] = routing.fleet.pools if routing.fleet is not None else (None,)
    pools = [_pool(of, place, index) for index, place in enumerate(places)]
    recorded = [pool.kernels for pool in kernel.pools if isinstance(pool.kernels, RecordedPrices)]
    for prices in recorded:
        prices.rewind()
    fleet = None
    if routing.fleet is not None:
        sent = of["transfer"].kv_transfer or AT_ONCE
        fleet = replace(routing.fleet, pools=tuple(pools), kv_transfer=sent)
        if not disaggregated(fleet):
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


def disaggregated(plan: FleetPlan) -> bool:
    """Whether prefill is apart from decode."""
    return any(pool.role == "decode" for pool in plan.pools)
