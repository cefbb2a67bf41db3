"""Replay recorded schedules of another engine and compare every decision.

A trace is one gzipped JSON object with `config`, `requests` and `steps`, as recorded from vLLM's own scheduler: tokens
scheduled, prefix hits, preemptions, running order, free pages and page tables per step. Tokens are functions of the
request, so that a replay needs no model.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.plan import StepOutcome, StepPlan
from serving.request import Request, TokenKeys
from serving.scheduler import Scheduler

_VOCABULARY = 50
_FIELDS = {
    "config": (
        "num_blocks",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "prefix",
    ),
    "requests": ("id", "arrive", "prompt", "max_tokens"),
    "steps": (),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision in which a replay departs from its trace."""

    trace: str
    step: int
    what: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        return f"{self.trace} step {self.step}: {self.what}: recorded {self.expected}, ours {self.got}"


@dataclass(frozen=True, slots=True)
class Conformance:
    """Outcome of replaying a folder of traces."""

    num_traces: int
    num_identical: int
    num_steps: int
    """Steps compared in the identical traces."""
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        return f"{self.num_identical} of {self.num_traces} traces, {self.num_steps} steps identical"


def check_folder(folder: Path) -> Conformance:
    """Replay every `*.json.gz` in `folder`. Raises `UsageError` when there is none or one cannot be read."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; name one that holds recorded schedules (*.json.gz)")
    paths = sorted(folder.glob("*.json.gz"))
    if not paths:
        raise UsageError(f"{folder} holds no recorded schedules (*.json.gz)")
    identical = steps = 0
    differences = []
    for path in paths:
        trace = _read(path)
        difference = check_trace(trace, path.name)
        if difference is None:
            identical += 1
            steps += len(trace["steps"])
        else:
            differences.append(difference)
    return Conformance(len(paths), identical, steps, tuple(differences))


def check_trace(trace: dict[str, Any], name: str = "trace") -> Difference | None:
    """Replay one trace; None when every step is identical."""
    replay = _Replay(trace)
    for index, (recorded, ours) in enumerate(zip(trace["steps"], replay.steps(), strict=True)):
        for what, expected in recorded.items():
            if what in ours and ours[what] != expected:
                return Difference(name, index, what, expected, ours[what])
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        with gzip.open(path) as file:
            trace = json.load(file)
        for part, fields in _FIELDS.items():
            for entry in [trace[part]] if part == "config" else trace[part]:
                missing = [field for field in fields if field not in entry]
                if missing:
                    raise KeyError(f"{part} lacks {', '.join(missing)}")
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        why = error.args[0] if isinstance(error, KeyError) else error
        raise UsageError(f"{path} is not a recorded schedule: {why}") from error
    return dict(trace)


def token_hash(request_id: str, position: int, salt: int) -> int:
    """The traces' token function: CRC-32 of "id:position:salt"."""
    return zlib.crc32(f"{request_id}:{position}:{salt}".encode())


class _Replay:
    """Drives our scheduler through the arrivals of a trace and says what it decided."""

    def __init__(self, trace: dict[str, Any]) -> None:
        c = trace["config"]
        self.asynchronous = bool(c.get("async_", False))
        self.k = int(c.get("k", 0))
        self.num_steps = len(trace["steps"])
        self.config = SchedulerConfig(
            num_pages=c["num_blocks"] - 1,
            page_tokens=c["block_size"],
            max_num_seqs=c["max_num_seqs"],
            max_num_batched_tokens=c["max_num_batched_tokens"],
            max_model_len=c["max_model_len"],
            enable_prefix_caching=c["prefix"],
            long_prefill_token_threshold=c.get("long_prefill_token_threshold", 0),
            queue_order=c.get("policy", "fcfs"),
            reserve_full_isl=c.get("scheduler_reserve_full_isl", True),
            watermark=c.get("watermark", 0.0),
            async_scheduling=self.asynchronous,
            num_speculative_tokens=self.k,
            draft_has_kv=self.k > 0 and c.get("method") == "draft_model",
        )
        self.scheduler = Scheduler(self.config)
        self.arrivals = trace["requests"]
        self.next_arrival = 0
        self.queue: list[StepPlan] = []
        self.outputs: dict[str, int] = {}

    def steps(self) -> Iterator[dict[str, Any]]:
        """One dictionary of decisions per call of the scheduler, with the traces' key names."""
        for index in range(self.num_steps):
            self._arrive(index)
            yield self._async_step() if self.asynchronous else self._step()

    def _arrive(self, step: int) -> None:
        while self.next_arrival < len(self.arrivals) and self.arrivals[self.next_arrival]["arrive"] <= step:
            a = self.arrivals[self.next_arrival]
            request = Request(
                id=a["id"],
                prompt_tokens=len(a["prompt"]),
                max_tokens=a["max_tokens"],
                arrival_s=float(a["arrive"]),
                priority=a.get("priority", 0),
                keys=TokenKeys(self.config.page_tokens, a["prompt"]),
            )
            self.outputs[a["id"]] = 0
            self.scheduler.add(request)
            self.next_arrival += 1

    def _step(self) -> dict[str, Any]:
        scheduler = self.scheduler
        plan = scheduler.plan(0.0)
        decided = self._decisions(plan)
        decided["waiting"] = sorted(str(request.id) for request in scheduler.waiting)
        out, finished = self._execute(plan)
        decided["out"] = out
        decided["finished"] = sorted(finished)
        return decided

    def _async_step(self) -> dict[str, Any]:
        plan = self.scheduler.plan(0.0)
        decided = self._decisions(plan)
        scheduled = plan is not None and len(plan) > 0
        if plan is not None and scheduled:
            self.queue.append(plan)
        finished: list[str] = []
        if len(self.queue) >= 2 or (self.queue and not scheduled):
            _, finished = self._execute(self.queue.pop(0))
            decided["finished"] = sorted(finished)
        return decided

    def _decisions(self, plan: StepPlan | None) -> dict[str, Any]:
        scheduler = self.scheduler
        decided: dict[str, Any] = {
            "running": [str(request.id) for request in scheduler.running()],
            "free": scheduler.pool.num_free,
            "sched": {},
            "new": {},
            "resumed": [],
            "preempted": [],
            "spec": {},
            "bt": {
                str(request.id): scheduler.seqs.pages_of(request.slot).tolist()
                for request in scheduler.running()
            },
        }
        if plan is None:
            return decided
        ids = [str(scheduler.seqs.request(slot).id) for slot in plan.slots.tolist()]
        decided["sched"] = dict(zip(ids, plan.num_new.tolist(), strict=True))
        decided["new"] = {str(a.request.id): a.cached_tokens for a in plan.admitted if not a.resumed}
        decided["resumed"] = sorted(str(a.request.id) for a in plan.admitted if a.resumed)
        decided["preempted"] = sorted(str(request.id) for request in plan.preempted)
        if plan.drafts is not None:
            decided["spec"] = {i: d for i, d in zip(ids, plan.drafts.tolist(), strict=True) if d}
        return decided

    def _execute(self, plan: StepPlan | None) -> tuple[dict[str, list[int]], list[str]]:
        if plan is None:
            return {}, []
        scheduler = self.scheduler
        owners = [scheduler.seqs.requests[slot] or scheduler._stale.get(slot) for slot in plan.slots.tolist()]
        samples = [True] * len(owners) if plan.samples is None else plan.samples.tolist()
        tokens: list[list[int]] = []
        out: dict[str, list[int]] = {}
        for row, request in enumerate(owners):
            produced: list[int] = []
            if request is not None and samples[row]:
                request_id = str(request.id)
                n = self.outputs[request_id]
                drafts = int(plan.drafts[row]) if plan.drafts is not None else 0
                padded = any(a.request is request for a in plan.admitted)
                accepted = 0
                while accepted < drafts and token_hash(request_id, n, 100 + accepted) % 10 < 6:
                    accepted += 1
                produced = [
                    -1 if padded else token_hash(request_id, n, 200 + z) % _VOCABULARY
                    for z in range(accepted)
                ]
                produced.append(token_hash(request_id, n, 7) % _VOCABULARY)
                left = request.max_tokens - n
                self.outputs[request_id] = n + min(len(produced), left)
            tokens.append(produced)
            if request is not None:
                out[str(request.id)] = produced
        finished = scheduler.commit(plan, StepOutcome(tokens=tokens))
        if self.k:
            for row, request in enumerate(owners):
                if request is not None and samples[row]:
                    scheduler.propose(request, self.k)
        return out, [str(request.id) for request in finished]
