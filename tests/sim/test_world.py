"""Clients, network, router and record: who waits for what, and what is written down."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from serving.errors import UsageError
from sim.record import Floats, RunRecord, Status, Tenant
from sim.router import make_router, router_names
from sim.workload.types import Workload
from sim.world import Frontend, Progress, run_world
from tests.sim.test_fast_forward import POLICIES, configs, workloads
from tests.sim.worlds import LinearPricer, make_workload

ROOT = Path(__file__).parents[2]
CONFIG = SchedulerConfig(num_pages=1000, max_num_seqs=8)
FLAT = LinearPricer(0.25, 0.0, 0.0)
"""A quarter of a second per step, which floats add up exactly."""


# ---- the way in and out ----------------------------------------------------------------------------------------------


def test_ttft_is_the_sum_of_its_parts() -> None:
    workload = replace(make_workload([1.0], [100], [3]), tenants=(Tenant(rtt_s=0.1),))
    run = run_world(
        workload,
        CONFIG,
        FLAT,
        frontend=Frontend(overhead_s=0.02, tokenize_s_per_token=0.001, detokenize_s_per_token=0.003),
    )
    requests = run.requests
    # Half a round trip, the gateway, 100 tokens; a step; one token's text and half a round trip.
    assert requests.queued_s[0] == pytest.approx(1.0 + 0.05 + 0.02 + 0.1, abs=1e-12)
    assert requests.scheduled_s[0] == requests.queued_s[0]
    assert requests.prefill_done_s[0] == pytest.approx(1.17 + 0.25, abs=1e-12)
    assert requests.first_token_s[0] == pytest.approx(1.42 + 0.003 + 0.05, abs=1e-12)
    assert requests.last_token_s[0] == pytest.approx(1.42 + 2 * 0.25 + 0.003 + 0.05, abs=1e-12)
    assert requests.network_s[0] == pytest.approx(0.1 + 0.02, abs=1e-12)
    assert requests.tokenize_s[0] == pytest.approx(0.1, abs=1e-12)


def test_each_tenant_has_its_own_round_trip() -> None:
    workload = replace(
        make_workload([0.0, 0.0], [10, 10], [1, 1]),
        tenant=np.array([0, 1]),
        tenants=(Tenant(name="near", rtt_s=0.0), Tenant(name="far", rtt_s=1.0)),
    )
    requests = run_world(workload, CONFIG, FLAT).requests
    assert requests.queued_s.tolist() == [0.0, 0.5]
    assert requests.first_token_s.tolist() == [0.25, 0.5 + 0.25 + 0.5]


def test_detokenising_delays_tokens_and_does_not_slow_the_engine() -> None:
    plain = run_world(make_workload([0.0], [10], [5]), CONFIG, FLAT)
    slow = run_world(
        make_workload([0.0], [10], [5]), CONFIG, FLAT, frontend=Frontend(detokenize_s_per_token=0.125)
    )
    np.testing.assert_array_equal(slow.steps.end_s, plain.steps.end_s)
    np.testing.assert_array_equal(slow.token_times_s(0), plain.token_times_s(0) + 0.125)


# ---- steps and tokens ------------------------------------------------------------------------------------------------


def test_token_times_are_the_ends_of_the_steps_that_gave_them() -> None:
    # 600 prompt tokens in chunks of 256 are three steps, of which the last gives the first token.
    config = SchedulerConfig(num_pages=1000, max_num_batched_tokens=256)
    run = run_world(make_workload([0.5], [600], [4]), config, FLAT)
    assert run.engine_token_times_s(0).tolist() == [0.5 + 0.25 * step for step in (3, 4, 5, 6)]
    assert run.requests.prefill_done_s[0] == 1.25


def test_a_preemption_leaves_a_gap_in_the_token_stream_and_loses_nothing() -> None:
    # Three pages of 4: both prompts of 4 run, a takes the third page, b starts over when a is done (3 tokens: 3 steps).
    config = SchedulerConfig(num_pages=3, page_tokens=4)
    run = run_world(make_workload([0.0, 0.0], [4, 4], [3, 3]), config, FLAT)
    assert run.engine_token_times_s(0).tolist() == [0.25, 0.5, 0.75]
    # Step 1 gives b's first token; steps 2 and 3 are a's alone; b's second and third follow.
    assert run.engine_token_times_s(1).tolist() == [0.25, 1.0, 1.25]
    assert run.requests.preemptions.tolist() == [0, 1]
    assert run.steps.preemptions.sum() == 1


class Recording(LinearPricer):
    """A price list that remembers what it was asked."""

    def __init__(self, *args: float) -> None:
        super().__init__(*args)
        self.asked: list[tuple[int, int, list[tuple[int, int]], int, int, int]] = []

    def step_s(
        self,
        num_tokens: int,
        num_sampled: int,
        prefills: Sequence[tuple[int, int]],
        num_decodes: int,
        decode_context_sum: int,
        decode_context_max: int,
    ) -> float:
        self.asked.append(
            (num_tokens, num_sampled, list(prefills), num_decodes, decode_context_sum, decode_context_max)
        )
        return super().step_s(
            num_tokens, num_sampled, prefills, num_decodes, decode_context_sum, decode_context_max
        )


def test_a_step_is_priced_by_its_tokens_chunks_and_contexts() -> None:
    pricer = Recording()
    config = SchedulerConfig(num_pages=1000, max_num_batched_tokens=2048)
    run_world(make_workload([0.0, 0.001], [1, 3000], [4, 2]), config, pricer, fast_forward=False)
    assert pricer.asked == [
        # tokens, sampled, chunks (tokens, context before), decodes, their contexts: sum, longest
        (1, 1, [(1, 0)], 0, 0, 0),
        (2048, 1, [(2047, 0)], 1, 2, 2),
        (954, 2, [(953, 2047)], 1, 3, 3),
        (2, 2, [], 2, 4 + 3001, 3001),
    ]


def test_2048_prompt_tokens_take_longer_than_one() -> None:
    short, long = (run_world(make_workload([0.0], [n], [1]), CONFIG, LinearPricer()).end_s for n in (1, 2048))
    # 0.01 + 1e-5 a token + 1e-9 for each query-key pair
    assert short == pytest.approx(0.01 + 1e-5 + 0.5e-9)
    assert long == pytest.approx(0.01 + 0.02048 + 1e-9 * 2048 * 1024)


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize(("asynchronous", "host_s", "step_s"), [
    (False, 0.125, 0.25 + 0.125),  # one after the other
    (True, 0.125, 0.25),  # host work hides behind the device
    (True, 0.5, 0.5),  # or the device waits for the host
])  # fmt: skip
def test_host_work_adds_to_a_step_or_overlaps_with_it(
    asynchronous: bool, host_s: float, step_s: float, fast_forward: bool
) -> None:
    config = replace(CONFIG, async_scheduling=asynchronous)
    run = run_world(
        make_workload([0.0], [10], [50]),
        config,
        LinearPricer(0.25, 0.0, 0.0, host_s),
        fast_forward=fast_forward,
    )
    times = run.engine_token_times_s(0)
    assert (np.diff(times)[:-1] == step_s).all()
    # The very last step has no next one to be planned for.
    assert times[-1] - times[-2] == (0.25 if asynchronous else step_s)


# ---- clients ---------------------------------------------------------------------------------------------------------


def most_in_flight(run: RunRecord) -> int:
    """Requests that had been sent and not ended, at the worst moment; an end at the same time comes first."""
    requests = run.requests
    done_s = np.where(np.isnan(requests.last_token_s), requests.sent_s, requests.last_token_s)
    events = sorted([(t, 1) for t in requests.sent_s.tolist()] + [(t, -1) for t in done_s.tolist()])
    return int(np.cumsum([change for _, change in events]).max())


@pytest.mark.parametrize("limit", [1, 3, 8])
@pytest.mark.parametrize("rtt_s", [0.0, 0.3])
def test_a_closed_loop_keeps_its_limit_and_uses_it(limit: int, rtt_s: float) -> None:
    count = 30
    workload = replace(
        make_workload([0.0] * count, [10] * count, [3 + i % 5 for i in range(count)], max_concurrency=limit),
        tenants=(Tenant(rtt_s=rtt_s),),
    )
    run = run_world(workload, CONFIG, LinearPricer())
    assert most_in_flight(run) == limit
    # Whenever a request ends and one is left, the next is sent at that very moment.
    sent_s = np.sort(run.requests.sent_s)
    ends_s = np.sort(run.requests.last_token_s)
    np.testing.assert_array_equal(sent_s[limit:], ends_s[: count - limit])


def test_a_closed_loop_sends_nothing_before_its_own_time() -> None:
    run = run_world(make_workload([0.0, 0.0, 50.0], [10] * 3, [2] * 3, max_concurrency=1), CONFIG, FLAT)
    assert run.requests.sent_s.tolist() == [0.0, 0.5, 50.0]


@pytest.mark.parametrize("rtt_s", [0.0, 0.5])
def test_a_sessions_next_turn_waits_for_the_answer_and_the_thinking(rtt_s: float) -> None:
    workload = make_workload(
        [0.0, 0.0, 0.0], [10, 20, 30], [2, 3, 1], after=[-1, 0, 1], think_s=[0.0, 1.0, 2.0]
    )
    run = run_world(replace(workload, tenants=(Tenant(rtt_s=rtt_s),)), CONFIG, FLAT)
    requests = run.requests
    assert requests.request_id.tolist() == [0, 1, 2]
    # Two steps, then thinking; three steps, then more thinking; a round trip each time.
    assert requests.sent_s.tolist() == [0.0, rtt_s + 0.5 + 1.0, 2 * rtt_s + 0.5 + 1.0 + 0.75 + 2.0]


def test_a_turn_is_not_sent_before_its_own_time() -> None:
    workload = make_workload([0.0, 9.0], [10, 20], [2, 3], after=[-1, 0], think_s=[0.0, 1.0])
    assert run_world(workload, CONFIG, FLAT).requests.sent_s.tolist() == [0.0, 9.0]


# ---- rejected requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", router_names())
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_rejected_requests_are_counted_with_their_reason_and_nobody_waits_for_them(
    router: str, num_replicas: int
) -> None:
    # Every third request is too long; its session goes on, and so does the closed loop.
    prompts = [10, 500, 10] * 4
    after = [-1, 0, 1, -1, 3, 4, -1, 6, 7, -1, 9, 10]
    workload = make_workload([0.0] * 12, prompts, [3] * 12, after=after, max_concurrency=3)
    config = SchedulerConfig(num_pages=20, page_tokens=16, max_num_seqs=1)
    run = run_world(workload, config, FLAT, num_replicas=num_replicas, router=router)
    requests = run.requests
    assert len(requests) == 12
    rejected = requests.status == Status.REJECTED
    assert (rejected == (requests.prompt_tokens == 500)).all()
    assert all("needs more than the whole KV cache" in reason for reason in requests.reason[rejected])
    assert (requests.status[~rejected] == Status.FINISHED).all()
    assert np.isnan(requests.first_token_s[rejected]).all()
    assert (requests.output_tokens[rejected] == 0).all()


def test_a_request_too_long_for_any_replica_is_rejected_when_it_arrives_and_not_when_a_seat_is_free() -> None:
    # One queue for all: the first request holds the only seat for 2.5 s.
    workload = make_workload([0.0, 0.1, 0.2], [10, 500, 10], [10, 3, 3], after=[-1, -1, 1])
    config = SchedulerConfig(num_pages=20, page_tokens=16, max_num_seqs=1)
    run = run_world(workload, config, FLAT, router="central")
    assert run.requests.status.tolist() == [Status.FINISHED, Status.REJECTED, Status.FINISHED]
    # The refusal is known at 0.1, so that the session's next turn is sent at its own time.
    assert run.requests.sent_s.tolist() == [0.0, 0.1, 0.2]


def test_an_unknown_router_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="did you mean 'central'"):
        make_router("centrl", [])


# ---- runs that end early ---------------------------------------------------------------------------------------------


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
    for order in ("fcfs", "priority", "sjf", "edf"):
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
