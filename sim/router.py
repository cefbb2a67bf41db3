"""Which replica serves a request. Names are those of vLLM, SGLang and llm-d where they have one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from serving.errors import UsageError, nearest
from serving.queues import Queue
from serving.request import Request
from sim.fleet.ring import HashRing
from sim.replica import Replica


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """What some routers need to know."""

    seed: int = 0
    """Of power_of_two and random."""
    prefix_tokens: int = 256
    """prefix_hash: tokens of a prompt that decide where it goes."""
    load_factor: float = 1.25
    """prefix_hash: most requests on a replica, as a multiple of its share of all."""
    session_of: Callable[[Request], Hashable | None] = lambda request: None
    """session: what names the session of a request; None where it has none."""


class Router:
    """Sends each request to a replica at once; `choose` says which. Replicas may come and go.

    `weights` are capacities in relation to one another, all alike by default. Every replica counts in proportion: turns,
    requests per weight, share of the ring.
    """

    name = "round_robin"

    def __init__(self, replicas: Sequence[Replica] = (), options: RouterOptions | None = None) -> None:
        self.replicas: list[Replica] = []
        self.options = options or RouterOptions()
        self.weights: dict[int, float] = {}
        self._credit: dict[int, float] = {}
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica, weight: float = 1.0) -> None:
        """A replica is ready to serve."""
        self.replicas.append(replica)
        self.replicas.sort(key=lambda r: r.index)
        self.weights[replica.index] = weight
        self._credit[replica.index] = 0.0

    def remove(self, replica: Replica) -> None:
        """A replica takes no more requests."""
        self.replicas.remove(replica)
        del self.weights[replica.index]
        del self._credit[replica.index]

    def submit(self, request: Request) -> bool:
        """Route a request. False when the replica rejects it."""
        return self.choose(request).submit(request)

    def choose(self, request: Request) -> Replica:
        """Replicas in turn; with weights smoothly interleaved, as nginx does it."""
        if len(self.replicas) == 1:
            return self.replicas[0]
        credit, weights = self._credit, self.weights
        for index, weight in weights.items():
            credit[index] += weight
        chosen = max(self.replicas, key=lambda replica: credit[replica.index])
        credit[chosen.index] -= sum(weights.values())
        return chosen

    def finished(self) -> None:
        """A request ended somewhere, or a replica came."""

    def unsent(self) -> int:
        """Requests that wait in the router."""
        return 0

    def withdraw(self) -> list[Request]:
        """Take out the requests that wait in the router."""
        return []

    def load(self, replica: Replica) -> float:
        """Requests running or waiting on a replica, per unit of its weight."""
        return replica.outstanding / self.weights[replica.index]

    def least_loaded(self) -> Replica:
        """The replica with the least `load`; the first of equals."""
        return min(self.replicas, key=self.load)


class LeastOutstanding(Router):
    """The replica with the fewest requests running or waiting; the first of equals."""

    name = "least_outstanding"

    def choose(self, request: Request) -> Replica:
        return self.least_loaded()


class InternalLb(Router):
    """vLLM's internal balancing of data-parallel ranks: the fewest of 4 x waiting + running; the first of equals.

    Counts are those of the moment; vLLM's are up to 0.1 s old, with what was sent since.
    """

    name = "internal_lb"

    def choose(self, request: Request) -> Replica:
        return self.least_loaded()

    def load(self, replica: Replica) -> float:
        score = 4 * (replica.num_waiting + replica.coming) + replica.scheduler.num_running
        return score / self.weights[replica.index]


class Central(Router):
    """One queue for all: a request leaves it when a replica has a free seat (M/M/c's queue)."""

    name = "central"

    def __init__(self, replicas: Sequence[Replica] = (), options: RouterOptions | None = None) -> None:
        super().__init__(replicas, options)
        self._waiting: deque[Request] = deque()

    def submit(self, request: Request) -> bool:
        replica = self._free()
        if replica is None or self._waiting:
            if self.replicas and self.replicas[0].scheduler.refusal(request):
                return self.replicas[0].submit(request)  # no seat will ever do, so that it is refused at once
            self._waiting.append(request)
            return True
        return replica.submit(request)

    def finished(self) -> None:
        while self._waiting and (replica := self._free()) is not None:
            replica.submit(self._waiting.popleft())

    def unsent(self) -> int:
        return len(self._waiting)

    def withdraw(self) -> list[Request]:
        waiting, self._waiting = list(self._waiting), deque()
        return waiting

    def _free(self) -> Replica | None:
        free = [r for r in self.replicas if r.outstanding < r.scheduler.config.max_num_seqs]
        return min(free, key=self.load, default=None)


class Random(Router):
    """Any replica, in proportion to the weights."""

    name = "random"

    def __init__(self, replicas: Sequence[Replica] = (), options: RouterOptions | None = None) -> None:
        super().__init__(replicas, options)
        self._rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.options.seed, 0x7054))))

    def choose(self, request: Request) -> Replica:
        weights = [self.weights[replica.index] for replica in self.replicas]
        at = self._rng.random() * sum(weights)
        for replica, weight in zip(self.replicas, weights, strict=True):
            at -= weight
            if at < 0:
                return replica
        return self.replicas[-1]


class PowerOfTwo(Random):
    """The less loaded of two replicas drawn at random (Mitzenmacher 2001); the first drawn of equals."""

    name = "power_of_two"

    def choose(self, request: Request) -> Replica:
        count = len(self.replicas)
        if count == 1:
            return self.replicas[0]
        first = int(self._rng.random() * count)
        second = int(self._rng.random() * (count - 1))
        second += second >= first
        return min((self.replicas[first], self.replicas[second]), key=self.load)


class LeastKv(Router):
    """The replica with the smallest share of its KV pages used by running and wanted by waiting requests.

    Among equals, as between idle replicas, the one with fewer requests.
    """

    name = "least_kv"

    def add(self, replica: Replica, weight: float = 1.0) -> None:
        super().add(replica, weight)
        scheduler = replica.scheduler
        if not isinstance(scheduler.waiting, PageCount):
            scheduler.waiting = PageCount(scheduler.waiting, scheduler.config.page_tokens)

    def choose(self, request: Request) -> Replica:
        return min(self.replicas, key=lambda r: (kv_demand(r), self.load(r)))


class PrefixHash(Router):
    """Requests that begin alike go to the same replica: a ring of hashes of the first `prefix_tokens` tokens.

    A hot prefix spills over to the next replicas clockwise when its own has `load_factor` times its share of all
    requests. What shares no prefix goes where load is least.
    """

    name = "prefix_hash"

    def __init__(self, replicas: Sequence[Replica] = (), options: RouterOptions | None = None) -> None:
        self._ring = HashRing()
        self._by_index: dict[int, Replica] = {}
        super().__init__(replicas, options)

    def add(self, replica: Replica, weight: float = 1.0) -> None:
        super().add(replica, weight)
        self._by_index[replica.index] = replica
        self._ring.add(replica.index, weight)

    def remove(self, replica: Replica) -> None:
        super().remove(replica)
        del self._by_index[replica.index]
        self._ring.remove(replica.index)

    def choose(self, request: Request) -> Replica:
        key = self.key(request)
        if key is None:
            return self.least_loaded()
        loads = {index: replica.outstanding for index, replica in self._by_index.items()}
        return self._by_index[self._ring.find_bounded(key, loads, self.options.load_factor)]

    def key(self, request: Request) -> Hashable | None:
        """What the ring hashes. A page's key names all before it too, so that one page stands for the prefix."""
        if not len(request.keys) or not self.replicas:
            return None
        pages = max(1, self.options.prefix_tokens // self.replicas[0].scheduler.config.page_tokens)
        return request.keys[min(pages, len(request.keys)) - 1]


class Session(PrefixHash):
    """All turns of a session go to one replica, by a ring of session names; others go where load is least."""

    name = "session"

    def choose(self, request: Request) -> Replica:
        key = self.key(request)
        return self.least_loaded() if key is None else self._by_index[self._ring.find(key)]

    def key(self, request: Request) -> Hashable | None:
        return self.options.session_of(request)


class PageCount:
    """A queue that knows how many KV pages its requests want."""

    def __init__(self, queue: Queue, page_tokens: int) -> None:
        self._queue = queue
        self._page_tokens = page_tokens
        self._wanted: dict[Request, int] = {}
        self.pages = 0
        for request in queue:
            self._count(request)

    def add(self, request: Request) -> None:
        self._count(request)
        self._queue.add(request)

    def put_back(self, request: Request) -> None:
        self._count(request)
        self._queue.put_back(request)

    def peek(self) -> Request:
        return self._queue.peek()

    def pop(self) -> Request:
        request = self._queue.pop()
        self.pages -= self._wanted.pop(request)
        return request

    def remove(self, request: Request) -> None:
        self._queue.remove(request)
        self.pages -= self._wanted.pop(request)

    def victim(self, running: Sequence[Request]) -> int:
        return self._queue.victim(running)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def _count(self, request: Request) -> None:
        pages = -(-request.num_tokens // self._page_tokens)
        self._wanted[request] = pages
        self.pages += pages


def kv_demand(replica: Replica) -> float:
    """Pages used by running and wanted by waiting requests, as a share of the replica's pages."""
    waiting, config = replica.scheduler.waiting, replica.scheduler.config
    assert isinstance(waiting, PageCount)
    return (replica.used_pages + waiting.pages) / config.num_pages


_ROUTERS: dict[str, type[Router]] = {
    router.name: router
    for router in (
        Router,
        LeastOutstanding,
        InternalLb,
        Central,
        LeastKv,
        PrefixHash,
        Session,
        PowerOfTwo,
        Random,
    )
}


def router_names() -> tuple[str, ...]:
    """Names that `make_router` knows."""
    return tuple(_ROUTERS)


def check_router(name: str) -> None:
    """Raise `UsageError` with the nearest names when no router is called `name`."""
    if name not in _ROUTERS:
        raise UsageError(f"unknown router {name!r}; {nearest(name, _ROUTERS)}")


def make_router(name: str, replicas: Sequence[Replica] = (), options: RouterOptions | None = None) -> Router:
    """The router called `name`. Raises `UsageError` with the nearest names when there is none."""
    check_router(name)
    return _ROUTERS[name](replicas, options)
