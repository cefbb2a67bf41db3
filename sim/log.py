"""Where a run is written while it happens: growing columns of steps, requests and token ranges."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from sim.record import Floats, RequestTable, Status, StepTable, TokenRanges

STEP_COLUMNS = (
    "start_s",
    "end_s",
    "gpu_s",
    "host_s",
    "num_tokens",
    "num_prefill_tokens",
    "num_prefills",
    "num_decodes",
    "decode_context_sum",
    "prefill_attention_area",
    "prefill_context_sum",
    "num_running",
    "num_waiting",
    "used_pages",
    "preemptions",
)
_TIMES = {"start_s", "end_s", "gpu_s", "host_s", "prefill_attention_area"}
_FLUSH = 4096

StepRow = tuple[float, float, float, float, int, int, int, int, int, float, int, int, int, int, int]


class StepLog:
    """Steps of one replica, in order of execution; 120 bytes a step once flushed."""

    def __init__(self) -> None:
        self._rows: list[StepRow] = []
        self._blocks: list[Floats] = []
        self._flushed = 0
        self._moving = False

    def __len__(self) -> int:
        return self._flushed + len(self._rows)

    def add(self, row: StepRow) -> None:
        """One step, columns in the order of `STEP_COLUMNS`."""
        self._rows.append(row)
        if len(self._rows) >= _FLUSH:
            self._flush()

    def add_block(self, block: Floats) -> None:
        """Many steps at once, shape (steps, columns)."""
        if len(block) <= 32:
            self._rows.extend(map(tuple, block.tolist()))
        else:
            self._flush()
            self._blocks.append(block)
            self._flushed += len(block)

    def _flush(self) -> None:
        if self._rows:
            self._moving = True
            self._blocks.append(np.array(self._rows, np.float64))
            self._flushed += len(self._rows)
            self._rows = []
            self._moving = False

    def peek(self) -> list[Floats]:
        """All steps so far in parts, for another thread: nothing is moved while the log is written."""
        while True:
            blocks, rows = list(self._blocks), list(self._rows)
            if not self._moving and len(blocks) == len(self._blocks):
                return [*blocks, *([np.array(rows, np.float64)] if rows else [])]
            time.sleep(0)

    def ends_s(self, first: int) -> list[float]:
        """Ends of the steps from `first` on."""
        parts: list[list[float]] = []
        left = self._flushed
        rest = [row[1] for row in self._rows[max(first - left, 0) :]]
        for block in reversed(self._blocks):
            if left <= first:
                break
            left -= len(block)
            parts.append(block[max(first - left, 0) :, 1].tolist())
        return [end_s for part in reversed(parts) for end_s in part] + rest

    def matrix(self) -> Floats:
        """All steps, shape (steps, columns)."""
        self._flush()
        if not self._blocks:
            return np.empty((0, len(STEP_COLUMNS)))
        return np.concatenate(self._blocks)


def step_table(logs: list[StepLog]) -> StepTable:
    """The logs of all replicas as one table sorted by (replica, start)."""
    matrices = [log.matrix() for log in logs]
    everything = np.concatenate(matrices)
    replica = np.repeat(np.arange(len(logs)), [len(m) for m in matrices])
    columns = {
        name: everything[:, i].copy() if name in _TIMES else everything[:, i].astype(np.int64)
        for i, name in enumerate(STEP_COLUMNS)
    }
    return StepTable(replica=replica.astype(np.int64), **columns)  # type: ignore[arg-type]


@dataclass(slots=True)
class RequestLog:
    """One entry per request of the workload; Python lists because they are written one scalar at a time."""

    count: int
    sent_s: list[float] = field(init=False)
    queued_s: list[float] = field(init=False)
    scheduled_s: list[float] = field(init=False)
    prefill_done_s: list[float] = field(init=False)
    engine_done_s: list[float] = field(init=False)
    replica: list[int] = field(init=False)
    output_tokens: list[int] = field(init=False)
    cached_tokens: list[int] = field(init=False)
    preemptions: list[int] = field(init=False)
    status: list[int] = field(init=False)
    reason: list[str] = field(init=False)
    ranges: list[tuple[int, ...]] = field(default_factory=list)
    """(request, replica, first step of the replica, steps), and where drafts are verified the tokens of each step."""
    speculates: bool = False
    """A step may give a request several tokens: a replica verifies drafts, or answers are shown whole."""
    unstreamed: list[int] = field(default_factory=list)
    """Requests of which nothing is shown before their end."""

    def __post_init__(self) -> None:
        for name in ("sent_s", "queued_s", "scheduled_s", "prefill_done_s", "engine_done_s"):
            setattr(self, name, [math.nan] * self.count)
        for name in ("output_tokens", "cached_tokens", "preemptions"):
            setattr(self, name, [0] * self.count)
        self.replica = [-1] * self.count
        self.status = [int(Status.UNFINISHED)] * self.count
        self.reason = [""] * self.count

    def add_guest(self) -> int:
        """A row beyond the workload's requests, for whoever makes requests of its own."""
        for name in ("sent_s", "queued_s", "scheduled_s", "prefill_done_s", "engine_done_s"):
            getattr(self, name).append(math.nan)
        for name in ("output_tokens", "cached_tokens", "preemptions"):
            getattr(self, name).append(0)
        self.replica.append(-1)
        self.status.append(int(Status.UNFINISHED))
        self.reason.append("")
        return len(self.status) - 1

    def drop_guests(self) -> None:
        """Only the workload's own requests are left."""
        if len(self.status) == self.count:
            return
        for name in ("sent_s", "queued_s", "scheduled_s", "prefill_done_s", "engine_done_s"):
            del getattr(self, name)[self.count :]
        for name in ("output_tokens", "cached_tokens", "preemptions", "replica", "status", "reason"):
            del getattr(self, name)[self.count :]
        self.ranges = [entry for entry in self.ranges if entry[0] < self.count]

    def token_ranges(
        self, rows: np.ndarray[tuple[int], np.dtype[np.int64]], logs: list[StepLog]
    ) -> TokenRanges:
        """Ranges in the order of the table's `rows`, step numbers counted over all replicas."""
        offsets = np.zeros(self.count + 1, np.int64)
        if not self.ranges:
            empty = np.empty(0, np.int64)
            return TokenRanges(offsets[: len(rows) + 1], empty, empty.copy())
        # Replicas of a pipeline write the tokens of each step down, which is one unless drafts are verified.
        ranges = [(*entry, 1)[:5] if self.speculates else entry[:4] for entry in self.ranges]
        table = np.array(ranges, np.int64)
        base = np.cumsum([0, *(len(log) for log in logs[:-1])])
        place = np.empty(self.count, np.int64)
        place[rows] = np.arange(len(rows))
        position = place[table[:, 0]]
        order = np.argsort(position, kind="stable")
        np.cumsum(np.bincount(position, minlength=len(rows)), out=offsets[1 : len(rows) + 1])
        first = (table[:, 2] + base[table[:, 1]])[order]
        per_step = table[order, 4] if self.speculates else None
        return TokenRanges(offsets[: len(rows) + 1], first, table[order, 3], per_step)


def request_table(
    log: RequestLog,
    *,
    prompt_tokens: np.ndarray[tuple[int], np.dtype[np.int64]],
    max_output_tokens: np.ndarray[tuple[int], np.dtype[np.int64]],
    tenant: np.ndarray[tuple[int], np.dtype[np.int64]],
    rtt_s: Floats,
    overhead_s: float,
    tokenize_s: Floats,
    detokenize_s: float,
    last_token_s: Floats,
) -> tuple[RequestTable, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """The log as a table of the requests that were sent, in order of sending, and their rows in the workload.

    A token reaches its client half a round trip and its detokenisation after it leaves the engine. `last_token_s` is
    when the last token left the engine, NaN where none did.
    """
    sent_s = np.array(log.sent_s)
    rows = np.flatnonzero(~np.isnan(sent_s))
    rows = rows[np.argsort(sent_s[rows], kind="stable")]
    way_out_s = rtt_s / 2 + detokenize_s
    prefill_done_s, engine_done_s = np.array(log.prefill_done_s), np.array(log.engine_done_s)
    first_s = prefill_done_s
    if log.unstreamed:
        first_s = prefill_done_s.copy()
        first_s[log.unstreamed] = engine_done_s[log.unstreamed]
    table = RequestTable(
        request_id=rows,
        tenant=tenant[rows],
        replica=np.array(log.replica, np.int64)[rows],
        sent_s=sent_s[rows],
        queued_s=np.array(log.queued_s)[rows],
        scheduled_s=np.array(log.scheduled_s)[rows],
        prefill_done_s=prefill_done_s[rows],
        engine_done_s=engine_done_s[rows],
        first_token_s=(first_s + way_out_s)[rows],
        last_token_s=(last_token_s + way_out_s)[rows],
        network_s=rtt_s[rows],
        gateway_s=np.full(len(rows), overhead_s),
        detokenize_s=np.full(len(rows), detokenize_s),
        tokenize_s=tokenize_s[rows],
        prompt_tokens=prompt_tokens[rows],
        output_tokens=np.array(log.output_tokens, np.int64)[rows],
        max_output_tokens=max_output_tokens[rows],
        cached_tokens=np.array(log.cached_tokens, np.int64)[rows],
        preemptions=np.array(log.preemptions, np.int64)[rows],
        status=np.array(log.status, np.int64)[rows],
        reason=np.array(log.reason, object)[rows],
    )
    return table, rows
