"""Keywords of `tt.simulate`, `tt.capacity`, `tt.plan` and `tt.sweep`, with their types.

Made of the table of flags by `python docs/schema.py`; not to be edited. `tokentwin COMMAND --help` explains each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from sim.slo import Goodput

Several = str | Sequence[Any] | Mapping[str, Any]
"""A list of values, one text with spaces, or pairs such as {"ttft": 500}."""


class SharedFlags(TypedDict, total=False):
    model: str | None
    pipeline_parallel_size: int | None
    pp: int | None
    collective_overlap: float | None
    enable_expert_parallel: bool | None
    expert_load_imbalance: float | None
    router: str | None
    router_prefix_tokens: int | None
    router_load_factor: float | None
    admission: str | Mapping[str, Any] | Sequence[Any] | None
    dtype: str | None
    quantization: str | None
    kv_cache_dtype: str | None
    kv_cache_recent_tokens: int | None
    policy: str | None
    scheduling_policy: Literal["fcfs", "priority", "sjf", "edf", "fair"] | None
    static_batch_size: int | None
    static_max_wait: float | None
    size_classes: str | None
    max_running_tokens: int | None
    prefill_share: float | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    gpu_memory_utilization: float | None
    block_size: int | None
    num_gpu_blocks_override: int | None
    enable_prefix_caching: bool | None
    kv_eviction: Literal["lru", "lfu", "cost", "session"] | None
    session_keep: float | None
    session_decay: float | None
    kv_offloading_size: float | None
    preemption_mode: Literal["recompute", "swap", "auto"] | None
    swap_space: float | None
    enable_chunked_prefill: bool | None
    long_prefill_token_threshold: int | None
    async_scheduling: bool | None
    speculative_config: str | Mapping[str, Any] | Sequence[Any] | None
    semantics: Literal["vllm-0.33", "vllm-2025"] | None
    engine_version: str | None
    disable_custom_all_reduce: bool | None
    enforce_eager: bool | None
    response_cache: str | None
    step_jitter: float | Literal["profile"] | None
    stall_rate: float | None
    stall_ms: float | None
    frontend_overhead_ms: float | None
    tokenize_us_per_token: float | None
    detokenize_us_per_token: float | None
    stream_interval: int | None
    stream_slice_ms: float | None
    network: str | Mapping[str, Any] | Sequence[Any] | None
    dataset_name: str | None
    dataset_path: str | Path | None
    num_prompts: int | None
    request_count: int | None
    input_len: int | None
    isl: int | None
    output_len: int | None
    osl: int | None
    shared_prefix_len: int | None
    session_turns_min: int | None
    session_turns_max: int | None
    think_time: float | None
    think_distribution: Literal["exponential", "constant"] | None
    rtt_ms: float | None
    priority: int | None
    best_of: int | None
    beam_width: int | None
    request_rate: float | None
    burstiness: float | None
    rate_scale: float | None
    ramp_up_strategy: Literal["linear", "exponential"] | None
    ramp_up_start_rps: float | None
    ramp_up_end_rps: float | None
    rate_points: str | None
    daily_curve: str | None
    period: float | None
    duration: float | None
    dataset_order: Literal["file", "shuffle", "sample"] | None
    dataset_tokenizer: str | Path | None
    random_input_len: int | None
    random_output_len: int | None
    random_range_ratio: str | None
    random_prefix_len: int | None
    prefix_repetition_num_prefixes: int | None
    prefix_repetition_prefix_len: int | None
    prefix_repetition_suffix_len: int | None
    prefix_repetition_output_len: int | None
    sharegpt_output_len: int | None
    sharegpt_multi_turn: bool | None
    custom_output_len: int | None
    burstgpt_model: str | None
    mooncake_block_tokens: int | None
    timed_trace_chunk_hash_size: int | None
    timed_trace_sec_multiplier: float | None
    timed_trace_label_timestamp: str | None
    timed_trace_label_input_length: str | None
    timed_trace_label_output_length: str | None
    timed_trace_label_hash_ids: str | None
    goodput: Goodput | Several | None
    slo: Several | None
    seed: int | None
    replications: int | None


class SimulateFlags(SharedFlags, total=False):
    gpu: str | None
    tensor_parallel_size: int | None
    tp: int | None
    data_parallel_size: int | None
    dp: int | None
    pools: str | Mapping[str, Any] | Sequence[Any] | None
    autoscaler: str | Mapping[str, Any] | Sequence[Any] | None
    cold_start: str | Mapping[str, Any] | Sequence[Any] | None
    failures: str | Mapping[str, Any] | Sequence[Any] | None
    kv_transfer: str | Mapping[str, Any] | Sequence[Any] | None
    max_concurrency: int | None
    concurrency: int | None
    until: float | None
    fast_forward: bool | None
    strict: bool | None
    metric_percentiles: str | Sequence[float] | None
    alert: Several | None


class CapacityFlags(SharedFlags, total=False):
    gpu: str | None
    tensor_parallel_size: int | None
    tp: int | None
    data_parallel_size: int | None
    dp: int | None
    pools: str | Mapping[str, Any] | Sequence[Any] | None
    autoscaler: str | Mapping[str, Any] | Sequence[Any] | None
    cold_start: str | Mapping[str, Any] | Sequence[Any] | None
    failures: str | Mapping[str, Any] | Sequence[Any] | None
    kv_transfer: str | Mapping[str, Any] | Sequence[Any] | None
    max_concurrency: int | None
    concurrency: int | None
    slo_attainment: float | None
    workload_var: Literal["request_rate", "rate_scale", "max_concurrency"] | None
    target_request_rate: float | None
    target_concurrency: float | None
    jobs: int | None
    strict: bool | None


class PlanFlags(SharedFlags, total=False):
    price: Several | None
    prices: str | Path | None
    gpus: Several | None
    models: Several | None
    tensor_parallel_sizes: Several | None
    tp_sizes: Several | None
    pipeline_parallel_sizes: Several | None
    pp_sizes: Several | None
    quantizations: Several | None
    kv_cache_dtypes: Several | None
    policies: Several | None
    chunks: Several | None
    batches: Several | None
    speculative_configs: Several | None
    total_gpus: int | None
    max_replicas: int | None
    top: int | None
    ttft: float | None
    tpot: float | None
    slo_attainment: float | None
    target_request_rate: float | None
    target_concurrency: float | None
    jobs: int | None


class SweepFlags(TypedDict, total=False):
    """What a sweep takes: one value, or a list of them as an axis."""

    model: str | Sequence[str | None] | None
    gpu: str | Sequence[str | None] | None
    tensor_parallel_size: int | Sequence[int | None] | None
    tp: int | Sequence[int | None] | None
    pipeline_parallel_size: int | Sequence[int | None] | None
    pp: int | Sequence[int | None] | None
    collective_overlap: float | Sequence[float | None] | None
    enable_expert_parallel: bool | Sequence[bool | None] | None
    expert_load_imbalance: float | Sequence[float | None] | None
    data_parallel_size: int | Sequence[int | None] | None
    dp: int | Sequence[int | None] | None
    router: str | Sequence[str | None] | None
    router_prefix_tokens: int | Sequence[int | None] | None
    router_load_factor: float | Sequence[float | None] | None
    pools: (
        str
        | Mapping[str, Any]
        | Sequence[Any]
        | Sequence[str | Mapping[str, Any] | Sequence[Any] | None]
        | None
    )
    autoscaler: (
        str
        | Mapping[str, Any]
        | Sequence[Any]
        | Sequence[str | Mapping[str, Any] | Sequence[Any] | None]
        | None
    )
    cold_start: (
        str
        | Mapping[str, Any]
        | Sequence[Any]
        | Sequence[str | Mapping[str, Any] | Sequence[Any] | None]
        | None
    )
    failures: (
        str
        | Mapping[str, Any]
        | Sequence[Any]
        | Sequence[str | Mapping[str, Any] | Sequence[Any] | None]
        | None
    )
    admission: (
        str
        | Mapping[str, Any]
        | Sequence[Any]
        | Sequence[str | Mapping[str, Any] | Sequence[Any] | None]
        | None
    )
    kv_transfer: (
        str
        | Mapping[str, Any]
        | Sequence[Any]
        | Sequence[str | Mapping[str, Any] | Sequence[Any] | None]
        | None
    )
    dtype: str | Sequence[str | None] | None
    quantization: str | Sequence[str | None] | None
    kv_cache_dtype: str | Sequence[str | None] | None
    kv_cache_recent_tokens: int | Sequence[int | None] | None
    policy: str | Sequence[str | None] | None
    scheduling_policy: (
        Literal["fcfs", "priority", "sjf", "edf", "fair"]
        | Sequence[Literal["fcfs", "priority", "sjf", "edf", "fair"] | None]
        | None
    )
    static_batch_size: int | Sequence[int | None] | None
    static_max_wait: float | Sequence[float | None] | None
    size_classes: str | Sequence[str | None] | None
    max_running_tokens: int | Sequence[int | None] | None
    prefill_share: float | Sequence[float | None] | None
    max_num_seqs: int | Sequence[int | None] | None
    max_num_batched_tokens: int | Sequence[int | None] | None
    max_model_len: int | Sequence[int | None] | None
    gpu_memory_utilization: float | Sequence[float | None] | None
    block_size: int | Sequence[int | None] | None
    num_gpu_blocks_override: int | Sequence[int | None] | None
    enable_prefix_caching: bool | Sequence[bool | None] | None
    kv_eviction: (
        Literal["lru", "lfu", "cost", "session"]
        | Sequence[Literal["lru", "lfu", "cost", "session"] | None]
        | None
    )
    session_keep: float | Sequence[float | None] | None
    session_decay: float | Sequence[float | None] | None
    kv_offloading_size: float | Sequence[float | None] | None
    preemption_mode: (
        Literal["recompute", "swap", "auto"] | Sequence[Literal["recompute", "swap", "auto"] | None] | None
    )
    swap_space: float | Sequence[float | None] | None
    enable_chunked_prefill: bool | Sequence[bool | None] | None
    long_prefill_token_threshold: int | Sequence[int | None] | None
    async_scheduling: bool | Sequence[bool | None] | None
    speculative_config: (
        str
        | Mapping[str, Any]
        | Sequence[Any]
        | Sequence[str | Mapping[str, Any] | Sequence[Any] | None]
        | None
    )
    semantics: Literal["vllm-0.33", "vllm-2025"] | Sequence[Literal["vllm-0.33", "vllm-2025"] | None] | None
    engine_version: str | Sequence[str | None] | None
    disable_custom_all_reduce: bool | Sequence[bool | None] | None
    enforce_eager: bool | Sequence[bool | None] | None
    response_cache: str | Sequence[str | None] | None
    step_jitter: float | Literal["profile"] | Sequence[float | Literal["profile"] | None] | None
    stall_rate: float | Sequence[float | None] | None
    stall_ms: float | Sequence[float | None] | None
    frontend_overhead_ms: float | Sequence[float | None] | None
    tokenize_us_per_token: float | Sequence[float | None] | None
    detokenize_us_per_token: float | Sequence[float | None] | None
    stream_interval: int | Sequence[int | None] | None
    stream_slice_ms: float | Sequence[float | None] | None
    network: (
        str
        | Mapping[str, Any]
        | Sequence[Any]
        | Sequence[str | Mapping[str, Any] | Sequence[Any] | None]
        | None
    )
    dataset_name: str | Sequence[str | None] | None
    dataset_path: str | Path | Sequence[str | Path | None] | None
    num_prompts: int | Sequence[int | None] | None
    request_count: int | Sequence[int | None] | None
    max_concurrency: int | Sequence[int | None] | None
    concurrency: int | Sequence[int | None] | None
    input_len: int | Sequence[int | None] | None
    isl: int | Sequence[int | None] | None
    output_len: int | Sequence[int | None] | None
    osl: int | Sequence[int | None] | None
    shared_prefix_len: int | Sequence[int | None] | None
    session_turns_min: int | Sequence[int | None] | None
    session_turns_max: int | Sequence[int | None] | None
    think_time: float | Sequence[float | None] | None
    think_distribution: (
        Literal["exponential", "constant"] | Sequence[Literal["exponential", "constant"] | None] | None
    )
    rtt_ms: float | Sequence[float | None] | None
    priority: int | Sequence[int | None] | None
    best_of: int | Sequence[int | None] | None
    beam_width: int | Sequence[int | None] | None
    request_rate: float | Sequence[float | None] | None
    burstiness: float | Sequence[float | None] | None
    rate_scale: float | Sequence[float | None] | None
    ramp_up_strategy: (
        Literal["linear", "exponential"] | Sequence[Literal["linear", "exponential"] | None] | None
    )
    ramp_up_start_rps: float | Sequence[float | None] | None
    ramp_up_end_rps: float | Sequence[float | None] | None
    rate_points: str | Sequence[str | None] | None
    daily_curve: str | Sequence[str | None] | None
    period: float | Sequence[float | None] | None
    duration: float | Sequence[float | None] | None
    dataset_order: (
        Literal["file", "shuffle", "sample"] | Sequence[Literal["file", "shuffle", "sample"] | None] | None
    )
    dataset_tokenizer: str | Path | Sequence[str | Path | None] | None
    random_input_len: int | Sequence[int | None] | None
    random_output_len: int | Sequence[int | None] | None
    random_range_ratio: str | Sequence[str | None] | None
    random_prefix_len: int | Sequence[int | None] | None
    prefix_repetition_num_prefixes: int | Sequence[int | None] | None
    prefix_repetition_prefix_len: int | Sequence[int | None] | None
    prefix_repetition_suffix_len: int | Sequence[int | None] | None
    prefix_repetition_output_len: int | Sequence[int | None] | None
    sharegpt_output_len: int | Sequence[int | None] | None
    sharegpt_multi_turn: bool | Sequence[bool | None] | None
    custom_output_len: int | Sequence[int | None] | None
    burstgpt_model: str | Sequence[str | None] | None
    mooncake_block_tokens: int | Sequence[int | None] | None
    timed_trace_chunk_hash_size: int | Sequence[int | None] | None
    timed_trace_sec_multiplier: float | Sequence[float | None] | None
    timed_trace_label_timestamp: str | Sequence[str | None] | None
    timed_trace_label_input_length: str | Sequence[str | None] | None
    timed_trace_label_output_length: str | Sequence[str | None] | None
    timed_trace_label_hash_ids: str | Sequence[str | None] | None
    goodput: Goodput | Several | None
    slo: Several | None
    seed: int | Sequence[int | None] | None
    until: float | Sequence[float | None] | None
    fast_forward: bool | Sequence[bool | None] | None
    replications: int | Sequence[int | None] | None
    strict: bool | Sequence[bool | None] | None
    serve_params: str | Path | None
    bench_params: str | Path | None
    link_vars: str | None
    num_runs: int | None
    output_dir: str | Path | None
    experiment_name: str | None
    resume: bool | None
    continue_on_error: bool | None
    jobs: int | None
    backend: Literal["joblib", "ray"] | None
    address: str | None
