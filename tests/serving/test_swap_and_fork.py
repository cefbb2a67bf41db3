"""Preemption by swapping, and forks that share the pages of their sibling's prompt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.plan import StepPlan
from serving.request import Request, State
from serving.scheduler import Scheduler
from serving.swap import SwapSpace
from tests.serving.driver import Engine


def scheduler(**limits: object) -> Scheduler:
    defaults = {"num_pages": 8, "page_tokens": 4, "max_num_seqs": 4, "enable_prefix_caching": False}
    return Scheduler(SchedulerConfig(**defaults | limits))  # type: ignore[arg-type]


def step(engine: Scheduler) -> StepPlan:
    plan = engine.plan(0.0)
    assert plan is not None
    engine.commit(plan)
    engine.check()
    return plan


def test_a_swapped_sequence_goes_on_where_it_stopped() -> None:
    engine = scheduler(num_pages=5, swap_pages=5)
    first, second = Request("first", 8, 9), Request("second", 7, 9)
    engine.add(first)
    engine.add(second)
    # Prompts take 2 + 2 pages. First grows to 9 tokens (page 5); then second's 8 tokens are full and no page is left.
    plans = [step(engine) for _ in range(3)]
    assert plans[2].preempted == [second]
    (move,) = plans[2].swap_out
    assert len(move.sources) == 2
    assert second.swapped_tokens == 8
    while second.state is State.PREEMPTED:
        plans.append(step(engine))
    resumed = plans[-1]
    assert [a.cached_tokens for a in resumed.admitted] == [8]
    assert resumed.swap_in[0].sources.tolist() == move.targets.tolist()
    assert resumed.swap_in[0].targets.tolist() == engine.seqs.pages_of(second.slot)[:2].tolist()
    assert resumed.num_tokens == 1, "nothing is computed again"
    while engine.num_unfinished:
        step(engine)
    assert engine.swap.num_free == 5
    assert first.num_tokens == 17
    assert second.num_tokens == 16


def test_drafts_in_flight_are_not_taken_for_tokens_when_swapping() -> None:
    engine = Engine(
        num_pages=7,
        page_tokens=4,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        swap_pages=20,
        async_scheduling=True,
        num_speculative_tokens=1,
        draft_has_kv=True,
    )
    engine.accept = lambda request_id, drafts: 0
    requests = [engine.add(name, 7, 10) for name in "ab"]
    engine.run()
    assert sum(r.preemptions for r in requests), "there must be something to swap"
    assert [len(engine.answers[name]) for name in "ab"] == [10, 10]
    assert engine.scheduler.swap.num_free == 20


def test_moves_of_a_step_without_rows_go_with_the_next() -> None:
    """A step that computes nothing is not executed, and what it decided to move must not be lost with it."""
    engine = scheduler(num_pages=4, swap_pages=8, async_scheduling=True, queue_order="priority")
    low = Request("low", 7, 9, priority=1)
    engine.add(low)
    engine.add(Request("high", 7, 2, priority=0))
    first, second = engine.plan(0.0), engine.plan(0.0)
    assert first is not None
    assert second is not None
    engine.commit(first)
    # The prompts and a token each fill all four pages. Low needs a fifth and gives way; high's last token is in flight.
    empty = engine.plan(0.0)
    assert empty is not None
    assert not len(empty)
    assert empty.preempted == [low]
    assert not empty.swap_out
    engine.commit(second)
    following = engine.plan(0.0)
    assert following is not None
    assert [len(move.sources) for move in following.swap_out] == [2]
    assert [a.request for a in following.admitted] == [low]
    assert [len(move.sources) for move in following.swap_in] == [2]


def test_when_the_host_is_full_sequences_are_recomputed() -> None:
    engine = scheduler(num_pages=5, swap_pages=1)
    second = Request("second", 7, 9)
    engine.add(Request("first", 8, 9))
    engine.add(second)
    plans = [step(engine) for _ in range(3)]
    assert plans[2].preempted == [second]
    assert not plans[2].swap_out
    assert second.swapped_pages is None
    while engine.num_unfinished:
        step(engine)


def test_an_aborted_sequence_gives_its_host_pages_back() -> None:
    engine = scheduler(num_pages=5, swap_pages=5)
    second = Request("second", 7, 9)
    engine.add(Request("first", 8, 9))
    engine.add(second)
    for _ in range(3):
        step(engine)
    assert engine.swap.num_free == 3
    engine.abort(second)
    assert engine.swap.num_free == 5


def test_host_pages_read_in_a_step_are_not_written_in_it() -> None:
    space = SwapSpace(2)
    first, second = Request(1, 4, 4), Request(2, 4, 4)
    pages = np.array([3, 4], np.int32)
    assert space.move_out(first, pages, 5)
    space.take_moves()
    space.move_in(first, np.array([6, 7], np.int32))
    assert not space.move_out(second, pages, 5)
    space.take_moves()
    assert space.move_out(second, pages, 5)


def test_swap_pages_below_zero_are_refused() -> None:
    with pytest.raises(UsageError, match="swap_pages is -1"):
        scheduler(swap_pages=-1)


def forks(prompt_tokens: int, count: int, **limits: object) -> tuple[Scheduler, list[Request]]:
    engine = scheduler(num_pages=30, **limits)
    parent = Request(0, prompt_tokens, 4)
    family = [parent, *(Request(i, prompt_tokens, 4, sibling=parent) for i in range(1, count))]
    for request in family:
        engine.add(request)
    return engine, family


@pytest.mark.parametrize(
    ("prompt_tokens", "pages", "copies"),
    [
        # Page size 4. The last prompt token is computed again, in a page of the fork's own.
        pytest.param(6, 2, 1, id="one full page, one of which a token is copied"),
        pytest.param(8, 2, 1, id="the last page is full: its first three tokens are copied"),
        pytest.param(9, 3, 0, id="nothing before the last token in its page"),
        pytest.param(1, 1, 0, id="a prompt of one token"),
    ],
)
def test_a_fork_takes_one_page(prompt_tokens: int, pages: int, copies: int) -> None:
    engine, family = forks(prompt_tokens, 3)
    first = step(engine)
    assert [a.request for a in first.admitted] == family[:1], "forks wait for the prompt"
    assert engine.used_pages == pages
    second = engine.plan(0.0)
    assert second is not None
    assert [(a.request, a.cached_tokens) for a in second.admitted] == [
        (fork, prompt_tokens - 1) for fork in family[1:]
    ]
    assert len(second.copies) == 2 * copies
    grown = 1 if prompt_tokens % 4 == 0 else 0  # the parent's own next token
    assert engine.used_pages == pages + 2 + grown
    tables = [engine.seqs.pages_of(request.slot)[:pages].tolist() for request in family]
    assert all(table[:-1] == tables[0][:-1] for table in tables)
    assert len({table[-1] for table in tables}) == 3
    engine.commit(second)
    while engine.num_unfinished:
        step(engine)
    assert engine.pool.num_free == 30


def test_a_fork_whose_sibling_is_gone_computes_its_own_prompt() -> None:
    engine, family = forks(6, 2)
    step(engine)
    engine.abort(family[0])
    plan = step(engine)
    assert plan.admitted[0].cached_tokens == 0
    assert plan.num_tokens == 6


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_loads_leave_nothing_behind(data: st.DataObject) -> None:
    """With tiny pools, swap spaces, forks and aborts everybody ends and every page comes back."""
    integers = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    engine = scheduler(
        num_pages=integers(4, 12),
        max_num_seqs=integers(1, 4),
        swap_pages=integers(0, 8),
        max_num_batched_tokens=integers(2, 16),
        enable_prefix_caching=data.draw(st.booleans()),
        async_scheduling=data.draw(st.booleans()),
        queue_order=data.draw(st.sampled_from(["fcfs", "priority"])),
    )
    requests: list[Request] = []
    for number in range(integers(1, 8)):
        request = Request(number, integers(1, 14), integers(1, 14), number, integers(0, 2))
        if requests and data.draw(st.booleans()):
            sibling = requests[-1]
            request = Request(number, sibling.prompt_tokens, integers(1, 14), number, sibling=sibling)
        if engine.add(request):
            requests.append(request)
    in_flight: list[StepPlan] = []
    for _ in range(600):
        plan = engine.plan(0.0)
        engine.check()
        if plan is not None and len(plan):
            in_flight.append(plan)
        if in_flight and (len(in_flight) > int(engine.config.async_scheduling) or plan is None):
            engine.commit(in_flight.pop(0))
        if requests and integers(0, 30) == 0:
            engine.abort(requests[integers(0, len(requests) - 1)])
        if not engine.num_unfinished and not in_flight:
            break
    assert not engine.num_unfinished
    assert engine.pool.num_free == engine.config.num_pages
    assert engine.swap.num_free == engine.config.swap_pages
    engine.check()
