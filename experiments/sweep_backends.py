"""Who runs the tasks of a sweep: this machine's cores by joblib, or a Ray cluster. The results do not depend on it."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

from experiments.sweep_spec import Params
from experiments.sweep_store import Outcome, Task
from serving.errors import TokenTwinError, UsageError

Runner = Callable[[Params, Params, int], dict[str, Any]]
"""(base flags, overrides, number of the run) → result JSON. A function of a module, so that workers find it."""


class Backend(Protocol):
    """Runs tasks and yields what became of them, in any order."""

    def run(self, runner: Runner, base: Params, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
        """Yield each task with its outcome as soon as it is there."""


def attempt(runner: Runner, base: Params, task: Task) -> tuple[Task, Outcome]:
    """Run one task; an error becomes its outcome."""
    try:
        return task, Outcome(runner(base, task.params, task.run))
    except Exception as error:
        kind = type(error).__name__
        return task, Outcome(None, " ".join(str(error).split()) or kind, kind)


def _in_worker(parent: int, runner: Runner, base: Params, task: Task) -> tuple[Task, Outcome]:
    _leave_with(parent)
    return attempt(runner, base, task)


@lru_cache(maxsize=1)
def _leave_with(parent: int) -> None:
    """End this process soon after its parent was killed; joblib's would wait for work for minutes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True, slots=True)
class Local:
    """Processes of this machine, kept for the whole sweep, so that each works out a deployment once."""

    jobs: int = 0
    """Processes; 0 is one for each core."""

    def run(self, runner: Runner, base: Params, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
        jobs = min(self.jobs or _cores(), len(tasks))
        if jobs <= 1:
            for task in tasks:
                yield attempt(runner, base, task)
            return
        joblib: Any = import_module("joblib")
        warnings.filterwarnings(
            "ignore", message=r"\d+ tasks which were", category=UserWarning
        )  # after Ctrl-C
        work = joblib.delayed(_in_worker)
        parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")
        try:
            yield from parallel(work(os.getpid(), runner, base, task) for task in tasks)
        except RuntimeError as error:
            if type(error).__name__ != "TerminatedWorkerError":
                raise
            raise TokenTwinError(
                "a worker process died, perhaps for lack of memory; lower --jobs and continue with --resume"
            ) from None


@dataclass(frozen=True, slots=True)
class Ray:
    """A Ray cluster. Its machines need the same TokenTwin, and the files that the sweep names."""

    address: str | None = None
    """Of a running cluster ("auto", "host:6379" or "ray://host:10001"); None starts one on this machine."""

    def run(self, runner: Runner, base: Params, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
        ray = self.connect()
        work = ray.remote(attempt)
        shared = ray.put(base)
        waiting = list(tasks)[::-1]
        running: list[Any] = []
        most = max(2 * int(ray.cluster_resources().get("CPU", 1)), 2)
        while waiting or running:
            while waiting and len(running) < most:
                running.append(work.remote(runner, shared, waiting.pop()))
            ready, running = ray.wait(running, num_returns=1)
            for reference in ready:
                yield ray.get(reference)

    def connect(self) -> Any:
        """The `ray` module, connected. Raises UsageError where it is not installed or nobody answers."""
        try:
            ray: Any = import_module("ray")
        except ImportError:
            raise UsageError(
                "--backend ray needs Ray: pip install 'tokentwin[cluster]', or leave --backend out to use this machine"
            ) from None
        if not ray.is_initialized():
            try:
                ray.init(
                    address=self.address,
                    log_to_driver=False,
                    configure_logging=False,
                    include_dashboard=None if self.address else False,
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())[:200]
                raise UsageError(f"--address {self.address}: no Ray cluster answers ({reason})") from None
        return ray


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def make_backend(name: str, *, jobs: int | None = None, address: str | None = None) -> Backend:
    """The backend called `name` ("joblib" or "ray"). Raises UsageError for a flag without effect."""
    if name == "ray":
        if jobs is not None:
            raise UsageError("--jobs has no effect with --backend ray; the cluster's cores are used")
        backend = Ray(address)
        backend.connect()
        return backend
    if address is not None:
        raise UsageError("--address has no effect without --backend ray; add it")
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {jobs}")
    return Local(jobs or 0)
