"""From a speculative configuration to what drafts: the draft model, its cache, and the step that uses them."""

from __future__ import annotations

import torch

from realengine.batch import LayerCache
from realengine.draft_model import ModelDrafter, first_layers
from realengine.draft_runner import DraftingStep
from realengine.kernels import operators
from realengine.load import Source, find_model, load
from realengine.models import Model
from realengine.runner import allocate_caches
from realengine.swap_store import SwapStore
from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.speculative_config import FLAG, SpeculativeConfig


def load_draft(
    config: SpeculativeConfig,
    target: Source,
    *,
    load_format: str,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
) -> Model | None:
    """The draft model in memory; None for methods without one. Raises `UsageError` when it cannot draft for `target`."""
    if config.method == "self":
        layers = target.architecture.shape.num_layers
        if config.num_layers is not None and config.num_layers >= layers:
            raise UsageError(
                f"{FLAG}: num_layers {config.num_layers} is not less than the {layers} layers of the model"
            )
    if config.model is None:
        return None
    source = find_model(config.model, load_format)
    ours, theirs = source.architecture.shape.vocab_size, target.architecture.shape.vocab_size
    if ours != theirs:
        raise UsageError(
            f"{FLAG}: {config.model} has a vocabulary of {ours} tokens and the model one of {theirs}; "
            "a draft model must have the same"
        )
    return load(source, device=device, dtype=dtype, max_positions=max_positions)


def draft_bytes_per_token(draft: Model | None, dtype: torch.dtype) -> float:
    """KV bytes of a token in the draft's own cache."""
    return 0.0 if draft is None else draft.architecture.shape.kv_bytes_per_token(1, dtype.itemsize)


def kept_distributions_bytes(limits: SchedulerConfig, vocab_size: int) -> int:
    """What the drafts of all sequences were drawn from, kept until they are verified: float32 [sequences, k, V]."""
    if not limits.draft_has_kv:
        return 0
    return 4 * limits.max_num_seqs * limits.num_speculative_tokens * vocab_size


def make_drafting_step(
    model: Model,
    caches: list[LayerCache],
    limits: SchedulerConfig,
    dtype: torch.dtype,
    device: torch.device,
    config: SpeculativeConfig,
    draft: Model | None,
) -> DraftingStep:
    """The step of a speculating engine over the target's `caches`."""
    num_slots = limits.max_num_seqs
    drafter: ModelDrafter | None = None
    paged = caches
    if config.method in ("draft_model", "self"):
        if draft is not None:
            own = allocate_caches(draft, limits.num_pages + 1, limits.page_tokens, device=device, dtype=dtype)
            paged = [*caches, *own]
        else:
            assert config.num_layers is not None
            draft, own = first_layers(model, config.num_layers), caches[: config.num_layers]
        drafter = ModelDrafter(
            draft,
            own,
            num_slots,
            config.num_speculative_tokens,
            limits.page_tokens,
            operators(device),
            device,
            own_cache=config.method == "draft_model",
            probabilistic=config.draft_sample_method == "probabilistic",
        )
    host_pages = limits.swap_pages + limits.host_cache_pages
    swap = SwapStore(paged, host_pages) if host_pages else None
    return DraftingStep(model, caches, swap, num_slots, device, drafter)
