"""The page's tables, and host gaps fitted to a run that has known ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibration.compare_host import Gaps, fit_gaps, with_gaps
from calibration.observed import Case, Observed, plain_workload
from calibration.validate import memory_of, replay, twin_samples
from experiments import live_doc
from experiments.validation_doc import BEGIN, END, LIVE, main, spliced, tables
from serving.errors import UsageError
from sim.deployment import Deployment

ROOT = Path(__file__).resolve().parents[2]
YARDSTICK = ROOT.parent / "shared" / "data" / "yardstick"
PAGE = ROOT / "docs" / "validation.md"
REMAKE = "run python -m experiments.validation_doc --write docs/validation.md"


def test_known_gaps_are_found_again() -> None:
    """A run of the twin with 0.4 ms before each step and 2 ms more before prompts is fitted by just these."""
    rng = np.random.default_rng(3)
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


def test_our_own_engines_tables_are_those_of_the_kept_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    kept = [PAGE.parent / "validation" / "live" / name for name in LIVE]
    assert live_doc.spliced(page, live_doc.tables(kept)) == page, REMAKE


def test_quick_without_a_page_has_nothing_to_leave_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 2
    assert "--write" in capsys.readouterr().err


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.skipif(not YARDSTICK.is_dir(), reason="the measured runs (../shared/data/yardstick) are absent")
def test_the_page_shows_what_real_runs_are_replayed_as_now() -> None:
    """Every line that the command makes, but for the host gaps: their fits take as long as the rest together."""
    made, page = tables(YARDSTICK, fits=False).splitlines(), PAGE.read_text(encoding="utf-8").splitlines()
    assert len(made) > 90
    assert [line for line in made if line not in page] == [], REMAKE
    shown = page[page.index(BEGIN) : page.index(END)]
    gaps = shown.index(next(line for line in shown if line.startswith("| host gaps")))
    fitted = shown[gaps : shown.index("", gaps)]
    assert len(fitted) == 6
    assert [line for line in shown[1:] if line and line not in made] == fitted, REMAKE
