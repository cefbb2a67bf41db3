"""Arrival times in seconds from a rate, a ramp or a curve. Definitions are those of `vllm bench serve`."""

from __future__ import annotations

import math

import numpy as np

from serving.errors import UsageError
from sim.record import Floats
from sim.workload.arrival_spec import DAILY_CURVES, ArrivalSpec

_MAX_ARRIVALS = 100_000_000


def gamma_gaps(count: int, burstiness: float, rng: np.random.Generator) -> Floats:
    """Gaps of mean 1 and coefficient of variation 1/sqrt(burstiness), shape (count,); constant for inf."""
    if burstiness == math.inf:
        return np.ones(count)
    gaps: Floats = rng.standard_gamma(burstiness, size=count) / burstiness
    return gaps


def steady(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> Floats:
    """`count` times at `rate` a second; the last is at exactly count / rate, the first is not at 0.

    Gaps are gamma(shape = burstiness, scale = 1 / (rate · burstiness)); their sums are rescaled to end at
    count / rate.
    """
    if count == 0 or rate == math.inf:
        return np.zeros(count)
    times = np.cumsum(gamma_gaps(count, burstiness, rng))
    if not times[-1] > 0:
        raise UsageError(
            f"`arrivals.burstiness` {burstiness:g} is so small that every gap underflows to 0; use 0.001 or more"
        )
    times_s: Floats = times * (count / rate / times[-1])
    times_s[-1] = count / rate
    return np.minimum(times_s, count / rate)


def ramp(
    count: int, strategy: str, start_rps: float, end_rps: float, burstiness: float, rng: np.random.Generator
) -> Floats:
    """`count` times whose rate goes from `start_rps` to `end_rps` request by request (not by time), without
    rescaling."""
    progress = np.arange(count) / max(count - 1, 1)
    if strategy == "linear":
        rates = start_rps + (end_rps - start_rps) * progress
    else:
        rates = start_rps * (end_rps / start_rps) ** progress
    return np.cumsum(gamma_gaps(count, burstiness, rng) / rates)


class RateCurve:
    """A rate as a function of time: linear between points, repeated with the period of the last point.

    Arrivals of a non-homogeneous process come from inverting the cumulative rate at the times of a process of
    rate 1.
    """

    def __init__(self, times_s: Floats, rates: Floats) -> None:
        self.times_s = times_s
        self.rates = rates
        pieces = (rates[1:] + rates[:-1]) / 2 * np.diff(times_s)
        self._cumulative = np.concatenate(([0.0], np.cumsum(pieces)))

    @classmethod
    def of(cls, spec: ArrivalSpec) -> RateCurve:
        """The curve of `rate_points` or of `daily_curve` with mean `request_rate`."""
        if spec.rate_points is not None:
            points = np.asarray(spec.rate_points, dtype=np.float64)
            return cls(points[:, 0], points[:, 1])
        assert spec.daily_curve is not None
        assert spec.request_rate is not None
        hours = np.asarray(DAILY_CURVES[spec.daily_curve])
        hours = hours / hours.mean() * spec.request_rate
        return cls(np.linspace(0.0, spec.period_s, 25), np.append(hours, hours[0]))

    @property
    def period_s(self) -> float:
        """Time of the last point."""
        return float(self.times_s[-1])

    @property
    def per_period(self) -> float:
        """Expected arrivals in one period: the integral of the rate."""
        return float(self._cumulative[-1])

    def expected(self, t_s: float) -> float:
        """Expected arrivals in [0, t_s)."""
        periods, rest_s = divmod(t_s, self.period_s)
        i = min(int(np.searchsorted(self.times_s, rest_s, side="right")) - 1, len(self.times_s) - 2)
        dt_s = rest_s - self.times_s[i]
        slope = (self.rates[i + 1] - self.rates[i]) / (self.times_s[i + 1] - self.times_s[i])
        inside = self._cumulative[i] + self.rates[i] * dt_s + slope * dt_s * dt_s / 2
        return float(periods * self.per_period + inside)

    def inverse(self, expected: Floats) -> Floats:
        """Times at which the expected number of arrivals reaches each value, same shape."""
        periods = np.floor(expected / self.per_period)
        rest = np.clip(expected - periods * self.per_period, 0.0, self.per_period)
        i = np.clip(np.searchsorted(self._cumulative, rest, side="right") - 1, 0, len(self.times_s) - 2)
        area = rest - self._cumulative[i]
        rate = self.rates[i]
        width_s = self.times_s[i + 1] - self.times_s[i]
        slope = (self.rates[i + 1] - rate) / width_s
        # area = rate·dt + slope·dt²/2, solved without cancellation; the root is 0 only where area is.
        root = np.sqrt(np.maximum(rate * rate + 2 * slope * area, 0.0))
        denominator = rate + root
        dt_s = np.divide(2 * area, denominator, out=np.zeros_like(area), where=denominator > 0)
        times_s: Floats = periods * self.period_s + self.times_s[i] + np.minimum(dt_s, width_s)
        return times_s


def along_curve(
    curve: RateCurve, count: int | None, duration_s: float, burstiness: float, rng: np.random.Generator
) -> Floats:
    """Times of arrivals before `duration_s` (may be inf), at most `count` of them; one of the two must limit
    it."""
    total = math.inf if duration_s == math.inf else curve.expected(duration_s)
    if count is None and total > _MAX_ARRIVALS:
        raise UsageError(
            f"the rate curve expects {total:,.0f} requests over {duration_s:g} s; shorten "
            "`arrivals.duration_s` or set `num_prompts`"
        )
    if count is not None:
        sums = np.cumsum(gamma_gaps(count, burstiness, rng))
    else:
        parts: list[Floats] = []
        last = 0.0
        while last < total:
            block = last + np.cumsum(gamma_gaps(int((total - last) * 1.1) + 64, burstiness, rng))
            parts.append(block)
            last = float(block[-1])
        sums = np.concatenate(parts) if parts else np.empty(0)
    times_s = curve.inverse(sums[sums < total])
    return times_s[times_s < duration_s]


def count_for(spec: ArrivalSpec) -> int | None:
    """How many requests a steady rate sends in `duration_s`, rounded; None when the spec does not say."""
    if spec.duration_s is None or spec.request_rate is None or spec.daily_curve is not None:
        return None
    count = round(spec.duration_s * spec.request_rate)
    if count < 1:
        raise UsageError(
            f"no request is sent in {spec.duration_s:g} s at {spec.request_rate:g} a second; raise "
            "`arrivals.duration_s` or `arrivals.request_rate`"
        )
    if count > _MAX_ARRIVALS:
        raise UsageError(
            f"{count:,} requests in {spec.duration_s:g} s are more than {_MAX_ARRIVALS:,}; lower "
            "`arrivals.duration_s` or `arrivals.request_rate`"
        )
    return count


def draw(spec: ArrivalSpec, count: int | None, rng: np.random.Generator) -> Floats:
    """Sorted arrival times in seconds of a spec that is not `from_trace`.

    `count` limits them; None is allowed for a curve, which then ends after `duration_s` or one period.
    """
    if spec.rate_points is not None or spec.daily_curve is not None:
        curve = RateCurve.of(spec)
        duration_s = spec.duration_s
        if duration_s is None:
            duration_s = math.inf if count is not None else curve.period_s
        return along_curve(curve, count, duration_s, spec.burstiness, rng)
    assert count is not None
    if spec.ramp_up_strategy is not None:
        assert spec.ramp_up_start_rps is not None
        assert spec.ramp_up_end_rps is not None
        return ramp(
            count, spec.ramp_up_strategy, spec.ramp_up_start_rps, spec.ramp_up_end_rps, spec.burstiness, rng
        )
    assert spec.request_rate is not None
    return steady(count, spec.request_rate, spec.burstiness, rng)
