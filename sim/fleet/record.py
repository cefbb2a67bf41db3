"""What a fleet leaves behind beside the tables of a run: pools, the lives of replicas, retries, transfers of KV."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class ReplicaState(IntEnum):
    """What a replica does: STOPPED → STARTING → READY → DRAINING → STOPPED, or READY → DOWN → STARTING."""

    STOPPED = 0
    STARTING = 1
    READY = 2
    DRAINING = 3
    """Serves what it has and gets no more."""
    DOWN = 4


PAID = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.DOWN)
"""States in which somebody pays for the machine."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """Replicas alike and what each of them has."""

    name: str
    role: str
    gpu: str
    gpus_per_replica: int
    weight: float
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cold_start_s: float
    pipeline_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """Replica i belongs to pool `pool_of[i]`. Events are in order of time; a replica is STOPPED before its first."""

    pools: tuple[PoolFacts, ...]
    pool_of: Ints
    event_s: Floats
    event_replica: Ints
    event_state: Ints
    """`ReplicaState` values."""
    retries: Ints
    """Per row of the request table: how often it was sent again after a failure."""
    prefill_replica: Ints
    """Per row: the replica that computed its prompt, where another one decoded; else -1."""
    kv_transfer_s: Floats
    """Per row: from the first token to the arrival of the KV at the decode pool; NaN without a transfer."""
    lost_tokens: int
    """Tokens that failed replicas had produced for requests that began again."""

    def per_replica(self, name: str) -> Ints:
        """A fact of each replica's pool, such as num_pages."""
        return np.array([getattr(self.pools[pool], name) for pool in self.pool_of], np.int64)

    def seconds(self, end_s: float) -> Floats:
        """Time each replica spent in each state until `end_s`, shape (replicas, states)."""
        out = np.zeros((len(self.pool_of), len(ReplicaState)))
        since = np.zeros(len(self.pool_of))
        state = np.zeros(len(self.pool_of), np.int64)
        for time_s, replica, new in zip(self.event_s, self.event_replica, self.event_state, strict=True):
            until_s = min(float(time_s), end_s)
            out[replica, state[replica]] += max(until_s - since[replica], 0.0)
            since[replica], state[replica] = until_s, new
        out[np.arange(len(state)), state] += np.maximum(end_s - since, 0.0)
        return out

    def serving_s(self, end_s: float) -> Floats:
        """Replica-seconds in which requests could be served until `end_s`, per replica."""
        return np.asarray(self.seconds(end_s)[:, [ReplicaState.READY, ReplicaState.DRAINING]].sum(axis=1))

    def paid_s(self, end_s: float) -> Floats:
        """Replica-seconds that somebody pays for, per replica."""
        return np.asarray(self.seconds(end_s)[:, list(PAID)].sum(axis=1))

    def counts(self, state: ReplicaState, pool: int | None = None) -> tuple[Floats, Ints]:
        """Times and, from each on, the number of replicas in a state (of one pool, or of all)."""
        now = np.zeros(len(self.pool_of), np.int64)
        mine = np.ones(len(self.pool_of), np.bool_) if pool is None else self.pool_of == pool
        values = []
        for replica, new in zip(self.event_replica, self.event_state, strict=True):
            now[replica] = new
            values.append(int(np.count_nonzero(mine & (now == state))))
        return self.event_s, np.array(values, np.int64)

    def json(self) -> dict[str, Any]:
        """Pools and lives as JSON values; what belongs to requests is in their table."""
        return {
            "pools": [asdict(pool) for pool in self.pools],
            "pool_of": self.pool_of.tolist(),
            "events": [
                [float(time_s), int(replica), ReplicaState(state).name.lower()]
                for time_s, replica, state in zip(
                    self.event_s, self.event_replica, self.event_state, strict=True
                )
            ],
            "lost_tokens": self.lost_tokens,
        }

    @staticmethod
    def of_json(content: dict[str, Any], columns: dict[str, npt.NDArray[Any]]) -> FleetRecord:
        """The inverse of `json`; `columns` are those of the request table."""
        codes = {state.name.lower(): int(state) for state in ReplicaState}
        events = content["events"]
        return FleetRecord(
            pools=tuple(PoolFacts(**pool) for pool in content["pools"]),
            pool_of=np.array(content["pool_of"], np.int64),
            event_s=np.array([event[0] for event in events], np.float64),
            event_replica=np.array([event[1] for event in events], np.int64),
            event_state=np.array([codes[event[2]] for event in events], np.int64),
            retries=columns["retries"].astype(np.int64),
            prefill_replica=columns["prefill_replica"].astype(np.int64),
            kv_transfer_s=columns["kv_transfer_s"].astype(np.float64),
            lost_tokens=int(content["lost_tokens"]),
        )
