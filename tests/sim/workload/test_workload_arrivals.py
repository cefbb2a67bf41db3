"""Arrival times: vLLM's definitions exactly, and statistics within bounds that a right generator meets.

Bounds are four standard errors wide unless said otherwise; seeds are fixed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from serving.errors import UsageError
from sim.record import Floats
from sim.workload.arrival_spec import DAILY_CURVES, ArrivalSpec
from sim.workload.arrivals import RateCurve, draw, gamma_gaps, ramp, steady


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(
    count=st.integers(1, 500),
    rate=st.floats(1e-3, 1e4),
    burstiness=st.one_of(st.floats(0.05, 50), st.just(math.inf)),
    seed=st.integers(0, 2**32),
)
def test_the_last_arrival_is_at_exactly_count_over_rate(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    times_s = steady(count, rate, burstiness, rng(seed))
    assert len(times_s) == count
    assert times_s[-1] == count / rate
    assert times_s[0] >= 0
    assert (np.diff(times_s) >= 0).all()
    assert np.isfinite(times_s).all()


def test_constant_gaps_put_the_first_arrival_one_gap_after_the_start() -> None:
    np.testing.assert_allclose(steady(5, 2.0, math.inf, rng()), [0.5, 1.0, 1.5, 2.0, 2.5], rtol=1e-15)


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert steady(4, math.inf, 1.0, rng()).tolist() == [0, 0, 0, 0]


def test_times_are_those_of_vllm_for_the_same_gamma_draws() -> None:
    """Gaps gamma(shape = b, scale = 1 / (rate · b)), summed, then times (N / rate) / sum."""
    rate, b, n = 3.0, 0.4, 200
    delays = np.cumsum(rng(7).gamma(b, 1 / (rate * b), size=n))
    np.testing.assert_allclose(steady(n, rate, b, rng(7)), delays * (n / rate / delays[-1]), rtol=1e-12)


@pytest.mark.parametrize("burstiness", [0.25, 0.5, 1.0, 4.0])
def test_gaps_have_mean_one_and_cv_one_over_root_burstiness(burstiness: float) -> None:
    n = 200_000
    gaps = gamma_gaps(n, burstiness, rng(1))
    cv = 1 / math.sqrt(burstiness)
    assert abs(gaps.mean() - 1) < 4 * cv / math.sqrt(n)
    # Variance of a gamma's sample variance: (κ − 1 + 2) σ⁴ / n with excess kurtosis 6 / shape.
    variance_error = cv**2 * math.sqrt((6 / burstiness + 2) / n)
    assert abs(gaps.var() - cv**2) < 4 * variance_error


def test_gaps_of_cv_3_5_are_never_equal_by_rounding() -> None:
    """Times cut to whole microseconds made 42 % of such gaps equal. A double resolves 4e-15 s at 20 s, so
    gaps over a nanosecond have to differ; a tenth of the gaps are smaller than that resolution by nature."""
    gaps_s = np.diff(steady(20_000, 1000.0, 1 / 3.5**2, rng(2)))
    visible = gaps_s[gaps_s > 1e-9]
    assert len(np.unique(visible)) == len(visible)
    assert np.count_nonzero(gaps_s == 0) < 0.12 * len(gaps_s)
    assert abs(gaps_s.std() / gaps_s.mean() - 3.5) < 0.2


def test_a_burstiness_that_underflows_is_refused() -> None:
    with pytest.raises(UsageError, match="burstiness"):
        steady(1, 1.0, 1e-9, rng(3))


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_ramps_change_the_rate_request_by_request(strategy: str) -> None:
    times_s = ramp(5, strategy, 1.0, 16.0, math.inf, rng())
    rates = [1, 4.75, 8.5, 12.25, 16] if strategy == "linear" else [1, 2, 4, 8, 16]
    np.testing.assert_allclose(np.diff(times_s, prepend=0), [1 / r for r in rates], rtol=1e-12)


CURVES = st.lists(st.tuples(st.floats(0.5, 100), st.floats(0, 50)), min_size=2, max_size=6).filter(
    lambda pairs: max(rate for _, rate in pairs) > 0.5
)


@given(CURVES, st.integers(0, 99))
@settings(deadline=None)
def test_a_curve_is_inverted_exactly(pairs: list[tuple[float, float]], seed: int) -> None:
    times_s = np.concatenate(([0.0], np.cumsum([gap for gap, _ in pairs[1:]])))
    curve = RateCurve(times_s, np.array([rate for _, rate in pairs]))
    expected = np.sort(rng(seed).uniform(0, 3 * curve.per_period, 50))
    back = [curve.expected(t) for t in curve.inverse(expected)]
    np.testing.assert_allclose(back, expected, rtol=1e-9, atol=1e-6)


def counts_in(times_s: Floats, edges: list[float]) -> list[int]:
    return [int(c) for c in np.histogram(times_s, edges)[0]]


def test_a_curve_sends_its_integral_in_every_window() -> None:
    """Poisson counts: within four roots of what the integral of the rate expects."""
    spec = ArrivalSpec(rate_points=((0, 10), (600, 40), (1200, 0), (1800, 20)))
    times_s = draw(spec, None, rng(4))
    expected = [600 * 25, 600 * 20, 600 * 10]  # trapezoids
    for got, mean in zip(counts_in(times_s, [0, 600, 1200, 1800]), expected, strict=True):
        assert abs(got - mean) < 4 * math.sqrt(mean)
    assert (np.diff(times_s) >= 0).all()
    assert times_s[-1] < 1800


def test_a_curve_repeats_when_more_requests_are_asked_for() -> None:
    spec = ArrivalSpec(rate_points=((0, 0), (10, 20)), burstiness=math.inf)
    times_s = draw(spec, 250, rng())
    assert counts_in(times_s, [0, 10, 20, 30]) == [100, 100, 50] or counts_in(times_s, [0, 10, 20, 30]) == [
        99,
        100,
        51,
    ]


@pytest.mark.parametrize("name", sorted(DAILY_CURVES))
def test_a_daily_curve_has_the_mean_rate_it_was_given(name: str) -> None:
    spec = ArrivalSpec(request_rate=2.0, daily_curve=name, period_s=3600)
    curve = RateCurve.of(spec)
    assert curve.per_period == pytest.approx(2.0 * 3600)
    times_s = draw(spec, None, rng(5))
    assert abs(len(times_s) - 7200) < 4 * math.sqrt(7200)
    hourly = np.histogram(times_s, 24, (0, 3600))[0]
    assert hourly.max() > 2 * hourly.min()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_rate": 0}, "inf sends all at once"),
        ({"request_rate": -1}, "positive"),
        ({"request_rate": math.nan}, "positive"),
        ({"request_rate": 1, "burstiness": 0}, "positive"),
        ({"request_rate": 1, "burstiness": math.nan}, "positive"),
        ({"rate_scale": 0}, "positive"),
        ({"rate_scale": math.inf}, "finite"),
        ({"burstiness": 2}, "no effect"),
        ({"request_rate": math.inf, "burstiness": 2}, "no effect"),
        ({"request_rate": 1, "rate_scale": 2}, "no effect"),
        ({"ramp_up_start_rps": 2}, "need `ramp_up_strategy`"),
        ({"ramp_up_strategy": "linear", "ramp_up_start_rps": 1}, "needs both"),
        ({"ramp_up_strategy": "cubic", "ramp_up_start_rps": 1, "ramp_up_end_rps": 2}, "linear"),
        (
            {"request_rate": 3, "ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 2},
            "replaces",
        ),
        ({"rate_points": ((0, 1),)}, "at least two"),
        ({"rate_points": ((1, 1), (2, 2))}, "first point"),
        ({"rate_points": ((0, 1), (0, 2))}, "increase"),
        ({"rate_points": ((0, -1), (1, 2))}, "negative"),
        ({"rate_points": ((0, 0), (1, 0))}, "positive"),
        ({"rate_points": "0:1,5"}, "look like"),
        ({"daily_curve": "office"}, "finite `request_rate`"),
        ({"daily_curve": "ofice", "request_rate": 1}, "known: consumer, office"),
        ({"period_s": 60}, "no effect"),
        ({"duration_s": 0, "request_rate": 1}, "greater than 0"),
        ({"request_rate": math.inf, "duration_s": 5}, "no effect"),
    ],
)
def test_options_that_cannot_be_met_or_have_no_effect_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        ArrivalSpec(**fields)


def test_a_ramp_may_stand_beside_an_infinite_rate_as_in_vllm() -> None:
    spec = ArrivalSpec(
        request_rate=math.inf, burstiness=4, ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=3
    )
    times_s = draw(spec, 3, rng())
    np.testing.assert_allclose(np.diff(times_s, prepend=0) * [1, 2, 3], gamma_gaps(3, 4, rng()), rtol=1e-12)


def test_rate_points_may_be_text() -> None:
    assert ArrivalSpec(rate_points="0:2,600:10.5").rate_points == ((0, 2), (600, 10.5))  # type: ignore[arg-type]
