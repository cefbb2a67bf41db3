"""A KV cache of mixed precision: of every sequence the last tokens in the engine's own type, all older ones quantised.

Pages hold every token quantised from the step in which it is computed, so that the scheduler, prefix caching and
sharing know of one kind of page with one size. Beside them each seat has a ring of its last N tokens as they were. A
query at position p reads (p - N, p] from the ring and what is older from pages: a token's precision changes when it
leaves the window, at no cost, instead of when its page is rewritten. Tokens that a sequence did not compute in its seat
(a cached prefix, pages swapped back in) are read from pages whatever their age.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from costmodel.formats import KV_DTYPES
from realengine.batch import Batch, LayerCache, RecentWindow
from realengine.inputs import StepInputs
from realengine.models import HeadNorms
from realengine.ops_torch import TorchAttention, token_index
from realengine.quant_kv import QuantisedCache
from serving.config import SchedulerConfig
from serving.errors import UsageError

Ints = npt.NDArray[np.int64]
OPTION = "--kv-cache-recent-tokens"


def check_recent(tokens: int, kv_cache_dtype: str, *, speculative: bool = False) -> None:
    """Raise `UsageError` where a window of recent tokens has no effect or the engine does not have it."""
    if tokens < 0:
        raise UsageError(f"{OPTION} must be 0 or more, got {tokens}")
    if not tokens:
        return
    if KV_DTYPES.get(kv_cache_dtype) == "bfloat16":
        raise UsageError(f"{OPTION} has an effect only with --kv-cache-dtype int8, int4 or fp8")
    if speculative:
        raise UsageError(f"{OPTION}: drafts are verified with one precision; leave out --speculative-config")


def num_seats(limits: SchedulerConfig) -> int:
    """Slots of the scheduler: while a step is on the device, the next one may have seated others."""
    return limits.max_num_seqs * (2 if limits.async_scheduling else 1)


@dataclass(slots=True)
class RecentRows:
    """A step's `RecentWindow` as plain arrays."""

    tokens: int
    seats: Ints
    first: Ints
    slots: Ints
    late_rows: Ints
    late_slots: Ints

    def window(self, put: Callable[[npt.NDArray[np.generic]], Tensor]) -> RecentWindow:
        """On the device; `put` brings an array there."""
        arrays = (self.seats, self.first, self.slots, self.late_rows, self.late_slots)
        return RecentWindow(self.tokens, *(put(array) for array in arrays))


class RecentTokens:
    """The rings of all seats in every layer, and which positions of each seat's sequence they hold."""

    def __init__(
        self,
        caches: Sequence[LayerCache],
        seats: int,
        tokens: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tokens = tokens
        for cache in caches:
            size = (seats * tokens, cache.k.shape[2], head_dim)
            cache.recent_k, cache.recent_v = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        self._turn: Ints = np.full(seats, -1, np.int64)
        self._first: Ints = np.zeros(seats, np.int64)
        """First position that was computed in the seat without a gap since."""
        self._next: Ints = np.zeros(seats, np.int64)

    def rows(self, inputs: StepInputs) -> RecentRows:
        """Where the recent tokens of a step's rows are; steps must be asked for in their order, each once."""
        n, decodes = self.tokens, inputs.num_decodes
        starts = np.append(np.arange(decodes), decodes + inputs.query_start[:-1].astype(np.int64))
        seats, begin = inputs.token_seats[starts], inputs.positions[starts]
        end = inputs.context_len.astype(np.int64)
        if inputs.turns is None:  # a step by itself, described as in the middle of service
            first = np.zeros_like(seats)
        else:
            turn = inputs.turns[starts]
            fresh = (turn != self._turn[seats]) | (begin != self._next[seats])
            first = np.where(fresh, begin, self._first[seats])
            self._turn[seats], self._first[seats], self._next[seats] = turn, first, end
        slots: Ints = inputs.token_seats * n + inputs.positions % n
        late = np.flatnonzero(inputs.positions >= np.repeat(end, end - begin) - n)
        late = late[late >= decodes]
        at_once = np.where(np.arange(len(slots)) < decodes, slots, -1)
        return RecentRows(n, seats, first, at_once, late, slots[late])

    def whole(self, count: int, device: torch.device) -> RecentWindow:
        """A sequence of `count` tokens computed at once; rings are neither read nor written."""
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        one = torch.zeros(1, dtype=torch.int64, device=device)
        nowhere = torch.full((count,), -1, dtype=torch.int64, device=device)
        return RecentWindow(self.tokens, one, one, nowhere, nothing, nothing)


@dataclass(slots=True)
class _Part:
    """What all layers share of a chunk: slots in pages of its old tokens, in the ring of newer ones, who sees what."""

    start: int
    stop: int
    index: Tensor
    ring: Tensor
    seen: Tensor


class RecentAttention(TorchAttention):
    """Attention on the CPU over rings and quantised pages."""

    def __init__(self, batch: Batch, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(batch, cos, sin, num_heads, num_kv_heads)
        assert batch.recent is not None
        self.window = batch.recent
        decodes, window = batch.num_decodes, self.window
        self._written = (
            torch.cat((torch.arange(decodes), window.late_rows)),
            torch.cat((window.slots[:decodes], window.late_slots)),
        )
        self._recent_index: Tensor | None = None
        self._old_index: Tensor | None = None
        self._seen: Tensor | None = None
        self._parts: list[_Part] = []

    def _prepare(self, page_tokens: int, dtype: torch.dtype) -> None:
        self._take_positions(dtype)
        batch, window, decodes, n = self.batch, self.window, self.batch.num_decodes, self.window.tokens
        tables = batch.page_table.long()
        if decodes:
            end, first = batch.context_len[:decodes, None].long(), window.first[:decodes, None]
            at = end - n + torch.arange(n)
            self._recent_index = (window.seats[:decodes, None] * n + at.clamp(min=0) % n).flatten()
            self._seen = at >= first
            edge = torch.maximum(end - n, first)
            longest = int(edge.max())
            if longest:
                index = token_index(tables[:decodes], longest, page_tokens)
                old = torch.arange(longest) < edge
                # As for plain decodes: what is not seen reads the sequence's first token, which is a number.
                self._old_index = torch.where(old, index, index[:, :1]).flatten()
                self._seen = torch.cat((old, self._seen), dim=1)
            self._seen = self._seen[:, None, None, :]
        starts = batch.query_start.tolist()
        for row in range(decodes, len(tables)):
            start, stop = (decodes + starts[row - decodes + i] for i in (0, 1))
            end_at, first_at = int(batch.context_len[row]), int(window.first[row])
            begin = end_at - (stop - start)
            # Query p sees pages before `edge` and the ring from there on.
            p = torch.arange(begin, end_at).unsqueeze(1)
            edge = torch.clamp(p - n + 1, min=first_at)
            num_old, ring_first = int(edge[-1]), min(int(edge[0]), begin)
            index = token_index(tables[row : row + 1], num_old, page_tokens)
            recent = torch.arange(ring_first, end_at)
            seen = torch.cat((torch.arange(num_old) < edge, (recent >= edge) & (recent <= p)), dim=1)
            ring = window.seats[row] * n + recent[: begin - ring_first] % n
            self._parts.append(_Part(start, stop, index.flatten(), ring, seen))

    def __call__(self, qkv: Tensor, cache: LayerCache, norms: HeadNorms | None) -> Tensor:
        q, k, v = self.rotated(qkv, cache.k.shape[1], norms)
        dim = q.shape[2]
        store = QuantisedCache(cache, dim, self.scratch)
        store.write(self.batch.slots, k, v)
        rings = cache.recent_k, cache.recent_v
        assert rings[0] is not None
        assert rings[1] is not None
        rings = rings[0], rings[1]
        # Chunks read the ring before their own tokens take the places of the oldest.
        before = [[ring.index_select(0, part.ring) for ring in rings] for part in self._parts]
        written, slots = self._written
        for ring, new in zip(rings, (k, v), strict=True):
            ring.index_copy_(0, slots, new.index_select(0, written))
        out = [self._decodes(q, store, rings)] if self.batch.num_decodes else []
        for part, recent in zip(self._parts, before, strict=True):
            rows = slice(part.start, part.stop)
            old = store.read(part.index, q.dtype)
            keys, values = (
                torch.cat((o, r, x[rows])).unsqueeze(0).transpose(1, 2)
                for o, r, x in zip(old, recent, (k, v), strict=True)
            )
            mine = q[rows].transpose(0, 1).unsqueeze(0)
            result = scaled_dot_product_attention(
                mine, keys, values, part.seen, enable_gqa=self.num_kv_heads != self.num_heads
            )
            out.append(result[0].transpose(0, 1).reshape(part.stop - part.start, -1))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _decodes(self, q: Tensor, store: QuantisedCache, rings: tuple[Tensor, Tensor]) -> Tensor:
        rows, dim = self.batch.num_decodes, q.shape[2]
        shape = (rows, -1, self.num_kv_heads, dim)
        assert self._recent_index is not None
        both = [ring.index_select(0, self._recent_index).view(shape) for ring in rings]
        if self._old_index is not None:
            old = store.read(self._old_index, q.dtype)
            both = [torch.cat((o.view(shape), r), dim=1) for o, r in zip(old, both, strict=True)]
        k, v = (x.transpose(1, 2) for x in both)
        mine = q[:rows].reshape(rows, self.num_kv_heads, -1, dim)
        return scaled_dot_product_attention(mine, k, v, self._seen).reshape(rows, -1)
