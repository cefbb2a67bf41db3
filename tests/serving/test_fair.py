"""Fair sharing by tokens served: the bound of the paper, weights, no saving up, no starvation."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.queues import Fair
from serving.request import Request
from tests.serving.driver import Engine


def served_by_tenant(engine: Engine) -> dict[int, int]:
    """Weighted tokens computed for each tenant, counted outside: prompts once, outputs twice."""
    total: dict[int, int] = {}
    for name, request in engine.requests.items():
        started = request.slot >= 0 or request.cached_tokens >= 0
        tokens = request.prompt_tokens * started + 2 * len(engine.answers[name])
        total[request.tenant] = total.get(request.tenant, 0) + tokens
    return total


def loaded(
    sizes: dict[int, tuple[int, int]], each: int, weights: dict[int, float] | None = None, **config: Any
) -> Engine:
    engine = Engine(queue_order="fair", enable_prefix_caching=False, **config)
    for tenant, (prompt, output) in sizes.items():
        for i in range(each):
            weight = (weights or {}).get(tenant, 1.0)
            engine.add((tenant, i), prompt, output, tenant=tenant, weight=weight)
    return engine


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=2, max_size=4),
    seats=st.integers(1, 4),
    seed=st.integers(1, 60),
)
@settings(max_examples=15, deadline=None)
def test_backlogged_tenants_stay_within_the_bound(
    sizes: list[tuple[int, int]], seats: int, seed: int
) -> None:
    """Theorem 4.4 of the paper: between tenants that always wait, service differs by at most twice the larger of the
    longest prompt and of what the output tokens of a full batch weigh."""
    engine = loaded(dict(enumerate(sizes)), 30, max_num_seqs=seats, max_num_batched_tokens=64)
    longest_output = max(output for _, output in sizes)
    bound = 2 * max(max(prompt for prompt, _ in sizes), 2 * seats * longest_output)
    for _ in range(seed):
        engine.step()
        waiting = {request.tenant for request in engine.scheduler.waiting}
        if waiting == set(range(len(sizes))):
            served = served_by_tenant(engine)
            assert max(served.values()) - min(served.values()) <= bound
    engine.run()
    assert engine.idle


def test_first_come_first_served_lets_a_flood_starve_others_and_fair_does_not() -> None:
    """One tenant sends 40 requests, then another sends one: it is next, not the forty-first."""
    ends = {}
    for order in ("fcfs", "fair"):
        engine = Engine(queue_order=order, max_num_seqs=2)
        for i in range(40):
            engine.add(("flood", i), 10, 5, tenant=0)
        late = engine.add("late", 10, 5, tenant=1)
        while not late.done:
            engine.step()
        ends[order] = engine.num_steps
        engine.run()
    assert ends["fair"] <= 10 < 90 <= ends["fcfs"]


def test_weights_divide_the_engine() -> None:
    """Three times the weight, three times the service, while both wait."""
    engine = loaded({0: (10, 10), 1: (10, 10)}, 200, {0: 3.0, 1: 1.0}, max_num_seqs=4)
    for _ in range(400):
        engine.step()
    served = served_by_tenant(engine)
    assert abs(served[0] / served[1] - 3.0) < 0.3


def test_idleness_is_not_saved_up() -> None:
    """A tenant that was away shares from when it comes back; it is not owed what it did not ask for."""
    engine = Engine(queue_order="fair", max_num_seqs=1, enable_prefix_caching=False)
    for i in range(60):
        engine.add((0, i), 10, 5, tenant=0)
    for _ in range(100):
        engine.step()
    before = served_by_tenant(engine)[0]
    for i in range(60):
        engine.add((1, i), 10, 5, tenant=1)
    for _ in range(100):
        engine.step()
    served = served_by_tenant(engine)
    assert abs((served[0] - before) - served[1]) <= 2 * (10 + 2 * 5)


def test_charges_by_hand() -> None:
    queue = Fair()
    a, b = Request("a", 10, 1, tenant=0), Request("b", 10, 1, tenant=1)
    queue.add(a)
    queue.charge(0, 10, 3)
    assert queue.served(0) == 10 + 2 * 3
    queue.add(b)
    assert queue.served(1) == 16  # lifted to the least of those who are there
    queue.charge(1, 1, 0)
    assert [r.id for r in queue] == ["a", "b"]
    assert queue.peek() is a
    queue.charge(0, 2, 0)
    assert queue.pop() is b
    queue.put_back(b)
    assert queue.victim([a, b]) == 0
    queue.remove(a)
    queue.ended(a)
    assert len(queue) == 1
