"""Fast-forward on and off must give the same run: same steps, same times, same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from serving.policies import Adaptive, BatchPolicy, Chunked, Continuous, Static
from sim.record import RunRecord, Status, Tenant
from sim.workload.types import Workload
from sim.world import run_world
from tests.sim.worlds import LinearPricer, make_workload

POLICIES: dict[str, Callable[[], BatchPolicy]] = {
    "chunked": Chunked,
    "continuous": Continuous,
    "static": Static,
    "adaptive": lambda: Adaptive(((30, 2), (60, 1)), 200, 0.5),
}


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(1, 12))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.013, 0.2, 1.7]), min_size=count, max_size=count))
    prompts = draw(st.lists(st.integers(1, 70), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    segments = []
    for i in range(count):
        kind = draw(st.sampled_from(["private", "group", "conversation"]))
        if kind == "group":
            segments.append([(min(prompts[i], 40), draw(st.integers(1, 2)))])
        elif kind == "conversation":
            # Its answer is shared with later turns, so pages are published while it decodes.
            segments.append([(prompts[i] + outputs[i], draw(st.integers(10, 12)))])
        else:
            segments.append([])
    workload = make_workload(
        np.cumsum(gaps).tolist(),
        prompts,
        outputs,
        segments=segments,
        priority=draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)),
        max_concurrency=draw(st.sampled_from([None, 1, 3])),
    )
    tenants = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    weights = (Tenant("a"), Tenant("b", weight=2.0), Tenant("c", weight=0.5))
    return replace(workload, tenant=np.array(tenants, np.int64), tenants=weights)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    page_tokens = draw(st.sampled_from([4, 16]))
    caching = draw(st.booleans())
    return SchedulerConfig(
        num_pages=draw(st.integers(8, 40)) * 16 // page_tokens,
        page_tokens=page_tokens,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([8, 32, 256])),
        max_model_len=draw(st.sampled_from([100, 4096])),
        enable_prefix_caching=caching,
        kv_eviction=draw(st.sampled_from(["lru", "lfu", "cost", "session"])) if caching else "lru",
        attention_tokens=64.0,
        host_cache_pages=draw(st.sampled_from([0, 0, 6])) if caching else 0,
        swap_pages=draw(st.sampled_from([0, 0, 12])),
        queue_order=draw(st.sampled_from(["fcfs", "priority", "sjf", "edf", "fair"])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 16])),
        reserve_full_isl=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.05])),
        async_scheduling=draw(st.booleans()),
    )


@given(
    seed=st.integers(0, 2**16),
    asynchronous=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_leap_under_fair_sharing_ends_where_another_head_would_fit(seed: int, asynchronous: bool) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(6, 12))
    workload = make_workload(
        np.cumsum(rng.choice([0, 0.01, 0.2], count)).tolist(),
        rng.integers(1, 70, count).tolist(),
        rng.integers(1, 90, count).tolist(),
    )
    workload = replace(workload, tenant=rng.integers(0, 2, count), tenants=(Tenant("a"), Tenant("b")))
    config = SchedulerConfig(num_pages=64, max_num_seqs=6, queue_order="fair", async_scheduling=asynchronous)
    leapt, stepped = (
        run_world(
            workload,
            config,
            LinearPricer(),
            make_policy=lambda: Adaptive(max_running_tokens=150),
            fast_forward=fast_forward,
        )
        for fast_forward in (True, False)
    )
    assert_same(leapt, stepped)


def assert_same(a: RunRecord, b: RunRecord) -> None:
    for name, column in a.requests.columns().items():
        other = b.requests.columns()[name]
        if column.dtype == object:
            assert column.tolist() == other.tolist(), name
        else:
            np.testing.assert_array_equal(column, other, err_msg=f"requests.{name}")
    for name, column in a.steps.columns().items():
        np.testing.assert_array_equal(column, b.steps.columns()[name], err_msg=f"steps.{name}")
    for row in range(len(a.requests)):
        np.testing.assert_array_equal(a.token_times_s(row), b.token_times_s(row))


@settings(max_examples=400, deadline=None)
@given(
    workloads(),
    configs(),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([0.0, 0.004, 0.05]),
    st.integers(1, 2),
)
def test_fast_forward_changes_nothing(
    workload: Workload, config: SchedulerConfig, policy: str, host_s: float, num_replicas: int
) -> None:
    runs = [
        run_world(
            workload,
            config,
            LinearPricer(host_s=host_s),
            make_policy=POLICIES[policy],
            num_replicas=num_replicas,
            fast_forward=fast_forward,
        )
        for fast_forward in (True, False)
    ]
    assert_same(*runs)
    # No request is ever lost, and the finished ones got every token they asked for (or all that fits).
    requests = runs[0].requests
    assert len(requests) == len(workload)
    assert not (requests.status == Status.UNFINISHED).any()
    finished = requests.status == Status.FINISHED
    room = min(config.max_model_len, config.num_pages * config.page_tokens + 1)
    asked = np.minimum(requests.max_output_tokens, room - requests.prompt_tokens)
    assert (requests.output_tokens[finished] == asked[finished]).all()
    assert (requests.output_tokens[~finished] == 0).all()
    for row in np.flatnonzero(finished).tolist():
        times = runs[0].token_times_s(row)
        assert len(times) == requests.output_tokens[row]
        assert (np.diff(times) > 0).all()
        assert times[0] == pytest.approx(requests.first_token_s[row])
        assert times[-1] == pytest.approx(requests.last_token_s[row])


@settings(max_examples=100, deadline=None)
@given(workloads(), configs(), st.sampled_from(sorted(POLICIES)), st.integers(1, 2), st.floats(0.01, 3.0))
def test_a_run_that_is_cut_within_a_leap_has_the_steps_that_are_over(
    workload: Workload, config: SchedulerConfig, policy: str, num_replicas: int, until_s: float
) -> None:
    runs = [
        run_world(
            workload,
            config,
            LinearPricer(host_s=0.004),
            make_policy=POLICIES[policy],
            num_replicas=num_replicas,
            fast_forward=fast_forward,
            until_s=until_s,
        )
        for fast_forward in (True, False)
    ]
    assert_same(*runs)
    assert runs[0].end_s == runs[1].end_s <= until_s


def test_a_lone_long_answer_is_one_leap() -> None:
    workload = make_workload([0.0], [100], [4000])
    config = SchedulerConfig(num_pages=1000, async_scheduling=False)
    events = []
    run = run_world(workload, config, LinearPricer(), progress=events.append)
    assert len(run.steps) == 4000
    # prefill 0.01 + 100 tokens; then 3,999 decodes whose contexts grow from 101
    context = 101 * 3999 + 3999 * 3998 // 2
    expected = 0.01 * 4000 + 1e-5 * (100 + 3999) + 1e-9 * 100 * 50 + 1e-7 * context
    assert run.requests.last_token_s[0] == pytest.approx(expected, rel=1e-12)
