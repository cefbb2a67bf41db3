"""Grouping, lines and reading, against a reader who is followed token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from sim.metrics import summarise
from sim.network import Network, delivering
from sim.streaming import (
    event_ends,
    grouped,
    over_line,
    perceived,
    perception,
    reading,
    sliced,
)
from sim.world import run_world
from tests.sim.worlds import LinearPricer, make_workload

times = st.lists(st.floats(0, 2), min_size=1, max_size=40).map(lambda gaps: np.cumsum(gaps))


def test_the_first_token_goes_at_once_and_the_rest_in_groups() -> None:
    assert event_ends(8, 3).tolist() == [0, 3, 6, 7]
    assert event_ends(7, 3).tolist() == [0, 3, 6]
    assert event_ends(1, 3).tolist() == [0]
    assert grouped(np.arange(8.0), 3).tolist() == [0, 3, 3, 3, 6, 6, 6, 7]


@given(times, st.integers(1, 10))
def test_grouping_delays_and_never_beyond_the_end(times_s: np.ndarray, interval: int) -> None:
    seen = grouped(times_s, interval)
    assert seen[0] == times_s[0]
    assert seen[-1] == times_s[-1]
    assert (seen >= times_s).all()
    assert (np.diff(seen) >= 0).all()
    assert len(np.unique(seen)) <= len(event_ends(len(times_s), interval))


def test_slices() -> None:
    seen = sliced(np.array([1.0, 1.04, 1.1, 1.25, 1.31]), 0.1)
    np.testing.assert_allclose(seen, [1.0, 1.1, 1.1, 1.3, 1.31])


@given(times, st.floats(0.001, 1))
def test_a_line_carries_events_one_after_the_other(sent_s: np.ndarray, each_s: float) -> None:
    free_s, expected = 0.0, []
    for time_s in sent_s:
        free_s = max(free_s, time_s) + each_s
        expected.append(free_s)
    np.testing.assert_allclose(over_line(sent_s, each_s), expected, rtol=1e-9, atol=1e-9)


@given(times, st.floats(0.5, 50))
@settings(max_examples=60)
def test_a_reader_followed_token_by_token(times_s: np.ndarray, speed: float) -> None:
    word = min(2, len(times_s) - 1)
    now_s = times_s[word]
    waited_s = 0.0
    for time_s in times_s:
        waited_s += max(0.0, time_s - now_s)
        now_s = max(now_s, time_s) + 1 / speed
    found = perceived(0.0, times_s, speed)
    assert found.stalled_share == pytest.approx(waited_s / (now_s - times_s[word]), abs=1e-6)
    assert found.first_word_s == times_s[word]
    assert found.longest_pause_s == pytest.approx(np.diff(times_s).max() if len(times_s) > 1 else 0.0)


def test_answers_slower_than_reading_stall_and_faster_ones_do_not() -> None:
    fast, slow = np.arange(50) * 0.01, np.arange(50) * 0.5
    assert perceived(0.0, fast).stalled_share == 0.0
    assert perceived(0.0, slow).stalled_share > 0.5


def test_a_run_read_in_several_ways() -> None:
    record = run_world(make_workload([0.0, 0.1], [10, 10], [40, 40]), SchedulerConfig(100), LinearPricer())
    plain, groups = reading(record), reading(record, interval=10)
    slow = reading(record, event_bytes=250.0, bytes_per_s=5000.0)
    assert (groups.longest_pause_s > 5 * plain.longest_pause_s).all()
    assert (groups.first_word_s > plain.first_word_s).all()
    assert (slow.longest_pause_s >= 250 / 5000 - 1e-9).all()


def test_perception_is_that_of_the_answers_as_they_came() -> None:
    """An answer of 20 tokens in 10 ms each, sent five at a time, to a client a quarter of a second away."""
    workload = make_workload([0.0], [10], [21])
    network = Network(rtt_ms=500)
    record = run_world(
        workload,
        SchedulerConfig(100),
        LinearPricer(0.01, 0.0, 0.0),
        delivering=delivering(network, workload.tenants, interval=5, slice_s=0.0),
    )
    found = perception(record)
    assert found.first_word.mean_s == pytest.approx(0.5 + 0.01 + 0.05)
    assert found.longest_pause.mean_s == pytest.approx(0.05)
    assert found.waiting_share == 0.0
    assert summarise(record).perceived == found
    assert found.figures()["p95_first_word_ms"] == pytest.approx(560)
