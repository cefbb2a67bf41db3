"""`--speculative-config` says the same as JSON, in a file and from Python, and errors say how to put it right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tokentwin as tt
from tests.tokentwin.shell import SMALL, Command

CONFIG = {
    "method": "draft_model",
    "model": "llama-3.2-1b",
    "num_speculative_tokens": 3,
    "acceptance": [0.8, 0.7, 0.6],
}


def counts(folder: Path) -> dict[str, float]:
    result = json.loads((folder / "result.json").read_text())
    return {key: value for key, value in result.items() if key.startswith("spec_decode")}


def test_a_flag_a_file_and_python_give_the_same_run(tokentwin: Command, tmp_path: Path) -> None:
    once = ("--replications", "1")
    answer = tokentwin(
        "simulate", *SMALL, *once, "--speculative-config", json.dumps(CONFIG), "-o", tmp_path / "a"
    )
    assert answer.code == 0, answer.err
    assert "Speculative Decoding" in answer.out
    found = counts(tmp_path / "a")
    assert set(found) == {
        "spec_decode_acceptance_rate", "spec_decode_acceptance_length", "spec_decode_num_drafts",
        "spec_decode_draft_tokens", "spec_decode_accepted_tokens", "spec_decode_per_position_acceptance_rates",
    }  # fmt: skip
    assert found["spec_decode_acceptance_length"] == pytest.approx(1 + 0.8 + 0.56 + 0.336, rel=0.05)

    file = tmp_path / "flags.yaml"
    file.write_text("speculative_config:\n  method: draft_model\n  model: llama-3.2-1b\n  num_speculative_tokens: 3\n"
                    "  acceptance: [0.8, 0.7, 0.6]\n")  # fmt: skip
    answer = tokentwin("simulate", *SMALL, *once, "--config", file, "-o", tmp_path / "b")
    assert answer.code == 0, answer.err
    assert counts(tmp_path / "b") == found

    printed = tokentwin("simulate", *SMALL, *once, "--config", file, "--print-config")
    again = tmp_path / "again.yaml"
    again.write_text(printed.out)
    answer = tokentwin("simulate", "--config", again, "-o", tmp_path / "c")
    assert answer.code == 0, answer.err
    assert counts(tmp_path / "c") == found

    run = tt.simulate(
        model="llama-3.1-8b", dataset_name="random", num_prompts=12, request_rate=8, replications=1,
        speculative_config=CONFIG,
    )  # fmt: skip
    assert run.summary.drafts is not None
    assert run.summary.drafts.num_draft_tokens == found["spec_decode_draft_tokens"]


def test_memory_counts_the_draft_model(tokentwin: Command) -> None:
    plain = json.loads(tokentwin("memory", "--model", "llama-3.1-8b", "--json").out)
    both = json.loads(
        tokentwin(
            "memory", "--model", "llama-3.1-8b", "--json", "--speculative-config", json.dumps(CONFIG)
        ).out
    )
    # Llama-3.2-1B: 1.24 billion parameters of 2 bytes; 16 layers of 8 KV heads of 64, K and V, 2 bytes each.
    assert both["weight_bytes"] - plain["weight_bytes"] == pytest.approx(2 * 1.2358e9, rel=0.001)
    assert both["kv_bytes_per_token"] - plain["kv_bytes_per_token"] == 16 * 8 * 64 * 2 * 2


def test_detailed_gaps_are_those_of_events(tokentwin: Command, tmp_path: Path) -> None:
    answer = tokentwin("simulate", *SMALL, "--replications", "1", "--save-detailed", "-o", tmp_path,
                       "--speculative-config", json.dumps(CONFIG))  # fmt: skip
    assert answer.code == 0, answer.err
    result = json.loads((tmp_path / "result.json").read_text())
    assert all(gap > 0 for gaps in result["itls"] for gap in gaps)
    tokens = sum(result["output_lens"])
    assert sum(len(gaps) + 1 for gaps in result["itls"]) < 0.6 * tokens


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**CONFIG, "acceptance": None}, '"acceptance" is missing'),
        ({**CONFIG, "num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        ({**CONFIG, "model": "qwen2.5-7b"}, "a draft model must have the same"),
        ({**CONFIG, "acceptance": "eagle"}, "no acceptance preset 'eagle'"),
    ],
)
def test_mistakes_are_one_line(tokentwin: Command, config: object, words: str) -> None:
    answer = tokentwin("simulate", *SMALL, "--speculative-config", json.dumps(config))
    assert answer.code == 2
    assert words in answer.error


def test_what_is_no_json_says_so(tokentwin: Command) -> None:
    answer = tokentwin("simulate", *SMALL, "--speculative-config", "ngram")
    assert answer.code == 2
    assert answer.error.startswith("error: --speculative-config")


def test_the_engine_is_not_told_what_it_finds_out(tokentwin: Command) -> None:
    pytest.importorskip("torch")
    answer = tokentwin("run", "--model", "llama-3.2-1b", "--load-format", "dummy", "--dataset-name", "random",
                       "--num-prompts", "1", "--device", "cpu", "--speculative-config", json.dumps(CONFIG))  # fmt: skip
    assert answer.code == 2
    assert "leave it out" in answer.error
