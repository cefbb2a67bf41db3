"""Queues by class: the order of the plain ones, and passing over a full class costs nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.classed import make_classed
from serving.config import QUEUE_ORDERS
from serving.policies import Adaptive, Chunked
from serving.policies.adaptive import estimated_tokens
from serving.queues import Queue, make_queue
from serving.request import Request
from serving.scheduler import Scheduler
from tests.serving.driver import Engine

CLASSES = ((32.0, 2), (64.0, 1), (math.inf, 1))


class Scanning(Adaptive):
    """What `Adaptive` is to decide: look at all that wait, in the plain queue's order, and pass over full classes."""

    def make_queue(self, order: str) -> Queue:
        return make_queue(order)

    def _candidates(self, scheduler: Scheduler) -> Iterator[Request]:
        running = list(scheduler.running())
        count, held = len(running), sum(map(estimated_tokens, running))
        room = [seqs for _, seqs in self.size_classes]
        for request in running:
            if (size := self._class_of(request)) is not None:
                room[size] -= 1
        waiting = list(scheduler.waiting)
        while waiting:
            request = waiting.pop(0)
            size = self._class_of(request)
            if size is not None and room[size] < 1:
                continue
            if self.max_running_tokens is not None:
                held += estimated_tokens(request)
                if held > self.max_running_tokens and count:
                    return
            if size is not None:
                room[size] -= 1
            count += 1
            yield request
            if scheduler.fair is not None:
                waiting = list(scheduler.waiting)  # the prompt was charged, and another tenant may be next


requests = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.integers(1, 90),
            "max_tokens": st.integers(1, 20),
            "priority": st.integers(0, 2),
            "deadline_s": st.sampled_from([1.0, 5.0, math.inf]),
            "tenant": st.integers(0, 2),
            "weight": st.sampled_from([1.0, 3.0]),
            "arrival_s": st.sampled_from([0.0, 1.0]),
        }
    ),
    min_size=1,
    max_size=14,
)


@given(
    asked=requests,
    order=st.sampled_from(QUEUE_ORDERS),
    classes=st.sampled_from([(), CLASSES, CLASSES[:1], ((40.0, 1),)]),
    tokens=st.none() | st.integers(1, 200),
    pages=st.integers(8, 30),
    gap=st.integers(0, 2),
    asynchronous=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_decisions_are_those_of_a_scan(
    asked: list[dict[str, Any]],
    order: str,
    classes: tuple[tuple[float, int], ...],
    tokens: int | None,
    pages: int,
    gap: int,
    asynchronous: bool,
) -> None:
    histories = []
    for policy in (Adaptive, Scanning):
        engine = Engine(
            policy(classes, tokens),
            num_pages=pages,
            page_tokens=8,
            max_num_batched_tokens=24,
            max_num_seqs=4,
            queue_order=order,
            async_scheduling=asynchronous,
        )
        history = []
        for number, fields in enumerate(asked):
            engine.add(number, **fields)
            history += [engine.step() for _ in range(gap)]
        history += engine.run()
        assert engine.idle
        histories.append(history)
    assert histories[0] == histories[1]


@given(asked=requests, order=st.sampled_from(QUEUE_ORDERS), pages=st.integers(8, 30))
@settings(max_examples=40, deadline=None)
def test_classes_that_are_never_full_change_nothing(
    asked: list[dict[str, Any]], order: str, pages: int
) -> None:
    histories = []
    for policy in (Chunked(), Adaptive(((32.0, 100), (math.inf, 100)), 100_000)):
        engine = Engine(policy, num_pages=pages, page_tokens=8, max_num_seqs=4, queue_order=order)
        for number, fields in enumerate(asked):
            engine.add(number, **fields)
        histories.append(engine.run())
    assert histories[0] == histories[1]


@given(asked=requests, order=st.sampled_from(QUEUE_ORDERS), seed=st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_is_that_of_the_plain_queue(asked: list[dict[str, Any]], order: str, seed: Any) -> None:
    plain, classed = make_queue(order), make_classed(order, lambda request: request.max_tokens % 3)
    waiting: list[Request] = []
    for number, fields in enumerate(asked):
        request = Request(number, fields.pop("prompt"), **fields)
        waiting.append(request)
        plain.add(request)
        classed.add(request)
        if seed.random() < 0.3:
            taken = plain.pop()
            assert classed.pop() is taken
            waiting.remove(taken)
            if seed.random() < 0.5:
                plain.put_back(taken)
                classed.put_back(taken)
                waiting.append(taken)
        elif seed.random() < 0.2:
            gone = waiting.pop(seed.randrange(len(waiting)))
            plain.remove(gone)
            classed.remove(gone)
        assert list(classed) == list(plain)
        assert len(classed) == len(plain)
        if waiting:
            assert classed.peek() is plain.peek()
            assert classed.victim(waiting) == plain.victim(waiting)
        for open_classes in ({0}, {1, 2}, {5}):
            passed = (each for each in plain if each.max_tokens % 3 in open_classes)
            assert classed.first(open_classes) is next(passed, None)


class Counted(int):
    """A priority that counts how often it is compared."""

    compared = itertools.count()

    def __lt__(self, other: int) -> bool:
        next(self.compared)
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        next(self.compared)
        return int(self) == other

    __hash__ = int.__hash__


@pytest.mark.parametrize("waiting", [500, 4_000])
def test_a_long_queue_of_a_full_class_costs_a_step_only_logarithms(
    monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    """Behind one long answer wait many; short ones come and go past them. Neither they nor the others are gone through.

    A heap of n compares at most two per level in an insertion or a removal, each with one test of equality first.
    """
    classified = itertools.count()
    class_of = Adaptive._class_of

    def counted(self: Adaptive, request: Request) -> int | None:
        next(classified)
        return class_of(self, request)

    monkeypatch.setattr(Adaptive, "_class_of", counted)
    engine = Engine(
        Adaptive(((64.0, 4), (math.inf, 1))), queue_order="priority", num_pages=10_000, max_num_seqs=8
    )
    engine.check = False
    scheduler = engine.scheduler
    for number in range(waiting):
        scheduler.add(Request(number, 100, 500, priority=Counted(number * 7919 % 1000)))
    steps, short = 50, 2
    compared, looked = next(Counted.compared), next(classified)
    for number in range(steps * short):
        if number % short == 0:
            plan = scheduler.plan(0.0)
            assert plan is not None
            scheduler.commit(plan)
        scheduler.add(Request(waiting + number, 10, 2, priority=Counted(1)))
    assert scheduler.num_running <= 5
    assert scheduler.num_waiting > waiting - 2
    operations = steps * (2 * short + 2)  # each short one comes and goes, and a step asks for the first
    assert next(Counted.compared) - compared < operations * 4 * math.log2(waiting)
    assert next(classified) - looked < steps * 40
