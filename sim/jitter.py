"""Which steps are late: the noise of a run that a deployment asks for, each source by its own switch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from costmodel.uncertainty import spread_of
from serving.errors import UsageError
from sim.noise import StepNoise

if TYPE_CHECKING:
    from sim.deployment import Built


def step_noise(built: Built, noise: StepNoise | None, seed: int) -> StepNoise | None:
    """`noise` (that of a replication), or what the deployment asks for; its stalls and a spread in numbers in both cases.

    Raises `UsageError` for a spread that cannot be and for half a stall.
    """
    d = built.deployment
    if (d.stall_rate > 0) != (d.stall_ms > 0):
        raise UsageError(
            "--stall-rate and --stall-ms go together: a share of steps such as 0.001, and a length such as 40"
        )
    if d.step_jitter is not None and not isinstance(d.step_jitter, str) and not 0 <= d.step_jitter <= 1:
        raise UsageError(
            f"--step-jitter is {d.step_jitter:g}; use profile, or a spread of 0 to 1 such as 0.02"
        )
    if noise is not None and isinstance(d.step_jitter, float):
        noise = replace(noise, log_std=d.step_jitter)
    if noise is None and d.step_jitter is not None:
        log_std = d.step_jitter if not isinstance(d.step_jitter, str) else _measured(built)
        noise = StepNoise(log_std, seed)
    if d.stall_rate:
        noise = replace(noise or StepNoise(0.0, seed), stall_rate=d.stall_rate, stall_s=d.stall_ms / 1e3)
    return noise


def _measured(built: Built) -> float:
    if built.pools:
        return max(map(_measured, built.pools))
    d = built.deployment
    return spread_of(
        built.model,
        built.profile,
        tensor_parallel_size=d.tensor_parallel_size,
        dtype=d.dtype,
        quantization=d.quantization,
        kv_cache_dtype=d.kv_cache_dtype,
    ).step_log_std
