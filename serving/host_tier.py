"""A second home for cached prefixes: pages that the device forgets stay in host memory and come back when asked for.

Only numbers live here, as in `serving.swap`: an executor moves the bytes before it computes the step, `moves_out` first,
then `moves_in`. A page that comes back stays on the host as well, so that forgetting it again moves nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np

from serving.pages import Pages
from serving.request import PageKeys
from serving.swap import Move


class HostTier:
    """`num_pages` host pages with ids from `first_page` on, the least recently used given up first."""

    def __init__(self, num_pages: int, first_page: int) -> None:
        self.num_pages = num_pages
        self.num_kept = self.num_loaded = 0
        """Pages moved out and in since the start."""
        self._free = list(range(first_page + num_pages - 1, first_page - 1, -1))
        self._page_of: OrderedDict[Hashable, int] = OrderedDict()
        self._pinned: set[int] = set()
        self._out: dict[int, int] = {}
        self._in: list[tuple[int, int]] = []

    def keep(self, key: Hashable, page: int) -> None:
        """The device is about to forget what `page` holds."""
        if key in self._page_of:
            self._page_of.move_to_end(key)
            return
        if self._free:
            host = self._free.pop()
        else:
            victim = next((k for k, held in self._page_of.items() if held not in self._pinned), None)
            if victim is None:
                return
            host = self._page_of.pop(victim)
        self._page_of[key] = host
        self._out[host] = page
        self.num_kept += 1

    def find(self, keys: PageKeys | Sequence[Hashable], first: int, limit: int) -> list[int]:
        """Host pages of the keys from `first` on, as far as they follow each other, up to `limit` pages in all."""
        found = []
        for i in range(first, min(limit, len(keys))):
            host = self._page_of.get(keys[i])
            if host is None:
                break
            found.append(host)
        return found

    def pin(self, hosts: Sequence[int], keys: PageKeys | Sequence[Hashable], first: int) -> None:
        """These pages will be loaded in this step: nothing may take their place until then."""
        self._pinned.update(hosts)
        for i in range(first, first + len(hosts)):
            self._page_of.move_to_end(keys[i])

    def load(self, hosts: Sequence[int], pages: Pages) -> None:
        """Bring host pages into these device pages."""
        self._in += zip(hosts, pages.tolist(), strict=True)
        self.num_loaded += len(hosts)

    def take_moves(self) -> tuple[list[Move], list[Move]]:
        """Moves out and in of the step that was planned."""
        out, into = self._out, self._in
        self._out, self._in = {}, []
        self._pinned.clear()
        moves_out = [Move(_array(out.values()), _array(out))] if out else []
        moves_in = [Move(_array(h for h, _ in into), _array(p for _, p in into))] if into else []
        return moves_out, moves_in

    def check(self) -> None:
        """Every host page is free or holds one key."""
        held = [*self._free, *self._page_of.values()]
        assert len(held) == len(set(held)) == self.num_pages, "a host page is lost or twice in use"


def _array(numbers: object) -> Pages:
    return np.array(list(numbers), np.int32)  # type: ignore[call-overload]
