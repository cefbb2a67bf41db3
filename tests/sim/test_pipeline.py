"""A pipeline by its limits: one stage, one request, many equal steps, a closed burst; and by what may not get lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.pipeline import UNVALIDATED, PipelinePricer, layers_per_stage
from costmodel.pricer import StepPricer
from serving.config import SchedulerConfig
from serving.errors import UsageError
from sim.deployment import Deployment, build, simulate
from sim.fleet.build import num_gpus
from sim.noise import StepNoise
from sim.pipeline import bubble_share, serve_pipeline
from sim.record import RunRecord, Status
from sim.replica import Replica
from sim.workload.types import Workload
from sim.world import run_world
from tests.sim.test_fast_forward import assert_same
from tests.sim.worlds import LinearPricer, make_workload


class StagePricer(LinearPricer):
    """The linear price on each stage, times the stage's weight; multiples of 2^-20 s, so that sums are exact."""

    def __init__(self, weights: Sequence[float], transfer_s: float = 0.0, **prices: float) -> None:
        super().__init__(**{"fixed_s": 2.0**-8, "token_s": 2.0**-16, "context_s": 0.0, **prices})
        self.weights, self._transfer_s = weights, transfer_s

    def stage_s(self, *step: Any) -> list[float]:
        seconds = self.step_s(*step)
        return [seconds * weight for weight in self.weights]

    def transfer_s(self, num_tokens: int) -> float:
        return self._transfer_s


def piped(workload: Workload, pricer: StagePricer, **config: Any) -> RunRecord:
    stages = len(pricer.weights)
    limits = {"num_pages": 4000, "max_num_seqs": 64, "max_num_batched_tokens": 512} | config
    record = run_world(workload, SchedulerConfig(pipeline_parallel_size=stages, **limits), pricer)
    record.meta["deployment"] = {"pipeline_parallel_size": stages}
    return record


workloads = st.lists(
    st.tuples(st.integers(0, 64), st.integers(1, 300), st.integers(1, 20)), min_size=1, max_size=12
).map(
    lambda rows: make_workload(
        sorted(at / 64 for at, _, _ in rows), [prompt for _, prompt, _ in rows], [out for _, _, out in rows]
    )
)


@settings(max_examples=60, deadline=None)
@given(workloads, st.integers(20, 60), st.sampled_from([0.0, 2.0**-10]))
def test_a_pipeline_of_one_stage_is_the_synchronous_engine(
    workload: Workload, num_pages: int, host_s: float
) -> None:
    config = SchedulerConfig(num_pages=num_pages, max_num_seqs=4, max_num_batched_tokens=64)
    plain = run_world(workload, config, StagePricer([1.0], host_s=host_s), fast_forward=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "_loop", serve_pipeline)
        stages = run_world(workload, config, StagePricer([1.0], host_s=host_s), fast_forward=False)
    for name in ("start_s", "end_s", "gpu_s", "host_s", "num_tokens", "num_decodes", "used_pages"):
        assert np.array_equal(getattr(plain.steps, name), getattr(stages.steps, name)), name
    for name in ("scheduled_s", "prefill_done_s", "last_token_s", "output_tokens", "preemptions"):
        assert np.array_equal(
            getattr(plain.requests, name), getattr(stages.requests, name), equal_nan=True
        ), name


def test_a_lone_request_feels_all_stages_and_hand_overs() -> None:
    built = build(Deployment(model="llama-3.1-70b", gpu="h200", pipeline_parallel_size=4))
    assert isinstance(built.pricer, PipelinePricer)
    record = simulate(make_workload([0.0], [1000], [50]), built)
    token_s = record.steps.end_s - record.steps.start_s
    for step, context in ((1, 1001), (49, 1049)):
        stages = built.pricer.stage_s(1, 1, (), 1, context, context)
        host_s, hand_over_s = built.pricer.host_s(1, 1), built.pricer.transfer_s(1)
        assert token_s[step] == pytest.approx(sum(stages) + 3 * hand_over_s + host_s, rel=1e-9)
    whole = StepPricer(built.model, built.profile)
    assert sum(built.pricer.stage_s(1, 1, (), 1, 1001, 1001)) == pytest.approx(
        whole.step_s(1, 1, (), 1, 1001, 1001), rel=0.02
    )
    assert any(UNVALIDATED in warning for warning in record.warnings)


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("steps", [1, 4, 16])
def test_bubbles_of_a_closed_burst(stages: int, steps: int) -> None:
    # Each prompt fills a step and gives one token: m equal steps through P equal stages take m + P - 1 stage times.
    record = piped(make_workload([0.0] * steps, [512] * steps, [1] * steps), StagePricer([1.0] * stages))
    stage_s = 2.0**-8 + 512 * 2.0**-16
    assert record.steps.end_s[-1] == (steps + stages - 1) * stage_s
    assert bubble_share(record) == pytest.approx((stages - 1) / (steps + stages - 1))


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 2.0, 1.0], [0.5, 0.25, 1.5, 1.0]])
def test_throughput_is_that_of_the_slowest_stage(weights: list[float]) -> None:
    # One token a step and always somebody who wants one: a step leaves whenever the slowest stage is done, unless the way
    # through all stages takes even longer for the P steps that may be in flight.
    count = 2 * len(weights)
    workload = make_workload([0.0] * count, [1] * count, [200] * count)
    transfer_s, one_s = 2.0**-12, 2.0**-8 + 2.0**-16
    record = piped(workload, StagePricer(weights, transfer_s=transfer_s), max_num_batched_tokens=1)
    apart_s = np.diff(record.steps.end_s)[count:-count]
    way_s = sum(weights) * one_s + (len(weights) - 1) * transfer_s
    expected_s = max(max(weights) * one_s, way_s / len(weights))
    assert apart_s[: len(apart_s) // 12 * 12].mean() == pytest.approx(expected_s, rel=1e-9)
    assert bubble_share(record) == pytest.approx(1 - np.mean(weights) * one_s / expected_s, abs=0.03)


def test_an_arrival_is_planned_when_a_stage_is_free_and_not_before_the_core_looks() -> None:
    # Two stages of 1/128 s. The second request arrives while the core waits for the first step: it is planned at its end.
    price = StagePricer([1.0, 1.0], fixed_s=2.0**-7, token_s=0.0)
    record = piped(make_workload([0.0, 2.0**-9], [8, 8], [2, 2]), price)
    assert record.requests.scheduled_s.tolist() == [0.0, 2.0**-6]


@settings(max_examples=60, deadline=None)
@given(workloads, st.integers(2, 4), st.integers(20, 60), st.booleans())
def test_every_token_is_given_once_and_steps_tile_the_time(
    workload: Workload, stages: int, num_pages: int, caching: bool
) -> None:
    record = piped(
        workload,
        StagePricer([1.0] * stages, host_s=2.0**-10),
        num_pages=num_pages,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=caching,
    )
    done = record.requests.status == Status.FINISHED
    assert np.array_equal(
        record.requests.output_tokens[done],
        np.minimum(workload.output_tokens, num_pages * 16 - workload.prompt_tokens + 1)[
            record.requests.request_id
        ][done],
    )
    assert (done | (record.requests.status == Status.REJECTED)).all()
    given = np.add.reduceat(
        np.append(record.tokens.count, 0),
        record.tokens.offsets[:-1].clip(max=len(record.tokens.count)),
    )
    given[np.diff(record.tokens.offsets) == 0] = 0
    assert np.array_equal(given, record.requests.output_tokens)
    assert (record.steps.start_s[1:] >= record.steps.end_s[:-1]).all()
    assert (record.steps.end_s > record.steps.start_s).all()


def test_the_same_seed_gives_the_same_run_with_noise() -> None:
    workload = make_workload(list(np.arange(40) / 8), [300] * 40, [60] * 40)
    d = Deployment(model="llama-3.1-8b", gpu="h100", pipeline_parallel_size=2, tensor_parallel_size=2)
    runs = [simulate(workload, d, noise=StepNoise(0.1, 7)) for _ in range(2)]
    assert np.array_equal(runs[0].steps.end_s, runs[1].steps.end_s)
    assert not np.array_equal(runs[0].steps.end_s, simulate(workload, d).steps.end_s)


def test_layers_are_divided_as_vllm_divides_them() -> None:
    assert layers_per_stage(80, 4) == [20, 20, 20, 20]
    assert layers_per_stage(22, 4) == [5, 6, 6, 5]
    assert layers_per_stage(23, 4) == [6, 6, 6, 5]
    with pytest.raises(UsageError, match="--pipeline-parallel-size"):
        layers_per_stage(4, 5)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"async_scheduling": True}, "--async-scheduling"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "acceptance": 0.5}},
            "drafts",
        ),
        ({"policy": "static"}, "--policy static"),
        ({"preemption_mode": "swap"}, "--preemption-mode"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
    ],
)
def test_what_does_not_go_together_is_refused(other: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(Deployment(model="llama-3.1-8b", gpu="h100", pipeline_parallel_size=2, **other))


def test_work_of_a_device_is_its_share_of_the_whole() -> None:
    built = build(Deployment(model="llama-3.1-70b", gpu="h100", pipeline_parallel_size=4))
    whole = StepPricer(built.model, built.profile)
    step = (np.array([64, 2048]), np.array([64, 1]), np.array([0, 2048 * 2049 // 2]), np.array([0, 0]))
    decoding = np.array([64_000, 0])
    for of_one, of_all in zip(
        built.pricer.step_work(*step, decoding), whole.step_work(*step, decoding), strict=True
    ):
        assert of_one * 4 == pytest.approx(of_all, rel=1e-9)


# ---- of a pool -------------------------------------------------------------------------------------------------

FLEET = {"model": "qwen3-0.6b", "gpu": "h200", "max_num_seqs": 8, "max_num_batched_tokens": 512}
STAGED = {"name": "staged", "pipeline_parallel_size": 2, "weight": 1.0}
PLAIN = {"name": "plain", "weight": 1.0}


def traffic(seed: int, count: int = 30) -> Workload:
    rng = np.random.default_rng(seed)
    sent = np.cumsum(rng.exponential(0.005, count)).tolist()
    return make_workload(sent, rng.integers(1, 400, count).tolist(), rng.integers(1, 40, count).tolist())


@pytest.mark.parametrize("seed", range(3))
def test_pools_with_stages_are_a_deployment_with_stages(seed: int) -> None:
    """The same replicas behind the same router: whether the stages are said once or in each pool."""
    pools = [{"name": "a"}, {"name": "b"}]
    whole = Deployment.model_validate({**FLEET, "pipeline_parallel_size": 2, "pools": pools})
    each = Deployment.model_validate(
        {**FLEET, "pools": [{**pool, "pipeline_parallel_size": 2} for pool in pools]}
    )
    runs = [simulate(traffic(seed), deployment) for deployment in (whole, each)]
    assert_same(*runs)
    assert bubble_share(runs[0]) == bubble_share(runs[1])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["round_robin", "least_outstanding", "central"]))
def test_a_pool_with_stages_beside_one_without(seed: int, router: str) -> None:
    """Each pool goes its own way: bubbles are those of the staged replica, and every token is there once."""
    d = Deployment.model_validate({**FLEET, "router": router, "pools": [STAGED, PLAIN]})
    record = simulate(traffic(seed), d)
    assert_same(record, simulate(traffic(seed), d, fast_forward=False))
    r, s = record.requests, record.steps
    assert (r.status == Status.FINISHED).all()
    for row in range(len(r)):
        times_s = record.engine_token_times_s(row)
        assert len(times_s) == r.output_tokens[row] == r.max_output_tokens[row]
        assert (np.diff(times_s) > 0).all()
    assert record.fleet is not None
    assert record.fleet.per_replica("pipeline_parallel_size").tolist() == [2, 1]
    mine = s.replica == 0
    share = bubble_share(record)
    assert share is not None
    assert share == pytest.approx(1 - s.gpu_s[mine].sum() / (s.end_s - s.start_s)[mine].sum())


def test_a_pool_does_with_its_requests_what_it_does_alone() -> None:
    work = traffic(1)
    record = simulate(work, Deployment.model_validate({**FLEET, "pools": [STAGED, PLAIN]}))
    for pool, stages in ((0, 2), (1, 1)):
        rows = np.flatnonzero(record.requests.replica == pool)
        assert len(rows) == len(work) // 2
        mine = make_workload(
            work.sent_s[rows].tolist(), work.prompt_tokens[rows].tolist(), work.output_tokens[rows].tolist()
        )
        alone = simulate(mine, Deployment.model_validate({**FLEET, "pipeline_parallel_size": stages}))
        np.testing.assert_array_equal(alone.requests.last_token_s, record.requests.last_token_s[rows])


def test_prefill_on_one_device_and_decode_on_stages() -> None:
    pools = [{"role": "prefill"}, {"role": "decode", "pipeline_parallel_size": 2}]
    built = build(Deployment.model_validate({**FLEET, "pools": pools}))
    record = simulate(traffic(2), built)
    assert (record.requests.status == Status.FINISHED).all()
    assert [pool.deployment.gpus_per_replica for pool in built.pools] == [1, 2]
    assert num_gpus(built.deployment) == 3
    with pytest.raises(UsageError, match=r"pool y: --pipeline-parallel-size must be in 1\.\.28, not 40"):
        build(
            Deployment.model_validate(
                {**FLEET, "pools": [PLAIN, {"name": "y", "weight": 1, "pipeline_parallel_size": 40}]}
            )
        )
