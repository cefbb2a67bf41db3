"""Pools and the places in them, at run time."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.request import Request
from sim.fleet.plan import PoolPlan
from sim.fleet.record import ReplicaState
from sim.fleet.scaler import Scaler
from sim.replica import Replica
from sim.router import Router

EXISTING = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DOWN)
HOLDS_REQUESTS = (ReplicaState.READY, ReplicaState.DRAINING)


@dataclass(slots=True, eq=False)
class Slot:
    """A place for a replica; `epoch` tells events that were meant for an earlier life."""

    index: int
    pool: Pool
    replica: Replica
    state: ReplicaState = ReplicaState.STOPPED
    epoch: int = 0
    served: bool = False
    link_free_s: float = 0.0
    """When the link to the decode pool is free again."""

    @property
    def outstanding(self) -> int:
        """Requests running or waiting here."""
        return self.replica.outstanding if self.state in HOLDS_REQUESTS else 0

    @property
    def is_empty(self) -> bool:
        """Whether nobody is waiting for anything from here."""
        return self.state not in HOLDS_REQUESTS or self.replica.is_empty


@dataclass(slots=True, eq=False)
class Pool:
    """A pool at run time."""

    plan: PoolPlan
    router: Router
    scaler: Scaler | None
    slots: list[Slot] = field(default_factory=list)

    def refusal(self, request: Request) -> str:
        """Why the pool's limits rule a request out; empty when they do not."""
        if request.external_tokens and not self.has_room(request):
            return f"prompt of {request.prompt_tokens} tokens leaves no room for a second token"
        return self.slots[0].replica.scheduler.refusal(request)

    def has_room(self, request: Request) -> bool:
        """Whether a request may have a second token here."""
        return self.slots[0].replica.scheduler.longest > request.prompt_tokens + 1

    def count(self, *states: ReplicaState) -> int:
        """Replicas in one of the states."""
        return sum(slot.state in states for slot in self.slots)
