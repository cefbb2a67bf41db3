"""The tensors of one step, as the model and its operators see them. No scheduling, no request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """B sequences, T new tokens; sequences with one new token ("decodes") come first, longer chunks after them.

    Everything is on the model's device. Padding rows, where a graph needs them, are decodes that write to page 0.
    """

    ids: Tensor
    """Token ids, int64 [T]."""
    positions: Tensor
    """Position of each token in its sequence, int64 [T]."""
    slots: Tensor
    """Where each token's K and V go: page * page_tokens + offset, int64 [T]."""
    page_table: Tensor
    """int32 [B, pages]; entries past a sequence's end are 0 and never read."""
    context_len: Tensor
    """Tokens of each sequence after this step, int32 [B]."""
    query_start: Tensor
    """First token of each chunk counted from the first chunk's, int32 [B - num_decodes + 1]."""
    num_decodes: int
    max_query: int
    """Tokens of the longest chunk; 1 when all rows decode."""
    longest: int
    """Largest of `context_len`."""
    sample_rows: Tensor | None
    """Rows of T whose logits are wanted, int64; None when it is every row."""
    recent: RecentWindow | None = None
    """The last tokens of each sequence, where they are kept in full precision (`realengine.quant_recent`)."""


@dataclass(slots=True)
class RecentWindow:
    """Where a step reads and writes rings of the last `tokens` tokens (`realengine.kernels.recent_ref`)."""

    tokens: int
    seats: Tensor
    """Whose ring each sequence has, int64 [B]."""
    first: Tensor
    """First position of each sequence that its ring may hold, int64 [B]."""
    slots: Tensor
    """Where in the rings decodes write their tokens, int64 [T]; negative: nowhere."""
    late_rows: Tensor
    """Rows of T of chunks that the rings keep, int64; written last, since queries still read what they replace."""
    late_slots: Tensor
    """Their places."""


@dataclass(slots=True)
class LayerCache:
    """K and V of one layer: `[num_pages + 1, page_tokens, kv_heads, head_dim]` each. Page 0 takes padding.

    A quantised cache is int8, or uint8 of half that width for int4, with a float32 scale per token and head,
    `[num_pages + 1, page_tokens, kv_heads]`.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    recent_k: Tensor | None = None
    recent_v: Tensor | None = None
    """Rings of the last tokens of each seat, `[seats * tokens, kv_heads, head_dim]`; no part of any page."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that a page consists of; fp8 as bytes, since not every copy knows it."""
        if self.k_scale is None or self.v_scale is None:
            return _plain(self.k), _plain(self.v)
        return self.k, self.v, self.k_scale, self.v_scale


def _plain(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
