"""Preemption by swapping: which pages of host memory hold the KV of which preempted sequence.

Only numbers live here; an executor moves the bytes, before it computes the step: `moves_out` first, then `moves_in`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from serving.pages import Pages
from serving.request import Request


class Move(NamedTuple):
    """Whole pages to copy: `sources[i]` to `targets[i]`."""

    sources: Pages
    targets: Pages


class SwapSpace:
    """`num_pages` host pages. A preempted sequence has all of its computed tokens there, or none."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._vacated: list[int] = []
        self._out: list[Move] = []
        self._in: list[Move] = []

    @property
    def num_free(self) -> int:
        """Host pages that a preemption may use now."""
        return len(self._free)

    def move_out(self, request: Request, pages: Pages, num_tokens: int) -> bool:
        """Send the first `num_tokens` tokens of a sequence, in `pages`, to the host. False when space lacks."""
        if not num_tokens or len(pages) > len(self._free):
            return False
        taken = np.array([self._free.pop() for _ in range(len(pages))], np.int32)
        self._out.append(Move(pages.copy(), taken))
        request.swapped_pages, request.swapped_tokens = taken, num_tokens
        return True

    def move_in(self, request: Request, pages: Pages) -> None:
        """Bring a sequence back into `pages`, as many as it has on the host."""
        swapped = request.swapped_pages
        assert swapped is not None
        self._in.append(Move(swapped, pages[: len(swapped)].copy()))
        # What is read in this step may be written to in the next.
        self._vacated += swapped.tolist()
        request.swapped_pages, request.swapped_tokens = None, 0

    def drop(self, request: Request) -> None:
        """The sequence will not come back."""
        if request.swapped_pages is not None:
            self._free += request.swapped_pages.tolist()
            request.swapped_pages, request.swapped_tokens = None, 0

    def take_moves(self) -> tuple[list[Move], list[Move]]:
        """Moves out and in of the step that was planned."""
        moves = self._out, self._in
        self._out, self._in = [], []
        self._free += self._vacated
        self._vacated = []
        return moves
