"""Decode steps read off a run's end: a run of the twin with a known gap a step gives it back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibration.compare_host import Gaps
from calibration.doc_tables import between
from calibration.drain import MOST_STEPS, WIDTH, by_size, main, stretches, table
from calibration.observed import Case, Observed, plain_workload
from calibration.step_times import Times
from calibration.validate import replay
from sim.deployment import Deployment, build

ROOT = Path(__file__).resolve().parents[2]
YARDSTICK = ROOT.parent / "shared" / "data" / "yardstick"


def case() -> Case:
    """80 requests within a second, answers of 200 to 600 tokens: their ends lie a few steps apart."""
    rng = np.random.default_rng(5)
    sent, prompts = np.sort(rng.uniform(0.0, 1.0, 80)), rng.integers(40, 600, 80)
    work = plain_workload("g", sent, prompts.tolist(), rng.integers(200, 600, 80).tolist())
    engine = Deployment(
        model="llama-3.1-8b", gpu="h200", max_num_batched_tokens=2048, max_num_seqs=128, max_model_len=4096
    )
    return Case("g", engine, work, Observed(), True)


@pytest.mark.parametrize("gap_s", [0.0, 4e-4])
def test_a_known_gap_is_read_off(gap_s: float) -> None:
    given = case()
    record, _ = replay(given, 40000, Gaps(gap_s).reprice)
    r = record.requests
    prices = build(given.deployment).pricer
    found = stretches(given, Times(r.scheduled_s, r.prefill_done_s, r.engine_done_s), prices)
    assert sum(s.steps for s in found) >= 30
    assert all(1 <= s.steps <= MOST_STEPS for s in found)
    for size, (_, took_s, priced_s) in by_size(found).items():
        host_s = prices.host_s(size * WIDTH + WIDTH // 2, size * WIDTH + WIDTH // 2)
        assert took_s - priced_s == pytest.approx(gap_s, abs=1e-5 + 0.5 * host_s)


def test_missing_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.shared
@pytest.mark.skipif(not YARDSTICK.is_dir(), reason="the measured runs (../shared/data/yardstick) are absent")
def test_the_page_shows_how_the_real_runs_end() -> None:
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    assert between(page, "drain", table(YARDSTICK)) == page, (
        "run python -m calibration.drain --write docs/validation.md"
    )
