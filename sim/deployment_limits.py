"""What a deployment's options mean for the scheduler and the batch policy, and which of them have no effect together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costmodel.formats import kv_format
from costmodel.memory import GIB, MemoryPlan
from costmodel.model import ModelShape
from costmodel.pricer import StepPricer
from costmodel.swap import host_link_bytes_per_s, recompute_coefficients
from serving.errors import UsageError
from serving.policies import CHUNKING
from serving.policies.adaptive import parse_size_classes

if TYPE_CHECKING:
    from sim.deployment import Deployment
    from sim.workload import Workload


def is_asynchronous(d: Deployment) -> bool:
    """Whether steps are planned ahead: by default where vLLM does so."""
    if d.async_scheduling is not None:
        return d.async_scheduling
    usual = d.policy in CHUNKING and d.semantics != "vllm-2025" and d.speculative_config is None
    return usual and d.pipeline_parallel_size == 1


def check_cache(name: str | None) -> None:
    """Raise `UsageError` for a cache of answers that there is not."""
    if name is not None and not name.startswith(("memory", "redis://", "rediss://")):
        raise UsageError(f"--response-cache {name!r}; use memory, or redis://HOST:PORT/0")


def check_recent(d: Deployment) -> None:
    """Raise `UsageError` where a window of recent tokens has no effect or no engine has it."""
    if not d.kv_cache_recent_tokens:
        return
    if kv_format(d.kv_cache_dtype).bits == 16:
        raise UsageError(
            "--kv-cache-recent-tokens has an effect only with --kv-cache-dtype int8, int4 or fp8; set one or leave it out"
        )
    if d.speculative_config is not None:
        raise UsageError(
            "--kv-cache-recent-tokens: drafts are verified with one precision; leave out --speculative-config"
        )


def idle_options(d: Deployment, workload: Workload) -> list[str]:
    """Warnings of options that mean nothing on a workload; no errors, for the same deployment may run others too."""
    if d.scheduling_policy == "fair" and len(set(workload.tenant.tolist())) == 1:
        return [
            "--scheduling-policy fair has no effect: all requests are of one tenant, so that they are served first come "
            "first; give tenants in a workload file"
        ]
    return []


def cut_answers(workload: Workload, max_model_len: int) -> list[str]:
    """A warning where requests ask for more than a sequence may hold, so that their answers end before."""
    prompts, asked = workload.prompt_tokens, workload.output_tokens
    cut = int(((prompts < max_model_len) & (prompts + asked > max_model_len)).sum())
    if not cut:
        return []
    return [
        f"{cut:,} of {len(asked):,} requests ask for more than fits max_model_len {max_model_len}, and their answers "
        "end there"
    ]


def eviction_limits(d: Deployment, model: ModelShape) -> dict[str, Any]:
    """The scheduler's limits for the eviction order. Raises `UsageError` for options without effect."""
    if d.kv_eviction != "session" and (d.session_keep is not None or d.session_decay is not None):
        raise UsageError("--session-keep and --session-decay have an effect only with --kv-eviction session")
    if d.kv_eviction == "lru":
        return {}
    if not d.enable_prefix_caching:
        raise UsageError(
            f"--kv-eviction {d.kv_eviction} has no effect with --no-enable-prefix-caching; drop one of them"
        )
    options: dict[str, Any] = {"kv_eviction": d.kv_eviction, "attention_tokens": model.attention_tokens}
    if d.session_keep is not None:
        options["session_keep_s"] = d.session_keep
    if d.session_decay is not None:
        options["session_decay"] = d.session_decay
    return options


def swapping(d: Deployment, memory: MemoryPlan, pricer: StepPricer, tokens: int) -> dict[str, Any]:
    """The scheduler's limits for preemption by swapping; `pricer` learns what a page costs."""
    if d.policy == "static":
        raise UsageError("--preemption-mode has no effect with --policy static, which never preempts")
    pages = host_pages("--swap-space", 4.0 if d.swap_space is None else d.swap_space, d, memory, pricer)
    if d.preemption_mode == "swap":
        return {"swap_pages": pages}
    moved_s = 2 * pricer.page_move_s / d.block_size
    return {"swap_pages": pages, "swap_costs": (moved_s, *recompute_coefficients(pricer, min(1024, tokens)))}


def host_pages(option: str, gib: float, d: Deployment, memory: MemoryPlan, pricer: StepPricer) -> int:
    """KV pages in `gib` GiB of host memory; `pricer` learns what it costs to move one."""
    page_bytes = d.block_size * memory.kv_bytes_per_token
    pricer.page_move_s = page_bytes / host_link_bytes_per_s(pricer.profile.facts)
    pages = int(gib * GIB / (page_bytes * d.tensor_parallel_size))
    if not pages:
        raise UsageError(f"{option} {gib:g} GiB holds no KV page of {page_bytes / 2**20:.1f} MiB; raise it")
    return pages


def fitting_seqs(d: Deployment, default: int, tokens: int) -> int:
    """How many sequences may run at once where a step computes `tokens`: a default is lowered to that, as vLLM does.

    Raises `UsageError` for a number that was given and is higher, as vLLM does.
    """
    if d.max_num_seqs is not None and d.max_num_seqs > tokens:
        raise UsageError(
            f"--max-num-batched-tokens {tokens} is smaller than --max-num-seqs {d.max_num_seqs}, and each running "
            "sequence takes a token of a step; raise the first or lower the second"
        )
    return min(default, tokens)


def policy_options(deployment: Deployment) -> dict[str, Any]:
    """Options of the batch policy. Raises `UsageError` for those that the policy does not take."""
    options: dict[str, Any] = {}
    if deployment.static_batch_size is not None:
        options["batch_size"] = deployment.static_batch_size
    if deployment.static_max_wait is not None:
        options["max_wait_s"] = deployment.static_max_wait
    if options and deployment.policy != "static":
        raise UsageError("--static-batch-size and --static-max-wait have an effect only with --policy static")
    adaptive: dict[str, Any] = {}
    if deployment.size_classes is not None:
        adaptive["size_classes"] = parse_size_classes(deployment.size_classes)
    if deployment.max_running_tokens is not None:
        adaptive["max_running_tokens"] = deployment.max_running_tokens
    if deployment.prefill_share is not None:
        adaptive["prefill_share"] = deployment.prefill_share
    if adaptive and deployment.policy != "adaptive":
        raise UsageError(
            "--size-classes, --max-running-tokens and --prefill-share have an effect only with --policy adaptive"
        )
    if (deployment.prefill_share or 1.0) < 1.0 and not deployment.enable_chunked_prefill:
        raise UsageError(
            f"--prefill-share {deployment.prefill_share:g} with --no-enable-chunked-prefill: a prompt longer than its "
            "share is not cut and would wait until nobody decodes; drop one of them"
        )
    return options | adaptive
