"""Who waits in which order. `fcfs` keeps arrival order with preempted requests in front; the others are heaps.

A queue also says who is the first to be preempted when pages run out: the last to run under `fcfs`, otherwise the
request with the largest key.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

from serving.request import Request

Key = tuple[Any, ...]


class Queue(Protocol):
    """Waiting requests. `peek` and `pop` give the next to admit."""

    def add(self, request: Request) -> None: ...
    def put_back(self, request: Request) -> None:
        """Return a preempted request to where it is next in line."""

    def peek(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def victim(self, running: Sequence[Request]) -> int:
        """Index in `running` of the sequence to preempt first."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


class Fcfs:
    """First come, first served; the newest running sequence is preempted first."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def put_back(self, request: Request) -> None:
        self._waiting.appendleft(request)

    def peek(self) -> Request:
        return self._waiting[0]

    def pop(self) -> Request:
        return self._waiting.popleft()

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)

    def victim(self, running: Sequence[Request]) -> int:
        return len(running) - 1

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)


class Ordered:
    """Smallest `key(request)` first; ties by arrival, then id. The largest key runs last and is preempted first."""

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._heap: list[tuple[Key, Request]] = []
        self._added = 0

    def add(self, request: Request) -> None:
        # The counter ends every comparison before it reaches the (unordered) request.
        self._added += 1
        heapq.heappush(self._heap, ((*self._key(request), orderable(request.id), self._added), request))

    put_back = add

    def peek(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[1] is not request]
        heapq.heapify(self._heap)

    def victim(self, running: Sequence[Request]) -> int:
        return max(range(len(running)), key=lambda i: self._key(running[i]))

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]))


class Fair:
    """Weighted fair sharing between tenants by tokens served (VTC: Sheng et al., "Fairness in Serving Large Language
    Models", 2024): the next request is of the tenant that has been served least for its weight, first come first.

    A tenant with nothing waiting or running does not save up: when it comes back, its counter is lifted to the least
    among those that are. Counters are whole tokens, so that served one by one or many at once is the same.
    """

    PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2

    def __init__(self) -> None:
        self._waiting: dict[int, Queue] = {}
        self._served: dict[int, int] = {}
        self._weights: dict[int, float] = {}
        self._active: dict[int, int] = {}
        self._count = 0

    def add(self, request: Request) -> None:
        tenant = request.tenant
        if not self._active.get(tenant):
            others = [self._level(other) for other, live in self._active.items() if live]
            self._weights[tenant] = request.weight
            lifted = math.ceil(min(others) * request.weight) if others else 0
            self._served[tenant] = max(self._served.get(tenant, 0), lifted)
        self._active[tenant] = self._active.get(tenant, 0) + 1
        self._of(tenant).add(request)
        self._count += 1

    def put_back(self, request: Request) -> None:
        self._of(request.tenant).put_back(request)
        self._count += 1

    def ended(self, request: Request) -> None:
        """A request that was added is done."""
        self._active[request.tenant] -= 1

    def charge(self, tenant: int, prompt_tokens: int, output_tokens: int) -> None:
        """So many tokens were computed for `tenant`."""
        self._served[tenant] += self.PROMPT_WEIGHT * prompt_tokens + self.OUTPUT_WEIGHT * output_tokens

    def served(self, tenant: int) -> int:
        """Weighted tokens that a tenant was served (lifts included)."""
        return self._served.get(tenant, 0)

    def peek(self) -> Request:
        return self._waiting[self._next()].peek()

    def pop(self) -> Request:
        self._count -= 1
        return self._waiting[self._next()].pop()

    def remove(self, request: Request) -> None:
        self._waiting[request.tenant].remove(request)
        self._count -= 1

    def victim(self, running: Sequence[Request]) -> int:
        """The newest sequence of the tenant that has been served most."""
        return max(range(len(running)), key=lambda i: (self._level(running[i].tenant), i))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        return (request for tenant in self._in_turn() for request in self._waiting[tenant])

    def _of(self, tenant: int) -> Queue:
        """What waits of a tenant, first come first."""
        if tenant not in self._waiting:
            self._waiting[tenant] = self._make()
        return self._waiting[tenant]

    def _make(self) -> Queue:
        return Fcfs()

    def _in_turn(self) -> list[int]:
        """Tenants, the next to be served first."""
        return sorted(self._waiting, key=lambda tenant: (self._level(tenant), tenant))

    def _next(self) -> int:
        return min(
            (tenant for tenant, waiting in self._waiting.items() if waiting),
            key=lambda tenant: (self._level(tenant), tenant),
        )

    def _level(self, tenant: int) -> float:
        return self._served[tenant] / self._weights[tenant]


def orderable(request_id: Hashable) -> tuple[int, int, str]:
    """Something that any two ids can be compared by."""
    if isinstance(request_id, int):
        return (0, request_id, "")
    return (1, 0, str(request_id))


def by_priority(request: Request) -> Key:
    """vLLM's priority order: lower value first, then earlier arrival."""
    return (request.priority, request.arrival_s)


def by_length(request: Request) -> Key:
    """Shortest predicted job first (output tokens; `max_tokens` where nothing was predicted)."""
    expected = request.predicted_tokens if request.predicted_tokens is not None else request.max_tokens
    return (expected, request.arrival_s)


def by_deadline(request: Request) -> Key:
    """Earliest deadline first."""
    return (request.deadline_s, request.arrival_s)


ORDERS: dict[str, Callable[[Request], Key]] = {
    "priority": by_priority,
    "sjf": by_length,
    "edf": by_deadline,
}
"""Keys of the orders that have one."""


def make_queue(order: str) -> Queue:
    """The queue named `order`: one of `serving.config.QUEUE_ORDERS`."""
    if order == "fcfs":
        return Fcfs()
    return Fair() if order == "fair" else Ordered(ORDERS[order])
