"""Random numbers that belong to a request and a position, so that neither batch nor order of steps changes a token.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011) is a keyed bijection
of a counter: key = the request's seed, counter = (position of the token, stream). Nothing is stored between steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

TARGET, ACCEPT, DRAFT = 0, 1, 2
"""Streams: the target's own draw, the acceptance of a draft, the draft model's draw."""

_WORD = 0xFFFFFFFF


def philox(seeds: Tensor, positions: Tensor, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words, in int64, for each seed and position."""
    positions = positions.long() + torch.zeros_like(seeds, dtype=torch.int64)
    seeds = seeds.long() + torch.zeros_like(positions)
    k0, k1 = seeds & _WORD, (seeds >> 32) & _WORD
    c0, c1 = positions & _WORD, torch.zeros_like(seeds)
    c2, c3 = torch.full_like(seeds, stream), torch.zeros_like(seeds)
    for _ in range(10):
        # int64 products wrap, and their bits are those of the unsigned product.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32 & _WORD) ^ c1 ^ k0, b & _WORD, (a >> 32 & _WORD) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """float64 in [0, 1) with all of its 53 bits random; float32 would give exact zeros too often."""
    a, b, _, _ = philox(seeds, positions, stream)
    return ((a >> 5) * 2**26 + (b >> 6)).double() * 2.0**-53
