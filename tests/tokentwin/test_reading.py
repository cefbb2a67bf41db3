"""`tokentwin reading` on a saved run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokentwin.cli import main

RUN = ("simulate", "--model", "llama-3.1-8b", "--gpu", "rtx4090", "--dataset-name", "random", "--num-prompts", "8",
       "--random-output-len", "64", "--request-rate", "4", "--replications", "1")  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a"
    assert main([*RUN, "-o", str(folder)]) == 0
    return folder


def test_larger_groups_pause_longer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reading", str(run), "--stream-interval", "1,16", "--json"]) == 0
    one, many = json.loads(capsys.readouterr().out)
    assert many["longest_pause_ms"]["median"] > 2 * one["longest_pause_ms"]["median"]
    assert many["first_word_ms"]["median"] > one["first_word_ms"]["median"]


def test_a_slow_line_makes_the_reader_wait(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two events of 250 bytes a second are slower than 5.3 tokens a second."""
    assert main(["reading", str(run), "--bandwidth", "500", "--json"]) == 0
    (slow,) = json.loads(capsys.readouterr().out)
    assert slow["stalled_share"]["mean"] > 0.5
    assert main(["reading", str(run)]) == 0
    assert "waiting for text" in capsys.readouterr().out


def test_errors(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reading", str(run), "--stream-interval", "1,0"]) == 2
    assert "--stream-interval must be at least 1, got 0" in capsys.readouterr().err
    for options, words in (
        (("--stream-interval", "8,8"), "--stream-interval 8,8 names one twice"),
        (("--stream-slice", "inf"), "--stream-slice must be a number of ms, 0 or more, got inf"),
        (("--event-bytes", "99"), "--event-bytes has no effect without --bandwidth"),
    ):
        assert main(["reading", str(run), *options]) == 2
        assert words in capsys.readouterr().err
    assert main(["reading", str(run / "nowhere")]) == 2


@pytest.mark.parametrize("whole", [("--beam-width", "3"), ("--best-of", "2"), ("--random-output-len", "1")])
def test_answers_that_come_whole_cannot_be_sent_otherwise(
    whole: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "a")
    known = ("simulate", "--model", "llama-3.1-8b", "--dataset-name", "random", "--num-prompts", "2")
    assert main([*known, "--random-input-len", "64", *whole, "--replications", "1", "-o", run]) == 0
    for options in (("--stream-interval", "1,8"), ("--stream-slice", "50")):
        capsys.readouterr()
        assert main(["reading", run, *options]) == 2
        assert "no answer came token by token" in capsys.readouterr().err
    assert main(["reading", run, "--bandwidth", "500"]) == 0  # a line slows the one event of an answer
