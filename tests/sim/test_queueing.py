"""With one seat, one-token requests and drawn service times a replica is a textbook queue, and must behave like one.

Three things per queue: every wait equals the textbook recursion on the same arrivals and services (exactly); the mean
over replications of the simulator agrees with the formula; and so does the recursion over very many customers (tightly).
Seeds are fixed, so that a test which passed passes again. Bounds are five standard errors (over 800 replications a
false alarm in a million, over six one in 250), and each test asserts that its standard error is small.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import exp, factorial, sqrt

import numpy as np
import pytest

from serving.config import SchedulerConfig
from sim.record import Floats
from sim.world import run_world
from tests.sim.worlds import DrawnPricer, make_workload

ONE_SEAT = SchedulerConfig(num_pages=4, max_num_seqs=1)
Draw = Callable[[np.random.Generator, tuple[int, ...]], Floats]


def simulated_waits(gaps: Floats, services: Floats, num_replicas: int = 1) -> Floats:
    """Time from joining the queue to being scheduled, per request in order of arrival."""
    count = len(gaps)
    run = run_world(
        make_workload(np.cumsum(gaps).tolist(), [1] * count, [1] * count),
        ONE_SEAT,
        DrawnPricer(services),
        num_replicas=num_replicas,
        router="central",
    )
    return run.requests.scheduled_s - run.requests.sent_s


def recursion_waits(gaps: Floats, services: Floats, servers: int = 1) -> Floats:
    """Kiefer and Wolfowitz: each customer takes the server that is free first. Shapes (..., customers)."""
    free_at = np.zeros((*gaps.shape[:-1], servers))
    arrivals = np.cumsum(gaps, axis=-1)
    waits = np.empty_like(gaps)
    for i in range(gaps.shape[-1]):
        first = free_at.argmin(axis=-1)[..., None]
        start = np.maximum(np.take_along_axis(free_at, first, -1)[..., 0], arrivals[..., i])
        waits[..., i] = start - arrivals[..., i]
        np.put_along_axis(free_at, first, (start + services[..., i])[..., None], -1)
    return waits


def exponential(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return rng.exponential(1.0, shape)


def constant(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return np.ones(shape)


def lognormal(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Mean 1, squared coefficient of variation exp(0.8) - 1 = 1.23."""
    return rng.lognormal(-0.4, sqrt(0.8), shape)


def hyperexponential(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Mean 0.75·0.5 + 0.25·2.5 = 1; second moment 2·(0.75·0.25 + 0.25·6.25) = 3.5."""
    return rng.exponential(1.0, shape) * np.where(rng.random(shape) < 0.75, 0.5, 2.5)


def pollaczek_khinchine(utilisation: float, second_moment: float) -> float:
    """Mean wait in M/G/1 with mean service 1."""
    return utilisation * second_moment / (2 * (1 - utilisation))


def erlang_c(utilisation: float, servers: int) -> float:
    """Mean wait in M/M/c with mean service 1: P(all busy) / (c·(1 - utilisation))."""
    offered = utilisation * servers
    busy = offered**servers / factorial(servers) / (1 - utilisation)
    return (
        busy / (sum(offered**k / factorial(k) for k in range(servers)) + busy) / (servers * (1 - utilisation))
    )


QUEUES = {
    "M/M/1": (exponential, 1, 0.6, pollaczek_khinchine(0.6, 2.0)),
    "M/D/1": (constant, 1, 0.8, pollaczek_khinchine(0.8, 1.0)),
    "M/G/1 lognormal": (lognormal, 1, 0.6, pollaczek_khinchine(0.6, exp(0.8))),
    "M/G/1 hyperexponential": (hyperexponential, 1, 0.4, pollaczek_khinchine(0.4, 3.5)),
    "M/M/3": (exponential, 3, 0.6, erlang_c(0.6, 3)),
}


def draw(
    seed: int, service: Draw, servers: int, utilisation: float, shape: tuple[int, ...]
) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    return rng.exponential(1 / (utilisation * servers), shape), service(rng, shape)


@pytest.mark.parametrize("queue", QUEUES)
def test_mean_waits_are_those_of_the_textbook(queue: str) -> None:
    service, servers, utilisation, expected = QUEUES[queue]
    replications, customers, warm_up = 6, 3500, 300
    gaps, services = draw(1, service, servers, utilisation, (replications, customers))
    waits = np.stack([simulated_waits(g, s, servers) for g, s in zip(gaps, services, strict=True)])
    np.testing.assert_allclose(waits, recursion_waits(gaps, services, servers), rtol=0, atol=1e-8)
    means = waits[:, warm_up:].mean(axis=1)
    error = means.std(ddof=1) / sqrt(replications)
    assert error < 0.12 * expected
    assert abs(means.mean() - expected) < 5 * error

    gaps, services = draw(2, service, servers, utilisation, (800, 6000))
    means = recursion_waits(gaps, services, servers)[:, warm_up:].mean(axis=1)
    error = means.std(ddof=1) / sqrt(len(means))
    assert error < 0.005 * expected
    assert abs(means.mean() - expected) < 5 * error


def test_at_80_percent_utilisation_the_mean_wait_is_four_service_times() -> None:
    gaps, services = draw(3, exponential, 1, 0.8, (4000,))
    np.testing.assert_allclose(
        simulated_waits(gaps, services), recursion_waits(gaps, services), rtol=0, atol=1e-8
    )
    # Long runs from empty: the first 1,000 customers, twenty relaxation times, are left out.
    gaps, services = draw(4, exponential, 1, 0.8, (1000, 8000))
    means = recursion_waits(gaps, services)[:, 1000:].mean(axis=1)
    error = means.std(ddof=1) / sqrt(len(means))
    assert error < 0.02
    assert abs(means.mean() - 0.8 / (1 - 0.8)) < 5 * error


def test_erlang_c_of_one_server_is_m_m_1() -> None:
    assert erlang_c(0.8, 1) == pytest.approx(0.8 / 0.2)
    # Two servers, each half busy: P(wait) = 1/3, mean wait 1/3.
    assert erlang_c(0.5, 2) == pytest.approx(1 / 3)


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_capacity_is_replicas_over_service_time_and_nothing_is_counted_twice(servers: int) -> None:
    # Saturated: everybody is there at time 0. A service time divided by the number of slots *and* slots that work in
    # parallel would end servers² times sooner than one does.
    count = 200 * servers
    run = run_world(
        make_workload([0.0] * count, [1] * count, [1] * count),
        ONE_SEAT,
        DrawnPricer(np.full(count, 0.5)),
        num_replicas=servers,
        router="central",
    )
    assert run.end_s == 200 * 0.5
    assert np.bincount(run.steps.replica).tolist() == [200] * servers


def test_seats_of_one_engine_share_its_steps() -> None:
    # Eight requests of ten tokens, a step of 0.5 s whatever it holds: ten steps, not 80 and not 10/8.
    run = run_world(
        make_workload([0.0] * 8, [1] * 8, [10] * 8),
        SchedulerConfig(num_pages=100, max_num_seqs=8),
        DrawnPricer(np.full(80, 0.5)),
    )
    assert run.end_s == 10 * 0.5
    assert (run.requests.last_token_s == 5.0).all()


def test_more_servers_make_no_customer_wait_longer() -> None:
    # Same arrivals, same services (FCFS: the i-th to start is the i-th to arrive): true of every path.
    gaps, services = draw(5, hyperexponential, 2, 0.9, (1500,))
    by_servers = [simulated_waits(gaps, services, servers) for servers in (2, 3, 4)]
    for fewer, more in pairwise(by_servers):
        assert (more <= fewer + 1e-9).all()
    assert by_servers[-1].mean() < by_servers[0].mean()


def test_a_pooled_queue_beats_separate_ones() -> None:
    # M/M/2 against two M/M/1 at the same load: 0.7²/(1 - 0.7²) = 0.96 service times against 0.7/0.3 = 2.33.
    gaps, services = draw(6, exponential, 2, 0.7, (3000,))

    def mean_wait(router: str) -> float:
        run = run_world(
            make_workload(np.cumsum(gaps).tolist(), [1] * 3000, [1] * 3000),
            ONE_SEAT,
            DrawnPricer(services),
            num_replicas=2,
            router=router,
        )
        return float((run.requests.scheduled_s - run.requests.sent_s).mean())

    central, least, turns = (mean_wait(r) for r in ("central", "least_outstanding", "round_robin"))
    assert central < least < turns


@pytest.mark.parametrize(
    ("service", "second"), [(lognormal, exp(0.8)), (hyperexponential, 3.5), (exponential, 2.0)]
)
def test_services_have_the_moments_that_the_formula_is_given(service: Draw, second: float) -> None:
    times = service(np.random.default_rng(7), (1_000_000,))
    for power, expected in ((1, 1.0), (2, second)):
        powers = times**power
        assert abs(powers.mean() - expected) < 5 * powers.std() / 1000
