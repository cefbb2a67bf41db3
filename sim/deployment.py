"""A deployment: model, devices, engine limits, policy. One frozen tree, with the names and meanings of vLLM's flags.

`build` turns it into what a run needs: model shape, device profile, memory plan, scheduler limits and prices.
`simulate` runs a workload on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from costmodel.engine_version import is_version
from costmodel.lockstep import LockstepPricer
from costmodel.memory import MemoryPlan, default_limits, plan_memory
from costmodel.model import ModelShape, load_model
from costmodel.pricer import StepPricer
from costmodel.prices import Prices
from costmodel.profile import DeviceProfile, load_profile
from costmodel.speculation import seqs_captured
from costmodel.stated_format import stated_format
from serving.config import SchedulerConfig
from serving.errors import InfeasibleError, UsageError
from serving.policies import CHUNKING, load_policy
from serving.speculative_config import parse_speculative_config
from sim.admission import TOO_MANY, Admission
from sim.deployment_limits import (
    check_cache,
    check_recent,
    cut_answers,
    eviction_limits,
    fitting_seqs,
    host_pages,
    idle_options,
    is_asynchronous,
    policy_options,
    swapping,
)
from sim.fleet.build import FLEET_FIELDS, build_pools, check_fleet, fleet_plan, is_fleet, pool_specs
from sim.fleet.spec import (
    MAX_REPLICAS,
    Autoscaler,
    ColdStart,
    Failures,
    KvTransfer,
    Pool,
    parse_structured,
)
from sim.jitter import step_noise
from sim.lockstep_build import check_workload, sharing_replicas, with_internal_lb
from sim.network import Network, check_network, delivering
from sim.noise import StepNoise
from sim.pipeline_build import check_parallel, make_pricer, of_engine, of_version
from sim.record import RunRecord, Status
from sim.router import RouterOptions
from sim.speculation import Speculation, check_speculation, plan_speculation
from sim.workload.types import Workload
from sim.world import Frontend, Progress, run_world

MAX_HOST_GIB = 16_384
"""Most host memory for pages: more is a mistake, and a list of all its pages would fill this machine's."""
MAX_DELAY_MS = 3.6e6
"""An hour."""


class Deployment(BaseModel):
    """One deployment. Unset limits take vLLM's defaults for the device.

    The network and the clients belong to the workload.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    model: str
    """A shipped model name, a Hugging Face id of a supported family, or a path to a config.json."""
    gpu: str = "h200"
    """A shipped device profile or a profile file."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices per replica."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Stages that the layers of a replica are divided into, each of tensor_parallel_size devices; not validated."""
    collective_overlap: float = Field(default=0.0, ge=0, le=1)
    """Tensor parallelism: share of a layer's all-reduces that hides behind its other work; 0 is as vLLM was measured."""
    enable_expert_parallel: bool = False
    """Mixture of experts: whole experts on each device instead of a slice of all."""
    expert_load_imbalance: float = Field(default=1.0, ge=1)
    """Mixture of experts: tokens of the busiest expert over the mean; 1 is uniform routing."""
    data_parallel_size: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    """Replicas behind a router. Those of a mixture of experts share its experts and step together, as in vLLM."""
    router: str = "round_robin"
    """How requests are spread over replicas: round_robin, least_outstanding, central, least_kv, prefix_hash, session,
    power_of_two, random, or internal_lb (vLLM's, default where replicas share experts)."""
    router_prefix_tokens: int = Field(default=256, ge=1)
    """Router prefix_hash: tokens of a prompt that decide where it goes."""
    router_load_factor: float = Field(default=1.25, ge=1)
    """Router prefix_hash: most requests on a replica as a multiple of its share; beyond it a prefix spills over."""
    pools: tuple[Pool, ...] = ()
    """Pools of replicas with settings of their own, such as [{gpu: h200, replicas: 2}, {gpu: l40s, replicas: 4}]."""
    autoscaler: Autoscaler | None = None
    """Replicas that follow the load, such as {outstanding: 32, max_replicas: 8}."""
    cold_start: ColdStart | None = None
    """How long a replica takes to start, such as {seconds: 90}; from weights and CUDA graphs by default."""
    failures: Failures | None = None
    """Replicas that fail and come back, such as {mtbf_s: 86400, mttr_s: 300}."""
    admission: Admission | None = None
    """Who is let in, such as {max_waiting: 100}."""
    kv_transfer: KvTransfer | None = None
    """Link from pools of role prefill to those of role decode, such as {bandwidth_gb_per_s: 50}."""
    dtype: str = "bfloat16"
    """Format of weights and activations: bfloat16, float16 or auto."""
    quantization: str | None = None
    """Weight format: fp8, fp8_block, int8_wo, int4_wo and others that the profile has prices for; by default what the
    checkpoint's config.json says, or 16 bit."""
    kv_cache_dtype: str = "auto"
    """Format of the KV cache: auto (16 bit), fp8, int8 or int4."""
    kv_cache_recent_tokens: int = Field(default=0, ge=0)
    """Quantised KV cache: of each sequence, the last tokens that are kept in 16 bit beside it."""
    policy: str = "chunked"
    """Batch policy: chunked (vLLM V1), adaptive (chunked with caps), continuous (whole prompts first), static, or
    my_module:MyPolicy."""
    scheduling_policy: Literal["fcfs", "priority", "sjf", "edf", "fair"] = "fcfs"
    """Order of the queue; fair: between tenants, by tokens served for their weight."""
    static_batch_size: int | None = Field(default=None, ge=1)
    """Policy static: requests per batch (max_num_seqs by default)."""
    static_max_wait: float | None = Field(default=None, ge=0)
    """Policy static: seconds that the oldest request waits for its batch to fill (0.1 by default)."""
    size_classes: str | None = None
    """Policy adaptive: TOKENS:SEQUENCES pairs such as 256:64,inf:8. Of requests of so many estimated tokens (prompt and
    longest answer) so many run at once; one whose class is full is passed over."""
    max_running_tokens: int | None = Field(default=None, ge=1)
    """Policy adaptive: most estimated tokens of all that run."""
    prefill_share: float | None = Field(default=None, gt=0, le=1)
    """Policy adaptive: share of a step's tokens that prompts may take while sequences decode (1 by default)."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences that may run at once; by default as vLLM sets it for the device: 1024 (H100 or larger) or 256."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens a step may compute; by default as vLLM sets it for the device: 2048, 8192 or 16384."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and answer together; the model's own limit by default, less where the KV cache is smaller."""
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1)
    """Share of the device's memory that the engine may use."""
    block_size: int = Field(default=16, ge=1)
    """Tokens per KV page."""
    num_gpu_blocks_override: int | None = Field(default=None, ge=2, le=10_000_000)
    """KV pages per replica, instead of what memory has room for."""
    enable_prefix_caching: bool = True
    """Keep the KV pages of prompts and use them again for equal beginnings."""
    kv_eviction: Literal["lru", "lfu", "cost", "session"] = "lru"
    """Which cached KV page is forgotten first: least recently used (vLLM), least frequently found, cheapest to compute
    again, or least recently used with the pages of conversations held back."""
    session_keep: float | None = Field(default=None, ge=0)
    """Eviction session: seconds that a conversation's pages are held back after its first answer (60 by default)."""
    session_decay: float | None = Field(default=None, gt=0, le=1)
    """Eviction session: factor by which that time shrinks with every turn (0.9 by default)."""
    kv_offloading_size: float | None = Field(default=None, gt=0, le=MAX_HOST_GIB)
    """Host memory in GiB, per replica, for cached prefixes that the device forgets; found there, they are copied back."""
    preemption_mode: Literal["recompute", "swap", "auto"] = "recompute"
    """What becomes of a sequence that has to make room: computed again, moved to host memory and back, or whichever the
    cost model says is cheaper."""
    swap_space: float | None = Field(default=None, gt=0, le=MAX_HOST_GIB)
    """Host memory for swapped sequences in GiB, per replica (4 by default)."""
    enable_chunked_prefill: bool = True
    """Cut prompts into chunks that fit the tokens of a step."""
    long_prefill_token_threshold: int = Field(default=0, ge=0)
    """A longer chunk of a prompt is cut to this many tokens; 0 is off."""
    async_scheduling: bool | None = None
    """Plan the next step while the current one runs; on by default under policy chunked, as in vLLM."""
    speculative_config: dict[str, Any] | str | None = None
    """Speculative decoding, as vLLM's JSON: {"method": "ngram", "num_speculative_tokens": 4}; for the twin also with
    "acceptance": 0.7, or as docs/speculation.md says."""
    semantics: Literal["vllm-0.33", "vllm-2025"] = "vllm-0.33"
    """Which vLLM V1 the scheduler copies: 2025 has no full-prompt gate and queues every freed page last."""
    engine_version: str | None = None
    """vLLM version such as 0.19: where the profile has products or all-reduces of several, the newest measured that is
    not newer prices them. The newest of all by default; semantics is the scheduler's."""
    disable_custom_all_reduce: bool = False
    """All-reduces by NCCL at any size, without vLLM's own kernel for up to 8 MiB."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    response_cache: str | None = None
    """Give the answer again to a request that repeats one (serve: if it is greedy or seeded): memory, or redis://HOST:PORT/0
    for several servers. Off by default."""
    step_jitter: float | Literal["profile"] | None = None
    """Spread of step times from step to step, in log units: a number, or that of the profile's measurements. Off by
    default; replications for intervals have the profile's where no number is given."""
    stall_rate: float = Field(default=0.0, ge=0, lt=1)
    """Share of steps that stall (page faults, collectors, neighbours)."""
    stall_ms: float = Field(default=0.0, ge=0)
    """Mean length of a stall."""
    frontend_overhead_ms: float = Field(default=0.0, ge=0, le=MAX_DELAY_MS)
    """Time a request spends in HTTP and gateways before it is tokenised."""
    tokenize_us_per_token: float = Field(default=1.0, ge=0, le=1e6)
    """Tokenising a prompt: about a million tokens a second for a fast tokeniser on one core."""
    detokenize_us_per_token: float = Field(default=20.0, ge=0, le=1e6)
    """Lag that detokenising and writing a token adds to its way out."""
    stream_interval: int = Field(default=1, ge=1)
    """Tokens to gather before they are sent; the first one goes at once."""
    stream_slice_ms: float = Field(default=0.0, ge=0, le=MAX_DELAY_MS)
    """Time in which tokens gather before they are sent, from the first one on; 0 is off."""
    network: Network | None = None
    """Lines, connections and readers, such as {bandwidth_mbit_s: 5, clients: 1, protocol: http/1.1}."""

    @property
    def gpus_per_replica(self) -> int:
        """Devices of one replica: the ranks of all its stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @field_validator("speculative_config", mode="before")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        return value if value is None else json.dumps(parse_structured(value))

    @field_validator("engine_version", mode="before")
    @classmethod
    def _as_version(cls, value: Any) -> Any:
        if value is not None and not (isinstance(value, str) and is_version(value)):
            raise ValueError(f"{value!r} is no version; write one as text, such as '0.19' or '0.10.2'")
        return value

    @field_validator(*FLEET_FIELDS, "network", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return parse_structured(value)


@dataclass(frozen=True, slots=True)
class Built:
    """A deployment worked out: everything a run needs."""

    deployment: Deployment
    model: ModelShape
    profile: DeviceProfile
    memory: MemoryPlan
    limits: SchedulerConfig
    pricer: StepPricer
    warnings: tuple[str, ...] = ()
    pools: tuple[Built, ...] = ()
    """One for each of the deployment's pools; the fields above are then those of the first."""
    speculation: Speculation | None = None

    @property
    def in_lockstep(self) -> bool:
        """Whether its replicas share their experts and step together."""
        return isinstance(self.pricer, LockstepPricer)

    def speculation_for(self, seed: int) -> Speculation | None:
        """Its drafts, with the luck of a seed."""
        return None if self.speculation is None else replace(self.speculation, seed=seed)


def build(deployment: Deployment) -> Built:
    """Work a deployment out. Raises `UsageError` for names and limits that cannot be, `InfeasibleError` for memory."""
    d = deployment
    check_fleet(d)
    check_network(d)
    check_cache(d.response_cache)
    if d.pools:
        pools = build_pools(d, build)
        first = pools[0]
        warnings = [
            f"pool {p.name}: {w}" for p, b in zip(pool_specs(d), pools, strict=True) for w in b.warnings
        ]
        return replace(first, deployment=d, warnings=tuple(warnings), pools=pools)
    model, profile = load_model(d.model), load_profile(d.gpu)
    tokens, seqs = default_limits(profile)
    tokens = d.max_num_batched_tokens or tokens
    seqs = d.max_num_seqs or seqs
    if d.max_model_len is not None and d.max_model_len > model.max_position_embeddings:
        raise UsageError(
            f"--max-model-len {d.max_model_len} is beyond the {model.max_position_embeddings} positions of {model.name}"
        )
    if (sharing := sharing_replicas(d, model)) > 1:
        d = with_internal_lb(d)
    longest = d.max_model_len or model.max_position_embeddings
    if not d.enable_chunked_prefill and d.policy in CHUNKING and tokens < longest:
        if d.max_num_batched_tokens is not None:
            raise UsageError(
                f"--max-num-batched-tokens {tokens} is smaller than --max-model-len {longest}, and prompts cannot be "
                "cut with --no-enable-chunked-prefill; raise it, lower --max-model-len, or leave chunked prefill on"
            )
        tokens = longest
    warnings = []
    if d.quantization is None:
        stated, unknown = stated_format(d.model)
        d = d.model_copy(update={"quantization": stated}) if stated is not None else d
        warnings += [unknown] if unknown is not None else []
    if (seats := fitting_seqs(d, seqs, tokens)) < seqs:
        warnings.append(
            f"max_num_seqs lowered from {seqs} to {seats}: a step computes at most {seats} tokens, one for each sequence"
        )
        seqs = seats
    check_recent(d)
    warnings += check_parallel(d, model)
    profile, unlike = of_engine(d, profile, sharing)
    warnings += unlike
    memory = plan_memory(
        model,
        profile,
        tensor_parallel_size=d.tensor_parallel_size,
        pipeline_parallel_size=d.pipeline_parallel_size,
        data_parallel_size=sharing,
        enable_expert_parallel=d.enable_expert_parallel,
        gpu_memory_utilization=d.gpu_memory_utilization,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        max_model_len=longest,
        block_size=d.block_size,
        dtype=d.dtype,
        quantization=d.quantization,
        kv_cache_dtype=d.kv_cache_dtype,
        kv_recent_tokens=d.kv_cache_recent_tokens * (2 if is_asynchronous(d) else 1),
        cuda_graphs=not d.enforce_eager,
    )
    drafting = None if d.speculative_config is None else parse_speculative_config(d.speculative_config)
    speculation = None
    if drafting is not None:
        speculation, memory = plan_speculation(
            drafting,
            model,
            profile,
            memory,
            tensor_parallel_size=d.tensor_parallel_size,
            dtype=d.dtype,
            quantization=d.quantization,
            kv_cache_dtype=d.kv_cache_dtype,
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            cuda_graphs=not d.enforce_eager,
        )
    pages = (d.num_gpu_blocks_override or memory.num_blocks) - 1  # vLLM keeps one block for padding
    if pages * d.block_size < longest:
        if d.max_model_len is not None:
            raise InfeasibleError(
                f"--max-model-len {longest} needs {-(-longest // d.block_size)} KV pages of {d.block_size} tokens and "
                f"{pages} fit; lower it to {pages * d.block_size} or raise --gpu-memory-utilization"
            )
        warnings.append(
            f"max_model_len lowered from {longest} to {pages * d.block_size}: the KV cache holds no longer sequence"
        )
        longest = pages * d.block_size
    asynchronous = is_asynchronous(d)
    if drafting is not None:
        asynchronous = check_speculation(drafting, d.policy, d.async_scheduling)
    if asynchronous and d.policy == "static":
        raise UsageError("--async-scheduling has no meaning for --policy static; leave it off")
    limits = SchedulerConfig(
        num_pages=pages,
        page_tokens=d.block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
        enable_prefix_caching=d.enable_prefix_caching,
        enable_chunked_prefill=d.enable_chunked_prefill,
        **eviction_limits(d, model),
        long_prefill_token_threshold=d.long_prefill_token_threshold,
        queue_order=d.scheduling_policy,
        async_scheduling=asynchronous,
        pipeline_parallel_size=d.pipeline_parallel_size,
    )
    if d.semantics == "vllm-2025":
        limits = replace(limits.vllm_2025(), async_scheduling=asynchronous)
    if drafting is not None:
        limits = drafting.limits(limits)
    pricer = make_pricer(
        d,
        model,
        profile,
        max_num_batched_tokens=max(tokens, longest) if d.policy not in CHUNKING else tokens,
        max_num_seqs=seqs if drafting is None else seqs_captured(seqs, drafting.num_speculative_tokens),
    )
    if d.preemption_mode != "recompute":
        limits = replace(limits, **swapping(d, memory, pricer, tokens))
    elif d.swap_space is not None:
        raise UsageError("--swap-space has an effect only with --preemption-mode swap or auto")
    if d.kv_offloading_size is not None:
        if not d.enable_prefix_caching:
            raise UsageError(
                "--kv-offloading-size has no effect with --no-enable-prefix-caching; drop one of them"
            )
        pages = host_pages("--kv-offloading-size", d.kv_offloading_size, d, memory, pricer)
        limits = replace(limits, host_cache_pages=pages)
    return Built(d, model, profile, memory, limits, pricer, tuple(warnings), speculation=speculation)


def simulate(
    workload: Workload,
    deployment: Deployment | Built,
    *,
    fast_forward: bool = True,
    progress: Callable[[Progress], None] | None = None,
    until_s: float = float("inf"),
    pricer: Prices | Sequence[Prices] | None = None,
    noise: StepNoise | None = None,
    seed: int = 0,
    watch: Callable[[Any], None] | None = None,
) -> RunRecord:
    """Run `workload` on `deployment` in simulated time and return what happened.

    Raises `UsageError` when not a single request can run, with the reason of the first. Interrupting it
    (KeyboardInterrupt) returns what happened so far, marked `interrupted`. `pricer` stands in for the deployment's own
    prices (a sequence for those of its pools); `noise` jitters the device time of its steps; `seed` is that of routers
    and failures. `watch` is told of the world before it runs.
    """
    built = deployment if isinstance(deployment, Built) else build(deployment)
    d = built.deployment
    options = policy_options(d)
    load_policy(d.policy, **options)  # a wrong name fails before anything runs
    if not len(workload):
        raise UsageError("the workload has no requests; check its filters, or give --num-prompts at least 1")
    if d.scheduling_policy == "edf" and all(tenant.goodput_ttft_s is None for tenant in workload.tenants):
        raise UsageError(
            "--scheduling-policy edf needs deadlines: set --goodput ttft:MS, or a tenant's goodput in a workload file"
        )
    prices = [pricer] if pricer is not None and not isinstance(pricer, Sequence) else pricer
    staged = [member.limits.pipelined for member in built.pools or (built,)]
    if any(pp and not hasattr(each, "stage_s") for pp, each in zip(staged, prices or (), strict=False)):
        raise UsageError("these prices know no stages; price a pipeline with those of its deployment")
    if built.in_lockstep:
        check_workload(workload)
        if any(not hasattr(each, "lockstep_s") for each in prices or ()):
            raise UsageError(
                "these prices know no ranks in lockstep; price replicas that share their experts with those of their "
                "deployment"
            )
    fleet = None
    if is_fleet(d):
        fleet = fleet_plan(
            built,
            workload,
            lambda name: load_policy(name, **(options if name == d.policy else {})),
            pricers=prices,
            seed=seed,
        )
    network = delivering(
        d.network, workload.tenants, interval=d.stream_interval, slice_s=d.stream_slice_ms / 1e3
    )
    if network is not None:
        ways = zip(workload.tenants, network.lines, strict=True)
        workload = replace(workload, tenants=tuple(replace(t, rtt_s=line.rtt_s) for t, line in ways))
    no_gateway = d.network is not None and "gateway" in d.network.without
    record = run_world(
        workload,
        built.limits,
        prices[0] if prices is not None else built.pricer,
        make_policy=lambda: load_policy(d.policy, **options),
        num_replicas=d.data_parallel_size,
        router=d.router,
        frontend=Frontend(
            0.0 if no_gateway else d.frontend_overhead_ms / 1e3,
            d.tokenize_us_per_token / 1e6,
            d.detokenize_us_per_token / 1e6,
        ),
        fast_forward=fast_forward,
        until_s=until_s,
        progress=progress,
        noise=step_noise(built, noise, seed),
        watch=watch,
        options=RouterOptions(seed, d.router_prefix_tokens, d.router_load_factor),
        fleet=fleet,
        speculation=built.speculation_for(seed),
        response_cache=d.response_cache is not None,
        delivering=network,
        lockstep=built.in_lockstep,
    )
    rejected = record.requests.status == Status.REJECTED
    if rejected.all() and len(rejected) and not record.requests.reason[0].startswith(TOO_MANY):
        raise UsageError(
            f"none of the {len(rejected)} requests can run: {record.requests.reason[0]}; raise --max-model-len or "
            "the memory for KV, or shorten the prompts"
        )
    longest = max(member.limits.max_model_len for member in built.pools or (built,))
    told = (*idle_options(d, workload), *cut_answers(workload, longest))
    warnings = [*built.warnings, *told, *record.warnings]
    if rejected.any():
        first = record.requests.reason[int(np.flatnonzero(rejected)[0])]
        warnings.append(
            f"{int(rejected.sum())} of {len(rejected)} requests rejected, the first because: {first}"
        )
    meta = {
        **record.meta,
        "deployment": d.model_dump(mode="json"),
        "limits": {name: getattr(built.limits, name) for name in built.limits.__slots__},
        "workload": {"name": workload.name, **workload.meta},
        "profile_hash": built.profile.content_hash,
        **of_version(built),
        **({"shared_experts": True} if built.in_lockstep else {}),
        "seed": seed,
    }
    return replace(record, warnings=tuple(warnings), meta=meta)
