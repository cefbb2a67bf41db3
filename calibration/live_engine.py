"""The engine under a workload: on the wall's clock in its own thread, or on the CPU time of the caller's.

On a shared machine a thread waits while neighbours run, and wall time says more about them than about the engine. So on
the CPU the same loop runs here in the caller's thread, on a clock that counts the thread's CPU time, stands still while
clients prepare their requests, and leaps to the next arrival when there is nothing to do. Scheduler, runner, kernels,
detokeniser and recorder are the engine's own; only who reads the clock differs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from realengine.answer import Output
from realengine.engine import Engine
from realengine.generation import Sampling
from realengine.inputs import StepInputs
from realengine.runner import Drawn, Runner
from realengine.seats import Draws
from serving.errors import TokenTwinError, UsageError
from sim.record import RequestTable, RunRecord, StepTable, TokenRanges
from sim.workload.types import Workload

_TICKS_PER_S = 2**30
CLOCKS = ("cpu", "wall")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that a client sends."""

    sent_s: float
    prompt: Sequence[int]
    max_tokens: int


def arrivals_of(workload: Workload, vocab_size: int, seed: int = 0) -> list[Arrival]:
    """Requests with token ids such that prompts are equal exactly where the workload says they are.

    Raises `UsageError` for beam searches, which its clients do not know.
    """
    if workload.beam_width is not None or workload.best_of is not None:
        raise UsageError(
            "validate --live serves neither beam searches nor best-of; leave out beam_width and best_of, or compare "
            "tokentwin run and simulate by tokentwin diff"
        )
    rng = np.random.default_rng(seed)
    streams: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
    out = []
    for row in range(len(workload)):
        count = int(workload.prompt_tokens[row])
        ids = rng.integers(3, vocab_size, count)
        begun = 0
        low, high = (int(workload.segment_offsets[row + i]) for i in (0, 1))
        for end, stream in zip(
            workload.segment_ends[low:high].tolist(),
            workload.segment_streams[low:high].tolist(),
            strict=True,
        ):
            end = min(end, count)
            known = streams.get(stream, np.empty(0, np.int64))
            if len(known) < end:
                fresh = np.random.default_rng((seed, int(stream))).integers(3, vocab_size, end)
                known = streams[stream] = fresh
            ids[begun:end] = known[begun:end]
            begun = end
        out.append(Arrival(float(workload.sent_s[row]), ids.tolist(), int(workload.output_tokens[row])))
    return out


class CpuTimeRunner:
    """A runner whose device time is the CPU time of the calling thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def launch(self, inputs: StepInputs, draws: Draws) -> Callable[[], Drawn]:
        begun_s = time.thread_time()
        drawn = self._runner.launch(inputs, draws)()
        drawn.device_s = time.thread_time() - begun_s
        return lambda: drawn

    def close(self) -> None:
        self._runner.close()


class IdleRunner:
    """A device that takes no time and draws token 5: what is left of a step is the host's."""

    def launch(self, inputs: StepInputs, draws: Draws) -> Callable[[], Drawn]:
        return lambda: Drawn(np.full(len(inputs.sample_rows), 5, np.int64), 0.0)

    def close(self) -> None: ...


class CpuTimeEngine(Engine):
    """`serve(arrivals)` runs them all in the calling thread; the record is in CPU seconds of that thread."""

    _skipped_s = 0.0
    _as_of: float | None = None
    _arrivals: deque[Arrival]
    _progress: Callable[[int], None] | None = None

    def serve(self, arrivals: Sequence[Arrival], progress: Callable[[int], None] | None = None) -> None:
        """Serve all; returns when the last has ended. `progress` is told how many have been sent."""
        self._arrivals = deque(sorted(arrivals, key=lambda arrival: arrival.sent_s))
        self._progress, self._sent = progress, 0
        self._skipped_s = -time.thread_time()
        self._serve()
        self.recorder.settle()
        self.runner.close()

    def now_s(self) -> float:
        """CPU seconds of this thread since `serve`, less what clients used, plus the idle time leapt over."""
        if self._as_of is not None:
            return self._as_of
        return round((time.thread_time() + self._skipped_s) * _TICKS_PER_S) / _TICKS_PER_S

    def _boundary(self, *first: Callable[[], None] | None) -> None:
        now_s = self.now_s()
        while self._arrivals and self._arrivals[0].sent_s <= now_s:
            self._send(self._arrivals.popleft())
        super()._boundary(*first)

    def _send(self, arrival: Arrival) -> None:
        begun_s, self._as_of = time.thread_time(), arrival.sent_s
        self.add(arrival.prompt, _sampling(arrival), _nobody)
        self._as_of = None
        self._sent += 1
        if self._progress is not None:
            self._progress(self._sent)
        self._skipped_s -= time.thread_time() - begun_s

    def _sleep(self) -> None:
        next_s = self._arrivals[0].sent_s if self._arrivals else float("inf")
        until_s = min(next_s, self.scheduler.wake_s)
        if until_s == float("inf"):
            self._stopping = True
            return
        self._skipped_s += max(0.0, until_s - self.now_s())
        self._boundary()


def serve_on_the_wall(
    engine: Engine, arrivals: Sequence[Arrival], progress: Callable[[int], None] | None = None
) -> None:
    """Start the engine, send every request at its time from this thread, and stop it when all have ended."""
    left = threading.Semaphore(0)

    def listener(output: Output) -> None:
        if output.finish_reason is not None:
            left.release()

    engine.start()
    origin_s = engine.now_s()
    try:
        for count, arrival in enumerate(sorted(arrivals, key=lambda a: a.sent_s), 1):
            while (wait_s := origin_s + arrival.sent_s - engine.now_s()) > 0:
                time.sleep(min(wait_s, 0.2))
            engine.add(arrival.prompt, _sampling(arrival), listener)
            if progress is not None:
                progress(count)
        for _ in arrivals:
            while not left.acquire(timeout=1.0):
                if engine.fault is not None:
                    raise TokenTwinError(
                        f"the engine ended with {engine.fault!r} before all requests were served"
                    )
    finally:
        engine.stop(timeout_s=30)


def record_of(engine: Engine, workload: Workload, meta: dict[str, Any]) -> RunRecord:
    """What the engine wrote down, as the record that the twin leaves too."""
    recorder, config = engine.recorder, engine.config
    requests = RequestTable(**recorder.request_columns())
    steps = StepTable(**recorder.step_columns())
    return RunRecord(
        requests=requests,
        steps=steps,
        tokens=TokenRanges(**recorder.token_columns()),
        tenants=workload.tenants,
        num_pages=config.num_pages,
        page_tokens=config.page_tokens,
        num_replicas=1,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        end_s=float(steps.end_s.max()) if len(steps) else 0.0,
        meta=meta,
    )


def _sampling(arrival: Arrival) -> Sampling:
    return Sampling(max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=True)


def _nobody(output: Output) -> None:
    """Listens to nothing."""
