"""`tokentwin simulate` from flags to files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.tokentwin.shell import SMALL, Command

FILES = [
    *("certainty.json", "minutes.parquet", "report.html", "requests.parquet", "result.json", "run.json"),
    *("steps.parquet", "tokens.parquet", "trace.json.gz"),
]


def run_json(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return content


def test_without_o_it_prints_and_writes_nothing(
    tokentwin: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = tokentwin("simulate", *SMALL)
    assert answer.code == 0
    assert answer.err == ""  # no terminal, no progress bar
    assert "Successful requests:                     12         of 12 sent" in answer.out
    assert " Verdict " in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80
    assert list(tmp_path.iterdir()) == []


def test_o_writes_every_file_and_says_where(tokentwin: Command, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    answer = tokentwin("simulate", *SMALL, "-o", folder, "--label", "first", "--metadata", "team=blue")
    assert answer.code == 0
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert f"Wrote to {folder}:" in answer.out
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert result["label"] == "first"
    assert result["team"] == "blue"
    assert result["completed"] == 12
    assert result["request_rate"] == 8.0
    assert result["model_id"] == "llama-3.1-8b"
    assert "ttfts" not in result
    assert pq.read_table(folder / "requests.parquet").num_rows == 12
    assert json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    assert "Roofline" in (folder / "report.html").read_text(encoding="utf-8")


def test_run_json_holds_what_it_takes_to_run_it_again(tokentwin: Command, tmp_path: Path) -> None:
    arguments = ("simulate", *SMALL, "--seed", "5", "--slo", "p95_ttft:500", "-o", str(tmp_path))
    tokentwin(*arguments)
    run = run_json(tmp_path)
    assert run["argv"] == ["tokentwin", *arguments]
    assert run["seed"] == 5
    assert run["version"]
    assert run["slos"] == {"p95_ttft": 0.5}
    assert run["partial"] is False
    for key in ("git_commit", "profile_hash", "deployment", "limits", "workload", "warnings"):
        assert key in run


def test_save_result_follows_vllm(
    tokentwin: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokentwin("simulate", *SMALL, "--save-result", "--date", "20260101-000000", "--concurrency", "4")
    name = "sim-8.0qps-concurrency4-llama-3.1-8b-20260101-000000.json"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert json.loads((tmp_path / name).read_text(encoding="utf-8"))["max_concurrency"] == 4


def test_append_result_adds_a_line(tokentwin: Command, tmp_path: Path) -> None:
    where = ("--save-result", "--result-dir", tmp_path / "out", "--result-filename", "r.json")
    for _ in range(2):
        tokentwin("simulate", *SMALL, *where, "--append-result", "--save-detailed")
    lines = (tmp_path / "out" / "r.json").read_text(encoding="utf-8").splitlines()
    assert [len(json.loads(line)["ttfts"]) for line in lines] == [12, 12]
    tokentwin("simulate", *SMALL, *where)
    assert len((tmp_path / "out" / "r.json").read_text(encoding="utf-8").splitlines()) == 1


def test_metrics_and_percentiles_are_those_asked_for(tokentwin: Command, tmp_path: Path) -> None:
    answer = tokentwin(
        "simulate",
        *SMALL,
        "-o",
        tmp_path,
        "--percentile-metrics",
        "tpot,ttft",
        "--metric-percentiles",
        "75,99.9",
    )
    assert "P75 TTFT (ms):" in answer.out
    assert "P99.9 TPOT (ms):" in answer.out
    assert "E2EL (ms)" not in answer.out
    keys = set(json.loads((tmp_path / "result.json").read_text(encoding="utf-8")))
    assert {"p75_ttft_ms", "p99.9_tpot_ms", "mean_ttft_ms"} <= keys
    assert not {key for key in keys if key.endswith(("_itl_ms", "_e2el_ms")) or key.startswith("p95")}


def test_plot_timeline_draws_beside_the_json(tokentwin: Command, tmp_path: Path) -> None:
    where = ("--save-result", "--result-dir", tmp_path, "--result-filename", "r.json")
    answer = tokentwin("simulate", *SMALL, *where, "--plot-timeline")
    assert answer.code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.timeline.html"]
    assert "to first token" in (tmp_path / "r.timeline.html").read_text(encoding="utf-8")


def test_a_missed_slo_exits_3_only_when_asked(tokentwin: Command) -> None:
    strict = ("--slo", "p95_ttft:0.001")
    assert tokentwin("simulate", *SMALL, *strict).code == 0
    answer = tokentwin("simulate", *SMALL, *strict, "--fail-on-slo")
    assert answer.code == 3
    assert "Misses P95 TTFT" in answer.out
    assert tokentwin("simulate", *SMALL, "--slo", "chat", "--fail-on-slo").code == 0


def test_goodput_counts_requests_within_their_limits(tokentwin: Command, tmp_path: Path) -> None:
    answer = tokentwin("simulate", *SMALL, "--goodput", "ttft:500", "tpot:50", "-o", tmp_path)
    assert "ttft<=500 tpot<=50" in answer.out
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["goodput_slos_ms"] == {"ttft": 500.0, "tpot": 50.0}
    assert result["slo_attainment"] == 1.0


def test_until_leaves_requests_unfinished_and_says_so(tokentwin: Command) -> None:
    answer = tokentwin("simulate", *SMALL, "--until", "0.5")
    assert answer.code == 0
    assert "of 12 requests had not ended when the run did" in " ".join(answer.out.split())


def test_a_lost_request_exits_1(tokentwin: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that never schedules anything leaves everything unfinished."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    answer = tokentwin("simulate", *SMALL, "--policy", "lazy_policy:Lazy")
    assert answer.code == 1
    assert "not finished" in answer.out
    assert answer.error == "error: 12 of 12 requests never ended"


def test_an_error_in_a_users_policy_is_one_line_that_names_its_line(
    tokentwin: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    answer = tokentwin("simulate", *SMALL, "--policy", "lazy_policy:Broken")
    assert answer.code == 2
    assert (
        answer.error == "error: policy Broken: ValueError in schedule (lazy_policy.py, line 19): no such turn"
    )


def test_fast_forward_changes_no_number(tokentwin: Command) -> None:
    assert tokentwin("simulate", *SMALL).out == tokentwin("simulate", *SMALL, "--no-fast-forward").out


def test_seeds_differ(tokentwin: Command) -> None:
    assert tokentwin("simulate", *SMALL).out != tokentwin("simulate", *SMALL, "--seed", "1").out


@pytest.mark.parametrize("policy", ["chunked", "continuous", "static"])
def test_the_sample_workload_runs_under_every_policy(tokentwin: Command, policy: str) -> None:
    answer = tokentwin(
        *("simulate", "--model", "llama-3.1-8b", "--dataset-name", "sample"),
        *("--policy", policy, "--replications", "2"),
    )
    assert answer.code == 0
    assert " Tenants " in answer.out


@pytest.mark.shared
@pytest.mark.parametrize("name", ["AzureLLMInferenceTrace_conv.csv", "mooncake_conversation_trace.jsonl"])
def test_the_public_traces_are_recognised_and_run(
    tokentwin: Command, name: str, pytestconfig: pytest.Config
) -> None:
    path = pytestconfig.rootpath.parent / "shared" / "data" / "traces" / name
    if not path.exists():
        pytest.skip("no shared data")
    answer = tokentwin("simulate", "--model", "llama-3.1-8b", "--dataset-path", path, "--num-prompts", "300")
    assert answer.code == 0
    assert "of 300 sent" in answer.out
