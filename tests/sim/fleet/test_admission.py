"""The door: a bucket's arithmetic, a full queue's formula, and what those who are let in get of it."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sim.admission import Admission, Bucket, Shedding, TokenBucket
from sim.record import RunRecord, Status
from tests.sim.fleet.worlds import pool, run_fleet
from tests.sim.test_queueing import ONE_SEAT
from tests.sim.worlds import DrawnPricer, LinearPricer, make_workload


@given(
    st.sampled_from([0.5, 2.0, 10.0]),
    st.sampled_from([1.0, 5.0]),
    st.lists(st.sampled_from([0.0, 0.05, 0.3, 2.0]), min_size=1, max_size=60),
)
def test_a_bucket_never_lets_more_than_burst_and_rate_through(
    rate: float, burst: float, gaps: list[float]
) -> None:
    bucket, times = Bucket(rate, burst), np.cumsum(gaps)
    let = [t for t in times.tolist() if bucket.take(1.0, t)]
    for i, first in enumerate(let):
        for j in range(i, len(let)):
            assert j - i + 1 <= burst + rate * (let[j] - first) + 1e-6
    # And it lets through whoever keeps to the rate.
    steady = Bucket(rate, burst)
    assert all(steady.take(1.0, k / rate) for k in range(100))


def test_tokens_can_be_counted_instead_of_requests() -> None:
    # 100 a second in, 150 each: after a full bucket of 300 every 1.5 s one passes.
    count = 40
    workload = make_workload((0.25 * np.arange(count)).tolist(), [100] * count, [50] * count)
    run = run_fleet(
        workload,
        admission=Admission(token_bucket=TokenBucket(rate=100, burst=300, by="tokens")),
    )
    admitted = run.requests.status == Status.FINISHED
    span_s = 0.25 * (count - 1)
    assert admitted.sum() == 300 // 150 + int(span_s * 100) // 150
    assert set(run.requests.reason[~admitted]) == {"429: the token bucket is empty"}


def loss(run: RunRecord) -> tuple[float, float]:
    """Share refused, and its standard error by batches."""
    refused = (run.requests.status == Status.REJECTED).astype(float)
    means = np.array([part.mean() for part in np.array_split(refused, 20)])
    return float(means.mean()), float(means.std(ddof=1) / sqrt(20))


@pytest.mark.parametrize(("utilisation", "waiting"), [(0.8, 1), (1.5, 3)])
def test_a_bounded_queue_is_m_m_1_k(utilisation: float, waiting: int) -> None:
    # K = waiting + 1 in service: P(full) = (1 - u)·u^K / (1 - u^(K + 1)).
    count = 8000
    rng = np.random.default_rng(17)
    run = run_fleet(
        make_workload(np.cumsum(rng.exponential(1 / utilisation, count)).tolist(), [1] * count, [1] * count),
        pool(ONE_SEAT, DrawnPricer(rng.exponential(1.0, count))),
        admission=Admission(max_waiting=waiting),
    )
    size = waiting + 1
    expected = (1 - utilisation) * utilisation**size / (1 - utilisation ** (size + 1))
    mean, error = loss(run)
    assert error < 0.08 * expected
    assert abs(mean - expected) < 4 * error


def overload(admission: Admission | None, factor: float = 2.0) -> RunRecord:
    """Requests of 0.1 s each on four seats, `factor` times as many as they can serve."""
    count = 2000
    rng = np.random.default_rng(4)
    workload = make_workload(
        np.cumsum(rng.exponential(1 / (40 * factor), count)).tolist(), [16] * count, [10] * count
    )
    return run_fleet(workload, pool(replicas=1, pricer=LinearPricer(0.01, 0.0, 0.0)), admission=admission)


def p95_of_admitted(run: RunRecord) -> float:
    done = run.requests.status == Status.FINISHED
    late = done & (run.requests.sent_s > 5)
    return float(np.percentile((run.requests.first_token_s - run.requests.sent_s)[late], 95))


def test_a_deadline_refuses_at_once_what_would_be_late() -> None:
    free, guarded = overload(None), overload(Admission(deadline_ms=500, deadline_window_s=2))
    assert p95_of_admitted(free) > 5  # an open queue at twice its capacity grows without end
    assert p95_of_admitted(guarded) < 0.75
    # Little's law is exact in the mean, so that an overload settles at the deadline.
    done = (guarded.requests.status == Status.FINISHED) & (guarded.requests.sent_s > 5)
    ttft_s = (guarded.requests.first_token_s - guarded.requests.sent_s)[done]
    assert ttft_s.mean() == pytest.approx(0.5, rel=0.15)
    # What can be served is served: refusals are the overload and little more.
    served = (guarded.requests.status == Status.FINISHED).mean()
    assert served > 0.9 * 0.5
    assert (overload(Admission(deadline_ms=500), factor=0.5).requests.status == Status.FINISHED).all()


def test_shedding_keeps_the_promise_to_those_who_are_in() -> None:
    shed = overload(Admission(shed=Shedding(ttft_ms=300, window_s=1)))
    assert p95_of_admitted(shed) < 0.45  # about its limit, where AIMD oscillates
    served = (shed.requests.status == Status.FINISHED).mean()
    assert served > 0.4
    light = overload(Admission(shed=Shedding(ttft_ms=300, window_s=1)), factor=0.4)
    assert (light.requests.status == Status.FINISHED).all()


def test_a_door_that_keeps_nobody_out_changes_nothing() -> None:
    assert not (overload(Admission(max_waiting=10**6)).requests.status == Status.REJECTED).any()
    with pytest.raises(ValidationError, match="sets nothing"):
        Admission()
    with pytest.raises(ValidationError, match="only with deadline_ms"):
        Admission(max_waiting=3, deadline_window_s=3)
