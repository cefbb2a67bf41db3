"""A report made of a saved folder is the one that was made when the run ended; older folders say what they lack."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.results import CERTAINTY, TOKENS, save_run
from experiments.saved import load_record, open_run
from serving.errors import UsageError
from sim.metrics import summarise
from sim.record import RunRecord, Tenant, TokenRanges
from tests.sim.toy_runs import toy_run
from tokentwin import simulate
from tokentwin.cli import main
from tokentwin.run import Run

WORKLOAD = """
tenants:
  - {name: chat, dataset: {name: random, input_len: 300, output_len: 400}, arrivals: {request_rate: 300},
     num_prompts: 60, slo_class: interactive, goodput: {ttft: 40, tpot: 4}, rtt_ms: 20}
  - {name: batch, dataset: {name: random, input_len: 900, output_len: 300}, arrivals: {request_rate: 100},
     num_prompts: 30}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("made")
    (folder / "load.yaml").write_text(WORKLOAD)
    run = simulate(
        folder / "load.yaml",
        model="qwen3-0.6b",
        gpu="h200",
        max_num_seqs=8,
        num_gpu_blocks_override=220,
        max_model_len=3000,
        slo=["p95_ttft:50", "mean_itl:9"],
        goodput={"e2el": 900},
        replications=3,
        seed=4,
    )
    run.save(folder / "run")
    return run, folder / "run"


def test_a_report_of_the_folder_is_the_report_of_the_run(made: tuple[Run, Path], tmp_path: Path) -> None:
    run, folder = made
    assert run.record.requests.preemptions.any()  # requests with several ranges of tokens
    opened = open_run(folder)
    assert opened.missing == ()
    assert opened.summary == run.summary
    assert opened.record.tenants == run.record.tenants
    again = opened.report(tmp_path / "again.html").read_text(encoding="utf-8")
    assert again == (folder / "report.html").read_text(encoding="utf-8")


def test_token_times_and_intervals_are_those_of_the_run(made: tuple[Run, Path]) -> None:
    run, folder = made
    opened = open_run(folder)
    for row in range(len(run.record.requests)):
        np.testing.assert_array_equal(opened.record.token_times_s(row), run.record.token_times_s(row))
    assert opened.certainty is not None
    assert opened.certainty.interval("p95_ttft") == run.certainty.interval("p95_ttft")
    assert opened.certainty.thin == run.certainty.thin


def test_a_folder_of_an_older_version_opens_and_says_what_it_lacks(
    made: tuple[Run, Path], tmp_path: Path
) -> None:
    run, folder = made
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    for name in (TOKENS, CERTAINTY):
        (old / name).unlink()
    what = json.loads((old / "run.json").read_text())
    what["tenants"] = [tenant["name"] for tenant in what["tenants"]]
    what["deployment"]["gpu"] = "gone.json"
    (old / "run.json").write_text(json.dumps(what))
    opened = open_run(old)
    assert [note.split()[0] for note in opened.missing] == ["This", "No"]
    assert "gone.json" in opened.missing[1]
    assert opened.summary.ttft == run.summary.ttft
    page = opened.report().read_text(encoding="utf-8")
    assert TOKENS in page
    assert "ITL (per event)" not in page
    assert "Roofline of the steps" not in page


def test_a_folder_without_the_percentiles_that_bound_intervals_serves_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its intervals are each percentile's own, as that version showed them, and the report says so."""
    traffic = {"dataset_name": "random", "isl": 100, "osl": 8, "num_prompts": 20, "request_rate": 50.0}
    run = simulate(model="qwen3-0.6b", gpu="h200", replications=2, **traffic)
    folder, old = tmp_path / "new", tmp_path / "old"
    run.save(folder)
    shutil.copytree(folder, old)
    saved = json.loads((old / CERTAINTY).read_text())
    replicated = saved["replicated"]
    del replicated["ladders"]
    for figures in (
        replicated["nominal"], *replicated["effects"].values(), *replicated["noise_only"], *replicated["replicas"]
    ):  # fmt: skip
        for name in [name for name in figures if name.startswith("_")]:
            del figures[name]
    (old / CERTAINTY).write_text(json.dumps(saved))
    opened = open_run(old)
    assert ["an older version" in note for note in opened.missing] == [True]
    assert opened.certainty is not None
    assert run.certainty.replicated is not None
    for name in ("p95_ttft", "mean_tpot", "p99_e2el"):
        assert opened.certainty.interval(name) == replace(run.certainty.replicated, ladders=()).interval(name)
    for command in (
        ["report", str(old)],
        ["report", str(old), str(folder), "-o", str(tmp_path / "both.html")],
        ["diff", str(old), str(folder), "-o", str(tmp_path / "diff")],
        ["compare", str(old), str(folder)],
        ["diagnose", str(old)],
        ["validate", "--against", str(old)],
    ):
        assert main(command) == 0, command
    assert capsys.readouterr().err == ""
    assert opened.missing[0] in (old / "report.html").read_text(encoding="utf-8")
    assert opened.missing[0] in (tmp_path / "both.html").read_text(encoding="utf-8")


def test_a_broken_file_is_one_line(made: tuple[Run, Path], tmp_path: Path) -> None:
    shutil.copytree(made[1], tmp_path / "broken")
    (tmp_path / "broken" / CERTAINTY).write_text('{"thin": 3}')
    with pytest.raises(UsageError, match=r"cannot read .*certainty\.json"):
        open_run(tmp_path / "broken")
    (tmp_path / "broken" / TOKENS).write_text("no parquet")
    with pytest.raises(UsageError, match="not a run"):
        open_run(tmp_path / "broken")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=3), min_size=1, max_size=6)
)
def test_any_ranges_of_tokens_survive(
    tmp_path_factory: pytest.TempPathFactory, ranges: list[list[tuple[int, int]]]
) -> None:
    """Also requests without tokens, at the start, in the middle and at the end."""
    n = len(ranges)
    run = toy_run(np.arange(n) * 0.1, np.full(n, 4), np.full(n, 20), tenants=(Tenant("a"),))
    flat = np.array([pair for each in ranges for pair in each], np.int64).reshape(-1, 2)
    offsets = np.cumsum([0, *(len(each) for each in ranges)])
    record = RunRecord(
        **{f: getattr(run, f) for f in RunRecord.__slots__}
        | {"tokens": TokenRanges(offsets, flat[:, 0].copy(), flat[:, 1].copy())}
    )
    folder = tmp_path_factory.mktemp("ranges")
    save_run(record, summarise(run), folder, steps=True)
    back = load_record(folder).tokens
    for name in TokenRanges.__slots__:
        np.testing.assert_array_equal(getattr(back, name), getattr(record.tokens, name))


def test_drafts_replicas_and_alerts_are_in_the_report_of_the_folder_too(tmp_path: Path) -> None:
    flags = "--model qwen3-0.6b --gpu h200 --dataset-name random --isl 100 --osl 40 --request-rate 400 --num-prompts 80"
    flags += " --max-num-seqs 4 --data-parallel-size 2 --replications 1"
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.6}'
    more = [
        "--speculative-config",
        drafts,
        "--alert",
        "ttft:p95:1s > 0.01s for 1s",
        "-o",
        str(tmp_path / "run"),
    ]
    assert main(["simulate", *flags.split(), *more]) == 0
    opened = open_run(tmp_path / "run")
    assert opened.record.tokens.per_step is not None
    again = opened.report(tmp_path / "again.html")
    assert again.read_bytes() == (tmp_path / "run" / "report.html").read_bytes()
