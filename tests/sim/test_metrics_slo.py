"""How promises are written, and what a wrong one is told."""

from __future__ import annotations

import pytest

from serving.errors import UsageError
from sim.slo import Goodput, Slo, parse_goodput, parse_slo


def test_percentile_limits_are_read_in_ms() -> None:
    assert parse_slo(["p95_ttft:500", "mean_tpot:50", "median_e2el:1e3", "p99.9_itl:70"]) == (
        Slo("p95", "ttft", 0.5),
        Slo("mean", "tpot", 0.05),
        Slo("median", "e2el", 1.0),
        Slo("p99.9", "itl", 0.07),
    )
    assert [s.percentile for s in parse_slo(["median_itl:1", "max_itl:1", "mean_ttft:1", "p100_ttft:1"])] == [
        50,
        100,
        None,
        100,
    ]


def test_presets_expand() -> None:
    assert [s.name for s in parse_slo(["chat"])] == ["p95_ttft", "p95_tpot"]
    assert parse_slo(["autocomplete"]) == (Slo("p95", "ttft", 0.2),)


def test_goodput_limits_are_read_in_ms() -> None:
    assert parse_goodput(["ttft:500", "e2el:5000"]) == Goodput(ttft_s=0.5, e2el_s=5.0)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["p95_tft:500"], "p95_ttft"),
        (["q95_ttft:500"], "unknown name"),
        (["p0_ttft:500"], "unknown name"),
        (["p101_ttft:500"], "unknown name"),
        (["chatt"], "'chat'"),
        (["p95_ttft"], "NAME:MILLISECONDS"),
        (["p95_ttft:"], "not a number"),
        (["p95_ttft:fast"], "not a number"),
        (["p95_ttft:0"], "positive"),
        (["p95_ttft:-3"], "positive"),
        (["p95_ttft:nan"], "positive"),
        (["p95_ttft:inf"], "positive"),
        (["p95_ttft:500", "p95_ttft:600"], "2 times"),
        (["chat", "p95_ttft:600"], "2 times"),
    ],
)
def test_a_wrong_slo_is_one_line_that_says_why(items: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        parse_slo(items)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["tfft:1"], "'ttft'"),
        (["itl:1"], "unknown"),
        (["ttft:0"], "positive"),
        (["ttft:1", "ttft:2"], "twice"),
    ],
)
def test_a_wrong_goodput_is_one_line_that_says_why(items: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_goodput(items)
