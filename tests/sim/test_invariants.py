"""Laws that hold on every run: flow, conservation, scale, and what the chapter says of static and continuous batching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from serving.policies import BatchPolicy, Chunked, Continuous, Static
from sim.record import Floats, RunRecord, Status
from sim.router import router_names
from sim.workload.types import Workload
from sim.world import Frontend, run_world
from tests.sim.test_fast_forward import POLICIES, configs, workloads
from tests.sim.worlds import LinearPricer, make_workload


def total_in_system(run: RunRecord, replica: int) -> tuple[float, float]:
    """Area under the number running and under the number waiting over a replica's steps."""
    steps = run.steps
    mine = steps.replica == replica
    lasted = steps.end_s[mine] - steps.start_s[mine]
    return float(lasted @ steps.num_running[mine]), float(lasted @ steps.num_waiting[mine])


@settings(max_examples=150, deadline=None)
@given(workloads(), configs(), st.sampled_from(["chunked", "continuous"]), st.integers(1, 2), st.booleans())
def test_littles_law_holds_as_an_exact_identity(
    workload: Workload, config: SchedulerConfig, policy: str, num_replicas: int, fast_forward: bool
) -> None:
    # L = lambda·W: the area under "how many are there", summed over steps, is the sum of the times they were there.
    # Somebody who arrives during a step is first seen by the step after it. (A closed loop's next request may come at
    # the very moment, and because, a step ended; whether the next step sees it is another matter.)
    workload = replace(workload, closed_loop=None)
    config = replace(config, async_scheduling=False)
    run = run_world(
        workload,
        config,
        LinearPricer(host_s=0.003),
        make_policy=POLICIES[policy],
        num_replicas=num_replicas,
        fast_forward=fast_forward,
    )
    requests, steps = run.requests, run.steps
    assume((requests.preemptions == 0).all())
    for replica in range(num_replicas):
        mine = (requests.replica == replica) & (requests.status == Status.FINISHED)
        scheduled_s, queued_s = requests.scheduled_s[mine], requests.queued_s[mine]
        running, waiting = total_in_system(run, replica)
        assert running == pytest.approx(float((requests.engine_done_s[mine] - scheduled_s).sum()), rel=1e-9)
        starts_s = steps.start_s[steps.replica == replica]
        seen_s = starts_s[np.searchsorted(starts_s, queued_s, side="left")] if mine.any() else queued_s
        assert waiting == pytest.approx(float((scheduled_s - seen_s).sum()), rel=1e-9, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(workloads(), configs(), st.sampled_from(["chunked", "continuous"]), st.sampled_from(router_names()))
def test_no_engine_idles_while_a_request_is_there(
    workload: Workload, config: SchedulerConfig, policy: str, router: str
) -> None:
    run = run_world(
        workload, config, LinearPricer(), make_policy=POLICIES[policy], num_replicas=2, router=router
    )
    requests, steps = run.requests, run.steps
    for replica in range(2):
        mine = (requests.replica == replica) & (requests.status != Status.REJECTED)
        of = steps.replica == replica
        starts_s, ends_s = steps.start_s[of], steps.end_s[of]
        idle_from = np.concatenate(([0.0], ends_s))[: len(starts_s)]
        for begin_s, end_s in zip(idle_from.tolist(), starts_s.tolist(), strict=True):
            if end_s > begin_s:
                # Somebody had come to this engine's queue before the gap ended and not left when it began?
                came_s = np.maximum(requests.queued_s, requests.sent_s)
                there = mine & (came_s < end_s) & (requests.engine_done_s > begin_s)
                if router == "central":
                    there &= requests.scheduled_s < end_s
                assert not there.any()


@settings(max_examples=100, deadline=None)
@given(
    workloads(),
    configs(),
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 3),
    st.sampled_from(router_names()),
    st.sampled_from([0.3, 1.0, 5.0, float("inf")]),
    st.sampled_from([0.0, 0.2]),
)
def test_every_request_is_finished_rejected_or_unfinished(
    workload: Workload,
    config: SchedulerConfig,
    policy: str,
    num_replicas: int,
    router: str,
    until_s: float,
    rtt_s: float,
) -> None:
    workload = replace(workload, tenants=tuple(replace(t, rtt_s=rtt_s) for t in workload.tenants))
    run = run_world(
        workload,
        config,
        LinearPricer(),
        make_policy=POLICIES[policy],
        num_replicas=num_replicas,
        router=router,
        until_s=until_s,
        frontend=Frontend(0.001, 1e-5, 1e-6),
    )
    requests = run.requests
    by_status = np.bincount(requests.status, minlength=3)
    assert by_status.sum() == len(requests) <= len(workload)
    assert len(set(requests.request_id.tolist())) == len(requests)
    unfinished = requests.status == Status.UNFINISHED
    if until_s == float("inf"):
        assert len(requests) == len(workload)
        assert not unfinished.any()
    for row in range(len(requests)):
        times = run.engine_token_times_s(row)
        assert len(times) == requests.output_tokens[row]
        if requests.status[row] == Status.REJECTED:
            assert requests.reason[row]
            assert len(times) == 0
        if requests.status[row] == Status.FINISHED:
            assert requests.reason[row] == "length"
            assert requests.sent_s[row] <= requests.queued_s[row] <= requests.scheduled_s[row]
            assert requests.scheduled_s[row] < requests.prefill_done_s[row] <= requests.engine_done_s[row]
            assert times[0] == requests.prefill_done_s[row]
            # Its last token ended it, unless it was cut off for want of pages.
            whole = requests.output_tokens[row] == requests.max_output_tokens[row]
            assert times[-1] == requests.engine_done_s[row] or (
                not whole and times[-1] < requests.engine_done_s[row]
            )
    assert (run.steps.used_pages <= config.num_pages).all()
    assert (run.steps.num_running <= config.max_num_seqs).all()
    assert (run.steps.end_s >= run.steps.start_s).all()


# ---- scale -----------------------------------------------------------------------------------------------------------

TIMES = ("sent_s", "queued_s", "scheduled_s", "prefill_done_s", "engine_done_s", "first_token_s", "last_token_s",
         "network_s", "tokenize_s", "blocked_s", "held_s", "gateway_s", "detokenize_s", "reader_s")  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    workloads(),
    configs(),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([0.0, 0.004]),
    st.sampled_from([2, 0.25]),
)
def test_stretching_all_times_stretches_all_latencies(
    workload: Workload, config: SchedulerConfig, policy: str, host_s: float, factor: float
) -> None:
    # Powers of two change only the exponent of a float, so that the stretched run is equal and not just close.
    def run(f: float) -> RunRecord:
        def make_policy() -> BatchPolicy:
            return Static(max_wait_s=0.1 * f) if policy == "static" else POLICIES[policy]()

        return run_world(
            replace(
                workload,
                sent_s=workload.sent_s * f,
                think_s=workload.think_s * f,
                tenants=tuple(replace(t, rtt_s=0.03 * f) for t in workload.tenants),
            ),
            replace(config, session_keep_s=config.session_keep_s * f),
            LinearPricer(0.01 * f, 1e-5 * f, 1e-7 * f, host_s * f),
            make_policy=make_policy,
            frontend=Frontend(0.002 * f, 1e-5 * f, 1e-6 * f),
        )

    plain, stretched = run(1.0), run(factor)
    for name, column in plain.requests.columns().items():
        expected = column * factor if name in TIMES else column
        if column.dtype == object:
            assert column.tolist() == stretched.requests.columns()[name].tolist()
        else:
            np.testing.assert_array_equal(stretched.requests.columns()[name], expected, err_msg=name)
    for name, column in plain.steps.columns().items():
        expected = column * factor if name.endswith("_s") else column
        np.testing.assert_array_equal(stretched.steps.columns()[name], expected, err_msg=name)


def busy_workload(seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    count = 60
    return make_workload(
        np.cumsum(rng.exponential(0.05, count)).tolist(),
        rng.integers(10, 300, count).tolist(),
        rng.integers(5, 60, count).tolist(),
    )


@pytest.mark.parametrize("seed", range(5))
def test_more_capacity_never_hurts_the_mean(seed: int) -> None:
    # Common random numbers: the same requests at the same times.
    def mean_s(num_replicas: int = 1, num_pages: int = 60, speed: float = 1.0) -> float:
        run = run_world(
            busy_workload(seed),
            SchedulerConfig(num_pages=num_pages, max_num_seqs=16, max_num_batched_tokens=256),
            LinearPricer(0.02 / speed, 1e-4 / speed, 1e-6 / speed),
            num_replicas=num_replicas,
            router="central",
        )
        assert (run.requests.status == Status.FINISHED).all()
        return float((run.requests.last_token_s - run.requests.sent_s).mean())

    for means in (
        [mean_s(num_replicas=n) for n in (1, 2, 4)],
        [mean_s(num_pages=n) for n in (60, 120, 600)],
        [mean_s(speed=f) for f in (1.0, 1.3, 2.0)],
    ):
        assert means == sorted(means, reverse=True)
        assert means[-1] < means[0]


# ---- static and continuous batching --------------------------------------------------------------------------------


class Watching(LinearPricer):
    """Notes how many sequences each step computes, finished ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[int] = []

    def step_s(
        self,
        num_tokens: int,
        num_sampled: int,
        prefills: Sequence[tuple[int, int]],
        num_decodes: int,
        decode_context_sum: int,
        decode_context_max: int,
    ) -> float:
        self.computed.append(len(prefills) + num_decodes)
        return super().step_s(
            num_tokens, num_sampled, prefills, num_decodes, decode_context_sum, decode_context_max
        )

    def decode_run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> Floats:
        self.computed += [num_decodes] * num_steps
        return super().decode_run_s(num_decodes, context_sum, context_max, num_steps)


CHAPTER_BATCH = [50] * 7 + [400]
"""Answer lengths of the chapter's example: seven requests of 50 tokens and one of 400."""


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_static_batch_of_seven_short_and_one_long_runs_its_last_350_steps_at_an_eighth(
    fast_forward: bool,
) -> None:
    pricer = Watching()
    run = run_world(
        make_workload([0.0] * 8, [20] * 8, CHAPTER_BATCH),
        SchedulerConfig(num_pages=1000, max_num_seqs=8),
        pricer,
        make_policy=lambda: Static(batch_size=8),
        fast_forward=fast_forward,
    )
    # The prompt's step gives the first token: 400 steps, of which the short ones use 50.
    assert len(run.steps) == 400
    assert run.steps.num_running.tolist() == [8] * 50 + [1] * 350
    # All eight rows are computed to the end: 1 of 8 is alive, 12.5 %.
    assert pricer.computed[:400] == [8] * 400
    occupancy = run.steps.num_running / np.array(pricer.computed[:400])
    assert (occupancy[-350:] == 0.125).all()


def test_continuous_batching_beats_static_on_that_mixture() -> None:
    count = 64
    makespan, mean = {}, {}
    for policy in (Static, Continuous, Chunked):
        run = run_world(
            make_workload([0.0] * count, [20] * count, CHAPTER_BATCH * (count // 8)),
            SchedulerConfig(num_pages=1000, max_num_seqs=8, max_num_batched_tokens=512),
            LinearPricer(),
            make_policy=policy,
        )
        makespan[policy] = run.end_s
        mean[policy] = float(run.requests.last_token_s.mean())
    # Static: eight batches of 400 steps. Continuous: 8·(7·50 + 400) = 6,000 tokens on eight seats are 750 steps, and
    # the 400 of the last long one can at worst come after them.
    steps_static, steps_continuous = 8 * 400, 750 + 400
    for better in (Continuous, Chunked):
        assert makespan[better] < makespan[Static] * 1.1 * steps_continuous / steps_static
        assert mean[better] < mean[Static] / 2


def test_a_batch_that_fills_in_time_does_not_wait_for_its_deadline() -> None:
    run = run_world(
        make_workload([0.0, 0.02, 0.04], [10] * 3, [5] * 3),
        SchedulerConfig(num_pages=100, max_num_seqs=8),
        LinearPricer(),
        make_policy=lambda: Static(batch_size=2, max_wait_s=0.1),
    )
    # The first two start when the second arrives. The third waits 0.1 s of its own, or for the batch to end if later:
    # five steps of a little over 0.01 s end at 0.07, so it starts at 0.04 + 0.1.
    assert run.requests.scheduled_s.tolist() == [0.02, 0.02, 0.04 + 0.1]
