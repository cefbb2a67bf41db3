"""Alert rules: the grammar reads back what it writes and points at wrong words; states follow Prometheus."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.alert_series import gauge, held, histories, history_words, values_at
from experiments.alerts import (
    COMPARISONS,
    GAUGES,
    LATENCIES,
    SHARES,
    Rule,
    duration_text,
    evaluate,
    evaluations,
    parse_rule,
    parse_rules,
)
from experiments.observed import alert_lines, any_fired, observed_json
from experiments.series import StepFunction
from serving.errors import UsageError
from sim.record import RunRecord
from tests.sim.toy_runs import toy_run

durations = st.integers(0, 10**9).map(lambda ms: ms / 1000) | st.floats(1e-6, 1e6, allow_nan=False)
windows = durations.filter(lambda s: s >= 1)
percentiles = st.integers(1, 100).map(lambda p: f"p{p}") | st.sampled_from(["p99.9", "p0.5"])


@st.composite
def rules(draw: Any) -> Rule:
    kind = draw(st.sampled_from(["latency", "gauge", "ratio"]))
    if kind == "latency":
        metric = draw(st.sampled_from(LATENCIES))
        statistic = draw(st.sampled_from(["mean", "median", "min", "max"]) | percentiles)
        threshold = draw(durations)
    elif kind == "gauge":
        metric = draw(st.sampled_from(GAUGES))
        statistic = draw(st.sampled_from(["mean", "min", "max"]))
        threshold = draw(st.floats(0, 1 if metric in SHARES else 1e9))
    else:
        metric, statistic, threshold = "error_rate", "", draw(st.floats(0, 1))
    comparison = draw(st.sampled_from(list(COMPARISONS)))
    return Rule(metric, statistic, draw(windows), comparison, threshold, draw(durations))


@given(rules())
def test_a_rule_written_is_the_rule_read(rule: Rule) -> None:
    again = parse_rule(str(rule))
    numbers = ("window_s", "threshold", "for_s")
    assert replace(again, **{name: getattr(rule, name) for name in numbers}) == rule
    for name in numbers:
        assert getattr(again, name) == pytest.approx(getattr(rule, name), rel=1e-15, abs=0)
    assert str(parse_rule(str(again))) == str(again)


PIECES = [
    "ttft",
    "kv_usage",
    "error_rate",
    ":",
    " ",
    "p95",
    "mean",
    "1m",
    ">",
    "<",
    "=",
    "1",
    "0.5",
    "%",
    "for",
    "é",
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_text_is_a_rule_or_a_usage_error(text: str) -> None:
    try:
        rule = parse_rule(text)
    except UsageError:
        return
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("ttft:p95:1m > 1s for 3m", Rule("ttft", "p95", 60.0, ">", 1.0, 180.0)),
        ("ttft:p99.9:1m30s>=250ms", Rule("ttft", "p99.9", 90.0, ">=", 0.25)),
        ("kv_usage:max:5m > 90%", Rule("kv_usage", "max", 300.0, ">", 0.9)),
        ("error_rate:5m > 0.01 for 10m", Rule("error_rate", "", 300.0, ">", 0.01, 600.0)),
        ("waiting:mean:30s < 2", Rule("waiting", "mean", 30.0, "<", 2.0)),
        ("  tpot:mean:1h  <=  0.5s  ", Rule("tpot", "mean", 3600.0, "<=", 0.5)),
    ],
)
def test_rules_as_people_write_them(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize(
    ("text", "column", "word", "why"),
    [
        ("tfft:p95:1m > 1s", 1, "tfft", "did you mean 'ttft'"),
        ("ttft:p9x5:1m > 1s", 6, "p9x5", "not a statistic of ttft; did you mean 'p95'"),
        ("ttft:p0:1m > 1s", 6, "p0", "not a statistic"),
        ("ttft:p95:1minute > 1s", 10, "1minute", "not a duration"),
        ("ttft:p95:500ms > 1s", 10, "500ms", "at least 1s"),
        ("ttft:p95:30s1m > 1s", 10, "30s1m", "not a duration"),
        ("ttft:p95:1m => 1s", 13, "=>", "not a comparison"),
        ("ttft:p95:1m > 1", 15, "1", "needs a unit"),
        ("ttft:p95:1m > fast", 15, "fast", "not a duration"),
        ("kv_usage:mean:1m > 90", 20, "90", "at most 1; write 90%"),
        ("kv_usage:p95:1m > 0.9", 10, "p95", "not a statistic of kv_usage"),
        ("waiting:mean:1m > 5%", 19, "5%", "not a threshold of waiting"),
        ("error_rate:p95:1m > 1%", 12, "p95", "has no statistic"),
        ("ttft:1m > 1s", 1, "ttft:1m", "write ttft:p95:1m"),
        ("ttft:p95:1m:2m > 1s", 13, "2m", "too many parts"),
        ("ttft:p95:1m > 1s during 3m", 18, "during", "only 'for'"),
        ("ttft:p95:1m > 1s for ever", 22, "ever", "not a duration"),
        ("ttft:p95:1m > 1s for 3m now", 25, "now", "nothing may stand"),
    ],
)
def test_an_error_points_at_the_wrong_word(text: str, column: int, word: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rule(text)
    assert f"column {column}, {word!r}" in str(caught.value)
    assert why in str(caught.value)
    assert text[column - 1 :].startswith(word)


@pytest.mark.parametrize("text", ["", "ttft:p95:1m", "ttft:p95:1m >", "ttft:p95:1m > 1s for"])
def test_what_is_missing_is_said(text: str) -> None:
    with pytest.raises(UsageError, match=r"missing|empty"):
        parse_rule(text)


def test_the_same_rule_twice_is_an_error() -> None:
    with pytest.raises(UsageError, match="given 2 times"):
        parse_rules(["ttft:p95:60s > 1s", "ttft:p95:1m > 1000ms"])


def test_durations_are_written_in_whole_units() -> None:
    assert [duration_text(s) for s in (0, 0.25, 90, 3600, 3661.5)] == [
        "0s",
        "250ms",
        "1m30s",
        "1h",
        "1h1m1s500ms",
    ]


# ---- states ------------------------------------------------------------------------------------------------

MINUTES = np.arange(1, 13) * 60.0
RULE = parse_rule("ttft:p95:1m > 1s for 3m")


def test_a_rule_fires_when_it_has_held_for_its_time_and_clears_when_it_does_not() -> None:
    """Bad from minute 3 to 8: pending at 3, 3 minutes later it fires, and it clears at 9, which is good again."""
    values = np.where((MINUTES >= 180) & (MINUTES <= 480), 2.0, 0.5)
    values[5] = 4.0
    (firing,) = evaluate(RULE, MINUTES, values).firings
    assert (firing.pending_s, firing.fired_s, firing.cleared_s, firing.worst) == (180.0, 360.0, 540.0, 4.0)


def test_three_bad_minutes_are_pending_for_two_and_do_not_fire() -> None:
    values = np.where((MINUTES >= 180) & (MINUTES <= 300), 2.0, 0.5)
    assert not evaluate(RULE, MINUTES, values).fired
    assert evaluate(replace(RULE, for_s=120.0), MINUTES, values).firings[0].fired_s == 300.0


def test_one_good_minute_or_one_without_samples_begins_the_wait_anew() -> None:
    for gap in (0.5, math.nan):
        values = np.full(12, 2.0)
        values[4] = gap
        first, second = evaluate(RULE, MINUTES, values).firings
        assert (first.pending_s, first.fired_s, first.cleared_s) == (60.0, 240.0, 300.0)
        assert (second.pending_s, second.fired_s, second.cleared_s) == (360.0, 540.0, None)


def test_without_for_a_rule_fires_at_once() -> None:
    values = np.array([0.5, 2.0, 0.5])
    (firing,) = evaluate(replace(RULE, for_s=0.0), MINUTES[:3], values).firings
    assert (firing.fired_s, firing.cleared_s) == (120.0, 180.0)


@given(st.lists(st.sampled_from([0.5, 2.0, math.nan]), max_size=25), st.integers(0, 5))
def test_a_rule_fires_exactly_where_it_has_held_long_enough(values: list[float], minutes: int) -> None:
    """By the definition: at an evaluation it fires when the comparison held there and at every one of the `minutes`
    before, counted back as far as it held without a gap."""
    times = np.arange(1, len(values) + 1) * 60.0
    history = evaluate(replace(RULE, for_s=60.0 * minutes), times, np.array(values))
    expected = {
        times[k]
        for k in range(len(values))
        if k >= minutes and all(v == 2.0 for v in values[k - minutes : k + 1])
    }
    firing = {
        t
        for t in times
        for one in history.firings
        if one.fired_s <= t and (one.cleared_s is None or t < one.cleared_s)
    }
    assert firing == expected


def test_equality_decides_between_above_and_at_least() -> None:
    values = np.array([1.0])
    assert not evaluate(parse_rule("ttft:p95:1m > 1s"), MINUTES[:1], values).fired
    assert evaluate(parse_rule("ttft:p95:1m >= 1s"), MINUTES[:1], values).fired


def test_evaluations_are_a_minute_apart_or_a_window_and_cover_the_run() -> None:
    np.testing.assert_allclose(evaluations(RULE, 10.0, 200.0), [70.0, 130.0, 190.0, 250.0])
    short = parse_rule("ttft:p95:10s > 1s")
    np.testing.assert_allclose(evaluations(short, 0.0, 30.0), [10.0, 20.0, 30.0])
    np.testing.assert_allclose(evaluations(RULE, 5.0, 5.0), [65.0])
    assert (
        evaluations(parse_rule("ttft:p95:5m > 1s"), 0.0, 600.0).tolist() == (60.0 * np.arange(1, 11)).tolist()
    )


# ---- of a run ----------------------------------------------------------------------------------------------


def slow_minutes() -> RunRecord:
    """A request each second for ten minutes. TTFT is 0.1 s, and 2 s for those sent in minutes 3 to 7 (from 180 s on to
    480 s); answers end 1 s after their first token."""
    run = toy_run(np.arange(600.0), np.full(600, 10), np.full(600, 2))
    sent = run.requests.sent_s
    ttft = np.where((sent >= 180) & (sent < 480), 2.0, 0.1)
    requests = replace(run.requests, first_token_s=sent + ttft, last_token_s=sent + ttft + 1)
    return replace(run, requests=requests, end_s=600.0)


def test_the_firing_minute_of_a_known_run() -> None:
    """First tokens of slow requests are seen from 182 s on: the window that ends at 240 s is the first bad one (58 of
    60 samples are slow), so the rule pends at 240, fires at 420 and clears at 540 (the window from 480 s has slow ones
    until 481 s: 2 of 60, above which P95 is not)."""
    (history,) = histories(slow_minutes(), [RULE])
    (firing,) = history.firings
    assert (firing.pending_s, firing.fired_s, firing.cleared_s) == (240.0, 420.0, 540.0)
    assert firing.worst == pytest.approx(2.0)
    assert history_words(history, 0.0) == f"{RULE}: fired at 7m, cleared at 9m (worst 2 s)."


def test_samples_are_seen_when_they_happen() -> None:
    run = slow_minutes()
    at = np.array([10.05])
    assert values_at(run, "ttft", "max", at, 1.0)[0] == pytest.approx(0.1)  # sent at 9, first token at 9.1
    assert math.isnan(values_at(run, "e2el", "max", np.array([1.0]), 1.0)[0])  # the first answer ends at 1.1
    assert values_at(run, "e2el", "max", np.array([1.2]), 1.0)[0] == pytest.approx(1.1)
    assert values_at(run, "tpot", "mean", at, 5.0)[0] == pytest.approx(1.0)


def test_error_rate_counts_refusals_among_what_ended() -> None:
    run = toy_run(np.arange(10.0), np.full(10, 10), np.full(10, 2), rejected=(1, 2))
    assert values_at(run, "error_rate", "", np.array([5.0, 20.0]), 60.0).tolist() == [
        pytest.approx(2 / 5),
        0.2,
    ]


def test_a_gauge_is_weighted_by_time() -> None:
    """4 from 0 to 10, 8 from 10 to 12, 0 after that."""
    function = StepFunction(np.array([0.0, 10.0, 12.0]), np.array([4.0, 8.0, 0.0]))
    at = np.array([10.0, 12.0, 14.0, 30.0])
    np.testing.assert_allclose(held(function, "mean", at, 4.0), [4.0, (2 * 4 + 2 * 8) / 4, 2 * 8 / 4, 0.0])
    np.testing.assert_allclose(held(function, "max", at, 4.0), [8.0, 8.0, 8.0, 0.0])
    np.testing.assert_allclose(held(function, "min", at, 4.0), [4.0, 0.0, 0.0, 0.0])


def test_kv_usage_is_a_share_of_all_pages() -> None:
    run = toy_run(np.zeros(4), np.full(4, 160), np.full(4, 20))
    values = gauge(run, "kv_usage").values
    assert values.max() == run.steps.used_pages.max() / run.num_pages


def test_json_counts_from_the_first_request() -> None:
    run = slow_minutes()
    requests = run.requests
    times = {name: getattr(requests, name) + 1000.0 for name in ("sent_s", "first_token_s", "last_token_s")}
    later = replace(run, requests=replace(requests, **times), end_s=1600.0, meta={"alerts": [str(RULE)]})
    (alert,) = observed_json(later)["sim_alerts"]
    assert alert["rule"] == "ttft:p95:1m > 1s for 3m"
    assert alert["fired"] == [
        {"pending_at_s": 240.0, "fired_at_s": 420.0, "cleared_at_s": 540.0, "worst": pytest.approx(2.0)}
    ]
    assert any_fired(later)
    assert alert_lines(later) == [(True, f"{RULE}: fired at 7m, cleared at 9m (worst 2 s).")]
    assert (observed_json(run), any_fired(run)) == ({}, False)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.07, 0.29, 0.57, 0.6, 0.9, 1.0, 1 / 3])
def test_shares_are_written_in_percent_where_that_says_the_same(share: float) -> None:
    rule = Rule("kv_usage", "mean", 60.0, ">", share)
    assert parse_rule(str(rule)) == rule
    assert str(rule).endswith("%") == (share != 1 / 3)
