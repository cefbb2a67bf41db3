"""What watches a run from the command line: alerts, share of peak, minute by minute."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.tokentwin.shell import SMALL, Command

ONCE = (*SMALL, "--replications", "1")
FIRES, QUIET = "ttft:p95:1s > 1ms for 1s", "kv_usage:max:1m > 99%"


def test_alerts_are_said_saved_and_drawn(tokentwin: Command, tmp_path: Path) -> None:
    answer = tokentwin("simulate", *ONCE, "--alert", FIRES, "--alert", QUIET, "-o", tmp_path)
    assert (answer.code, answer.err) == (0, "")
    assert f"{FIRES}: fired at 2s" in " ".join(answer.out.split())
    fired, quiet = json.loads((tmp_path / "result.json").read_text())["sim_alerts"]
    assert fired["rule"] == FIRES
    assert fired["fired"][0]["fired_at_s"] - fired["fired"][0]["pending_at_s"] == pytest.approx(1.0)
    assert quiet["fired"] == []
    assert "Alerts" in (tmp_path / "report.html").read_text()


def test_a_firing_alert_fails_only_where_it_is_asked_to(tokentwin: Command) -> None:
    assert tokentwin("simulate", *ONCE, "--alert", FIRES).code == 0
    assert tokentwin("simulate", *ONCE, "--alert", FIRES, "--fail-on-alert").code == 3
    assert tokentwin("simulate", *ONCE, "--alert", QUIET, "--fail-on-alert").code == 0
    alone = tokentwin("simulate", *ONCE, "--fail-on-alert")
    assert (alone.code, "--fail-on-alert has no effect without --alert" in alone.error) == (2, True)


def test_a_wrong_rule_is_one_line_before_anything_runs(tokentwin: Command) -> None:
    wrong = tokentwin("simulate", *ONCE, "--alert", "ttft:p9x5:1m > 1s")
    assert (wrong.code, wrong.out) == (2, "")
    assert "column 6, 'p9x5': not a statistic of ttft" in wrong.error


def test_rules_come_from_a_file_too(tokentwin: Command, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"model: llama-3.1-8b\nalert: '{FIRES}'\n")
    answer = tokentwin("simulate", "--config", config, *ONCE[2:], "--fail-on-alert")
    assert answer.code == 3, answer.err
    config.write_text(f"model: llama-3.1-8b\nalert:\n  - '{FIRES}'\n  - '{QUIET}'\n")
    assert "quiet" in tokentwin("simulate", "--config", config, *ONCE[2:]).out


def test_share_of_peak_is_in_table_file_and_minutes(tokentwin: Command, tmp_path: Path) -> None:
    answer = tokentwin("simulate", *ONCE, "-o", tmp_path)
    assert "MFU, while busy (%):" in answer.out
    result = json.loads((tmp_path / "result.json").read_text())
    assert 0 < result["sim_mfu_wall"] < result["sim_mfu"] < 1
    assert 0 < result["sim_mbu_wall"] < result["sim_mbu"] < 1
    minutes = pq.read_table(tmp_path / "minutes.parquet")
    assert sum(minutes.column("arrived").to_pylist()) == 12
    assert 0 < minutes.column("mfu").to_pylist()[0] < 1
    assert "Share of the device" in (tmp_path / "report.html").read_text()
