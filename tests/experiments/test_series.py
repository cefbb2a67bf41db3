"""Reductions for the screen keep extremes, areas and counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.series import (
    StepFunction,
    band,
    ecdf,
    in_system,
    over_replicas,
    percentile_by_window,
    rate_per_s,
    thin,
)
from tests.sim.toy_runs import toy_run

changes = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), min_size=1, max_size=200)


@given(changes, st.integers(1, 40))
def test_a_band_keeps_extremes_and_area(rows: list[tuple[float, int]], buckets: int) -> None:
    rows.sort()
    times, values = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    b = band(StepFunction(times, values), 0.0, 101.0, buckets)
    # The function by hand: 0 until the first time, and the last of several values at one time.
    last = np.append(times[1:] > times[:-1], True)
    held = np.concatenate([[0.0], values[last]])
    spans = np.diff(np.concatenate([[0.0], times[last], [101.0]]))
    assert b.mean.sum() * 101.0 / buckets == pytest.approx(float(np.dot(held, spans)), rel=1e-6, abs=1e-6)
    assert (
        b.high.max() == held[spans > 0].max() if (spans > 0).all() else b.high.max() >= held[spans > 0].max()
    )
    assert (b.low <= b.mean).all()
    assert (b.mean <= b.high).all()


def test_a_replica_counts_nothing_between_steps() -> None:
    run = toy_run([0.0, 10.0], [10, 10], [5, 5])
    f = over_replicas(run.steps, run.steps.num_running)
    at_5s = f.values[np.searchsorted(f.times_s, 5.0, side="right") - 1]
    assert (f.values.max(), at_5s, f.values[-1]) == (1, 0, 0)


def test_replicas_add_up() -> None:
    one = toy_run([0.0] * 3, [10] * 3, [50] * 3).steps
    columns = {k: np.concatenate([v, v]) for k, v in one.columns().items()}
    both = replace(one, **columns | {"replica": np.repeat([0, 1], len(one))})
    assert over_replicas(both, both.num_running).values.max() == 6


def test_the_number_in_the_system_returns_to_zero() -> None:
    f = in_system(toy_run(np.arange(50) * 0.1, [10] * 50, [20] * 50, rejected=(4,)))
    assert f.values[-1] == 0
    assert f.values.max() == 3  # each stays 222 to 232 ms and one comes every 100 ms


def test_rates_count_every_event() -> None:
    t, rate = rate_per_s(np.linspace(0, 10, 101), 0.0, 10.0, 20)
    assert rate.sum() * 0.5 == pytest.approx(101)
    assert len(t) == 20


def test_percentiles_by_window() -> None:
    at = np.array([1.0, 2.0, 3.0, 61.0, 62.0, 63.0, 125.0])
    t, p = percentile_by_window(at, np.array([1.0, 2, 3, 10, 20, 30, 99]), 60.0, 0.0, 50, least=3)
    assert t.tolist() == [30.0, 90.0]
    assert p.tolist() == [2.0, 20.0]


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=3000))
def test_an_ecdf_is_monotone_and_ends_at_all(values: list[float]) -> None:
    x, share = ecdf(np.array(values), max_points=100)
    assert len(x) <= 100
    assert (np.diff(x) >= 0).all()
    assert (np.diff(share) > 0).all()
    assert (x[-1], share[-1]) == (max(values), 1.0)


def test_thinning_keeps_the_heaviest() -> None:
    weight = np.arange(1000.0)
    rows = thin(np.arange(1000), weight, 90)
    assert len(rows) <= 90
    assert set(range(970, 1000)) <= set(rows.tolist())
