"""What a run leaves behind: one row per request, one row per step, and where each token's time is.

Plain numpy columns in seconds and tokens. The twin writes them, and so does the real engine, so that two runs
open side by side. Metrics, reports and exports read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.beams import BeamCounts, CandidateCounts
from serving.draft_counts import DraftCounts
from serving.draft_steps import DraftSteps
from sim.fleet.record import FleetRecord

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


OPTIONAL_COLUMNS = ("blocked_s", "held_s", "gateway_s", "detokenize_s", "reader_s")
"""Columns of the request table that older runs and the engine's do not have."""


class Status(IntEnum):
    """Where a request ended. `arrived = FINISHED + REJECTED + FAILED + UNFINISHED` holds on every run."""

    UNFINISHED = 0
    FINISHED = 1
    REJECTED = 2
    FAILED = 3
    """It was let in, and its replica failed once too often, or its client did not read."""


@dataclass(frozen=True, slots=True)
class RequestTable:
    """One row per request, in order of `sent_s`. Times that never happened are NaN.

    A request's path: sent by the client (`sent_s`) → network and tokenisation → joins the scheduler's queue
    (`queued_s`) → first scheduled (`scheduled_s`) → first token leaves the engine (`prefill_done_s`) → last token
    leaves the engine (`engine_done_s`). `first_token_s` and `last_token_s` are when the client receives them.
    """

    request_id: Ints
    """Index of the request in its workload."""
    tenant: Ints
    """Index into `RunRecord.tenants`."""
    replica: Ints
    """Replica that served it; -1 when it never reached one."""
    sent_s: Floats
    queued_s: Floats
    scheduled_s: Floats
    prefill_done_s: Floats
    engine_done_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    network_s: Floats
    """Request's way in, plus the last token's way out: round trips, handshakes, and its own bytes on the line."""
    tokenize_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    """Tokens really produced, which is fewer than asked for an unfinished or truncated request."""
    max_output_tokens: Ints
    cached_tokens: Ints
    """Prompt tokens found in the prefix cache when the request was first admitted."""
    preemptions: Ints
    status: Ints
    """`Status` values."""
    reason: npt.NDArray[np.object_]
    """Finish reason ("length", "stop"), the reason of a rejection in words, or "" while unfinished."""
    blocked_s: Floats = field(default_factory=lambda: np.empty(0))
    """What other requests of the same client cost: waiting for a connection, for their bytes on the line, for answers
    that have to come first. This, gateway, detokenize and reader are shares of E2EL; 0 in runs that do not know them."""
    held_s: Floats = field(default_factory=lambda: np.empty(0))
    """Of it, what passed before the request went off."""
    gateway_s: Floats = field(default_factory=lambda: np.empty(0))
    detokenize_s: Floats = field(default_factory=lambda: np.empty(0))
    reader_s: Floats = field(default_factory=lambda: np.empty(0))
    """What is due to the client's own reading, or to the window that it leaves the sender."""

    def __post_init__(self) -> None:
        for name in OPTIONAL_COLUMNS:
            if len(getattr(self, name)) != len(self.request_id):
                object.__setattr__(self, name, np.zeros(len(self.request_id)))

    def __len__(self) -> int:
        return len(self.request_id)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Every column by name, in declaration order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class StepTable:
    """One row per engine step, sorted by (replica, start_s)."""

    replica: Ints
    start_s: Floats
    end_s: Floats
    gpu_s: Floats
    """Predicted (or measured) device time of the step, without waits for the host."""
    host_s: Floats
    """Host work that the step needs; overlapped with the device when scheduling is asynchronous."""
    num_tokens: Ints
    """Tokens computed in the step, before padding."""
    num_prefill_tokens: Ints
    num_prefills: Ints
    """Sequences that computed a prompt chunk (more than one token, or an unfinished prompt)."""
    num_decodes: Ints
    decode_context_sum: Ints
    """Sum over decoding sequences of the context attended to (current token included)."""
    prefill_attention_area: Floats
    """Sum over prompt chunks of query-key pairs: chunk·context_before + chunk·(chunk+1)/2."""
    prefill_context_sum: Ints
    """Sum over prompt chunks of the context read (context_before + chunk)."""
    num_running: Ints
    num_waiting: Ints
    used_pages: Ints
    """KV pages held by running sequences (pages that only cache a prefix are not counted)."""
    preemptions: Ints

    def __len__(self) -> int:
        return len(self.start_s)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Every column by name, in declaration order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def where(self, rows: npt.NDArray[np.bool_]) -> StepTable:
        """Some of the steps; the ranges of tokens do not fit them."""
        return StepTable(**{name: column[rows] for name, column in self.columns().items()})


@dataclass(frozen=True, slots=True)
class TokenRanges:
    """Which steps gave which tokens: each range is `count` consecutive rows of the step table, as many tokens each.

    Ranges of request i are rows `offsets[i]:offsets[i + 1]`, in time order.
    """

    offsets: Ints
    first_step: Ints
    count: Ints
    per_step: Ints | None = None
    """Tokens that each step of a range gave at once; None where all gave one (no drafts were verified)."""


@dataclass(frozen=True, slots=True)
class Deliveries:
    """When clients took the events of their answers; those of request i are rows `offsets[i]:offsets[i + 1]`."""

    offsets: Ints
    seen_s: Floats
    tokens: Ints
    """Tokens of each event, 1 or more."""

    def owners(self) -> Ints:
        """The request of each event."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


@dataclass(frozen=True, slots=True)
class Tenant:
    """A class of requests with its own promises (times in seconds) and its own way to the server."""

    name: str = "default"
    slo_class: str = ""
    goodput_ttft_s: float | None = None
    goodput_tpot_s: float | None = None
    goodput_e2el_s: float | None = None
    rtt_s: float = 0.0
    """Network round trip between this tenant's clients and the server."""
    weight: float = 1.0
    """Share of the engine that it is owed relative to others under `--scheduling-policy fair`."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A whole run: tables, the capacity they were made under, and what it was.

    `meta` holds JSON values only: argv, resolved config, seed, version, git commit, profile hash and so on.
    """

    requests: RequestTable
    steps: StepTable
    tokens: TokenRanges
    tenants: tuple[Tenant, ...]
    num_pages: int
    """KV pages of one replica."""
    page_tokens: int
    num_replicas: int
    max_num_seqs: int
    max_num_batched_tokens: int
    end_s: float
    """Simulated time at which the run ended."""
    interrupted: bool = False
    warnings: tuple[str, ...] = ()
    drafts: DraftCounts | None = None
    """What became of drafts; None without speculative decoding."""
    draft_steps: DraftSteps | None = None
    """What drafts add to the work of each step; None without speculative decoding, or where it was not kept."""
    beams: BeamCounts | None = None
    """What beam searches took; None without any."""
    candidates: CandidateCounts | None = None
    """What best-of took; None where no request asks for it."""
    meta: dict[str, Any] = field(default_factory=dict)
    deliveries: Deliveries | None = None
    """Of a run that follows streams over a network; otherwise a token is there a fixed lag after its step."""
    fleet: FleetRecord | None = None
    """Of a run with pools, an autoscaler, failures or admission. `num_replicas` then counts all that ever were, and the
    other limits are those of the first pool."""

    def replica_s(self, duration_s: float) -> float:
        """Replica-seconds in which requests could be served, in `duration_s` from the first request on."""
        if self.fleet is None or not len(self.requests):
            return duration_s * max(self.num_replicas, 1)
        return float(self._serving_s(self.fleet, duration_s).sum())

    def gpu_busy_share(self, duration_s: float) -> float:
        """Device time of all steps over that of `duration_s` from the first request on, each replica times its GPUs."""
        if self.fleet is None or not len(self.requests):
            busy_s, wall_s = float(self.steps.gpu_s.sum()), self.replica_s(duration_s)
        else:
            gpus = self.fleet.per_replica("gpus_per_replica")
            busy_s = float(np.dot(gpus[self.steps.replica], self.steps.gpu_s))
            wall_s = float(np.dot(gpus, self._serving_s(self.fleet, duration_s)))
        return min(busy_s / wall_s, 1.0) if wall_s > 0 else 0.0

    def _serving_s(self, fleet: FleetRecord, duration_s: float) -> Floats:
        from_s = float(self.requests.sent_s.min())
        return fleet.serving_s(from_s + duration_s) - fleet.serving_s(from_s)

    def total(self, name: str) -> int:
        """A limit such as num_pages summed over all replicas that ever were."""
        if self.fleet is None:
            limit: int = getattr(self, name)
            return limit * max(self.num_replicas, 1)
        return int(self.fleet.per_replica(name).sum())

    def limit_at_steps(self, name: str) -> int | Ints:
        """A limit such as max_num_seqs, of the replica that ran each step where replicas differ."""
        if self.fleet is None:
            limit: int = getattr(self, name)
            return limit
        return self.fleet.per_replica(name)[self.steps.replica]

    def token_times_s(self, row: int) -> Floats:
        """When each token of request `row` reached its client, shape (output_tokens,)."""
        if (d := self.deliveries) is not None:
            mine = slice(int(d.offsets[row]), int(d.offsets[row + 1]))
            return np.repeat(d.seen_s[mine], d.tokens[mine])
        engine_s = self.engine_token_times_s(row)
        if not len(engine_s):
            return engine_s
        lag_s = float(self.requests.first_token_s[row] - engine_s[0])
        return engine_s + lag_s

    def event_times_s(self, row: int) -> Floats:
        """When events of request `row` came: to the client where streams were followed, otherwise out of the engine.

        What a step gave together is one event.
        """
        if (d := self.deliveries) is not None:
            return d.seen_s[int(d.offsets[row]) : int(d.offsets[row + 1])]
        return self._times_s(row, together=True)

    def engine_token_times_s(self, row: int) -> Floats:
        """When each token of request `row` left the engine, shape (output_tokens,)."""
        return self._times_s(row, together=False)

    def _times_s(self, row: int, *, together: bool) -> Floats:
        ranges = range(int(self.tokens.offsets[row]), int(self.tokens.offsets[row + 1]))
        end_s = self.steps.end_s
        parts = [end_s[(f := int(self.tokens.first_step[r])) : f + int(self.tokens.count[r])] for r in ranges]
        several = None if together else self.tokens.per_step
        if several is not None:
            parts = [np.repeat(part, several[r]) for part, r in zip(parts, ranges, strict=True)]
        if not parts:
            r = self.requests
            if r.status[row] != Status.FINISHED or r.replica[row] >= 0:
                return np.empty(0)
            # Answered from the cache: all tokens at once, out of no step.
            return np.full(1 if together else int(r.output_tokens[row]), r.engine_done_s[row])
        return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)
