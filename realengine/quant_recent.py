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
from realengine.batch import Batch, ChunkWindow, LayerCache, RecentWindow
from realengine.inputs import StepInputs
from realengine.models import HeadNorms
from realengine.ops_torch import TorchAttention, token_index
from realengine.quant_kv import QuantisedCache
from serving.config import SchedulerConfig
from serving.errors import UsageError

Ints = npt.NDArray[np.int64]
OPTION = "--kv-cache-recent-tokens"


def check_recent(
    tokens: int, kv_cache_dtype: str, device: torch.device, *, speculative: bool = False
) -> None:
    """Raise `UsageError` where a window of recent tokens has no effect or the engine does not have it."""
    if tokens < 0:
        raise UsageError(f"{OPTION} must be 0 or more, got {tokens}")
    if not tokens:
        return
    if KV_DTYPES.get(kv_cache_dtype) == "bfloat16":
        raise UsageError(f"{OPTION} has an effect only with --kv-cache-dtype int8, int4 or fp8")
    if device.type != "cpu":
        raise UsageError(f"{OPTION}: the engine has it on the CPU only; leave it out, or use --device cpu")
    if speculative:
        raise UsageError(f"{OPTION}: drafts are verified with one precision; leave out --speculative-config")


def num_seats(limits: SchedulerConfig) -> int:
    """Slots of the scheduler: while a step is on the device, the next one may have seated others."""
    return limits.max_num_seqs * (2 if limits.async_scheduling else 1)


class RecentTokens:
    """The rings of all seats in every layer, and which positions of each seat's sequence they hold."""

    def __init__(
        self, caches: Sequence[LayerCache], seats: int, tokens: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.tokens = tokens
        for cache in caches:
            size = (seats * tokens, cache.k.shape[2], head_dim)
            cache.recent_k, cache.recent_v = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
        self._turn: Ints = np.full(seats, -1, np.int64)
        self._first: Ints = np.zeros(seats, np.int64)
        """First position that was computed in the seat without a gap since."""
        self._next: Ints = np.zeros(seats, np.int64)

    def window(self, inputs: StepInputs, put: Callable[[npt.NDArray[np.generic]], Tensor]) -> RecentWindow:
        """Where the recent tokens of a step's rows are; steps must be asked for in their order."""
        n, decodes = self.tokens, inputs.num_decodes
        starts = np.append(np.arange(decodes), decodes + inputs.query_start[:-1].astype(np.int64))
        seats, begin = inputs.token_seats[starts], inputs.positions[starts]
        end = inputs.context_len.astype(np.int64)
        turn = self._turn[seats] if inputs.turns is None else inputs.turns[starts]
        fresh = (turn != self._turn[seats]) | (begin != self._next[seats])
        first = np.where(fresh, begin, self._first[seats])
        self._turn[seats], self._first[seats], self._next[seats] = turn, first, end
        kept = np.flatnonzero(inputs.positions >= np.repeat(end, end - begin) - n)
        at = end[:decodes, None] - n + np.arange(n)
        return RecentWindow(
            tokens=n,
            write_rows=put(kept),
            write_slots=put(self._slots(inputs.token_seats[kept], inputs.positions[kept])),
            decode_slots=put(self._slots(seats[:decodes, None], np.maximum(at, 0))),
            decode_seen=put(at >= first[:decodes, None]),
            decode_old=put(np.maximum(end[:decodes] - n, first[:decodes])),
            chunks=[
                self._chunk(seat, b, e, f, put)
                for seat, b, e, f in zip(
                    seats[decodes:].tolist(),
                    begin[decodes:].tolist(),
                    end[decodes:].tolist(),
                    first[decodes:].tolist(),
                    strict=True,
                )
            ],
        )

    def whole(self, count: int) -> RecentWindow:
        """A sequence of `count` tokens computed at once, in a seat of its own."""
        nothing = torch.zeros(0, dtype=torch.int64)
        one = ChunkWindow(0, count, 0, nothing)
        no_decodes = nothing.view(0, self.tokens)
        return RecentWindow(self.tokens, nothing, nothing, no_decodes, no_decodes.bool(), nothing, [one])

    def _chunk(
        self, seat: int, begin: int, end: int, first: int, put: Callable[[npt.NDArray[np.generic]], Tensor]
    ) -> ChunkWindow:
        ring_first = min(max(first, begin - self.tokens + 1), begin)
        before = np.arange(ring_first, begin)
        return ChunkWindow(begin, end, ring_first, put(self._slots(np.full(len(before), seat), before)))

    def _slots(self, seats: Ints, positions: Ints) -> Ints:
        slots: Ints = seats * self.tokens + positions % self.tokens
        return slots


@dataclass(slots=True)
class _Part:
    """What all layers share of a chunk: slots in pages of its old tokens, and who sees what."""

    start: int
    stop: int
    index: Tensor
    seen: Tensor


class RecentAttention(TorchAttention):
    """Attention on the CPU over rings and quantised pages."""

    def __init__(self, batch: Batch, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(batch, cos, sin, num_heads, num_kv_heads)
        assert batch.recent is not None
        self.window = batch.recent
        self._old_index: Tensor | None = None
        self._seen: Tensor | None = None
        self._parts: list[_Part] = []

    def _prepare(self, page_tokens: int, dtype: torch.dtype) -> None:
        self._made = True
        batch, window, decodes = self.batch, self.window, self.batch.num_decodes
        self.cos, self.sin = self.cos.to(dtype), self.sin.to(dtype)
        tables = batch.page_table.long()
        if decodes:
            self._seen = window.decode_seen
            longest = int(window.decode_old.max())
            if longest:
                index = token_index(tables[:decodes], longest, page_tokens)
                old = torch.arange(longest) < window.decode_old.unsqueeze(1)
                # As for plain decodes: what is not seen reads the sequence's first token, which is a number.
                self._old_index = torch.where(old, index, index[:, :1]).flatten()
                self._seen = torch.cat((old, self._seen), dim=1)
            self._seen = self._seen[:, None, None, :]
        starts = batch.query_start.tolist()
        for row, chunk in enumerate(window.chunks):
            # Query p sees pages before `edge` and the ring from there on.
            p = torch.arange(chunk.begin, chunk.end).unsqueeze(1)
            edge = torch.clamp(p - window.tokens + 1, min=chunk.ring_first)
            num_old = int(edge[-1])
            index = token_index(tables[decodes + row : decodes + row + 1], num_old, page_tokens)
            recent = torch.arange(chunk.ring_first, chunk.end)
            seen = torch.cat((torch.arange(num_old) < edge, (recent >= edge) & (recent <= p)), dim=1)
            self._parts.append(_Part(decodes + starts[row], decodes + starts[row + 1], index.flatten(), seen))

    def __call__(self, qkv: Tensor, cache: LayerCache, norms: HeadNorms | None) -> Tensor:
        q, k, v = self.rotated(qkv, cache.k.shape[1], norms)
        window, dim = self.window, q.shape[2]
        store = QuantisedCache(cache, dim, self.scratch)
        store.write(self.batch.slots, k, v)
        rings = cache.recent_k, cache.recent_v
        assert rings[0] is not None
        assert rings[1] is not None
        rings = rings[0], rings[1]
        # Chunks read the ring before their own tokens take the places of the oldest.
        before = [[ring.index_select(0, chunk.slots) for ring in rings] for chunk in window.chunks]
        for ring, new in zip(rings, (k, v), strict=True):
            ring.index_copy_(0, window.write_slots, new.index_select(0, window.write_rows))
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
        window, rows, dim = self.window, self.batch.num_decodes, q.shape[2]
        shape = (rows, -1, self.num_kv_heads, dim)
        both = [ring.index_select(0, window.decode_slots.flatten()).view(shape) for ring in rings]
        if self._old_index is not None:
            old = store.read(self._old_index, q.dtype)
            both = [torch.cat((o.view(shape), r), dim=1) for o, r in zip(old, both, strict=True)]
        k, v = (x.transpose(1, 2) for x in both)
        mine = q[:rows].reshape(rows, self.num_kv_heads, -1, dim)
        return scaled_dot_product_attention(mine, k, v, self._seen).reshape(rows, -1)
