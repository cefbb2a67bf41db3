"""Queues whose requests have classes, for policies that pass over classes without room: the first request of the others
is found without looking at those that wait before it. The order is that of the plain queues of `serving.queues`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence

from serving.queues import ORDERS, Fair, Fcfs, Key, Ordered, orderable
from serving.request import Request

ClassOf = Callable[[Request], int | None]
"""A request's class; it must not change while the request waits."""


class Classed:
    """A heap for each class, all in one order. `order` names that of a plain queue (not "fair")."""

    def __init__(self, order: str, class_of: ClassOf) -> None:
        self._plain = Fcfs() if order == "fcfs" else Ordered(ORDERS[order])
        self._key = None if order == "fcfs" else ORDERS[order]
        self._class_of = class_of
        self._heaps: dict[int | None, list[tuple[Key, Request]]] = {}
        self._added = 0

    def add(self, request: Request) -> None:
        self._push(request, 1)

    def put_back(self, request: Request) -> None:
        self._push(request, -1 if self._key is None else 1)

    def _push(self, request: Request, end: int) -> None:
        self._added += 1
        key = () if self._key is None else (*self._key(request), orderable(request.id))
        heap = self._heaps.setdefault(self._class_of(request), [])
        heapq.heappush(heap, ((*key, end * self._added), request))

    def first(self, classes: Collection[int | None]) -> Request | None:
        """The next request of one of `classes`; None when none waits."""
        heads = [heap[0] for name, heap in self._heaps.items() if heap and name in classes]
        return min(heads)[1] if heads else None

    def peek(self) -> Request:
        return min(heap[0] for heap in self._heaps.values() if heap)[1]

    def pop(self) -> Request:
        return heapq.heappop(min((heap for heap in self._heaps.values() if heap), key=lambda heap: heap[0]))[
            1
        ]

    def remove(self, request: Request) -> None:
        name = self._class_of(request)
        heap = self._heaps[name]
        if heap[0][1] is request:
            heapq.heappop(heap)
        else:
            self._heaps[name] = [entry for entry in heap if entry[1] is not request]
            heapq.heapify(self._heaps[name])

    def victim(self, running: Sequence[Request]) -> int:
        return self._plain.victim(running)

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(entry for heap in self._heaps.values() for entry in heap))


class ClassedFair(Fair):
    """Fair sharing between tenants, each tenant's requests by class."""

    def __init__(self, class_of: ClassOf) -> None:
        super().__init__()
        self._class_of = class_of

    def _make(self) -> Classed:
        return Classed("fcfs", self._class_of)

    def first(self, classes: Collection[int | None]) -> Request | None:
        """As `Classed.first`."""
        in_turn = (self._waiting[tenant].first(classes) for tenant in self._in_turn())  # type: ignore[attr-defined]
        return next((request for request in in_turn if request is not None), None)


def make_classed(order: str, class_of: ClassOf) -> Classed | ClassedFair:
    """As `serving.queues.make_queue`, by class."""
    return ClassedFair(class_of) if order == "fair" else Classed(order, class_of)
