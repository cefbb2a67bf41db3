"""Intervals, extrapolations and thin percentiles in the table, the JSON and the page."""

from __future__ import annotations

import io
import json
from functools import lru_cache

import pytest
from rich.console import Console

from experiments.certainty import bracket, certainty_lines, ends_ms, interval_keys
from experiments.console import print_run
from experiments.report import report_html
from experiments.results import result_json
from sim.certainty import Certainty, assess, default_replications
from sim.deployment import Deployment, build, simulate
from sim.intervals import Interval
from sim.metrics import Summary, summarise
from sim.record import RunRecord
from sim.slo import Goodput
from sim.verdict import verdict
from sim.workload import TenantSpec, WorkloadSpec, load_workload


@lru_cache
def judged(replications: int = 3) -> tuple[RunRecord, Summary, Certainty]:
    tenant = {
        "dataset": {"name": "random", "input_len": 200, "output_len": 10, "range_ratio": 0.5},
        "arrivals": {"request_rate": 100.0},
        "num_prompts": 60,
    }
    spec = WorkloadSpec(tenants=(TenantSpec.model_validate(tenant),))
    built = build(
        Deployment(
            model="qwen2.5-0.5b", gpu="h200", max_num_seqs=8, max_num_batched_tokens=512, max_model_len=4096
        )
    )
    record = simulate(load_workload(spec, seed=2), built)
    goodput = Goodput(ttft_s=0.5)
    summary = summarise(record, goodput=goodput)
    sure = assess(record, summary, built, spec, seed=2, replications=replications, goodput=goodput, jobs=1)
    return record, summary, sure


def table(width: int = 80) -> list[str]:
    record, summary, sure = judged()
    out = io.StringIO()
    print_run(
        record, summary, verdict(record, summary), console=Console(file=out, width=width), certainty=sure
    )
    return out.getvalue().splitlines()


def test_the_table_has_an_interval_beside_every_latency_within_80_columns() -> None:
    lines = table()
    assert all(len(line) <= 80 for line in lines)
    rows = [line for line in lines if "(ms):" in line and line.startswith(("Mean", "Median", "P9"))]
    assert len(rows) == 4 * 5
    for row in rows:
        value = float(row[41:51])
        low, high = (float(end) for end in row[row.index("[") + 1 : row.index("]")].split(", "))
        assert low <= value <= high
    assert any("(send to first token received)" in line for line in lines)


def test_thin_percentiles_and_extrapolations_are_marked_in_the_table() -> None:
    lines = table()
    assert next(line for line in lines if line.startswith("P99 TTFT")).endswith("*")
    assert not next(line for line in lines if line.startswith("P90 TTFT")).endswith("*")
    text = " ".join(" ".join(lines).split())
    assert "* P99 TTFT of 60 samples is nearly the maximum; 368 would bound it." in text
    assert "Not measured: attention: head_dim 64" in text
    assert "95% intervals for another run of this traffic, from 3 replications" in text


def test_the_json_has_low_and_high_of_every_figure_and_says_where_they_come_from() -> None:
    record, summary, sure = judged()
    result = json.loads(json.dumps(result_json(record, summary, certainty=sure), allow_nan=False))
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "p90", "p95", "p99"):
            name = f"{statistic}_{metric}"
            low, high = result[f"{name}_ci95_low_ms"], result[f"{name}_ci95_high_ms"]
            assert low <= result[f"{name}_ms"] <= high, name
    assert result["output_throughput_ci95_low"] <= result["output_throughput"]
    assert result["request_goodput_ci95_high"] >= result["request_goodput"]
    assert 0 <= result["slo_attainment_ci95_low"] <= result["slo_attainment_ci95_high"] <= 1
    assert result["sim_replications"] == 3
    assert sum(result["sim_variance_shares"]["mean_tpot"].values()) == pytest.approx(1.0)
    assert result["sim_thin_percentiles"]["p99_ttft"] == {"samples": 60, "needed": 368}
    assert any("head_dim 64" in line for line in result["sim_extrapolations"])
    only = interval_keys(sure, ("ttft",))
    assert not [key for key in only if "tpot" in key]


def test_the_page_says_how_sure_its_headline_is() -> None:
    record, summary, sure = judged()
    page = report_html(record, summary, verdict(record, summary), certainty=sure)
    assert "How sure" in page
    interval = sure.interval("p95_ttft")
    assert interval is not None
    assert f"P95 TTFT [{interval.low * 1000:,.4g} to {interval.high * 1000:,.4g}]" in page
    assert "Not measured: attention: head_dim 64" in page
    assert "How sure" not in report_html(record, summary, verdict(record, summary))


def test_what_the_page_warns_of_is_not_said_again() -> None:
    _, _, sure = judged()
    said = sure.extrapolations[0].words
    assert sorted([*certainty_lines(sure, [said]), f"Not measured: {said}."]) == sorted(certainty_lines(sure))


def test_one_replication_leaves_intervals_out_and_keeps_the_rest() -> None:
    record, summary, sure = judged(1)
    assert sure.replicated is None
    assert bracket(sure, "p95_ttft") == "*"
    assert bracket(sure, "mean_ttft") == bracket(None, "mean_ttft") == ""
    assert interval_keys(sure) == {}
    assert any("head_dim" in line for line in certainty_lines(sure))
    assert default_replications(record) == 8
    assert result_json(record, summary, certainty=sure)["sim_replications"] == 1


def test_an_interrupt_keeps_the_run_and_says_that_intervals_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sim.certainty.replicate", interrupted)
    judged.cache_clear()
    _, _, sure = judged(4)
    judged.cache_clear()
    assert sure.interrupted
    assert "Interrupted before intervals were known." in certainty_lines(sure)


def test_ends_of_a_second_and_more_are_whole_ms() -> None:
    assert ends_ms(Interval(1.0, 0.004989, 24.1404, 1.0, 0.0, 0.0)) == "4.989 to 24,140"
