"""The page's tables, and host gaps fitted to a run that has known ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibration.compare_host import Gaps, fit_gaps, with_gaps
from calibration.observed import Case, Observed, plain_workload
from calibration.validate import memory_of, replay, twin_samples
from experiments.validation_doc import BEGIN, END, main, spliced, tables
from serving.errors import UsageError
from sim.deployment import Deployment

YARDSTICK = Path(__file__).resolve().parents[3] / "shared" / "data" / "yardstick"


def test_known_gaps_are_found_again() -> None:
    """A run of the twin with 0.4 ms before each step and 2 ms more before prompts is fitted by just these."""
    rng = np.random.default_rng(2)
    sent, prompts, outputs = rng.exponential(0.4, 120), rng.integers(50, 900, 120), rng.integers(5, 80, 120)
    work = plain_workload("g", np.cumsum(sent), prompts.tolist(), outputs.tolist())
    engine = Deployment(model="llama-3.1-8b", gpu="rtx4090", max_num_batched_tokens=1024, max_model_len=2048)
    case, truth = Case("g", engine, work, Observed(), True), Gaps(4e-4, 2e-3)
    record, _ = replay(case, memory_of(case).num_blocks, truth.reprice)
    case = replace(case, observed=Observed(samples=twin_samples(record, at_engine=True)))
    assert with_gaps(case, truth).mean_error() == pytest.approx(0, abs=1e-12)
    found = fit_gaps(case)
    assert found.step_s == pytest.approx(truth.step_s, rel=0.15)
    assert found.prefill_s == pytest.approx(truth.prefill_s, rel=0.1)


def test_tables_replace_what_stands_between_the_marks() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert spliced(page, "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert spliced(spliced(page, "x"), "new") == spliced(page, "new")
    with pytest.raises(UsageError, match="lacks the lines"):
        spliced("a page", "new")


def test_a_missing_yardstick_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.skipif(not YARDSTICK.is_dir(), reason="the measured runs (../shared/data/yardstick) are absent")
def test_every_yardstick_has_its_table() -> None:
    text = tables(YARDSTICK)
    assert "| RTX 4090 |" in text
    assert "fitted on RTX PRO 6000" in text
    assert text.count("tp8 conc64") == 3
