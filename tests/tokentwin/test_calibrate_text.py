"""`tokentwin calibrate text` on a tokenizer of letters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tokentwin.shell import Command


def test_a_tokenizer_of_letters(tokentwin: Command, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("fastapi")
    vocabulary = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[])
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("thequickbrownfox" * 40)
    command = ("calibrate", "text", str(tmp_path), "--dataset-path", str(tmp_path / "text.txt"))
    found = json.loads(tokentwin(*command, "--json").out)
    assert found["tokenize_us_per_token"] > 0
    assert found["detokenize_us_per_token"] > 0
    assert found["event_bytes"] > 150
    said = tokentwin(*command).out
    assert "For simulate: --tokenize-us-per-token" in said
    answer = tokentwin("calibrate", "text", str(tmp_path / "nowhere"))
    assert answer.code == 2
    assert "there is no tokenizer.json" in answer.err
