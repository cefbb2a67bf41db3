"""What few requests and autocorrelated token times can say."""

from __future__ import annotations

import numpy as np
import pytest

from sim.metrics import summarise
from sim.samples import batch_means, gaps_in_time_order, mean_intervals, samples_needed, thin_percentiles
from tests.sim.toy_runs import toy_run


def test_samples_needed_follow_from_the_maximum() -> None:
    # 0.95^71 = 0.0262 > 0.025 > 0.95^72; 0.99^367 = 0.02500... > 0.025 > 0.99^368
    assert [samples_needed(p) for p in (50, 90, 95, 99)] == [6, 36, 72, 368]
    for p in (50, 90, 95, 99, 99.9):
        n = samples_needed(p)
        assert (p / 100) ** n <= 0.025 < (p / 100) ** (n - 1)


def test_a_p99_of_71_requests_is_called_nearly_the_maximum_and_one_of_400_is_not() -> None:
    few, many = (summarise(toy_run(np.arange(n) * 0.05, np.full(n, 10), np.full(n, 4))) for n in (71, 400))
    found = {thin.name: thin for thin in thin_percentiles(few)}
    assert found["p99_ttft"].samples == 71
    assert "nearly the maximum; 368 would bound it" in found["p99_ttft"].words
    assert "few samples" in found["p95_ttft"].words
    assert "p90_ttft" not in found
    assert thin_percentiles(many) == ()


def test_batch_means_cover_where_naive_intervals_of_correlated_values_do_not() -> None:
    """AR(1) at 0.95 has 39 times the variance of the mean of independent values: naive intervals cover a quarter."""
    rng = np.random.default_rng(0)
    covered = naive = 0
    for _ in range(300):
        values = np.empty(4000)
        last = rng.normal()
        for i, shock in enumerate(rng.normal(size=4000) * np.sqrt(1 - 0.95**2)):
            last = 0.95 * last + shock
            values[i] = last
        mean, half = batch_means(values)
        covered += abs(mean) <= half
        naive += abs(mean) <= 1.96 * values.std() / np.sqrt(len(values))
    print(f"batch means hold {covered / 300:.0%}, naive intervals {naive / 300:.0%}")
    assert 0.88 <= covered / 300 <= 0.99
    assert naive / 300 < 0.45


def test_a_short_series_has_a_mean_and_no_interval() -> None:
    mean, half = batch_means(np.arange(10.0))
    assert mean == 4.5
    assert np.isnan(half)


def test_a_recorded_run_has_intervals_of_its_means() -> None:
    rng = np.random.default_rng(1)
    run = toy_run(np.sort(rng.uniform(0, 60, 200)), rng.integers(5, 200, 200), rng.integers(2, 40, 200))
    summary, intervals = summarise(run), mean_intervals(run)
    for metric in ("ttft", "tpot", "e2el", "itl"):
        mean, low, high = intervals[f"mean_{metric}"]
        assert mean == pytest.approx(getattr(summary, metric).mean_s)
        assert low < mean < high
    assert len(gaps_in_time_order(run)) == int((run.requests.output_tokens - 1).sum())
