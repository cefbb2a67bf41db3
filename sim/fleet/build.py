"""From a deployment's words to a fleet worked out: pools built, checked together, weighed for the router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from costmodel.pricer import graph_sizes
from costmodel.prices import Prices
from serving.errors import UsageError
from serving.policies import BatchPolicy
from sim.fleet.plan import FleetPlan, PoolPlan
from sim.fleet.spec import ColdStart, Pool
from sim.router import PrefixHash, check_router

if TYPE_CHECKING:
    from sim.deployment import Built, Deployment
    from sim.workload.types import Workload

FLEET_FIELDS = ("pools", "autoscaler", "cold_start", "failures", "admission", "kv_transfer")
"""Fields of a deployment that are mappings: YAML in a file, JSON on the command line."""


def is_fleet(d: Deployment) -> bool:
    """Whether more happens than fixed replicas alike behind a router."""
    return bool(d.pools or d.autoscaler or d.failures or d.admission)


def is_dynamic(d: Deployment) -> bool:
    """Whether replicas come and go."""
    return d.failures is not None or any(pool.autoscaler for pool in pool_specs(d))


def pool_specs(d: Deployment) -> tuple[Pool, ...]:
    """The pools, one of the deployment's own settings where none are named."""
    scaler = d.autoscaler
    if d.pools:
        return tuple(
            pool.model_copy(
                update={
                    "name": pool.name or f"pool{index}",
                    "autoscaler": (own := pool.autoscaler or scaler),
                    "replicas": max(pool.replicas, own.min_replicas) if own else pool.replicas,
                }
            )
            for index, pool in enumerate(d.pools)
        )
    count = max(d.data_parallel_size, scaler.min_replicas) if scaler else d.data_parallel_size
    return (Pool(name="default", replicas=count, autoscaler=scaler),)


def num_replicas(d: Deployment) -> int:
    """Replicas at the start."""
    return sum(pool.replicas for pool in pool_specs(d))


def most_replicas(d: Deployment) -> int:
    """Replicas that there may be at once."""
    return sum(pool.autoscaler.max_replicas if pool.autoscaler else pool.replicas for pool in pool_specs(d))


def num_gpus(d: Deployment) -> int:
    """GPUs at the start."""
    return sum(
        p.replicas
        * (p.tensor_parallel_size or d.tensor_parallel_size)
        * (p.pipeline_parallel_size or d.pipeline_parallel_size)
        for p in pool_specs(d)
    )


def devices(built: Built) -> str:
    """The GPUs in words, such as "2 x h200 + 4 x l40s"."""
    if not built.pools:
        return f"{num_gpus(built.deployment)} x {built.profile.name}"
    specs = pool_specs(built.deployment)
    counts: dict[str, int] = {}
    for pool, own in zip(built.pools, specs, strict=True):
        count = own.replicas * pool.deployment.gpus_per_replica
        counts[pool.profile.name] = counts.get(pool.profile.name, 0) + count
    return " + ".join(f"{count} x {gpu}" for gpu, count in counts.items())


def check_fleet(d: Deployment) -> None:
    """Raise `UsageError` for what cannot be together or has no effect."""
    check_router(d.router)
    own = {
        name: d.__class__.model_fields[name].default
        for name in ("router_prefix_tokens", "router_load_factor")
    }
    for name, default in own.items():
        if getattr(d, name) != default and d.router != PrefixHash.name:
            raise UsageError(f"--{name.replace('_', '-')} has an effect only with --router prefix_hash")
    if d.router == PrefixHash.name and not d.enable_prefix_caching:
        raise UsageError(
            "--router prefix_hash has no effect with --no-enable-prefix-caching; drop one of them"
        )
    specs = pool_specs(d)
    if d.pools and d.data_parallel_size != 1:
        raise UsageError("--data-parallel-size has no effect with pools; set replicas in each of them")
    names = [str(pool.name) for pool in specs]
    if len(set(names)) < len(names):
        raise UsageError(
            f"pools: two are called {max(names, key=names.count)!r}; give each a name of its own"
        )
    if len({pool.weight is None for pool in specs}) > 1:
        raise UsageError(
            "pools: some have a weight and some do not; set it for all, or leave it to the estimate"
        )
    for pool in specs:
        if (scaler := pool.autoscaler) is None:
            continue
        if pool.replicas > scaler.max_replicas:
            where = f"pool {pool.name}: replicas" if d.pools else "--data-parallel-size"
            raise UsageError(
                f"{where} {pool.replicas} is above the autoscaler's max_replicas {scaler.max_replicas}"
            )
        if pool.role == "decode" and scaler.p95_ttft_ms is not None:
            raise UsageError(
                f"pool {pool.name}: a decode pool has no TTFT; scale it by outstanding, waiting or kv_cache_usage"
            )
    roles = {pool.role for pool in specs}
    if roles not in ({"both"}, {"prefill", "decode"}):
        if len(roles) == 1:
            (role,) = roles
            other = "decode" if role == "prefill" else "prefill"
            raise UsageError(
                f"pools: role {role} without a pool of role {other}; add one, or leave role out for pools that do both"
            )
        both = next(pool.name for pool in specs if pool.role == "both")
        others = " and ".join(sorted(roles - {"both"}))
        raise UsageError(
            f"pools: {both} has role both (the default) beside pools of role {others}; give it prefill or decode, or "
            "leave role out of all of them"
        )
    if d.kv_transfer is not None and roles == {"both"}:
        raise UsageError("--kv-transfer has an effect only with pools of role prefill and decode")
    if d.cold_start is not None and d.failures is None and all(pool.autoscaler is None for pool in specs):
        raise UsageError("--cold-start has an effect only with --autoscaler or --failures")
    if d.failures is not None:
        most = most_replicas(d)
        for outage in d.failures.schedule:
            if outage.replica >= most:
                raise UsageError(
                    f"--failures: replica {outage.replica} does not exist; "
                    + (f"name one of 0 to {most - 1}" if most > 1 else "the only one is 0")
                )


def build_pools(d: Deployment, build: Callable[[Deployment], Built]) -> tuple[Built, ...]:
    """Each pool as a deployment worked out; empty where none are named. Errors name the pool."""
    if not d.pools:
        return ()
    alone: dict[str, Any] = dict.fromkeys(FLEET_FIELDS) | {"pools": (), "router": "round_robin"}
    alone |= {"router_prefix_tokens": 256, "router_load_factor": 1.25}
    out = []
    for pool in pool_specs(d):
        try:
            out.append(build(d.model_copy(update=alone | pool.overrides())))
        except UsageError as error:
            raise type(error)(f"pool {pool.name}: {error}") from None
    kv = {pool.deployment.kv_cache_dtype for pool in out}
    if len(kv) > 1 and any(pool.role == "decode" for pool in d.pools):
        raise UsageError(f"pools: kv_cache_dtype differs ({', '.join(sorted(kv))}); KV is sent as it is")
    return tuple(out)


def fleet_plan(
    built: Built,
    workload: Workload,
    make_policy: Callable[[str], BatchPolicy],
    *,
    pricers: Sequence[Prices] | None = None,
    seed: int = 0,
) -> FleetPlan:
    """The fleet that a run needs. `make_policy` makes one by name; `pricers` stand in for the pools' own."""
    d, specs = built.deployment, pool_specs(built.deployment)
    members = built.pools or (built,)
    prompt = float(workload.prompt_tokens.mean()) if len(workload) else 1.0
    output = float(workload.output_tokens.mean()) if len(workload) else 1.0
    rates = [requests_per_s(m, pool.role, prompt, output) for m, pool in zip(members, specs, strict=True)]
    pools = []
    for index, (member, pool) in enumerate(zip(members, specs, strict=True)):
        gpus = member.deployment.gpus_per_replica
        first = next(i for i, other in enumerate(specs) if other.role == pool.role)
        own = PoolPlan(
            config=member.limits,
            pricer=member.pricer if pricers is None else pricers[index],
            replicas=pool.replicas,
            name=str(pool.name),
            role=pool.role,
            make_policy=lambda name=member.deployment.policy: make_policy(name),  # type: ignore[misc]
            speculation=member.speculation_for(seed),
            weight=pool.weight if pool.weight is not None else rates[index] / rates[first],
            cold_start_s=cold_start_s(member, d.cold_start or ColdStart()),
            autoscaler=pool.autoscaler,
            gpu=member.profile.name,
            gpus_per_replica=gpus,
            kv_bytes_per_token=member.memory.kv_bytes_per_token * gpus,
        )
        pools.append(own)
    return FleetPlan(
        tuple(pools),
        router=d.router,
        prefix_tokens=d.router_prefix_tokens,
        load_factor=d.router_load_factor,
        failures=d.failures,
        admission=d.admission,
        kv_transfer=d.kv_transfer,
        seed=seed,
    )


def cold_start_s(built: Built, how: ColdStart) -> float:
    """The cold start of one replica of a deployment."""
    weights = built.memory.weight_bytes * built.deployment.gpus_per_replica
    graphs = (
        0
        if built.deployment.enforce_eager
        else len(graph_sizes(built.limits.max_num_seqs, built.limits.max_num_batched_tokens))
    )
    return how.duration_s(weights, graphs, built.profile.facts.load_bytes_per_s)


def requests_per_s(built: Built, role: str, prompt_tokens: float, output_tokens: float) -> float:
    """What a replica can serve at best, from its prices: prompts one by one, decodes in the largest batch that fits.

    An estimate to weigh pools against one another, not a capacity.
    """
    limits, pricer = built.limits, built.pricer
    prompt, output = max(1, round(prompt_tokens)), max(1.0, output_tokens)
    chunk = min(prompt, limits.max_num_batched_tokens)
    prefill_s = pricer.step_s(chunk, 1, [(chunk, 0)], 0, 0, 0) * prompt / chunk
    held = limits.num_pages * limits.page_tokens / (prompt + output)
    batch = max(1, min(limits.max_num_seqs, int(held)))
    context = prompt + round(output / 2)
    decode_s = pricer.step_s(batch, batch, (), batch, batch * context, context) * output / batch
    return 1.0 / {"both": prefill_s + decode_s, "prefill": prefill_s, "decode": decode_s}[role]
