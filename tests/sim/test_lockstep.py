"""Data-parallel ranks that share their experts: steps begin and end together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.prices import Step
from serving.config import SchedulerConfig
from serving.errors import UsageError
from sim.deployment import Deployment, build, simulate
from sim.noise import StepNoise
from sim.record import RunRecord, Status
from sim.world import run_world
from tests.sim.worlds import LinearPricer, make_workload

FIXED_S, OWN_S, SHARED_S = 0.01, 1e-4, 1e-5
CONFIG = SchedulerConfig(
    num_pages=200, page_tokens=16, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=2048
)


class GroupPrices(LinearPricer):
    """A fixed time, one for each of a rank's own tokens, and one for each token of all ranks (1 of an idle rank)."""

    def lockstep_s(self, steps: Sequence[Step | None]) -> list[float]:
        total = sum(1 if step is None else step[0] for step in steps)  # type: ignore[misc]
        own = [0 if step is None else step[0] for step in steps]
        return [FIXED_S + OWN_S * each + SHARED_S * total for each in own]  # type: ignore[operator]


class OneRank(LinearPricer):
    def lockstep_s(self, steps: Sequence[Step | None]) -> list[float]:
        (step,) = steps
        assert step is not None
        return [self.step_s(*step)]  # type: ignore[arg-type]


def tables(run: RunRecord) -> list[np.ndarray]:
    columns = [
        getattr(run.steps, name) for name in ("replica", "start_s", "end_s", "gpu_s", "host_s", "num_tokens")
    ]
    times = [
        getattr(run.requests, name) for name in ("replica", "scheduled_s", "first_token_s", "last_token_s")
    ]
    return [*columns, *times]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("noise", [None, StepNoise(0.1, 3, stall_rate=0.1, stall_s=0.01)])
def test_a_group_of_one_is_a_plain_replica(asynchronous: bool, noise: StepNoise | None) -> None:
    rng = np.random.default_rng(5)
    config = SchedulerConfig(
        num_pages=60,
        page_tokens=16,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        max_model_len=900,
        async_scheduling=asynchronous,
    )
    sent = np.sort(rng.uniform(0, 3, 60)).tolist()
    workload = make_workload(sent, rng.integers(1, 300, 60).tolist(), rng.integers(1, 120, 60).tolist())
    prices = OneRank(host_s=0.004)
    plain = run_world(workload, config, prices, fast_forward=False, noise=noise)
    group = run_world(workload, config, prices, lockstep=True, noise=noise)
    for one, other in zip(tables(plain), tables(group), strict=True):
        np.testing.assert_array_equal(one, other)


def test_two_equal_ranks_take_the_step_that_hand_arithmetic_gives() -> None:
    workload = make_workload([0.0, 0.0], [100, 100], [3, 3])
    run = run_world(workload, CONFIG, GroupPrices(), num_replicas=2, router="internal_lb", lockstep=True)
    prefill = FIXED_S + 100 * OWN_S + 200 * SHARED_S
    decode = FIXED_S + OWN_S + 2 * SHARED_S
    assert sorted(run.requests.replica.tolist()) == [0, 1]
    for rank in (0, 1):
        steps = run.steps.end_s[run.steps.replica == rank]
        assert steps == pytest.approx([prefill, prefill + decode, prefill + 2 * decode])


def test_an_idle_rank_waits_for_the_step_in_progress_and_the_busy_one_for_its_own() -> None:
    # Rank 0 computes a prompt of 200 from 0; the second request comes meanwhile to rank 1.
    workload = make_workload([0.0, 0.001], [200, 10], [2, 2])
    run = run_world(workload, CONFIG, GroupPrices(), num_replicas=2, router="round_robin", lockstep=True)
    first = FIXED_S + 200 * OWN_S + 201 * SHARED_S  # with the dummy token of rank 1
    second = (
        FIXED_S + 10 * OWN_S + 11 * SHARED_S
    )  # one decode of rank 0 waits for ten prompt tokens of rank 1
    third = FIXED_S + OWN_S + 2 * SHARED_S
    steps = run.steps
    assert steps.end_s[steps.replica == 0] == pytest.approx([first, first + second])
    assert steps.start_s[steps.replica == 1] == pytest.approx([first, first + second])
    assert steps.end_s[steps.replica == 1] == pytest.approx([first + second, first + second + third])
    assert run.requests.scheduled_s[1] == pytest.approx(first)


def test_the_slowest_rank_sets_the_pace() -> None:
    """Noise of one rank delays all: with two ranks each step takes the larger of two factors."""
    workload = make_workload([0.0, 0.0], [16, 16], [1500, 1500])
    noise = StepNoise(0.2, 1)
    run = run_world(workload, CONFIG, GroupPrices(), num_replicas=2, lockstep=True, noise=noise)
    took = (run.steps.end_s - run.steps.start_s)[run.steps.replica == 0][1:]
    # Of two lognormal factors of mean 1 the larger is 2 Phi(sigma / sqrt 2) in the mean: 1.1125 for sigma 0.2.
    assert np.mean(took) / (FIXED_S + OWN_S + 2 * SHARED_S) == pytest.approx(1.1125, rel=0.02)


loads = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=25)


@settings(max_examples=25, deadline=None)
@given(
    loads,
    st.integers(1, 4),
    st.sampled_from(["internal_lb", "round_robin", "central"]),
    st.booleans(),
    st.integers(16, 60),
)
def test_everybody_ends_once_pages_come_back_and_steps_are_common(
    load: list[tuple[float, int, int]], ranks: int, router: str, asynchronous: bool, pages: int
) -> None:
    sent, prompts, outputs = zip(*sorted(load), strict=True)
    config = SchedulerConfig(
        num_pages=pages,
        page_tokens=16,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        max_model_len=256,
        async_scheduling=asynchronous,
    )

    def run() -> tuple[RunRecord, Any]:
        worlds: list[Any] = []
        record = run_world(
            make_workload(sent, prompts, outputs),
            config,
            GroupPrices(host_s=0.001),
            num_replicas=ranks,
            router=router,
            lockstep=True,
            watch=worlds.append,
        )
        return record, worlds[0]

    record, world = run()
    fits = np.array(prompts) + np.array(outputs) <= 256
    assert (record.requests.status[fits] == Status.FINISHED).all()
    np.testing.assert_array_equal(record.requests.output_tokens[fits], np.array(outputs)[fits])
    for rank in world.replicas:
        assert rank.scheduler.used_pages == 0
        assert not rank.outstanding
    spans = sorted(
        {(start, end) for start, end in zip(record.steps.start_s, record.steps.end_s, strict=True)}
    )
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    for one, other in zip(tables(record), tables(run()[0]), strict=True):
        np.testing.assert_array_equal(one, other)


MOE: dict[str, Any] = {"model": "qwen3-30b-a3b", "gpu": "h200", "max_model_len": 4096}


def test_a_mixtures_replicas_share_and_others_are_on_their_own() -> None:
    shared = build(Deployment(**MOE, data_parallel_size=2))
    assert shared.in_lockstep
    assert shared.deployment.router == "internal_lb"
    assert any("one published run" in warning for warning in shared.warnings)
    assert (
        build(Deployment(**MOE, data_parallel_size=2, router="round_robin")).deployment.router
        == "round_robin"
    )
    alone, pooled = build(Deployment(**MOE)), build(Deployment(**MOE, pools=({"replicas": 2},)))
    dense = build(Deployment(model="llama-3.1-8b", gpu="h200", data_parallel_size=2))
    assert not any(b.in_lockstep for b in (alone, pooled, dense))
    assert dense.deployment.router == "round_robin"
    assert pooled.limits.num_pages == alone.limits.num_pages < shared.limits.num_pages


def test_a_mixture_serves_from_start_to_end() -> None:
    workload = make_workload([0.0, 0.0, 0.1, 0.2], [300, 20, 700, 50], [20, 40, 10, 5])
    for whole in (False, True):
        run = simulate(workload, Deployment(**MOE, data_parallel_size=2, enable_expert_parallel=whole))
        assert (run.requests.status == Status.FINISHED).all()
        assert set(run.requests.replica.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size and --data-parallel-size 2"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
            "--speculative-config and",
        ),
        ({"autoscaler": {"outstanding": 4, "max_replicas": 4}}, "--autoscaler and"),
        ({"failures": {"mtbf_s": 100, "mttr_s": 1}}, "--failures and"),
        ({"admission": {"max_waiting": 10}}, "--admission and"),
    ],
)
def test_what_is_not_modelled_beside_shared_experts_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(Deployment(**MOE, data_parallel_size=2, **options))


def test_prices_without_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="no ranks in lockstep"):
        simulate(
            make_workload([0.0], [10], [2]), Deployment(**MOE, data_parallel_size=2), pricer=LinearPricer()
        )
