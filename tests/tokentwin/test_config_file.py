"""`--config` reads flags, `--print-config` writes them, and what is written runs the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tokentwin.shell import SMALL, Command

CONTENT = """
model: llama-3.1-8b
max-num-seqs: 64
goodput: {ttft: 500, tpot: 50}
slo: [chat, p99_ttft:900]
dataset_name: random
request_count: 12
request-rate: 8
random_range_ratio: 0.5
quantization: null
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(CONTENT, encoding="utf-8")
    return path


def test_the_printed_configuration_gives_the_same_run(
    tokentwin: Command, config: Path, tmp_path: Path
) -> None:
    printed = tokentwin("simulate", "--config", config, "--print-config").out
    again = tmp_path / "again.yaml"
    again.write_text(printed, encoding="utf-8")
    first, second = (tokentwin("simulate", "--config", path) for path in (config, again))
    assert first.code == 0
    assert first.out == second.out
    assert tokentwin("simulate", "--config", again, "--print-config").out == printed


def test_limits_are_printed_as_resolved(tokentwin: Command) -> None:
    printed = tokentwin("simulate", *SMALL, "--print-config").out
    for line in ("max_num_seqs: 1024", "max_num_batched_tokens: 8192", "async_scheduling: true", "seed: 0"):
        assert f"\n{line}\n" in printed
    assert "KV pages of 16 tokens" in printed


def test_flags_override_the_file(tokentwin: Command, config: Path) -> None:
    printed = tokentwin("simulate", "--config", config, "--print-config", "--max-num-seqs", "8").out
    assert "\nmax_num_seqs: 8\n" in printed
    assert "\nrequest_rate: 8.0\n" in printed


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("modle: x", "unknown key 'modle'; did you mean 'model'"),
        ("max_num_seqs: many", "max_num_seqs: "),
        ("max_num_seqs: yes", "max_num_seqs: must be a number, got true"),
        ("max_num_seqs: 0", "--max-num-seqs"),
        ("seed: 1\nSeed: 2", "unknown key 'Seed'"),
        ("isl: 3\ninput-len: 4", "input_len is given twice"),
        ("- model", "expected lines such as model"),
        ("model: [", "not YAML"),
        ("config: other.yaml", "unknown key 'config'"),
    ],
)
def test_errors_name_the_file_and_the_key(
    tokentwin: Command, tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content, encoding="utf-8")
    answer = tokentwin("simulate", "--config", path, *SMALL[:2])
    assert answer.code == 2
    assert words in answer.error


def test_a_missing_file_is_named(tokentwin: Command) -> None:
    answer = tokentwin("simulate", "--config", "/nowhere.yaml")
    assert answer.code == 2
    assert "--config /nowhere.yaml: No such file" in answer.error


def test_other_commands_take_their_own_keys(tokentwin: Command, tmp_path: Path) -> None:
    path = tmp_path / "memory.yaml"
    path.write_text("model: qwen3-8b\ngpu: l40s\n", encoding="utf-8")
    assert "qwen3-8b on one NVIDIA L40S" in tokentwin("memory", "--config", path).out
