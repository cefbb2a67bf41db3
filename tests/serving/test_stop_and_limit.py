"""A request that stops by itself on its last allowed token has stopped; it did not run into its limit."""

from __future__ import annotations

import numpy as np
import pytest

from serving.config import SchedulerConfig
from serving.plan import StepOutcome
from serving.request import Request
from serving.scheduler import Scheduler


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stop_comes_before_length_on_the_same_token(asynchronous: bool) -> None:
    scheduler = Scheduler(SchedulerConfig(num_pages=4, async_scheduling=asynchronous))
    request = Request("a", prompt_tokens=3, max_tokens=1)
    scheduler.add(request)
    plan = scheduler.plan(0.0)
    assert plan is not None
    finished = scheduler.commit(
        plan, StepOutcome(counts=np.array([1]), stopped=np.array([True]), reasons=["stop"])
    )
    assert finished == [request]
    assert request.reason == "stop"


def test_a_stop_beyond_the_limit_is_dropped_with_its_token() -> None:
    # Two drafts accepted and a third token that stops, where only two tokens are allowed: the limit comes first.
    config = SchedulerConfig(num_pages=8, num_speculative_tokens=2)
    scheduler = Scheduler(config)
    request = Request("a", prompt_tokens=3, max_tokens=3)
    scheduler.add(request)
    first = scheduler.plan(0.0)
    assert first is not None
    scheduler.commit(first, StepOutcome(counts=np.array([1])))
    scheduler.propose(request, 2)
    second = scheduler.plan(0.0)
    assert second is not None
    outcome = StepOutcome(counts=np.array([3]), stopped=np.array([True]), reasons=["stop"])
    scheduler.commit(second, outcome)
    assert (request.reason, request.output_tokens) == ("length", 3)
