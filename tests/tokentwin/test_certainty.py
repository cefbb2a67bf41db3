"""--replications, --strict and `tokentwin diff` from the command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import tokentwin as tt
from tests.tokentwin.shell import SMALL, Command


def test_intervals_are_there_by_default_and_gone_with_one_replication(
    tokentwin: Command, tmp_path: Path
) -> None:
    answer = tokentwin("simulate", *SMALL, "-o", tmp_path / "a")
    assert "Brackets are 95% intervals" in answer.out
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["mean_tpot_ci95_low_ms"] < result["mean_tpot_ms"] < result["mean_tpot_ci95_high_ms"]
    assert "How sure" in (tmp_path / "a" / "report.html").read_text()
    once = tokentwin("simulate", *SMALL, "--replications", "1", "-o", tmp_path / "b")
    assert "Brackets" not in once.out
    assert "mean_tpot_ci95_low_ms" not in json.loads((tmp_path / "b" / "result.json").read_text())
    wrong = tokentwin("simulate", *SMALL, "--replications", "0")
    assert (wrong.code, "--replications must be at least 1" in wrong.err) == (2, True)


def test_a_limit_within_the_interval_is_said_to_be_uncertain(tokentwin: Command, tmp_path: Path) -> None:
    def verdict(limit_ms: float, *more: str) -> tuple[str, str]:
        out = tokentwin(
            "simulate", *SMALL, "--slo", f"p95_tpot:{limit_ms:.6f}", *more, "-o", tmp_path / "a"
        ).out
        return out, (tmp_path / "a" / "report.html").read_text()

    verdict(50.0)
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    low, high = (result[f"p95_tpot_ci95_{end}_ms"] for end in ("low", "high"))
    words = "Not certain: the 95% interval of P95 TPOT"
    for limit_ms, uncertain in ((0.99 * low, 0), (1.01 * low, 1), (0.99 * high, 1), (1.01 * high, 0)):
        assert [text.count(words) for text in verdict(limit_ms)] == [uncertain, uncertain]
    assert words not in verdict(1.01 * low, "--replications", "1")[0]


def test_strict_refuses_before_the_run_what_the_deployment_tells_and_after_it_what_occurred(
    tokentwin: Command,
) -> None:
    traffic = shlex.split("--dataset-name random --request-rate 5 --num-prompts 20 --replications 1 --strict")
    before = tokentwin("simulate", "--model", "qwen2.5-0.5b", "--gpu", "h200", *traffic)
    assert before.code == 2
    assert "--strict: not measured" in before.err
    assert before.out == ""
    measured = ("--model", "llama-3.1-8b", "--gpu", "rtx4090", "--random-output-len", "8", *traffic)
    assert tokentwin("simulate", *measured, "--random-input-len", "500").code == 0
    short = tokentwin("simulate", *measured, "--random-input-len", "5")
    assert short.code == 2
    assert "decode: context 6 to 12 outside the measured 16" in short.err
    assert "Mean TTFT" in short.out


def test_from_python_intervals_are_asked_for_and_deployments_compared() -> None:
    asked = {"model": "llama-3.1-8b", "gpu": "rtx4090", "dataset_name": "random", "request_rate": 5.0}
    assert tt.simulate(**asked, num_prompts=20).certainty.replicated is None
    run = tt.simulate(**asked, num_prompts=20, replications=3)
    interval = run.certainty.interval("mean_tpot")
    assert interval is not None
    assert interval.low <= run.summary.tpot.mean_s <= interval.high
    with pytest.raises(tt.UsageError, match="--strict"):
        tt.simulate(**{**asked, "model": "qwen2.5-0.5b"}, num_prompts=5, strict=True)
    spec = tt.spec_from_flags({"dataset_name": "random", "request_rate": 5.0, "num_prompts": 20})
    a, b = (
        tt.replicate(spec, tt.Deployment(model="llama-3.1-8b", gpu=gpu), seed=0, replications=3)
        for gpu in ("rtx4090", "h200")
    )
    assert tt.compare(a, b)["mean_tpot"].words == "lower"


def test_diff_of_two_saved_runs(tokentwin: Command, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    once = (*SMALL, "--replications", "1")
    for folder, more in ((a, ()), (b, ("--max-num-seqs", "2"))):
        assert tokentwin("simulate", *once, *more, "-o", folder).code == 0
    answer = tokentwin("diff", a, b, "--metric", "mean_ttft", "p95_e2el", "-o", tmp_path / "d")
    assert answer.code == 0, answer.err
    document = json.loads((tmp_path / "d" / "diff.json").read_text())
    entry = document["metrics"]["mean_ttft"]
    assert set(document["metrics"]) == {"mean_ttft", "p95_e2el"}
    assert entry["parts"]["schedule"] == pytest.approx(entry["difference"], rel=0.02)
    assert (tmp_path / "d" / "diff.html").stat().st_size > 1_000_000
    missing = tokentwin("diff", a, tmp_path / "nothing")
    assert missing.code == 2
    assert "cannot read" in missing.err
