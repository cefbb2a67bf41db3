"""Which pool and which replica served what, for how long, and what it took."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sim.fleet.record import PoolFacts, ReplicaState
from sim.record import Floats, Ints, RunRecord, Status


@dataclass(frozen=True, slots=True)
class Share:
    """What a replica, or all of a pool, did. Times in seconds; NaN where there is nothing to count."""

    replica_s: float
    """Replica-seconds paid for, cold starts and outages included."""
    serving_s: float
    """Replica-seconds in which it could serve."""
    requests: int
    """Requests that ended here or were here last, and in a prefill pool those that it handed over."""
    prompt_tokens: int
    """Prompt tokens computed here (recomputed ones again, cached ones not)."""
    output_tokens: int
    """Tokens given out here to requests that kept them."""
    busy_share: float
    """Time of steps / time in which it could serve."""
    kv_share: float
    """KV pages in use, over the time in which it could serve."""
    p95_ttft_s: float
    """Of finished requests whose prompts were computed here."""
    outages: int


@dataclass(frozen=True, slots=True)
class PoolShare:
    """A pool and its share."""

    facts: PoolFacts
    share: Share
    ready_mean: float
    """Mean number of replicas that could serve."""
    ready_most: int

    @property
    def gpu_hours(self) -> float:
        """Replica-hours times the GPUs of a replica."""
        return self.share.replica_s / 3600 * self.facts.gpus_per_replica


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """A fleet's run in numbers."""

    pools: tuple[PoolShare, ...]
    replicas: tuple[tuple[str, Share], ...]
    """Name of the pool and share, by replica."""
    replica_hours: float
    gpu_hours: float
    retries: int
    lost_tokens: int
    """Tokens of attempts that failed."""
    kv_transfers: int
    kv_transfer_mean_s: float

    def json(self) -> dict[str, Any]:
        """JSON values; NaN where there is none."""
        return {
            "replica_hours": self.replica_hours,
            "gpu_hours": self.gpu_hours,
            "retries": self.retries,
            "lost_tokens": self.lost_tokens,
            "kv_transfers": self.kv_transfers,
            "kv_transfer_mean_ms": self.kv_transfer_mean_s * 1000,
            "pools": [
                {
                    **asdict(pool.facts),
                    "ready_mean": pool.ready_mean,
                    "ready_most": pool.ready_most,
                    "gpu_hours": pool.gpu_hours,
                    **_share_json(pool.share),
                }
                for pool in self.pools
            ],
            "replicas": [
                {"replica": index, "pool": pool, **_share_json(share)}
                for index, (pool, share) in enumerate(self.replicas)
            ],
        }


def _share_json(share: Share) -> dict[str, Any]:
    out = asdict(share)
    out["p95_ttft_ms"] = out.pop("p95_ttft_s") * 1000
    return out


def fleet_summary(record: RunRecord) -> FleetSummary | None:
    """The fleet of a run; None where it was one replica and nothing else."""
    fleet = record.fleet
    if fleet is None and record.num_replicas < 2:
        return None
    count = record.num_replicas
    if fleet is None:
        deployment = record.meta.get("deployment") or {}
        facts = PoolFacts(
            "default",
            "both",
            str(deployment.get("gpu", "")),
            int(deployment.get("tensor_parallel_size", 1)) * int(deployment.get("pipeline_parallel_size", 1)),
            1.0,
            record.num_pages,
            record.max_num_seqs,
            record.max_num_batched_tokens,
            0.0,
        )
        pools: tuple[PoolFacts, ...] = (facts,)
        pool_of: Ints = np.zeros(count, np.int64)
        paid_s = serving_s = np.full(count, record.end_s)
        outages = np.zeros(count, np.int64)
    else:
        pools, pool_of = fleet.pools, fleet.pool_of
        seconds = fleet.seconds(record.end_s)
        paid_s = fleet.paid_s(record.end_s)
        serving_s = seconds[:, ReplicaState.READY] + seconds[:, ReplicaState.DRAINING]
        down = fleet.event_state == ReplicaState.DOWN
        outages = np.bincount(fleet.event_replica[down], minlength=count)
    per = _by_replica(record)
    replicas = [
        Share(
            float(paid_s[i]),
            float(serving_s[i]),
            int(per.requests[i]),
            int(per.prompt[i]),
            int(per.output[i]),
            _over(per.busy_s[i], serving_s[i]),
            _over(per.kv_s[i], serving_s[i]),
            _p95(per.ttft_s[per.first == i]),
            int(outages[i]),
        )
        for i in range(count)
    ]
    shares = []
    for number, facts in enumerate(pools):
        mine = np.flatnonzero(pool_of == number)
        shares.append(
            _pool(record, number, facts, [replicas[i] for i in mine], per.ttft_s[np.isin(per.first, mine)])
        )
    transfers = np.empty(0) if fleet is None else fleet.kv_transfer_s[~np.isnan(fleet.kv_transfer_s)]
    return FleetSummary(
        tuple(shares),
        tuple((pools[pool_of[i]].name, share) for i, share in enumerate(replicas)),
        float(paid_s.sum()) / 3600,
        sum(pool.gpu_hours for pool in shares),
        0 if fleet is None else int(fleet.retries.sum()),
        0 if fleet is None else fleet.lost_tokens,
        len(transfers),
        float(transfers.mean()) if len(transfers) else math.nan,
    )


def _pool(
    record: RunRecord, number: int, facts: PoolFacts, members: list[Share], ttft_s: Floats
) -> PoolShare:
    serving_s = sum(share.serving_s for share in members)

    def mean(name: str) -> float:
        return _over(sum(getattr(s, name) * s.serving_s for s in members if s.serving_s), serving_s)

    whole = Share(
        sum(share.replica_s for share in members),
        serving_s,
        sum(share.requests for share in members),
        sum(share.prompt_tokens for share in members),
        sum(share.output_tokens for share in members),
        mean("busy_share"),
        mean("kv_share"),
        _p95(ttft_s),
        sum(share.outages for share in members),
    )
    most = len(members)
    if record.fleet is not None:
        _, ready = record.fleet.counts(ReplicaState.READY, number)
        most = int(ready.max()) if len(ready) else 0
    return PoolShare(facts, whole, _over(serving_s, record.end_s), most)


@dataclass(frozen=True, slots=True)
class _ByReplica:
    requests: Ints
    prompt: Ints
    output: Ints
    busy_s: Floats
    kv_s: Floats
    first: Ints
    """Per finished request: where its prompt was computed."""
    ttft_s: Floats


def _by_replica(record: RunRecord) -> _ByReplica:
    r, s, count = record.requests, record.steps, record.num_replicas
    length_s = s.end_s - s.start_s
    pages = s.used_pages / np.maximum(record.limit_at_steps("num_pages"), 1)
    tokens, finished = record.tokens, r.status == Status.FINISHED
    first, handed = r.replica.copy(), np.zeros(count, np.int64)
    if record.fleet is not None:
        apart = record.fleet.prefill_replica >= 0
        first[apart] = record.fleet.prefill_replica[apart]
        handed = np.bincount(first[apart], minlength=count)
    per_step = tokens.per_step if tokens.per_step is not None else 1
    given = tokens.count * per_step
    where = s.replica[tokens.first_step] if len(tokens.first_step) else np.empty(0, np.int64)
    return _ByReplica(
        np.bincount(r.replica[r.replica >= 0], minlength=count) + handed,
        np.bincount(s.replica, s.num_prefill_tokens, count).astype(np.int64),
        np.bincount(where, given, count).astype(np.int64),
        np.bincount(s.replica, length_s, count).astype(np.float64),
        np.bincount(s.replica, length_s * pages, count).astype(np.float64),
        first[finished],
        (r.first_token_s - r.sent_s)[finished],
    )


def _over(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else 0.0


def _p95(values: Floats) -> float:
    return float(np.percentile(values, 95)) if len(values) else math.nan
