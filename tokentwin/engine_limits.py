"""Limits of the real engine's scheduler that come from a deployment's choices about memory."""

from __future__ import annotations

from typing import Any

from costmodel.formats import kv_format
from costmodel.memory import GIB
from costmodel.model import ModelShape
from serving.errors import UsageError
from serving.speculative_config import FLAG, SpeculativeConfig, parse_speculative_config
from sim.deployment import Deployment
from sim.deployment_limits import eviction_limits
from sim.speculation import check_speculation


def drafting(d: Deployment) -> SpeculativeConfig | None:
    """Speculative decoding as the engine does it. Raises `UsageError` for what only the twin can be told."""
    if d.speculative_config is None:
        return None
    config = parse_speculative_config(d.speculative_config)
    if config.acceptance is not None:
        raise UsageError(
            f'{FLAG}: "acceptance" is what a twin assumes; the engine finds out by verifying: leave it out'
        )
    check_speculation(config, d.policy, None)
    return config


def memory_limits(d: Deployment, shape: ModelShape) -> dict[str, Any]:
    """Eviction order and host pages for swapping, as fields of `SchedulerConfig`.

    Raises `UsageError` for options without effect, and for a choice that only the cost model can make.
    """
    limits = eviction_limits(d, shape)
    if d.kv_offloading_size is not None:
        if not d.enable_prefix_caching:
            raise UsageError(
                "--kv-offloading-size has no effect with --no-enable-prefix-caching; drop one of them"
            )
        limits["host_cache_pages"] = _host_pages("--kv-offloading-size", d.kv_offloading_size, d, shape)
    if d.preemption_mode == "recompute":
        if d.swap_space is not None:
            raise UsageError("--swap-space has an effect only with --preemption-mode swap")
        return limits
    if d.preemption_mode == "auto":
        raise UsageError(
            "--preemption-mode auto asks the cost model what is cheaper, which the engine does not have; "
            "use swap or recompute"
        )
    if d.policy == "static":
        raise UsageError("--preemption-mode has no effect with --policy static, which never preempts")
    space_gib = 4.0 if d.swap_space is None else d.swap_space
    return {**limits, "swap_pages": _host_pages("--swap-space", space_gib, d, shape)}


def _host_pages(option: str, gib: float, d: Deployment, shape: ModelShape) -> int:
    """KV pages of the engine in `gib` GiB of host memory."""
    wide = d.dtype == "float32" and d.kv_cache_dtype == "auto"
    element_bytes = 4.0 if wide else kv_format(d.kv_cache_dtype).element_bytes(shape.head_dim)
    page_bytes = d.block_size * shape.kv_bytes_per_token(1, element_bytes)
    pages = int(gib * GIB / page_bytes)
    if not pages:
        raise UsageError(f"{option} {gib:g} GiB holds no KV page of {page_bytes / 2**20:.1f} MiB; raise it")
    return pages
