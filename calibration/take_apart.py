"""A recorded run taken apart into a `Side`: made again from its deployment, or replayed from its tables."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from calibration.model_prices import ModelPrices
from calibration.recorded import RecordedPrices, built_of, frontend_of, rules_of, workload_of
from calibration.sides import INSTEAD, PARTS, Pool, Routing, Side, Ways
from calibration.worlds import disaggregated, world
from serving.errors import TokenTwinError, UsageError
from serving.policies import load_policy
from serving.speculative_config import parse_speculative_config
from sim.deployment import Built, Deployment, build
from sim.deployment_limits import policy_options
from sim.fleet.build import fleet_plan, is_fleet
from sim.fleet.spec import KvTransfer
from sim.jitter import step_noise
from sim.meta import meta_value
from sim.record import RunRecord
from sim.router import RouterOptions
from sim.workload import Workload
from sim.world import Frontend


def take_apart(record: RunRecord, name: str) -> Side:
    """Take a run apart. Raises `UsageError` for what no replay can repeat."""
    if record.meta.get("shared_experts"):
        raise UsageError(
            f"{name} ran on replicas that share their experts: a step's time depends on all of them, and no replay knows "
            f"that; {INSTEAD}"
        )
    workload, notes = workload_of(record)
    built = built_of(record)
    if built is not None and not notes:
        side = _of_deployment(record, name, workload, built, recorded=False)
        again = world(dict.fromkeys(PARTS, side))
        if _same_run(record, again):
            return replace(side, made_again=again)
    if built is None and _has_stages(record):
        raise UsageError(
            f"{name} ran in a pipeline, and its deployment or profile is not at hand as it was: a record has the "
            f"mean of the stages' times and not each; {INSTEAD}"
        )
    if built is None and record.fleet is not None:
        built = _layout(record, name)
    if built is not None:
        side = _of_deployment(record, name, workload, built, recorded=True)
    else:
        side = _of_record(record, name, workload)
    return replace(side, notes=(*(f"{name}: {note}" for note in notes), *side.notes))


def _of_deployment(record: RunRecord, name: str, workload: Workload, built: Built, *, recorded: bool) -> Side:
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
    return Side(
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
        d.kv_transfer or KvTransfer() if plan is not None and disaggregated(plan) else None,
        Ways(d.network, d.stream_interval, d.stream_slice_ms / 1e3),
        seed,
        float(meta_value(record, "until_s", math.inf)),
    )


def _of_record(record: RunRecord, name: str, workload: Workload) -> Side:
    """From the tables alone: real runs, and twins' whose deployment is not at hand."""
    rules, notes = rules_of(record)
    prices = RecordedPrices(record, None)
    pool = Pool("default", rules.limits, rules.policy, rules.policy_options, prices, prices, None)
    stated = (record.meta.get("deployment") or {}).get("speculative_config")
    return Side(
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


def _frontend(record: RunRecord, d: Deployment) -> Frontend:
    """As recorded; no gateway where a network says that it is not there."""
    if d.network is not None and "gateway" in d.network.without:
        return replace(frontend_of(record), overhead_s=0.0)
    return frontend_of(record)


def _has_stages(record: RunRecord) -> bool:
    pools = () if record.fleet is None else record.fleet.pools
    stated = (record.meta.get("deployment") or {}).get("pipeline_parallel_size", 1)
    return stated > 1 or any(pool.pipeline_parallel_size > 1 for pool in pools)


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
