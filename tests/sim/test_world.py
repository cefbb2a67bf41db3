"""Clients, network, router and record: who waits for what, and what is written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.policies import BatchPolicy
from serving.step import Step
from sim.deployment import Deployment, build, simulate
from sim.record import RunRecord, Status, Tenant
from sim.router import make_router, router_names
from sim.world import Frontend, run_world
from tests.sim.test_fast_forward import POLICIES
from tests.sim.worlds import LinearPricer, make_workload

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
    assert requests.network_s[0] == pytest.approx(0.1, abs=1e-12)
    assert requests.gateway_s[0] == 0.02
    assert requests.detokenize_s[0] == 0.003
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


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_decode_that_waits_for_others_prompts_has_a_gap_in_its_token_stream(
    fast_forward: bool, asynchronous: bool
) -> None:
    # `continuous` stalls decodes while prompts run. Steps of 0.25 s: prompt of 0, decode, decode, prompt of 1 (it came
    # at 0.6), then both decode, then the prompt of 2 (it came at 1.1), then all that is left.
    config = replace(CONFIG, async_scheduling=asynchronous)
    run = run_world(
        make_workload([0.0, 0.6, 1.1], [4, 4, 4], [8, 6, 2]),
        config,
        FLAT,
        make_policy=POLICIES["continuous"],
        fast_forward=fast_forward,
    )
    late = (
        0.25 if asynchronous else 0.0
    )  # a step planned ahead does not see who comes while the one before it runs
    gaps = [0.75 + late, 1.25 + late]
    grid = [0.25 * i for i in range(1, 20)]
    expected = [t for t in grid if t - 0.25 not in gaps][:8]
    assert run.engine_token_times_s(0).tolist() == expected
    for row in range(3):
        assert run.requests.last_token_s[row] == run.requests.engine_done_s[row]


class Passing(BatchPolicy):
    """Lets one half of the running requests decode in even steps and the other half in odd ones."""

    def schedule(self, step: Step) -> None:
        step.admit_waiting()
        for request in step.running:
            if (request.id + step.scheduler.num_planned) % 2:  # type: ignore[operator]
                step.extend(request)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_policy_that_passes_over_running_requests_leaves_gaps_in_their_token_streams(
    asynchronous: bool,
) -> None:
    config = replace(CONFIG, async_scheduling=asynchronous)
    run = run_world(make_workload([0.0] * 2, [4, 4], [4, 4]), config, FLAT, make_policy=Passing)
    # Both prompts in the first step; then 0, 1, 0, 1, 0, 1.
    assert run.engine_token_times_s(0).tolist() == [0.25, 0.5, 1.0, 1.5]
    assert run.engine_token_times_s(1).tolist() == [0.25, 0.75, 1.25, 1.75]
    assert run.requests.engine_done_s.tolist() == [1.5, 1.75]


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


def test_padding_beside_chunks_alone_has_a_token_of_context() -> None:
    # The first of a static batch of two ends with its prompt, while the other's is in its second chunk.
    deployment = Deployment(
        model="llama-3.1-8b",
        gpu="a100",
        policy="static",
        static_batch_size=2,
        long_prefill_token_threshold=64,
        max_model_len=4096,
    )
    workload = make_workload([0.0, 0.0], [10, 128], [1, 3])
    run = simulate(workload, deployment)
    chunk_s = build(deployment).pricer.step_s(64 + 1, 1 + 1, [(64, 64)], 1, 1, 1)
    assert run.steps.gpu_s[1] == chunk_s
    assert (run.requests.status == Status.FINISHED).all()


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
