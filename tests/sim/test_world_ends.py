"""Runs that end before their requests do, and runs that are repeated."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from sim.record import Floats, RunRecord, Status
from sim.workload.types import Workload
from sim.world import Progress, run_world
from tests.sim.test_fast_forward import POLICIES, configs, workloads
from tests.sim.worlds import LinearPricer, make_workload

ROOT = Path(__file__).parents[2]
CONFIG = SchedulerConfig(num_pages=1000, max_num_seqs=8)
FLAT = LinearPricer(0.25, 0.0, 0.0)
"""A quarter of a second per step, which floats add up exactly."""


def assert_consistent(run: RunRecord, workload: Workload) -> None:
    """Whatever is written down belongs together."""
    requests, steps = run.requests, run.steps
    assert len(requests) <= len(workload)
    assert np.bincount(requests.status, minlength=3).sum() == len(requests)
    for row in range(len(requests)):
        times = run.engine_token_times_s(row)
        assert len(times) == requests.output_tokens[row]
        assert (np.diff(times) > 0).all()
        assert (times <= run.end_s).all()
        finished = requests.status[row] == Status.FINISHED
        assert np.isnan(requests.engine_done_s[row]) != finished
        if len(times):
            assert requests.prefill_done_s[row] == times[0]
        if requests.status[row] == Status.UNFINISHED:
            assert requests.output_tokens[row] < requests.max_output_tokens[row]
    assert (steps.end_s >= steps.start_s).all()


class Interrupting(LinearPricer):
    """Ctrl-C in the n-th pricing of a step."""

    def __init__(self, after: int) -> None:
        super().__init__(host_s=0.004)
        self.after = after

    def step_s(self, *args: object) -> float:  # type: ignore[override]
        self.after -= 1
        if self.after < 0:
            raise KeyboardInterrupt
        return super().step_s(*args)  # type: ignore[arg-type]

    def decode_run_s(self, *args: object) -> Floats:  # type: ignore[override]
        self.after -= 1
        if self.after < 0:
            raise KeyboardInterrupt
        return super().decode_run_s(*args)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(workloads(), configs(), st.sampled_from(sorted(POLICIES)), st.integers(0, 40), st.integers(1, 2))
def test_an_interrupted_run_leaves_a_partial_record_that_is_consistent(
    workload: Workload, config: SchedulerConfig, policy: str, after: int, num_replicas: int
) -> None:
    pricer = Interrupting(after)
    run = run_world(workload, config, pricer, make_policy=POLICIES[policy], num_replicas=num_replicas)
    assert run.interrupted == (pricer.after < 0)
    assert_consistent(run, workload)


def test_an_interrupted_run_says_how_many_requests_had_not_ended() -> None:
    run = run_world(
        make_workload([0.0, 0.0, 9.0], [10] * 3, [2, 40, 2]), CONFIG, Interrupting(5), fast_forward=False
    )
    assert run.interrupted
    assert run.requests.status.tolist() == [Status.FINISHED, Status.UNFINISHED]
    # Five steps were run: the prompt's gave the first token.
    assert run.requests.output_tokens.tolist() == [2, 5]
    assert run.warnings == ("2 of 3 requests had not ended when the run did",)


class InterruptedAt(LinearPricer):
    """Ctrl-C when a step with so many tokens is priced; every other takes a quarter of a second."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(0.25, 0.0, 0.0)
        self.num_tokens = num_tokens

    def step_s(self, num_tokens: int, *args: object) -> float:  # type: ignore[override]
        if num_tokens == self.num_tokens:
            raise KeyboardInterrupt
        return super().step_s(num_tokens, *args)  # type: ignore[arg-type]


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_interrupt_keeps_the_steps_that_were_over_on_other_replicas(
    fast_forward: bool, asynchronous: bool
) -> None:
    config = replace(CONFIG, async_scheduling=asynchronous)
    workload = make_workload([0.0, 10.1], [10, 77], [100, 5])
    run = run_world(workload, config, InterruptedAt(77), num_replicas=2, fast_forward=fast_forward)
    assert run.interrupted
    assert_consistent(run, workload)
    # The first replica gave a token each quarter of a second until the second got its request.
    assert run.requests.output_tokens.tolist() == [40, 0]
    assert run.end_s == 10.0
    assert len(run.steps) == 40


def test_an_interrupt_from_the_progress_callback_ends_the_run() -> None:
    def progress(told: Progress) -> None:
        raise KeyboardInterrupt

    workload = make_workload([0.0], [10], [5])
    run = run_world(workload, CONFIG, FLAT, progress=progress)
    assert run.interrupted
    assert_consistent(run, workload)


def test_progress_is_told_at_the_end() -> None:
    told: list[Progress] = []
    run = run_world(make_workload([0.0, 1.0], [10] * 2, [5] * 2), CONFIG, FLAT, progress=told.append)
    assert (told[-1].done, told[-1].total) == (2, 2)
    assert told[-1].sim_s == run.end_s


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_may_end_at_a_given_time(fast_forward: bool, asynchronous: bool) -> None:
    config = replace(CONFIG, async_scheduling=asynchronous)
    workload = make_workload([0.0, 0.5, 50.0], [10] * 3, [3, 100, 2])
    run = run_world(workload, config, FLAT, until_s=5.0, fast_forward=fast_forward)
    assert run.requests.status.tolist() == [Status.FINISHED, Status.UNFINISHED]
    assert run.end_s <= 5.0
    assert_consistent(run, workload)


def test_an_empty_workload_is_an_empty_run() -> None:
    run = run_world(make_workload([], [], []), CONFIG, FLAT)
    assert (len(run.requests), len(run.steps), run.end_s) == (0, 0, 0.0)


# ---- determinism -----------------------------------------------------------------------------------------------------

SCRIPT = """
import hashlib
import numpy as np
from serving.config import SchedulerConfig
from serving.policies import Chunked, Continuous, Static
from sim.world import run_world
from tests.sim.worlds import LinearPricer, make_workload

rng = np.random.default_rng(11)
count = 150
prompts, outputs = rng.integers(1, 200, count).tolist(), rng.integers(1, 80, count).tolist()
workload = make_workload(
    np.cumsum(rng.exponential(0.02, count)).tolist(), prompts, outputs,
    segments=[[(min(p, 96), int(rng.integers(1, 4)))] if rng.random() < 0.5 else [] for p in prompts],
    priority=rng.integers(0, 3, count).tolist(),
)
digest = hashlib.sha256()
for policy in (Chunked, Continuous, Static):
    for order in ("fcfs", "priority", "sjf", "edf", "fair"):
        config = SchedulerConfig(num_pages=80, max_num_seqs=12, queue_order=order, async_scheduling=policy is Chunked)
        run = run_world(workload, config, LinearPricer(), make_policy=policy, num_replicas=2, router="least_outstanding")
        for table in (run.requests, run.steps):
            for name, column in table.columns().items():
                digest.update(name.encode())
                digest.update(repr(column.tolist()).encode() if column.dtype == object else column.tobytes())
        for part in (run.tokens.offsets, run.tokens.first_step, run.tokens.count):
            digest.update(part.tobytes())
print(digest.hexdigest(), len(run.steps))
"""


def test_the_same_seed_gives_the_same_bytes_in_every_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    digest, steps = outputs.pop().split()
    assert len(digest) == 64
    assert int(steps) > 100
