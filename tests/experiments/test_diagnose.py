"""`tokentwin diagnose`: a run with a known disease is found to have it, and what is proposed was simulated to help."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.diagnose import Diagnosis, diagnose
from experiments.diagnose_changes import Change
from experiments.diagnose_report import diagnosis_lines
from experiments.diagnose_run import from_columns, read_measured
from experiments.diagnose_stats import Exponent, decode_split, growth_exponent, shared_share, tail_rows
from serving.errors import UsageError
from sim.deployment import Deployment
from sim.slo import parse_slo
from sim.workload import load_workload
from sim.workload.spec import PrefixRepetitionSpec, TenantSpec, WorkloadSpec
from tests.experiments.sick_runs import bench_json, columns, folder, sick_run, spans, write_csv
from tokentwin.api import simulate

LLAMA = Deployment(model="llama-3.1-8b")


@functools.cache
def found_in(name: str) -> Diagnosis:
    return diagnose(read_measured(folder(name)), replications=3, jobs=1)


def fired(d: Diagnosis) -> dict[str, str]:
    return {f.rule: f.cause for f in d.findings if f.fired}


@pytest.mark.parametrize(
    ("name", "stage", "rule", "cause", "cure"),
    [
        ("queue", "queue", "queue", "max_num_seqs", {"max_num_seqs": 64}),
        ("pages", "queue", "queue", "kv_pages", {"num_gpu_blocks_override": None}),
        ("stalls", "prompts", "stalls", "", {"policy": "chunked", "max_num_batched_tokens": 512}),
        ("bandwidth", "kernels", "bandwidth", "", None),
        ("floor", "kernels", "floor", "", {"tensor_parallel_size": 4}),
        ("prefix", "prefill", "prefix cache", "off", {"enable_prefix_caching": True}),
    ],
)
def test_a_known_disease_is_found_and_its_cure_proposed(
    name: str, stage: str, rule: str, cause: str, cure: dict[str, object] | None
) -> None:
    d = found_in(name)
    assert not d.healthy
    assert d.target.stage == stage
    assert fired(d)[rule] == cause
    assert d.causes[0].rule == rule
    assert 1 <= len(d.proposed) <= 3
    if cure is not None:
        assert cure in [dict(trial.change.fields) for trial in d.proposed]
    for trial in d.proposed:
        assert trial.effect is not None
        assert trial.effect.high < 0, "an interval with no improvement in it is not proposed"
        # The effect is of the run's own twin, whose figure is the run's.
        assert trial.effect.a == pytest.approx(d.target.value_s, rel=1e-9)
    assert d.check is not None
    assert d.check.error == pytest.approx(0, abs=1e-9), "a run of the twin replays as itself"


def test_preempted_requests_point_to_too_little_kv_memory() -> None:
    d = found_in("pages")
    assert "preemption" in fired(d)
    preemptions = sick_run("pages").record.requests.preemptions.sum()
    assert next(f for f in d.findings if f.rule == "preemption").value == pytest.approx(preemptions / 80)


def test_a_proposal_does_what_it_says_when_it_is_run() -> None:
    d = found_in("queue")
    trial = next(t for t in d.proposed if "max_num_seqs" in t.change.fields)
    from tests.experiments.sick_runs import RUNS, SERVED

    again = simulate(**{**SERVED, **RUNS["queue"], **trial.change.fields})
    assert again.summary.slos[0].value_s == trial.after_s
    worse = dict(trial.worse)
    assert again.summary.tpot.mean_s - sick_run("queue").summary.tpot.mean_s == pytest.approx(
        worse["mean_tpot"].value
    )
    assert worse["mean_tpot"].value > 0, "more seats decode in larger batches"


def test_a_healthy_run_gets_nothing_wrong_and_nothing_is_simulated() -> None:
    d = found_in("healthy")
    assert d.healthy
    assert d.check is None
    assert not d.proposed
    assert any(line.startswith("Nothing wrong") for line in diagnosis_lines(d))


def test_no_change_on_the_server_cures_the_network() -> None:
    d = found_in("network")
    assert d.target.stage == "network"
    # 300 ms round trip of a TTFT that has little else: half of it in, half of it out.
    assert d.target.stages["network"] == pytest.approx(0.3 / d.target.value_s, rel=0.05)
    assert d.why_nothing == "nothing on the server cures this"


def test_where_nothing_tried_helps_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # One request a second never needs a second seat, so that more of them change nothing.
    more_seats = Change({"max_num_seqs": 2048}, "floor", words="more seats")
    monkeypatch.setattr("experiments.diagnose.changes_for", lambda findings, patient: (more_seats,))
    d = diagnose(read_measured(folder("floor")), replications=3, jobs=1)
    assert d.proposed == ()
    (trial,) = d.rejected
    assert trial.after_s == trial.before_s
    assert "Nothing tried helps." in diagnosis_lines(d)


def test_without_an_slo_the_chat_preset_stands_in() -> None:
    run = read_measured(folder("healthy"))
    run = from_columns(
        "x", "a test", sent_s=run.sent_s, prompt_tokens=run.prompt_tokens, output_tokens=run.output_tokens,
        ttft_s=run.ttft_s, e2el_s=run.e2el_s,
    )  # fmt: skip
    d = diagnose(run)
    assert d.assumed
    assert {j.slo.name for j in d.judged} == {"p95_ttft", "p95_tpot"}


# ---- foreign formats ---------------------------------------------------------------------------------------


def test_bench_json_spans_and_csv_of_one_run_say_the_same(tmp_path: Path) -> None:
    table = columns("queue")
    bench = read_measured(bench_json("queue", tmp_path / "bench.json"), LLAMA)
    otlp = tmp_path / "spans.json"
    otlp.write_text(json.dumps(spans(table)), encoding="utf-8")
    lines = tmp_path / "spans.jsonl"
    lines.write_text("\n".join(json.dumps(spans(table)) for _ in range(1)) + "\n", encoding="utf-8")
    foreign = [bench, read_measured(otlp, LLAMA), read_measured(lines, LLAMA)]
    foreign.append(read_measured(write_csv(tmp_path / "requests.csv", table), LLAMA))
    slos = parse_slo(["p95_ttft:500"])
    own = found_in("queue")
    for run in foreign:
        assert len(run) == 90
        d = diagnose(run, slos)
        assert d.target.value_s == pytest.approx(own.target.value_s, rel=1e-6)
        assert d.target.stage == "queue"
        assert d.target.stages["queue"] == pytest.approx(own.target.stages["queue"], abs=0.01)
        # The twin does not know that the run had 16 seats: with vLLM's default it is far off, and says so.
        assert d.check is not None
        assert not d.check.trusted
        assert "calibrate first" in d.why_nothing


def test_a_foreign_run_with_its_flags_is_treated_as_ones_own(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "requests.csv", columns("queue"))
    served = LLAMA.model_copy(update={"max_num_seqs": 16})
    d = diagnose(read_measured(path, served), parse_slo(["p95_ttft:500"]), replications=3, jobs=1)
    assert d.check is not None
    assert abs(d.check.error) < 0.02
    assert any("max_num_seqs" in trial.change.fields for trial in d.proposed)


def test_without_a_deployment_rules_are_applied_and_nothing_is_simulated(tmp_path: Path) -> None:
    d = diagnose(read_measured(write_csv(tmp_path / "r.csv", columns("queue"))), parse_slo(["p95_ttft:500"]))
    # TPOT rises while the 16 seats fill up, which the times of requests do show; the rest needs steps.
    assert fired(d).keys() == {"queue", "bandwidth"}
    assert "give --model" in d.why_nothing
    skipped = {f.rule: f.evidence for f in d.findings if f.fired is None}
    assert skipped["host"] == "does not apply: the CSV has no device times"


def test_a_bench_json_without_the_servers_queue_times_does_not_guess(tmp_path: Path) -> None:
    d = diagnose(
        read_measured(bench_json("queue", tmp_path / "b.json", server=False)), parse_slo(["p95_ttft:500"])
    )
    assert d.target.stage == "unknown"
    assert "no queue times" in next(f for f in d.findings if f.rule == "queue").evidence


def test_gaps_of_a_bench_json_show_stalls(tmp_path: Path) -> None:
    run = read_measured(bench_json("stalls", tmp_path / "bench.json"))
    assert "stalls" in fired(diagnose(run, parse_slo(["p99_itl:50"])))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sent_s,prompt_tokens\n1,2\n", "no column 'output_tokens'"),
        ("sent_s,prompt_tokens,output_tokens,ttft_s,e2el_s,que_s\n0,1,1,1,1,1\n", "did you mean 'queue_s'"),
        (
            "sent_s,prompt_tokens,output_tokens,ttft_s,e2el_s\n0,1,1,x,1\n",
            "line 2: ttft_s: 'x' is not a number",
        ),
        ("sent_s,prompt_tokens,output_tokens,ttft_s,e2el_s\n0,1,1,1\n", "line 2: 5 fields are needed"),
        (
            "sent_s,prompt_tokens,output_tokens,ttft_s,e2el_s\n0,1,1,2,1\n",
            "request 1: e2el_s is less than ttft_s",
        ),
        ('{"resourceSpans": []}', "no finished 'llm_request' span"),
        ('{"spans": []}', "whose top level has resourceSpans"),
        ('{"resourceSpans": []}\n{oops\n', "line 2: not JSON"),
        ('{"request_throughput": 1}', "no list 'input_lens'; save the run with"),
    ],
)
def test_a_broken_export_is_one_clear_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / ("run.json" if text.startswith("{") else "run.csv")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=words.replace("(", r"\(")) as error:
        read_measured(path)
    assert str(path) in str(error.value)


# ---- statistics, by formula --------------------------------------------------------------------------------


@pytest.mark.parametrize(("power", "fires"), [(1.0, False), (1.6, True)])
def test_prefill_that_grows_faster_than_prompts_is_told_from_a_line(power: float, fires: bool) -> None:
    prompts = np.geomspace(100, 10_000, 200).astype(np.int64)
    prefill_s = 1e-5 * prompts.astype(float) ** power
    run = from_columns(
        "x", "a test", sent_s=np.arange(200.0), prompt_tokens=prompts, output_tokens=np.full(200, 1),
        ttft_s=prefill_s + 0.001, e2el_s=prefill_s + 0.001, queue_s=np.full(200, 0.001), prefill_s=prefill_s,
    )  # fmt: skip
    d = diagnose(run, parse_slo(["p95_ttft:1"]))
    growth = next(f for f in d.findings if f.rule == "prefill growth")
    assert growth.value == pytest.approx(power, abs=0.01)
    assert growth.fired is fires


@pytest.mark.parametrize(("preempted", "cause"), [(1, "eviction"), (0, "stalls")])
def test_a_long_tail_of_tpot_is_eviction_only_where_the_slow_were_preempted(
    preempted: int, cause: str
) -> None:
    slow = np.arange(200) % 40 == 0
    tpot_s = np.where(slow, 0.1, 0.01)
    run = from_columns(
        "x", "a test", sent_s=np.arange(200.0), prompt_tokens=np.full(200, 100), output_tokens=np.full(200, 11),
        ttft_s=np.full(200, 0.1), e2el_s=0.1 + 10 * tpot_s, preemptions=slow.astype(np.int64) * preempted,
    )  # fmt: skip
    d = diagnose(run, parse_slo(["p99_tpot:50"]))
    tail = next(f for f in d.findings if f.rule == "tail")
    assert tail.fired
    assert tail.value == pytest.approx(10)
    assert tail.cause == cause


@settings(max_examples=50, deadline=None)
@given(st.floats(0.3, 2.5), st.floats(0.05, 0.5), st.integers(0, 10_000))
def test_the_interval_of_an_exponent_holds_it(power: float, noise: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.uniform(100, 10_000, 400)
    found = growth_exponent(x, x**power * np.exp(rng.normal(0, noise, 400)))
    assert isinstance(found, Exponent)
    # Twice the half width of a 95% interval is four standard errors: one in 16,000 lies beyond.
    assert abs(found.value - power) < 2 * (found.high - found.low) / 2 + 1e-9


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 40))
def test_what_an_endless_cache_would_find_is_counted_exactly(prefixes: int, pages: int, suffix: int) -> None:
    # Each of the N prompts but the first of its prefix repeats `pages` full pages.
    dataset = PrefixRepetitionSpec(
        num_prefixes=prefixes, prefix_len=16 * pages, suffix_len=suffix, output_len=1
    )
    count = prefixes * 7
    spec = WorkloadSpec(tenants=(TenantSpec(dataset=dataset, num_prompts=count),))
    expected = (count - prefixes) * 16 * pages / (count * (16 * pages + suffix))
    assert shared_share(spec, 0, 16) == pytest.approx(expected)
    assert len(load_workload(spec, seed=0)) == count


@pytest.mark.parametrize("name", ["queue", "pages", "stalls", "bandwidth", "healthy"])
def test_the_time_between_tokens_is_split_without_rest(name: str) -> None:
    split = decode_split(read_measured(folder(name)))
    assert sum(split.values()) == pytest.approx(1)
    assert all(share >= 0 for share in split.values())


def test_the_tail_of_a_percentile_has_as_many_ranks_below_it_as_above() -> None:
    values = np.arange(1000.0)
    rows = tail_rows(values, 95.0)
    assert rows.sum() == pytest.approx(100, abs=1)
    assert values[rows].mean() == pytest.approx(np.percentile(values, 95), abs=1)
    assert tail_rows(values, None).all()
