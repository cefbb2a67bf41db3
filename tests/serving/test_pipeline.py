"""Several plans in flight at once, as a pipeline needs them: nothing lost, nothing computed twice, pages come back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.policies import Adaptive, Chunked, Continuous
from serving.request import State
from tests.serving.driver import Engine
from tests.serving.test_scheduler_properties import Arrival, OneByOne, arrivals, configs, drive

pipelines = st.builds(
    lambda config, stages: {**config, "async_scheduling": False, "pipeline_parallel_size": stages},
    configs,
    st.integers(1, 5),
)
policies = st.sampled_from([Chunked, Continuous, Adaptive])


def run(engine: Engine, load: list[Arrival]) -> list[Any]:
    """Drive the engine as `drive` does, and see that no sequence is in two plans that sample for it."""
    plan = engine.plan

    def watched() -> Any:
        decided = plan()
        sampling = [
            request.id
            for step, owners in engine.in_flight
            for row, request in enumerate(owners)
            if step.samples is None or step.samples[row]
        ]
        assert len(sampling) == len(set(sampling)), "a token is computed from one that is not known yet"
        assert len(engine.in_flight) <= engine.config.pipeline_parallel_size
        return decided

    engine.plan = watched  # type: ignore[method-assign]
    return drive(engine, load)


@settings(max_examples=200, deadline=None)
@given(arrivals, pipelines, policies)
def test_everybody_ends_and_nothing_leaks(
    load: list[Arrival], config: dict[str, Any], make_policy: Any
) -> None:
    engine = Engine(make_policy(), **config)
    run(engine, load)
    assert engine.idle
    assert not engine.scheduler._stale
    assert not engine.scheduler._cooling
    assert len(engine.scheduler.seqs._free_slots) == len(engine.scheduler.seqs.requests)
    needed = again = 0
    for index, request in engine.requests.items():
        arrival, answer = load[index], engine.answers[index]
        if request.state is State.REJECTED:
            continue
        assert request.state is State.FINISHED
        assert request.output_tokens == len(answer)
        assert request.stale_tokens == 0
        room = engine.scheduler.finish_at(request) - request.prompt_tokens
        stop = arrival.stop_at + 1 if arrival.stop_at is not None else room + 1
        if request.reason == "stop":
            assert len(answer) == stop <= room
        elif request.reason == "length":
            assert len(answer) == room <= stop
        else:
            assert request.reason == "abort"
        needed += request.num_tokens
        again += request.preemptions * request.num_tokens
    # Nothing is planned on speculation: what is computed twice was preempted in between.
    assert engine.tokens_scheduled <= needed + again


@settings(max_examples=100, deadline=None)
@given(arrivals, pipelines)
def test_the_vector_form_of_a_step_decides_what_the_sequential_form_decides(
    load: list[Arrival], config: dict[str, Any]
) -> None:
    engines = [Engine(Chunked(), **config), Engine(OneByOne(Chunked()), **config)]
    assert drive(engines[0], load) == drive(engines[1], load)


@settings(max_examples=50, deadline=None)
@given(arrivals, configs)
def test_one_stage_is_the_synchronous_engine(load: list[Arrival], config: dict[str, Any]) -> None:
    config["async_scheduling"] = False
    engines = [Engine(Chunked(), **config), Engine(Chunked(), **config, pipeline_parallel_size=1)]
    assert drive(engines[0], load) == drive(engines[1], load)


def test_a_sequence_in_flight_is_not_scheduled_and_others_are() -> None:
    engine = Engine(pipeline_parallel_size=3)
    engine.add("a", 5)
    assert engine.plan().sched == {"a": 5}
    assert engine.plan().sched == {}
    engine.add("b", 7)
    assert engine.plan().sched == {"b": 7}
    engine.commit()
    assert engine.plan().sched == {"a": 1}


def test_chunks_of_one_prompt_follow_each_other_through_the_stages() -> None:
    engine = Engine(pipeline_parallel_size=3, max_num_batched_tokens=8)
    engine.add("a", 20)
    assert [engine.plan().sched for _ in range(4)] == [{"a": 8}, {"a": 8}, {"a": 4}, {}]


def test_tokens_in_flight_of_a_preempted_sequence_arrive_and_it_waits_for_them() -> None:
    # Ten pages of 4: the prompts fill 2 + 7; the tenth is what a grows by, and then b has to make room, whose two last
    # chunks are in flight.
    engine = Engine(
        num_pages=10,
        page_tokens=4,
        max_num_batched_tokens=16,
        pipeline_parallel_size=4,
        enable_prefix_caching=False,
        reserve_full_isl=False,
    )
    engine.add("a", 8, max_tokens=12)
    assert engine.plan().sched == {"a": 8}
    engine.add("b", 28, max_tokens=4)
    assert engine.plan().sched == {"b": 16}
    assert engine.plan().sched == {"b": 12}
    engine.commit()
    assert engine.plan().sched == {"a": 1}
    engine.scheduler.preempt(engine.requests["b"].slot)
    assert engine.requests["b"].stale_tokens == 28
    assert engine.plan().sched == {}
    engine.commit()
    assert engine.requests["b"].stale_tokens == 12
    assert "b" not in engine.plan().sched
    engine.commit()
    assert len(engine.answers["b"]) == 1
    assert engine.requests["b"].num_tokens == 29
    engine.run()
    assert engine.idle
    assert len(engine.answers["b"]) == 4


@pytest.mark.parametrize("other", [{"async_scheduling": True}, {"num_speculative_tokens": 2}])
def test_what_does_not_go_together_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="pipeline_parallel_size"):
        SchedulerConfig(num_pages=10, pipeline_parallel_size=2, **other)
