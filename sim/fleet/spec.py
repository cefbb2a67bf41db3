"""What a fleet is made of, as it is written in YAML: pools, autoscaler, failures, the link between pools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from sim.workload.yaml_lines import DuplicateKey, load_yaml, unique_keys


def parse_structured(value: Any) -> Any:
    """A mapping or list from its text, JSON or YAML's one-line form; anything else as it is. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        content = json.loads(value, object_pairs_hook=unique_keys)  # YAML takes JSON's 1e-06 for a word
    except json.JSONDecodeError:
        try:
            content = load_yaml(value)
        except DuplicateKey as error:
            raise ValueError(str(error.problem)) from None
        except (yaml.YAMLError, RecursionError):
            content = None
    if not isinstance(content, dict | list):
        raise ValueError(
            f"{value[:40]!r} is not a mapping; write it as {{key: value}}, or in a --config file"
        )
    return content


Role = Literal["both", "prefill", "decode"]


MAX_REPLICAS = 10_000
"""Of a pool; each is an engine with its own pages."""


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ColdStart(_Spec):
    """Seconds from the decision to start a replica until it serves: start of the engine, weights, CUDA graphs.

    `seconds` stands in for all of it. The defaults are assumptions in the range of public start-up logs, to be replaced
    by what you measure.
    """

    seconds: float | None = Field(default=None, ge=0)
    """The whole cold start."""
    engine_s: float = Field(default=20.0, ge=0)
    """Machine, container, Python and CUDA context."""
    load_gb_per_s: float | None = Field(default=None, gt=0)
    """Weights from disk or network to all devices of a replica together, in 10^9 bytes per second; by default what
    `calibrate` measured, where the profile has it, otherwise 2."""
    graph_capture_s: float = Field(default=0.3, ge=0)
    """Capture of one CUDA graph."""

    def duration_s(
        self, weight_bytes: float, num_graphs: int, measured_bytes_per_s: float | None = None
    ) -> float:
        """The cold start of a replica whose weights take `weight_bytes` on all its devices together."""
        if self.seconds is not None:
            return self.seconds
        rate = self.load_gb_per_s * 1e9 if self.load_gb_per_s is not None else measured_bytes_per_s or 2e9
        return self.engine_s + weight_bytes / rate + num_graphs * self.graph_capture_s


class Autoscaler(_Spec):
    """Scales as Kubernetes' HorizontalPodAutoscaler: desired = ceil(current · metric / target), the largest over the
    targets that are set, then held back by the cool-downs and clamped to the range.
    """

    outstanding: float | None = Field(default=None, gt=0)
    """Target: requests running or waiting per replica."""
    waiting: float | None = Field(default=None, gt=0)
    """Target: requests in the queue per replica."""
    kv_cache_usage: float | None = Field(default=None, gt=0, le=1)
    """Target: share of the KV pages in use."""
    p95_ttft_ms: float | None = Field(default=None, gt=0)
    """Target: P95 of TTFT over the last `window_s`; those still waiting count with their wait so far."""
    window_s: float = Field(default=60.0, gt=0)
    """Of p95_ttft_ms."""
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(ge=1, le=MAX_REPLICAS)
    interval_s: float = Field(default=15.0, gt=0)
    """Seconds between two looks at the metrics (15 in Kubernetes)."""
    tolerance: float = Field(default=0.1, ge=0, lt=1)
    """A ratio of metric to target this close to 1 changes nothing."""
    scale_up_cooldown_s: float = Field(default=0.0, ge=0)
    """Scale up only to the least that was wanted in the last so many seconds (Kubernetes' stabilisation window)."""
    scale_down_cooldown_s: float = Field(default=300.0, ge=0)
    """Scale down only to the most that was wanted in the last so many seconds."""
    max_step_up: int | None = Field(default=None, ge=1)
    """Most replicas added at one look."""
    max_step_down: int | None = Field(default=None, ge=1)
    """Most replicas taken away at one look."""

    @model_validator(mode="after")
    def _consistent(self) -> Autoscaler:
        if not self.targets():
            raise ValueError("autoscaler needs a target: outstanding, waiting, kv_cache_usage or p95_ttft_ms")
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}")
        if self.window_s != 60.0 and self.p95_ttft_ms is None:
            raise ValueError("window_s has an effect only with p95_ttft_ms")
        return self

    def targets(self) -> dict[str, float]:
        """The targets that are set, by metric; TTFT in seconds."""
        out: dict[str, float] = {}
        for name in ("outstanding", "waiting", "kv_cache_usage"):
            if (value := getattr(self, name)) is not None:
                out[name] = value
        if self.p95_ttft_ms is not None:
            out["p95_ttft_s"] = self.p95_ttft_ms / 1000
        return out


class Outage(_Spec):
    """One failure that is known beforehand."""

    time_s: float = Field(ge=0)
    replica: int = Field(ge=0)
    down_s: float | None = Field(default=None, gt=0)
    """Until the replica begins its cold start; for good where it is not given."""


class Failures(_Spec):
    """When replicas fail, and what becomes of their requests."""

    mtbf_s: float | None = Field(default=None, gt=0)
    """Mean of the exponential time from being ready to failing, each replica by itself."""
    mttr_s: float | None = Field(default=None, ge=0)
    """Mean of the exponential time from failing to the cold start."""
    schedule: tuple[Outage, ...] = ()
    """Failures at given times instead."""
    max_retries: int = Field(default=3, ge=0)
    """How often the router sends a request again, from scratch, before it fails for good."""
    retry_backoff_s: float = Field(default=0.0, ge=0)
    """Pause before the first of them; each further one is twice as long."""

    @model_validator(mode="after")
    def _consistent(self) -> Failures:
        if (self.mtbf_s is None) is not (self.mttr_s is None):
            raise ValueError("mtbf_s and mttr_s belong together; set both")
        if (self.mtbf_s is None) is not bool(self.schedule):
            raise ValueError("failures needs either mtbf_s and mttr_s, or a schedule")
        return self


class KvTransfer(_Spec):
    """The way of KV pages from a prefill replica to a decode replica."""

    bandwidth_gb_per_s: float = Field(default=50.0, gt=0, allow_inf_nan=True)
    """Of one prefill replica's link, in 10^9 bytes per second; 50 is one 400 Gbit/s port. Transfers queue for it."""
    latency_ms: float = Field(default=1.0, ge=0)
    """Per transfer, besides the bytes: the hand-over between the engines."""


class Pool(_Spec):
    """Replicas alike; what is not set is as in the deployment."""

    name: str | None = None
    replicas: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    role: Role = "both"
    """prefill: prompts and first tokens; decode: the rest, with the KV of the prompts sent over."""
    weight: float | None = Field(default=None, gt=0)
    """Capacity of one replica for the router; by default estimated from prices and KV pages."""
    gpu: str | None = None
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    pipeline_parallel_size: int | None = Field(default=None, ge=1)
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    policy: str | None = None
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    max_model_len: int | None = Field(default=None, ge=2)
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    num_gpu_blocks_override: int | None = Field(default=None, ge=2)
    enforce_eager: bool | None = None
    autoscaler: Autoscaler | None = None
    """Of this pool; the deployment's scales every pool that has none."""

    def overrides(self) -> dict[str, Any]:
        """The deployment's fields that this pool sets."""
        own = self.model_dump(exclude={"name", "replicas", "role", "weight", "autoscaler"}, exclude_none=True)
        return dict(own)


def set_by_all(pools: Sequence[Pool]) -> set[str]:
    """Settings that every pool has for itself, so that the deployment's have no effect."""
    own = [pool.overrides().keys() for pool in pools]
    return set(own[0]).intersection(*own) if own else set()
