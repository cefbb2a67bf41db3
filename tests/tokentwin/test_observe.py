"""What watches a run from the command line: alerts, share of peak, minutes, spans, and metrics while it goes on."""

from __future__ import annotations

import json
import socket
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

import tokentwin as tt
from experiments.observed import UTILISATION
from experiments.report_figures import step_roofline
from tests.otlp_collector import collector, spans_in
from tests.tokentwin.shell import SMALL, Command
from tokentwin.commands.simulate import work_so_far
from tokentwin.job import make_job, run_job
from tokentwin.live import of_world
from tokentwin.server.run_meters import RunMeters, bucketed, serving

ONCE = (*SMALL, "--replications", "1")
FIRES, QUIET = "ttft:p95:1s > 1ms for 1s", "kv_usage:max:1m > 99%"


def test_alerts_are_said_saved_and_drawn(tokentwin: Command, tmp_path: Path) -> None:
    answer = tokentwin("simulate", *ONCE, "--alert", FIRES, "--alert", QUIET, "-o", tmp_path)
    assert (answer.code, answer.err) == (0, "")
    assert f"{FIRES}: fired at 2s" in " ".join(answer.out.split())
    fired, quiet = json.loads((tmp_path / "result.json").read_text())["sim_alerts"]
    assert fired["rule"] == FIRES
    assert fired["fired"][0]["fired_at_s"] - fired["fired"][0]["pending_at_s"] == pytest.approx(1.0)
    assert quiet["fired"] == []
    assert "Alerts" in (tmp_path / "report.html").read_text()


def test_a_firing_alert_fails_only_where_it_is_asked_to(tokentwin: Command) -> None:
    assert tokentwin("simulate", *ONCE, "--alert", FIRES).code == 0
    assert tokentwin("simulate", *ONCE, "--alert", FIRES, "--fail-on-alert").code == 3
    assert tokentwin("simulate", *ONCE, "--alert", QUIET, "--fail-on-alert").code == 0
    alone = tokentwin("simulate", *ONCE, "--fail-on-alert")
    assert (alone.code, "--fail-on-alert has no effect without --alert" in alone.error) == (2, True)


def test_a_wrong_rule_is_one_line_before_anything_runs(tokentwin: Command) -> None:
    wrong = tokentwin("simulate", *ONCE, "--alert", "ttft:p9x5:1m > 1s")
    assert (wrong.code, wrong.out) == (2, "")
    assert "column 6, 'p9x5': not a statistic of ttft" in wrong.error


def test_rules_come_from_a_file_too(tokentwin: Command, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"model: llama-3.1-8b\nalert: '{FIRES}'\n")
    answer = tokentwin("simulate", "--config", config, *ONCE[2:], "--fail-on-alert")
    assert answer.code == 3, answer.err
    config.write_text(f"model: llama-3.1-8b\nalert:\n  - '{FIRES}'\n  - '{QUIET}'\n")
    assert "quiet" in tokentwin("simulate", "--config", config, *ONCE[2:]).out


def test_share_of_peak_is_in_table_file_and_minutes(tokentwin: Command, tmp_path: Path) -> None:
    answer = tokentwin("simulate", *ONCE, "-o", tmp_path)
    assert "MFU, while busy (%):" in answer.out
    result = json.loads((tmp_path / "result.json").read_text())
    assert 0 < result["sim_mfu_wall"] < result["sim_mfu"] < 1
    assert 0 < result["sim_mbu_wall"] < result["sim_mbu"] < 1
    steps = pq.read_table(tmp_path / "steps.parquet").to_pydict()
    length_s = np.array(steps["end_s"]) - np.array(steps["start_s"])
    mean = np.dot(steps["mfu"], length_s) / length_s.sum()
    assert mean == pytest.approx(result["sim_mfu"], rel=1e-5)
    minutes = pq.read_table(tmp_path / "minutes.parquet")
    assert sum(minutes.column("arrived").to_pylist()) == 12
    assert 0 < minutes.column("mfu").to_pylist()[0] < 1
    assert "Share of the device" in (tmp_path / "report.html").read_text()


# ---- spans -------------------------------------------------------------------------------------------------


def test_spans_of_every_request_are_in_the_file(
    tokentwin: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for name in ("a.jsonl", "b.jsonl"):
        answer = tokentwin("simulate", *ONCE, "--otlp-file", tmp_path / name)
        assert answer.code == 0, answer.err
        assert name in answer.out
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    document = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert [span["name"] for span in spans].count("llm_request") == 12
    assert min(int(span["startTimeUnixNano"]) for span in spans) >= 1_700_000_000 * 10**9


def test_a_sample_says_how_many_it_has(tokentwin: Command, tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    answer = tokentwin("simulate", *ONCE, "--otlp-file", file, "--otlp-traces-sample-ratio", "0.5")
    assert answer.code == 0
    traced = file.read_text().count('"llm_request"')
    assert answer.err == f"note: {traced} of 12 requests were traced\n"
    assert 0 < traced < 12


def test_spans_go_to_a_collector(tokentwin: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with collector() as (url, got):
        answer = tokentwin("simulate", *ONCE, "--otlp-traces-endpoint", url)
    assert (answer.code, answer.err) == (0, "")
    assert [span.name for span in spans_in(got)].count("llm_request") == 12
    nobody = tokentwin("simulate", *ONCE, "--otlp-traces-endpoint", url)
    assert nobody.code == 1
    assert "Mean TTFT" in nobody.out
    assert "does not take the spans" in nobody.error


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--otlp-traces-sample-ratio", "0.5"), "has no effect without --otlp-file"),
        (("--otlp-file", "x", "--otlp-traces-sample-ratio", "2"), "must lie above 0 and up to 1"),
        (("--otlp-traces-endpoint", "localhost:4317"), "write a URL"),
        (("--metrics-port", "70000"), "--metrics-port 70000"),
    ],
)
def test_wrong_flags_are_one_line_before_anything_runs(
    tokentwin: Command, flags: tuple[str, ...], why: str
) -> None:
    answer = tokentwin("simulate", *ONCE, *flags)
    assert (answer.code, answer.out) == (2, "")
    assert why in answer.error


# ---- metrics -----------------------------------------------------------------------------------------------


def scrape(address: str) -> dict[str, float]:
    """Samples of a page of metrics by name and finished reason, through Prometheus's own parser."""
    text = urllib.request.urlopen(address, timeout=10).read().decode()
    families = text_string_to_metric_families(text)
    return {
        sample.name + sample.labels.get("finished_reason", "") + sample.labels.get("le", ""): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_are_there_while_a_simulation_runs_and_right_when_it_ends() -> None:
    """Looked at from between two events, they grow with the run; at its end they say what the summary says."""
    flags = {"model": "llama-3.1-8b", "gpu": "h200", "dataset_name": "random", "num_prompts": 300}
    job = make_job({**flags, "request_rate": 20.0, "replications": 1})
    seen: list[dict[str, float]] = []
    with serving(lambda: meters[0] if meters else None, 0) as address:
        meters: list[RunMeters] = []

        def watch(world: Any) -> None:
            assert scrape(address) == {}
            meters.append(RunMeters(of_world(world), "m", work_so_far(job)))
            for at_s in (2.0, 5.0):
                world.clock.call_at(at_s, lambda: seen.append(scrape(address)))

        run = run_job(job, watch=watch)
        end = scrape(address)
    first, second = seen
    assert [first["tokentwin:run_time_seconds"], second["tokentwin:run_time_seconds"]] == [2.0, 5.0]
    for name in ("vllm:generation_tokens_total", "vllm:request_success_totallength"):
        assert 0 < first[name] < second[name] < end[name]
    assert first["vllm:num_requests_running"] > 0
    assert end["vllm:num_requests_running"] == 0
    s = run.summary
    assert end["vllm:request_success_totallength"] == s.completed == 300
    assert end["vllm:prompt_tokens_total"] == s.total_input_tokens
    assert end["vllm:generation_tokens_total"] == s.total_output_tokens
    assert end["vllm:time_to_first_token_seconds_count"] == 300
    queued = run.record.requests.first_token_s - run.record.requests.queued_s
    assert end["vllm:time_to_first_token_seconds_sum"] == pytest.approx(queued.sum(), rel=1e-3)
    assert end["vllm:time_to_first_token_seconds_bucket0.1"] == pytest.approx((queued <= 0.1).sum(), abs=2)
    assert end["vllm:time_to_first_token_seconds_bucket+Inf"] == 300
    assert end["vllm:iteration_tokens_total_count"] == s.num_steps
    assert end["vllm:inter_token_latency_seconds_count"] == s.total_output_tokens - 300
    assert end["vllm:estimated_flops_per_gpu_total"] == pytest.approx(run.roofline().flops.sum())


def test_flops_while_a_run_with_drafts_goes_on_are_those_of_its_roofline() -> None:
    drafts = (
        '{"method": "draft_model", "model": "llama-3.2-1b", "num_speculative_tokens": 3, "acceptance": 0.6}'
    )
    flags = {"model": "llama-3.1-8b", "gpu": "h200", "dataset_name": "random", "isl": 200, "osl": 30}
    job = make_job({**flags, "num_prompts": 40, "replications": 1, "speculative_config": drafts})
    meters: list[RunMeters] = []
    with serving(lambda: meters[0] if meters else None, 0) as address:
        run = run_job(
            job, watch=lambda world: meters.append(RunMeters(of_world(world), "m", work_so_far(job)))
        )
        end = scrape(address)
    assert end["vllm:estimated_flops_per_gpu_total"] == pytest.approx(run.roofline().flops.sum())
    assert run.record.draft_steps is not None
    alone = step_roofline(replace(run.record, draft_steps=None), replace(run.built, speculation=None))
    assert end["vllm:estimated_flops_per_gpu_total"] > 1.05 * alone.flops.sum()


def test_a_taken_port_is_one_line(tokentwin: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = tokentwin("simulate", *ONCE, "--metrics-port", taken.getsockname()[1])
    assert answer.code == 2
    assert "choose another, or 0 for any that is free" in answer.error


def test_the_address_is_said_and_the_port_is_free_again(tokentwin: Command) -> None:
    answer = tokentwin("simulate", *ONCE, "--metrics-port", "0")
    assert answer.code == 0
    address = answer.err.split()[2]
    assert address.startswith("http://127.0.0.1:")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=2)


@given(st.lists(st.floats(0.0, 3.0), max_size=30))
def test_buckets_are_those_of_the_client_library(values: list[float]) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("x", "x", registry=registry, buckets=(0.5, 1, 2.5))
    for value in values:
        histogram.observe(value)
    buckets, total = bucketed(np.array(values), np.ones(len(values)), (0.5, 1, 2.5))
    for bound, count in buckets:
        assert registry.get_sample_value("x_bucket", {"le": bound}) == count
    assert registry.get_sample_value("x_sum") == pytest.approx(total)


def test_accepted_drafts_are_counted_by_the_end() -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.6}'
    asked = {
        "model": "llama-3.1-8b",
        "gpu": "h200",
        "dataset_name": "random",
        "num_prompts": 30,
        "request_rate": 8.0,
    }
    job = make_job({**asked, "speculative_config": drafts, "replications": 1})
    meters: list[RunMeters] = []
    run = run_job(job, watch=lambda world: meters.append(RunMeters(of_world(world), "m")))
    values = {sample.name: sample.value for family in meters[0].collect() for sample in family.samples}
    assert values["vllm:generation_tokens_total"] == run.summary.total_output_tokens


def test_a_fleet_is_watched_too() -> None:
    """Replicas come, fail and go while somebody looks; what a lost replica had computed is computed again."""
    flags = {
        "model": "llama-3.1-8b",
        "gpu": "h200",
        "dataset_name": "random",
        "num_prompts": 200,
        "request_rate": 20.0,
    }
    fleet = {"data_parallel_size": 2, "failures": "{mtbf_s: 4, mttr_s: 1}"}
    job = make_job({**flags, **fleet, "replications": 1})
    assert work_so_far(job) is None
    seen: list[float] = []

    def watch(world: Any) -> None:
        meters = RunMeters(of_world(world), "m")

        def look() -> None:
            values = {s.name: s.value for family in meters.collect() for s in family.samples}
            seen.append(values["vllm:generation_tokens_total"])

        for at_s in (1.0, 3.0, 6.0, 9.0):
            world.clock.call_at(at_s, look)

    run = run_job(job, watch=watch)
    assert run.record.fleet is not None
    assert seen == sorted(seen)
    assert 0 < seen[0] < seen[-1]
    assert UTILISATION not in run.record.meta


def test_from_python_rules_are_a_keyword_and_their_histories_an_attribute() -> None:
    asked = {
        "model": "llama-3.1-8b",
        "gpu": "h200",
        "dataset_name": "random",
        "num_prompts": 12,
        "request_rate": 8.0,
    }
    run = tt.simulate(**asked, alert=[FIRES, QUIET])
    fired, quiet = run.alerts
    assert (str(fired.rule), fired.fired, quiet.fired) == (FIRES, True, False)
    assert len(fired.times_s) == len(fired.values)
    assert tt.simulate(**asked, alert=FIRES).alerts[0].firings == fired.firings
    assert tt.simulate(**asked).alerts == ()
    assert int(run.minutes["arrived"].sum()) == 12
    with pytest.raises(tt.UsageError, match="column 1, 'tfft'"):
        tt.simulate(**asked, alert="tfft:p95:1m > 1s")
