"""Ctrl-C in a command made of many runs: one line and 130, and no conclusion from the run that was cut short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import experiments.diagnose
import experiments.policy_test_watch
from tests.tokentwin.shell import SMALL, Command


def cut_short(run: Any) -> Any:
    return lambda *given, **more: replace(run(*given, **more), interrupted=True)


def test_a_policy_is_not_judged_by_it(tokentwin: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = experiments.policy_test_watch
    monkeypatch.setattr(watch, "run_world", cut_short(watch.run_world))
    answer = tokentwin("policy-test", "chunked")
    assert (answer.code, answer.out, answer.error) == (130, "", "error: interrupted")


def test_no_change_is_proposed_from_it(
    tokentwin: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = ("--replications", "1", "--slo", "p95_tpot:1", "-o", tmp_path / "run")
    assert tokentwin("simulate", *SMALL, *once).code == 0
    monkeypatch.setattr(experiments.diagnose, "simulate", cut_short(experiments.diagnose.simulate))
    answer = tokentwin("diagnose", tmp_path / "run")
    assert (answer.code, answer.out, answer.error) == (130, "", "error: interrupted")


def test_a_sweep_says_how_it_goes_on(
    tokentwin: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "a.yaml").write_text(
        "{base: {model: llama-3.1-8b, dataset_name: random}, grid: {seed: [1, 2]}}", encoding="utf-8"
    )
    monkeypatch.setattr("tokentwin.commands.sweep.run_asked", press)
    answer = tokentwin("sweep", tmp_path / "a.yaml", "-o", tmp_path / "results")
    assert answer.code == 130
    assert "the same command with --resume goes on from there" in answer.error
