"""Which replica serves a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from serving.errors import UsageError, nearest
from serving.request import Request
from sim.replica import Replica


class Router:
    """Sends each request to a replica at once; `choose` says which."""

    name = "round_robin"

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = list(replicas)
        self._next = 0

    def submit(self, request: Request) -> bool:
        """Route a request. False when the replica rejects it."""
        return self.choose(request).submit(request)

    def choose(self, request: Request) -> Replica:
        """Replicas in turn."""
        replica = self.replicas[self._next]
        self._next = (self._next + 1) % len(self.replicas)
        return replica

    def finished(self) -> None:
        """A request ended somewhere."""

    def unsent(self) -> int:
        """Requests that wait in the router."""
        return 0


class LeastOutstanding(Router):
    """The replica with the fewest requests running or waiting; the first of equals."""

    name = "least_outstanding"

    def choose(self, request: Request) -> Replica:
        return min(self.replicas, key=lambda replica: replica.outstanding)


class Central(Router):
    """One queue for all: a request leaves it when a replica has a free seat (M/M/c's queue)."""

    name = "central"

    def __init__(self, replicas: Sequence[Replica]) -> None:
        super().__init__(replicas)
        self._waiting: deque[Request] = deque()

    def submit(self, request: Request) -> bool:
        replica = self._free()
        if replica is None or self._waiting:
            if self.replicas[0].scheduler.refusal(request):
                return self.replicas[0].submit(request)  # no seat will ever do, so that it is refused at once
            self._waiting.append(request)
            return True
        return replica.submit(request)

    def finished(self) -> None:
        while self._waiting and (replica := self._free()) is not None:
            replica.submit(self._waiting.popleft())

    def unsent(self) -> int:
        return len(self._waiting)

    def _free(self) -> Replica | None:
        replica = min(self.replicas, key=lambda replica: replica.outstanding)
        return replica if replica.outstanding < replica.scheduler.config.max_num_seqs else None


_ROUTERS: dict[str, Callable[[Sequence[Replica]], Router]] = {
    router.name: router for router in (Router, LeastOutstanding, Central)
}


def router_names() -> tuple[str, ...]:
    """Names that `make_router` knows."""
    return tuple(_ROUTERS)


def make_router(name: str, replicas: Sequence[Replica]) -> Router:
    """The router called `name`. Raises `UsageError` with the nearest names when there is none."""
    if name not in _ROUTERS:
        raise UsageError(f"unknown router {name!r}; {nearest(name, _ROUTERS)}")
    return _ROUTERS[name](replicas)
