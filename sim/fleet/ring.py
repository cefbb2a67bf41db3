"""A consistent-hash ring with virtual nodes and, where wanted, bounded loads."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Hashable, Iterator, Mapping
from hashlib import blake2b

VIRTUAL_NODES = 160
"""Points on the ring per unit of weight (Ketama's number): shares differ by about 1/sqrt(160) = 8 %."""


def point(text: str) -> int:
    """Where a text lies on the ring: 64 bits that do not depend on the process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class HashRing:
    """Nodes on a circle of 64-bit hashes: a key belongs to the first node clockwise of it.

    Removing a node moves only the keys that were its own, adding one takes keys from others but moves none between
    them (Karger et al. 1997). `find_bounded` passes full nodes by (Mirrokni, Thorup and Zadimoghaddam 2018).
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []
        self._weights: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, node: int, weight: float = 1.0) -> None:
        """Put a node on the ring, with points in proportion to its weight (at least one)."""
        self._weights[node] = weight
        for copy in range(max(1, round(VIRTUAL_NODES * weight))):
            insort(self._points, (point(f"{node}/{copy}"), node))

    def remove(self, node: int) -> None:
        """Take a node off the ring."""
        del self._weights[node]
        self._points = [entry for entry in self._points if entry[1] != node]

    def clockwise(self, key: Hashable) -> Iterator[int]:
        """Every node once, in the order in which a key falls to them."""
        points = self._points
        start = bisect_right(points, (point(repr(key)), -1))
        seen: set[int] = set()
        for i in range(len(points)):
            node = points[(start + i) % len(points)][1]
            if node not in seen:
                seen.add(node)
                yield node
                if len(seen) == len(self._weights):
                    return

    def find(self, key: Hashable) -> int:
        """The node that a key belongs to."""
        return next(self.clockwise(key))

    def find_bounded(self, key: Hashable, loads: Mapping[int, int], load_factor: float) -> int:
        """The first node clockwise that one more does not lift over `load_factor` times its share of the load.

        A node of weight w takes at most ceil(load_factor · (total + 1) · w / sum of weights), so that with a factor
        of at least 1 some node always has room.
        """
        total = sum(loads[node] for node in self._weights) + 1
        each = load_factor * total / sum(self._weights.values())
        for node in self.clockwise(key):
            if loads[node] < math.ceil(each * self._weights[node]):
                return node
        return self.find(key)
