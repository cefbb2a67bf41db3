"""Steps read off request times: a run of the twin with known gaps gives just these back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibration.compare_host import Gaps
from calibration.doc_tables import between
from calibration.observed import Case, Observed, plain_workload
from calibration.step_times import (
    DECODES,
    PROMPT_TOKENS,
    Step,
    Times,
    classes,
    main,
    read_off,
    read_times,
    table,
)
from calibration.validate import replay
from serving.errors import UsageError
from sim.deployment import Deployment
from sim.record import RunRecord

ROOT = Path(__file__).resolve().parents[2]
YARDSTICK = ROOT.parent / "shared" / "data" / "yardstick"
PAGES = 40000


def case() -> Case:
    rng = np.random.default_rng(2)
    sent, prompts = np.cumsum(rng.exponential(0.04, 120)), rng.integers(40, 1500, 120)
    work = plain_workload("g", sent, prompts.tolist(), rng.integers(30, 120, 120).tolist())
    engine = Deployment(
        model="llama-3.1-8b", gpu="h200", max_num_batched_tokens=2048, max_num_seqs=64, max_model_len=4096
    )
    return Case("g", engine, work, Observed(), True)


def times(record: RunRecord) -> Times:
    r = record.requests
    return Times(r.scheduled_s, r.prefill_done_s, r.engine_done_s)


@pytest.mark.parametrize("gaps", [Gaps(), Gaps(0.0, 4e-3), Gaps(2e-4, 2e-3)])
def test_known_gaps_are_read_off(gaps: Gaps) -> None:
    given = case()
    record, _ = replay(given, PAGES, gaps.reprice)
    steps, over, _, seen = read_off(given, times(record), PAGES)
    if not gaps.step_s:  # else the clock runs ahead by a step where nothing is recorded for long
        assert len(steps) == len(record.steps)
        assert all(step.consistent for step in steps)
    prompts, decodes = np.split(over, [len(PROMPT_TOKENS)])
    often = seen >= 5
    assert often.sum() >= 5
    assert prompts[often[: len(prompts)]] == pytest.approx(gaps.step_s + gaps.prefill_s, abs=5e-5)
    assert decodes[often[len(prompts) :]] == pytest.approx(gaps.step_s, abs=5e-5)


def test_every_step_has_a_class_and_every_class_a_name() -> None:
    assert len(classes()) == len(PROMPT_TOKENS) + len(DECODES)
    for tokens, prompts, name in (
        (1, True, "1 to 384 tokens"),
        (2048, True, "2,048 tokens"),
        (9, False, "9 to 32 dec"),
    ):
        assert classes()[Step(tokens, tokens, prompts, 0.0).group].startswith(name)
    assert Step(9000, 0, True, 0.0).group == len(PROMPT_TOKENS) - 1
    assert Step(900, 900, False, 0.0).group == len(classes()) - 1


def test_a_run_that_was_another_one_is_not_read_off() -> None:
    given = case()
    record, _ = replay(given, PAGES)
    own = times(record)
    other = replace(own, first_token_s=np.roll(own.first_token_s, 1))
    steps = read_off(given, own, PAGES, rounds=1)[0]
    assert all(step.consistent for step in steps)
    try:
        lost = read_off(given, other, PAGES, rounds=1)[0]
    except UsageError:
        return
    assert not all(step.consistent for step in lost)


def test_missing_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(UsageError, match="requests"):
        read_times(tmp_path, "x")


@pytest.mark.shared
@pytest.mark.skipif(not YARDSTICK.is_dir(), reason="the measured runs (../shared/data/yardstick) are absent")
def test_the_page_shows_the_steps_of_the_real_runs() -> None:
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    assert between(page, "steps", table(YARDSTICK)) == page, (
        "run python -m calibration.step_times --write docs/validation.md"
    )
