"""The command line of `tokentwin diagnose`: text, JSON, exit codes, and one clear line for what cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.experiments.sick_runs import columns, folder, write_csv
from tests.tokentwin.shell import Command


def test_a_sick_run_in_words(tokentwin: Command) -> None:
    told = tokentwin("diagnose", folder("prefix"), "--replications", "3", "--jobs", "1")
    assert told.code == 0
    assert "Misses P95 TTFT" in told.out
    assert "P95 TTFT is governed by prefill" in told.out
    assert "prefix caching on (--enable-prefix-caching)" in told.out
    assert max(map(len, told.out.splitlines())) <= 80


def test_the_same_as_strict_json_and_by_exit_code(tokentwin: Command) -> None:
    told = tokentwin("diagnose", folder("network"), "--json", "--fail-on-slo")
    assert told.code == 3
    answer = json.loads(told.out, parse_constant=lambda word: pytest.fail(word))
    assert answer["target"] == "p95_ttft"
    assert answer["promises"][0]["stage"] == "network"
    assert answer["why_nothing"]
    assert {rule["rule"] for rule in answer["rules"]} >= {"queue", "bandwidth", "tail", "preemption"}


def engines(tmp_path: Path) -> Path:
    """The healthy run as the real engine leaves one: it does not know its device's profile."""
    path = tmp_path / "engine"
    shutil.copytree(folder("healthy"), path)
    meta = json.loads((path / "run.json").read_text(encoding="utf-8"))
    del meta["deployment"]["gpu"]
    (path / "run.json").write_text(json.dumps(meta | {"real": True}), encoding="utf-8")
    return path


def test_a_run_of_the_engine_is_simulated_on_the_device_that_the_user_names(
    tokentwin: Command, tmp_path: Path
) -> None:
    path = engines(tmp_path)
    told = tokentwin("diagnose", path, "--slo", "p95_ttft:1")
    assert "give --gpu, the profile" in " ".join(told.out.split())
    told = tokentwin("diagnose", path, "--slo", "p95_ttft:1", "--gpu", "l40s", "--json")
    answer = json.loads(told.out)
    # The run was made on an H200; an L40S has a quarter of its FLOP/s and less.
    assert answer["twin"]["error"] > 1
    assert "calibrate first" in answer["why_nothing"]


def test_a_healthy_run_in_words(tokentwin: Command) -> None:
    told = tokentwin("diagnose", folder("healthy"), "--fail-on-slo")
    assert told.code == 0
    assert "Nothing wrong" in told.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere",), "nowhere: no such run"),
        ((".",), "not a run folder"),
        (("RUN", "--model", "llama-3.1-8b"), "--model has no effect"),
        (("ENGINE", "--tensor-parallel-size", "2"), "a run of the engine takes --gpu alone"),
        (("CSV", "--gpu", "h100"), "--gpu has no effect without --model"),
        (("CSV", "--fail-on-slo"), "--fail-on-slo has no effect without an SLO"),
        (("CSV", "--slo", "p95_itl:50"), "needs gaps between tokens, which the CSV lacks"),
        (("RUN", "--replications", "1"), "at least 3 for intervals"),
        (("RUN", "--slo", "p95_tfft:5"), "did you mean"),
    ],
)
def test_bad_usage_is_one_line(
    tokentwin: Command, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    table = {name: values[:40] for name, values in columns("healthy").items()}
    known = {
        "ENGINE": engines(tmp_path),
        "RUN": folder("healthy"),
        "CSV": write_csv(tmp_path / "requests.csv", table),
    }
    told = tokentwin("diagnose", *(str(known.get(word, word)) for word in arguments))
    assert told.code == 2
    assert words in told.error
