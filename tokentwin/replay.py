"""A workload on the real engine, in real time: prompts, clients, and the record of what happened.

The clients do what those of `sim.world` do: they send on time, or when a seat of the closed loop is free, or when the
answer before has arrived and the user has thought. They sit beside the engine: there is no network and no HTTP.
"""

from __future__ import annotations

import heapq
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from realengine.answer import Listener, Output
from realengine.engine import Engine
from realengine.generation import Sampling
from realengine.recorder import Recorder
from serving.beams import BeamCounts, CandidateCounts
from serving.draft_counts import DraftCounts
from serving.draft_steps import DraftSteps, draft_steps
from serving.errors import TokenTwinError, UsageError
from sim.certainty import Certainty
from sim.metrics import Summary
from sim.record import Ints, RequestTable, RunRecord, Status, StepTable, TokenRanges
from sim.verdict import Verdict
from sim.workload import Workload
from sim.world import Progress
from tokentwin.replay_beams import BestOf, Search, fold
from tokentwin.run import REPORT, TRACE

LATE_S = 0.05
"""A request that is sent later than this is worth a warning."""
_TELL_EVERY_S = 0.1
_WARMUP_TOKENS = 16
_MASK = 2**64 - 1


# ---- prompts -----------------------------------------------------------------------------------------------


class Prompts:
    """Token ids that are equal exactly where the workload says that prompts are.

    A token is a function of seed, stream and position; what a request shares with nobody is a stream of its own. A
    conversation goes on with the answers that the engine really gave (`answered`).
    """

    def __init__(self, workload: Workload, vocab_size: int, seed: int) -> None:
        self._workload = workload
        self._vocab_size = vocab_size
        self._seed = seed
        self._answers: dict[int, list[tuple[int, Ints]]] = {}

    def ids(self, row: int) -> list[int]:
        """The prompt of a request."""
        count = int(self._workload.prompt_tokens[row])
        ids = np.empty(count, np.int64)
        begun = 0
        for end, stream in self._segments(row):
            end = min(end, count)
            ids[begun:end] = self._tokens(2 * stream, begun, end)
            for start, tokens in self._answers.get(stream, ()):
                low, high = max(start, begun), min(start + len(tokens), end)
                if low < high:
                    ids[low:high] = tokens[low - start : high - start]
            begun = end
        ids[begun:] = self._tokens(2 * row + 1, begun, count)
        known: list[int] = ids.tolist()
        return known

    def goes_on(self, row: int) -> bool:
        """Whether later prompts hold the answer to this one."""
        segments = self._segments(row)
        return bool(segments) and segments[-1][0] > int(self._workload.prompt_tokens[row])

    def answered(self, row: int, tokens: list[int]) -> None:
        """Tell what the engine answered to a request that `goes_on`."""
        end, stream = self._segments(row)[-1]
        start = int(self._workload.prompt_tokens[row])
        self._answers.setdefault(stream, []).append((start, np.array(tokens[: end - start], np.int64)))

    def _segments(self, row: int) -> list[tuple[int, int]]:
        w = self._workload
        low, high = int(w.segment_offsets[row]), int(w.segment_offsets[row + 1])
        return list(zip(w.segment_ends[low:high].tolist(), w.segment_streams[low:high].tolist(), strict=True))

    def _tokens(self, stream: int, begin: int, end: int) -> Ints:
        """Tokens `begin` to `end` of a stream, by SplitMix64."""
        key = (self._seed * 0xD1342543DE82EF95 + stream * 0xAF251AF3B0F025B5) & _MASK
        x = np.arange(begin + 1, end + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return (x % np.uint64(self._vocab_size)).astype(np.int64)


# ---- clients -----------------------------------------------------------------------------------------------


class _Clients:
    """Sends the requests of a workload and listens to their answers, in the caller's thread."""

    def __init__(self, engine: Engine, workload: Workload, prompts: Prompts, origin_s: float) -> None:
        self.rows: list[int] = []
        """Rows of the workload in order of sending."""
        self.done = 0
        self.late_s = 0.0
        self._engine, self._workload, self._prompts = engine, workload, prompts
        self._first_turn, self._turn = workload.conversations()
        self._origin_s = origin_s
        waits = workload.after
        self._ready = [(float(workload.sent_s[row]), row) for row in np.flatnonzero(waits < 0).tolist()]
        heapq.heapify(self._ready)
        self._next_turns: dict[int, list[int]] = {}
        for row in np.flatnonzero(waits >= 0).tolist():
            self._next_turns.setdefault(int(waits[row]), []).append(row)
        closed = workload.closed_loop
        self._seats = closed.max_concurrency if closed is not None else math.inf
        self._standing: deque[int] = deque()
        self._ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.beams: BeamCounts | None = None if workload.beam_width is None else BeamCounts()
        self.candidates: CandidateCounts | None = None if workload.best_of is None else CandidateCounts()
        self.shown: dict[int, int] = {}
        """Tokens of the answers that are shown whole, by row."""

    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._engine.now_s() - self._origin_s

    def run(self, until_s: float, progress: Callable[[Progress], None] | None) -> bool:
        """Until every request has ended or `until_s` has come; True when the user interrupted it."""
        try:
            self._run(until_s, progress)
        except KeyboardInterrupt:
            return True
        return False

    def _run(self, until_s: float, progress: Callable[[Progress], None] | None) -> None:
        total, told_s = len(self._workload), -math.inf
        while self.done < total and (now_s := self.now_s()) < until_s:
            if progress is not None and now_s - told_s >= _TELL_EVERY_S:
                told_s = now_s
                progress(Progress(now_s, self.done, total, now_s))
            while self._ready and self._ready[0][0] <= now_s:
                ready_s, row = heapq.heappop(self._ready)
                self._send_or_stand(row, ready_s)
            self._listen(min(self._ready[0][0] if self._ready else math.inf, until_s))
        if progress is not None:
            progress(Progress(self.now_s(), self.done, total, self.now_s()))

    def _listen(self, until_s: float) -> None:
        """Wait for an answer to end, at most until then, and take all that have."""
        if self._engine.fault is not None:
            raise TokenTwinError(f"the engine failed: {self._engine.fault!r}") from self._engine.fault
        wait_s = min(until_s - self.now_s(), _TELL_EVERY_S)
        try:
            self._ended.get(timeout=max(wait_s, 0.0))()
            while True:
                self._ended.get_nowait()()
        except queue.Empty:
            return

    def _send_or_stand(self, row: int, ready_s: float) -> None:
        """In a closed loop a client may have to wait for a seat."""
        if self._seats > 0:
            self._seats -= 1
            self.late_s = max(self.late_s, self.now_s() - ready_s)
            self._send(row)
        else:
            self._standing.append(row)

    def _send(self, row: int) -> None:
        w = self._workload
        tenant = int(w.tenant[row])
        limit_s = w.tenants[tenant].goodput_ttft_s
        prompt, length = self._prompts.ids(row), int(w.output_tokens[row])
        how: dict[str, Any] = {
            "priority": int(w.priority[row]),
            "tenant": tenant,
            "deadline_s": math.inf if limit_s is None else self._engine.now_s() + limit_s,
            "weight": w.tenants[tenant].weight,
            "turn": (first, int(self._turn[row])) if (first := int(self._first_turn[row])) >= 0 else None,
        }
        if w.beam_width is not None and (width := int(w.beam_width[row])):
            self._search(row, prompt, width, length, how)
            return
        if w.best_of is not None and (count := int(w.best_of[row])) > 1:
            self._sample(row, prompt, count, length, how)
            return
        listener = self._listener(row)
        self.rows.append(row)
        self._engine.add(prompt, _sampling(length), listener, **how)

    def _search(self, row: int, prompt: list[int], width: int, length: int, how: dict[str, Any]) -> None:
        assert self.beams is not None

        def sent() -> None:
            self.rows.append(row)

        done = partial(self._whole, row)
        Search(self._engine, prompt, width, length, self.beams, how, self._ended.put, sent, done)

    def _sample(self, row: int, prompt: list[int], count: int, length: int, how: dict[str, Any]) -> None:
        assert self.candidates is not None
        listener = BestOf(count, self.candidates, self._ended.put, partial(self._whole, row))
        self.rows += [row] * count
        self._engine.add(prompt, BestOf.sampling(count, length, row), listener, **how)

    def _whole(self, row: int, tokens: list[int]) -> None:
        """An answer that is shown whole has ended; without tokens when it could not be made."""
        if tokens:
            self.shown[row] = len(tokens)
        self._done(row, tokens if self._prompts.goes_on(row) else [])

    def _listener(self, row: int) -> Listener:
        keeps, tokens = self._prompts.goes_on(row), list[int]()

        def listen(output: Output) -> None:
            if keeps:
                tokens.extend(output.token_ids)
            if output.finish_reason is not None:
                self._ended.put(lambda: self._done(row, tokens))

        return listen

    def _done(self, row: int, tokens: list[int]) -> None:
        self.done += 1
        self._seats += 1
        if tokens:
            self._prompts.answered(row, tokens)
        now_s = self.now_s()
        if self._standing:
            self._send_or_stand(self._standing.popleft(), now_s)
        for turn in self._next_turns.pop(row, ()):
            ready_s = max(now_s + float(self._workload.think_s[turn]), float(self._workload.sent_s[turn]))
            heapq.heappush(self._ready, (ready_s, turn))


def _sampling(max_tokens: int) -> Sampling:
    """Greedy, and exactly so many tokens."""
    return Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def warm_up(engine: Engine, workload: Workload, vocab_size: int, count: int, seed: int = 0) -> None:
    """Let a started engine answer `count` requests of the workload's lengths, with a prefix cache of their own."""
    prompts = Prompts(workload, vocab_size, seed + 1)
    rows = [i % len(workload) for i in range(count)]
    tokens = [min(int(workload.output_tokens[row]), _WARMUP_TOKENS) for row in rows]
    ended = threading.Semaphore(0)

    def listen(output: Output) -> None:
        if output.finish_reason is not None:
            ended.release()

    for row, max_tokens in zip(rows, tokens, strict=True):
        engine.add(prompts.ids(row), _sampling(max_tokens), listen, salt="warm-up")
    for _ in rows:
        ended.acquire()


# ---- the run -----------------------------------------------------------------------------------------------


def replay(
    engine: Engine,
    workload: Workload,
    *,
    vocab_size: int,
    seed: int = 0,
    until_s: float = math.inf,
    progress: Callable[[Progress], None] | None = None,
) -> RunRecord:
    """Send `workload` to a started engine, stop the engine when all has ended, and return what happened.

    What the engine did before is not in the record. KeyboardInterrupt ends the run early: the record then holds what
    happened so far and is marked `interrupted`. Raises `UsageError` when no request can run.
    """
    check(workload)
    before, origin_s = len(engine.recorder.requests), engine.now_s()
    engine.recorder.drafts = DraftCounts()
    clients = _Clients(engine, workload, Prompts(workload, vocab_size, seed), origin_s)
    try:
        interrupted = clients.run(until_s, progress)
    finally:
        engine.stop()
    record = _record(engine, workload, clients.rows, before, origin_s)
    if clients.beams is not None or clients.candidates is not None:
        table, tokens = fold(record.requests, record.tokens, workload, clients.shown)
        record = replace(
            record, requests=table, tokens=tokens, beams=clients.beams, candidates=clients.candidates
        )
    refused = record.requests.status == Status.REJECTED
    if len(refused) and refused.all():
        raise UsageError(
            f"none of the {len(refused)} requests can run: {record.requests.reason[0]}; raise --max-model-len or "
            "--num-gpu-blocks-override, or shorten the prompts"
        )
    warnings = list(workload.warnings)
    if lost := len(workload) - int((record.requests.status != Status.UNFINISHED).sum()):
        warnings.append(f"{lost} of {len(workload)} requests had not ended when the run did")
    if refused.any():
        first = record.requests.reason[int(np.flatnonzero(refused)[0])]
        warnings.append(
            f"{int(refused.sum())} of {len(refused)} requests rejected, the first because: {first}"
        )
    if clients.late_s > LATE_S:
        warnings.append(f"requests were sent up to {clients.late_s * 1000:.0f} ms late: this machine is busy")
    return replace(record, interrupted=interrupted, warnings=tuple(warnings))


def check(workload: Workload) -> None:
    """Raise `UsageError` for what a run beside the engine cannot have."""
    if not len(workload):
        raise UsageError("the workload has no requests; check its filters, or give --num-prompts at least 1")
    if any(tenant.rtt_s for tenant in workload.tenants):
        raise UsageError(
            "a network round trip (--rtt-ms) is only simulated: the clients of run sit beside the engine; leave it out"
        )


def scaled(workload: Workload, time_scale: float) -> Workload:
    """The same requests, with all that clients wait for `time_scale` times as fast."""
    if time_scale == 1.0:
        return workload
    # A spec would give the times before scaling, to whoever wants to send the same requests again.
    meta = {key: value for key, value in workload.meta.items() if key != "spec"} | {"time_scale": time_scale}
    if isinstance(rate := meta.get("request_rate"), int | float):
        meta["request_rate"] = rate * time_scale
    return replace(
        workload, sent_s=workload.sent_s / time_scale, think_s=workload.think_s / time_scale, meta=meta
    )


def _record(engine: Engine, workload: Workload, rows: list[int], before: int, origin_s: float) -> RunRecord:
    """The engine's columns from request `before` on, with times since `origin_s`."""
    recorder, config = engine.recorder, engine.config
    skipped = sum(step.start_s < origin_s for step in recorder.steps)
    steps = _typed(recorder.step_columns(), skipped, origin_s, durations=("gpu_s", "host_s"))
    requests = _typed(recorder.request_columns(), before, origin_s, durations=("network_s", "tokenize_s"))
    sent = len(recorder.requests) - before  # an interrupt may come just before the last row was handed over
    requests["request_id"] = np.array(rows[:sent], np.int64)
    tokens = recorder.token_columns()
    offsets = tokens["offsets"][before:]
    used = slice(int(offsets[0]), None)
    table = StepTable(**steps)
    return RunRecord(
        requests=RequestTable(**requests),
        steps=table,
        tokens=TokenRanges(
            offsets - offsets[0],
            tokens["first_step"][used] - skipped,
            tokens["count"][used],
            tokens["per_step"][used] if recorder.speculates else None,
        ),
        drafts=recorder.drafts if recorder.speculates else None,
        draft_steps=_draft_steps(recorder, skipped),
        tenants=workload.tenants,
        num_pages=config.num_pages,
        page_tokens=config.page_tokens,
        num_replicas=1,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        end_s=float(table.end_s.max()) if len(table) else engine.now_s() - origin_s,
    )


def _draft_steps(recorder: Recorder, skipped: int) -> DraftSteps | None:
    """Of the steps from number `skipped` on."""
    count = len(recorder.steps)
    found = draft_steps([recorder.draft_log if recorder.speculates else None], [count])
    return None if found is None else found.where(np.arange(count) >= skipped)


def _typed(
    columns: Mapping[str, Any], first: int, origin_s: float, durations: Iterable[str]
) -> dict[str, Any]:
    """Rows from `first` on, in the types of the record (an empty list has none), points in time since `origin_s`."""
    out: dict[str, Any] = {}
    for name, values in columns.items():
        if name == "reason":
            out[name] = values[first:]
        elif name.endswith("_s"):
            out[name] = values[first:].astype(np.float64) - (0.0 if name in durations else origin_s)
        else:
            kind = np.float64 if name == "prefill_attention_area" else np.int64
            out[name] = values[first:].astype(kind)
    return out


@dataclass(frozen=True)
class RealRun:
    """A finished run of the engine: its record, its numbers and its verdict. Saves the files of a simulated run."""

    record: RunRecord
    summary: Summary
    verdict: Verdict
    num_requests: int
    """Requests of the workload, whether or not they were sent."""
    certainty: Certainty = field(default_factory=Certainty)
    """Percentiles of few samples; a run by itself has no intervals, and nothing in it is extrapolated."""

    @property
    def num_lost(self) -> int:
        """Requests that neither finished nor were rejected with a reason."""
        return self.num_requests - int((self.record.requests.status != Status.UNFINISHED).sum())

    def save(self, folder: str | Path, **how: Any) -> list[Path]:
        """Write everything into a folder, as `tokentwin.run.Run.save`, and return the files."""
        from experiments.minutes import write_minutes
        from experiments.perfetto import write_trace
        from experiments.report import write_report
        from experiments.results import save_run
        from experiments.utilisation import engine_work, step_share_columns

        base, work = Path(folder), engine_work(self.record)
        how |= {"verdict": self.verdict, "certainty": self.certainty, "steps": True}
        how["step_columns"] = step_share_columns(self.record, work)
        paths = save_run(self.record, self.summary, base, **how)
        paths.append(write_minutes(self.record, work, base))
        report = write_report(
            self.record, self.summary, self.verdict, base / REPORT, certainty=self.certainty
        )
        return [*paths, write_trace(self.record, base / TRACE), report]
