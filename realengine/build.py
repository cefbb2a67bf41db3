"""An engine from a model's name: find it, load it, give it a cache, a runner and a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from realengine.draft_build import (
    draft_bytes_per_token,
    kept_distributions_bytes,
    load_draft,
    make_drafting_step,
)
from realengine.draft_runner import CudaDraftingRunner
from realengine.engine import Engine
from realengine.load import DTYPES, Source, find_model, load
from realengine.models import Model
from realengine.parallel import SINGLE, TensorParallel
from realengine.quant_kv import kv_bytes_per_token
from realengine.quant_recent import RecentTokens, check_recent, num_seats
from realengine.runner import CpuRunner, Runner, StepRunner, allocate_caches
from realengine.swap_store import SwapStore
from realengine.workers import LeadingRunner, control_group, follow
from serving.config import SchedulerConfig
from serving.errors import InfeasibleError, UsageError
from serving.policies import BatchPolicy
from serving.speculative_config import SpeculativeConfig

CPU_CACHE_BYTES = 2 * 2**30
"""KV cache on the CPU unless told otherwise, or less where all sequences together cannot need it."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine needs beside the scheduler's limits. Raises `UsageError` naming the field."""

    model: str | Path
    load_format: str = "auto"
    dtype: str = "auto"
    """One of `realengine.load.DTYPES`; auto is bfloat16."""
    device: str = "auto"
    """cuda, cuda:1, cpu; auto is CUDA where there is one."""
    gpu_memory_utilization: float = 0.92
    enforce_eager: bool = False
    """Record no CUDA graphs."""
    seed: int = 0
    """Of the seeds of requests that bring none."""
    speculative: SpeculativeConfig | None = None
    quantization: str | None = None
    """Weights rounded to nearest at loading: one of `realengine.quant.SCHEMES`."""
    kv_cache_dtype: str = "auto"
    """auto (as computed), int8, int4 or fp8."""
    kv_cache_recent_tokens: int = 0
    """Of each sequence, the last tokens that a quantised cache keeps as they are (`realengine.quant_recent`)."""

    def torch_device(self) -> torch.device:
        """The device meant. Raises `UsageError` when it is not there."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise UsageError(f"--device {self.device!r}; use cpu, cuda or cuda:N") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: PyTorch finds no CUDA device here; use --device cpu")
        return device

    def torch_dtype(self) -> torch.dtype:
        """The type of weights, activations and cache."""
        if self.dtype == "auto":
            return torch.bfloat16
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype!r}; use auto, {', '.join(DTYPES)}")
        return DTYPES[self.dtype]


def build_engine(
    options: EngineOptions,
    limits: SchedulerConfig,
    *,
    policy: BatchPolicy | None = None,
    num_pages: int | None = None,
    ranks: TensorParallel = SINGLE,
    source: Source | None = None,
    record_events: bool = False,
) -> Engine:
    """An engine that is ready to `start`.

    `num_pages` replaces that of `limits`; None works it out from the device's memory. `max_model_len` is cut to what the
    model was made for. With several `ranks` this is rank 0, and the others are in `serve_rank` with the same arguments.
    Raises `UsageError` and `InfeasibleError` as the parts do.
    """
    source = source if source is not None else find_model(options.model, options.load_format)
    runner, limits = _build_runner(options, limits, num_pages, ranks, source)
    if ranks.size > 1:
        runner = LeadingRunner(runner, control_group())
    return Engine(
        limits,
        runner,
        policy=policy,
        tokenizer=source.tokenizer,
        eos_token_ids=source.architecture.eos_token_ids,
        vocab_size=source.architecture.shape.vocab_size,
        seed=options.seed,
        record_events=record_events,
        speculative=options.speculative,
    )


def serve_rank(
    options: EngineOptions,
    limits: SchedulerConfig,
    *,
    num_pages: int | None = None,
    ranks: TensorParallel,
    source: Source | None = None,
) -> None:
    """A rank after 0, from its first step to the last; returns when rank 0 stops.

    Every rank has joined the default process group of `torch.distributed` before.
    """
    source = source if source is not None else find_model(options.model, options.load_format)
    runner, _ = _build_runner(options, limits, num_pages, ranks, source)
    follow(runner, control_group())


def _build_runner(
    options: EngineOptions,
    limits: SchedulerConfig,
    num_pages: int | None,
    ranks: TensorParallel,
    source: Source,
) -> tuple[Runner, SchedulerConfig]:
    device, dtype = options.torch_device(), options.torch_dtype()
    recent, drafts = options.kv_cache_recent_tokens, options.speculative is not None
    check_recent(recent, options.kv_cache_dtype, speculative=drafts)
    longest = min(limits.max_model_len, source.architecture.shape.max_position_embeddings)
    limits = replace(limits, max_model_len=longest)
    model = load(
        source,
        device=device,
        dtype=dtype,
        max_positions=longest,
        ranks=ranks,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_recent_tokens=options.kv_cache_recent_tokens,
    )
    draft, speculative = None, options.speculative
    if speculative is not None:
        if ranks.size > 1:
            raise UsageError(
                "--speculative-config: the engine drafts on one device; use --tensor-parallel-size 1"
            )
        draft = load_draft(
            speculative,
            source,
            load_format=options.load_format,
            device=device,
            dtype=dtype,
            max_positions=longest,
        )
        limits = speculative.limits(limits)
    if num_pages is None:
        num_pages = pages_that_fit(model, limits, dtype, device, options.gpu_memory_utilization, draft)
        num_pages = ranks.least(num_pages, device)
    limits = replace(limits, num_pages=num_pages)
    graphs = not options.enforce_eager
    return make_runner(
        model, limits, dtype, device, graphs=graphs, speculative=speculative, draft=draft
    ), limits


def make_runner(
    model: Model,
    limits: SchedulerConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    graphs: bool = True,
    speculative: SpeculativeConfig | None = None,
    draft: Model | None = None,
) -> Runner:
    """The runner for `device`, with caches of `limits.num_pages` pages; `draft` is that of `speculative`."""
    caches = allocate_caches(model, limits.num_pages + 1, limits.page_tokens, device=device, dtype=dtype)
    if speculative is not None:
        drafting = make_drafting_step(model, caches, limits, dtype, device, speculative, draft)
        return CudaDraftingRunner(drafting) if device.type == "cuda" else CpuRunner(drafting)
    host_pages = limits.swap_pages + limits.host_cache_pages
    swap = SwapStore(caches, host_pages) if host_pages else None
    step = StepRunner(model, caches, swap, num_seats(limits), device)
    if recent := model.kv_recent_tokens:
        dim = model.architecture.shape.head_dim
        step.recent = RecentTokens(caches, num_seats(limits), recent, dim, dtype, device)
    if device.type == "cuda":
        from realengine.cuda import CudaRunner

        width = -(-min(limits.max_model_len, limits.num_pages * limits.page_tokens) // limits.page_tokens)
        return CudaRunner(step, limits.max_num_seqs, width, graphs=graphs)
    return CpuRunner(step, overlap=limits.async_scheduling)


def pages_that_fit(
    model: Model,
    limits: SchedulerConfig,
    dtype: torch.dtype,
    device: torch.device,
    utilization: float,
    draft: Model | None = None,
) -> int:
    """KV pages for `device`, weights being there already.

    On CUDA `utilization` of the memory less what is taken, less room for the activations of a full step. Raises
    `InfeasibleError` when not even one page fits.
    """
    shape = model.architecture.shape
    per_token: float = kv_bytes_per_token(
        shape.num_layers, model.num_kv_heads, shape.head_dim, model.kv_cache_dtype, dtype
    )
    per_token += draft_bytes_per_token(draft, dtype)
    page_bytes = int(per_token * limits.page_tokens)
    if device.type != "cuda":
        wanted = limits.max_num_seqs * -(-limits.max_model_len // limits.page_tokens)
        return max(1, min(wanted, (CPU_CACHE_BYTES - recent_bytes(model, limits, dtype)) // page_bytes))
    free, total = torch.cuda.mem_get_info(device)
    # The widest tensors of a step: gate and up side by side, their product, and logits in two types.
    widest = 3 * shape.intermediate_size // model.ranks.size + 4 * shape.hidden_size
    activations = limits.max_num_batched_tokens * widest * dtype.itemsize
    activations += (
        limits.max_num_seqs * (1 + limits.num_speculative_tokens) * shape.vocab_size * (dtype.itemsize + 8)
    )
    activations += kept_distributions_bytes(limits, shape.vocab_size)
    room = int(total * utilization) - (total - free) - activations - recent_bytes(model, limits, dtype)
    if room < page_bytes:
        raise InfeasibleError(
            f"{shape.name} leaves {max(room, 0) / 2**30:.2f} GiB for the KV cache at --gpu-memory-utilization "
            f"{utilization}; a page takes {page_bytes / 2**20:.1f} MiB"
        )
    return room // page_bytes


def recent_bytes(model: Model, limits: SchedulerConfig, dtype: torch.dtype) -> int:
    """Memory of the rings of recent tokens of all seats."""
    shape = model.architecture.shape
    per_token = kv_bytes_per_token(shape.num_layers, model.num_kv_heads, shape.head_dim, "auto", dtype)
    return num_seats(limits) * model.kv_recent_tokens * per_token
