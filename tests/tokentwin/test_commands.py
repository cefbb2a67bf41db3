"""The smaller commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from costmodel.model import shipped_models
from costmodel.profile import list_profiles
from tests.tokentwin.shell import Command
from tokentwin.interrupt import between_events
from tokentwin.progress import progress_bar


def test_without_a_command_it_prints_help(tokentwin: Command) -> None:
    answer = tokentwin()
    assert answer.code == 0
    for name in ("simulate", "memory", "profile", "model", "workload", "conformance", "calibrate"):
        assert name in answer.out


def test_memory_prints_its_arithmetic(tokentwin: Command) -> None:
    answer = tokentwin("memory", "--model", "llama-3.1-70b", "--gpu", "h200", "--tp", "2")
    assert answer.code == 0
    assert "2 x 80 layers x 4 KV heads x 128 x 2 B = 163,840 B" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


def test_memory_json_adds_up(tokentwin: Command) -> None:
    plan = json.loads(tokentwin("memory", "--model", "qwen3-8b", "--json").out)
    parts = ("weight_bytes", "activation_bytes", "non_torch_bytes", "graph_bytes", "kv_cache_bytes")
    left = plan["budget_bytes"] - sum(plan[name] for name in parts)
    assert 0 <= left < plan["block_size"] * plan["kv_bytes_per_token"]


def test_lists_name_everything_shipped(tokentwin: Command) -> None:
    profiles, models = tokentwin("profile", "list").out, tokentwin("model", "list").out
    assert [line.split()[0] for line in profiles.splitlines()[1:]] == list(list_profiles())
    assert max(map(len, (profiles + models).splitlines())) <= 82
    assert [line.split()[0] for line in models.splitlines()] == list(shipped_models())


def test_profile_show(tokentwin: Command, tmp_path: Path) -> None:
    text = tokentwin("profile", "show", "h200").out
    for words in ("gemm/bfloat16", "held-out", "hull:", "TB/s"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80
    file = tmp_path / "copy.json"
    file.write_text(tokentwin("profile", "show", "h200", "--json").out, encoding="utf-8")
    assert tokentwin("profile", "show", file).out == text


def test_model_show(tokentwin: Command) -> None:
    text = tokentwin("model", "show", "meta-llama/Llama-3.1-8B-Instruct").out
    assert "8.03 billion" in text
    assert "131,072 in 16 bit" in text  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    assert "experts" not in text
    assert "128" in tokentwin("model", "show", "qwen3-30b-a3b").out
    assert json.loads(tokentwin("model", "show", "qwen3-8b", "--json").out)["num_layers"] == 36


def test_workload_describe(tokentwin: Command) -> None:
    answer = tokentwin("workload", "describe", "--dataset-name", "sample")
    assert answer.code == 0
    for tenant in ("chat", "documents", "code"):
        assert tenant in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80
    summary = json.loads(tokentwin("workload", "describe", "--dataset-name", "sample", "--json").out)
    assert summary["num_requests"] == 610


def test_conformance_of_a_folder_without_traces_or_with_a_broken_one(
    tokentwin: Command, tmp_path: Path
) -> None:
    assert "holds no recorded schedules" in tokentwin("conformance", tmp_path).error
    (tmp_path / "a.json.gz").write_bytes(b"not gzip")
    assert "is not a recorded schedule" in tokentwin("conformance", tmp_path).error


@pytest.mark.shared
@pytest.mark.slow
def test_conformance_counts_steps_and_exits_1_on_a_difference(
    tokentwin: Command, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    import gzip

    traces = sorted((pytestconfig.rootpath.parent / "shared" / "data" / "vllm_schedules").glob("*.json.gz"))
    if not traces:
        pytest.skip("no shared data")
    small = min(traces, key=lambda path: path.stat().st_size)
    (tmp_path / "same.json.gz").write_bytes(small.read_bytes())
    answer = tokentwin("conformance", tmp_path)
    assert answer.code == 0
    assert answer.out.startswith("1 of 1 traces, ")
    content = json.loads(gzip.decompress(small.read_bytes()))
    content["steps"][3]["free"] += 1
    (tmp_path / "wrong.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    answer = tokentwin("conformance", tmp_path)
    assert answer.code == 1
    assert answer.out.startswith("1 of 2 traces, ")
    assert "first difference: wrong.json.gz step 3: free: recorded" in answer.out


@pytest.mark.shared
def test_a_fitted_profile_can_be_used(
    tokentwin: Command, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    folder = pytestconfig.rootpath.parent / "shared" / "data" / "kernels"
    table = folder / "kernels_comm_h200_sxm.csv"
    if not table.exists():
        pytest.skip("no shared data")
    profile = tmp_path / "mine.json"
    answer = tokentwin("calibrate", "fit", table, "--device", "h200", "--folds", "0", "-o", profile)
    assert answer.code == 0
    assert "all_reduce" in answer.out
    assert f"use it with --gpu {profile}" in answer.out
    assert tokentwin("memory", "--model", "llama-3.1-8b", "--gpu", profile).code == 0


def test_the_progress_bar_is_silent_without_a_terminal_and_when_told() -> None:
    with progress_bar() as bar:
        assert bar is None
    with progress_bar(silent=True) as bar:
        assert bar is None


def test_the_progress_bar_shows_time_requests_and_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sim.world import Progress

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with progress_bar() as bar:
        assert bar is not None
        bar(Progress(sim_s=61.0, done=50, total=200, wall_s=0.5))
    out, err = capsys.readouterr()
    assert out == ""
    for words in ("50/200", "61 s simulated", "100 requests/s"):
        assert words in err


def test_an_interrupt_waits_for_the_next_event() -> None:
    import signal

    from sim.world import Progress

    state = Progress(0.0, 0, 1, 0.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores interrupts
    try:
        with between_events() as told:
            told(state)
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                told(state)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)  # the second one does not wait
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
