"""Routers against what they must be in the limit: queueing theory, a single big cache, sessions in one place."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest

from serving.config import SchedulerConfig
from serving.errors import UsageError
from sim.record import Floats, RunRecord
from sim.router import RouterOptions, make_router
from sim.world import run_world
from tests.sim.fleet.worlds import pool, run_fleet
from tests.sim.test_queueing import ONE_SEAT, erlang_c, exponential, pollaczek_khinchine, simulated_waits
from tests.sim.worlds import DrawnPricer, LinearPricer, make_workload

SERVERS = 4


def waits(router: str, utilisation: float, customers: int, seed: int = 11) -> Floats:
    """Waits of exponential customers at `SERVERS` one-seat engines behind a router."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / (utilisation * SERVERS), customers)
    run = run_world(
        make_workload(np.cumsum(gaps).tolist(), [1] * customers, [1] * customers),
        ONE_SEAT,
        DrawnPricer(rng.exponential(1.0, customers)),
        num_replicas=SERVERS,
        router=router,
    )
    return run.requests.scheduled_s - run.requests.sent_s


def interval(values: Floats, batches: int = 20) -> tuple[float, float]:
    """Mean and its standard error by batch means."""
    means = np.array([part.mean() for part in np.array_split(values, batches)])
    return float(means.mean()), float(means.std(ddof=1) / sqrt(batches))


@pytest.mark.parametrize("servers", [2, 5])
def test_a_central_queue_is_m_m_c(servers: int) -> None:
    rng = np.random.default_rng(servers)
    count, utilisation = 8_000, 0.75
    found = simulated_waits(
        rng.exponential(1 / (utilisation * servers), count), exponential(rng, (count,)), servers
    )
    mean, error = interval(found[500:])
    assert error < 0.15 * erlang_c(utilisation, servers)
    assert abs(mean - erlang_c(utilisation, servers)) < 4 * error


def test_random_splitting_is_m_m_1_at_each_replica() -> None:
    # A Poisson stream split at random is Poisson: each server is M/M/1 at the same utilisation.
    mean, error = interval(waits("random", 0.6, 8_000)[500:])
    expected = pollaczek_khinchine(0.6, 2.0)
    assert error < 0.15 * expected
    assert abs(mean - expected) < 4 * error


def test_turns_are_e_c_m_1_at_each_replica() -> None:
    # Every c-th arrival: gaps are Erlang-c. GI/M/1: wait = s/(1 - s) with s the root of s = A*(1 - s) in (0, 1).
    utilisation = 0.7
    root = 0.5
    for _ in range(200):
        root = (utilisation * SERVERS / (utilisation * SERVERS + (1 - root))) ** SERVERS
    expected = root / (1 - root)
    mean, error = interval(waits("round_robin", utilisation, 8_000)[500:])
    assert error < 0.15 * expected
    assert abs(mean - expected) < 4 * error


def test_two_choices_lie_between_one_and_all() -> None:
    by_router = {
        r: waits(r, 0.85, 5000)[500:].mean() for r in ("random", "power_of_two", "least_outstanding")
    }
    assert by_router["least_outstanding"] < by_router["power_of_two"] < by_router["random"]
    # Mitzenmacher: one more choice takes away most of what there is to take.
    gained = by_router["random"] - by_router["power_of_two"]
    assert gained > 0.6 * (by_router["random"] - by_router["least_outstanding"])


def test_seeds_decide_two_choices() -> None:
    def replicas(seed: int) -> list[int]:
        workload = make_workload(np.linspace(0, 3, 60).tolist(), [50] * 60, [20] * 60)
        run = run_world(
            workload,
            SchedulerConfig(num_pages=200, max_num_seqs=4),
            LinearPricer(),
            num_replicas=5,
            router="power_of_two",
            options=RouterOptions(seed=seed),
        )
        return run.requests.replica.tolist()

    assert replicas(1) == replicas(1)
    assert replicas(1) != replicas(2)


# ---- caches ------------------------------------------------------------------------------------------------

BIG = SchedulerConfig(num_pages=6000, max_num_seqs=16, max_num_batched_tokens=2048)


def grouped(num_groups: int, count: int = 600, seed: int = 5) -> Any:
    """Prompts of 192 tokens, 128 of them common to a group."""
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, num_groups, count)
    return make_workload(
        (0.05 * np.arange(count)).tolist(),
        [192] * count,
        rng.integers(1, 20, count).tolist(),
        segments=[[(128, int(g) + 1)] for g in groups],
    )


def cached(run: RunRecord) -> int:
    return int(run.requests.cached_tokens.sum())


def test_a_prefix_router_over_many_caches_hits_as_often_as_one_big_cache() -> None:
    workload = grouped(40)
    fast = LinearPricer(1e-4, 1e-7, 1e-10)  # each request ends before the next arrives: every hit is possible
    alone = run_world(workload, BIG, fast)
    spread = run_world(workload, BIG, fast, num_replicas=4, router="prefix_hash")
    assert cached(alone) == cached(spread) == (600 - 40) * 128  # all but the first of each group
    # Where requests are spread without regard, each replica must see a group once.
    blind = run_world(workload, BIG, fast, num_replicas=4, router="round_robin")
    assert cached(blind) < cached(alone)


def test_each_prefix_has_one_home_until_it_is_hot() -> None:
    workload = grouped(40)
    run = run_world(workload, BIG, LinearPricer(1e-4, 1e-7, 1e-10), num_replicas=4, router="prefix_hash")
    homes: dict[int, set[int]] = {}
    for stream, replica in zip(workload.segment_streams, run.requests.replica, strict=True):
        homes.setdefault(int(stream), set()).add(int(replica))
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert len({next(iter(r)) for r in homes.values()}) == 4


def test_a_hot_prefix_spills_over_and_stays_within_its_bound() -> None:
    # One prefix for all, 200 at once: the load factor bounds every replica, and the rest goes clockwise.
    count, factor = 200, 1.25
    workload = make_workload([0.0] * count, [192] * count, [8] * count, segments=[[(128, 1)]] * count)
    run = run_world(
        workload,
        BIG,
        LinearPricer(),
        num_replicas=4,
        router="prefix_hash",
        options=RouterOptions(load_factor=factor),
    )
    counts = np.bincount(run.requests.replica, minlength=4)
    assert counts.max() <= np.ceil(factor * count / 4)
    assert (counts > 0).all()


def test_a_session_stays_where_it_began() -> None:
    turns, sessions = 5, 30
    after = [-1 if t == 0 else s * turns + t - 1 for s in range(sessions) for t in range(turns)]
    count = turns * sessions
    prompts = [100 * (1 + t) for _ in range(sessions) for t in range(turns)]
    workload = make_workload(
        [0.1 * s for s in range(sessions) for _ in range(turns)],
        prompts,
        [20] * count,
        segments=[[(prompts[s * turns + t] + 20, s + 1)] for s in range(sessions) for t in range(turns)],
        after=after,
        think_s=[0.0 if a < 0 else 0.5 for a in after],
    )
    sticky = run_world(workload, BIG, LinearPricer(), num_replicas=4, router="session")
    order = np.argsort(sticky.requests.request_id)
    by_session = sticky.requests.replica[order].reshape(sessions, turns)
    assert (by_session == by_session[:, :1]).all()
    assert len(np.unique(by_session)) == 4
    # What a session could find in one big cache it finds here.
    alone = run_world(workload, BIG, LinearPricer())
    assert cached(sticky) == cached(alone) > 0


def test_least_kv_sees_pages_and_not_requests() -> None:
    # One long prompt holds replica 0; short ones all go to replica 1 until its pages weigh as much.
    config = replace(BIG, num_pages=1000)
    workload = make_workload([0.0, *[1.0] * 8], [8000, *[800] * 8], [400] * 9)
    run = run_world(workload, config, LinearPricer(), num_replicas=2, router="least_kv")
    assert run.requests.replica.tolist() == [0, *[1] * 8]
    outstanding = run_world(workload, config, LinearPricer(), num_replicas=2, router="least_outstanding")
    assert outstanding.requests.replica.tolist() != run.requests.replica.tolist()


@pytest.mark.parametrize("router", ["round_robin", "least_outstanding", "random"])
def test_weights_share_out_the_load(router: str) -> None:
    # All at once: turns and requests per weight are exact, random ones binomial.
    count = 1600
    workload = make_workload([0.0] * count, [60] * count, [10] * count)
    run = run_fleet(workload, pool(weight=3.0, name="heavy"), pool(name="light"), router=router)
    share = np.bincount(run.requests.replica, minlength=2)[0] / count
    error = 4 * sqrt(0.75 * 0.25 / count) if router == "random" else 1 / count
    assert share == pytest.approx(0.75, abs=error)


def test_unknown_router_is_told_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'prefix_hash'"):
        make_router("prefix_has")
