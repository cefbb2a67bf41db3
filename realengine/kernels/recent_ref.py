"""Rings of each seat's last tokens as they were, beside quantised pages that hold all tokens.

Position p of the sequence in seat s is at `s * tokens + p % tokens` of its ring. A query at p reads positions from
`max(p - tokens + 1, first)` to p as they were and older ones from pages. `first` is the first position that was computed
in the seat without a gap since; a ring does not know what was before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Recent:
    """The rings of one layer, and where in them the B sequences of a batch are."""

    k: Tensor
    v: Tensor
    """[seats * tokens, KVH, D]"""
    seats: Tensor
    """int64 [B]"""
    first: Tensor
    """int64 [B]"""
    tokens: int

    def rows(self, start: int, stop: int) -> Recent:
        """The same rings for sequences `start` to `stop`."""
        return Recent(self.k, self.v, self.seats[start:stop], self.first[start:stop], self.tokens)

    def slots(self, row: int, positions: Tensor) -> Tensor:
        """Where in the rings sequence `row` has these positions."""
        return self.seats[row] * self.tokens + positions % self.tokens


def write_recent(
    k: Tensor, v: Tensor, rows: Tensor, slots: Tensor, recent_k: Tensor, recent_v: Tensor
) -> None:
    """Rows of k and v [T, KVH, D] into slots of the rings."""
    for ring, new in ((recent_k, k), (recent_v, v)):
        ring.index_copy_(0, slots, new.index_select(0, rows).to(ring.dtype))


def with_recent(
    old: Tensor, ring: Tensor, new: Tensor | None, begin: int, recent: Recent, row: int, queries: Tensor
) -> tuple[Tensor, Tensor]:
    """What the queries of one sequence read, [tokens, KVH, D], and which of it each one sees, [queries, tokens].

    `old` are its first `begin` tokens and more from pages; `new` its tokens from `begin` on where rings do not hold
    them yet; `queries` positions.
    """
    edges = torch.maximum(queries - recent.tokens + 1, recent.first[row]).unsqueeze(1)
    pages = torch.arange(int(edges.max()), device=old.device)
    # Chunks find up to tokens - 1 positions before their own in the ring; a decode finds its own there too.
    end = begin if new is not None else int(queries[-1]) + 1
    fresh = torch.arange(min(int(edges.min()), end), end, device=old.device)
    parts, positions = [old[: len(pages)], ring[recent.slots(row, fresh)]], [fresh]
    if new is not None:
        parts.append(new)
        positions.append(torch.arange(begin, begin + len(new), device=old.device))
    whole = torch.cat(positions)
    seen = torch.cat((pages < edges, (whole >= edges) & (whole <= queries.unsqueeze(1))), dim=1)
    return torch.cat([part.to(old.dtype) for part in parts]), seen
