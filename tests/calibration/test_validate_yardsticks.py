"""The yardsticks: real engines under load, replayed with the shipped profiles. docs/validation.md has the targets."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from calibration.compare import Comparison
from calibration.validate import validate

YARDSTICK = Path(__file__).resolve().parents[3] / "shared" / "data" / "yardstick"
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(
        not YARDSTICK.is_dir(), reason="the measured runs (../shared/data/yardstick) are absent"
    ),
]

MEAN_LIMIT, LARGEST_LIMIT = 0.015, 0.04
"""Mean and largest absolute error over the 15 figures of a run."""


@cache
def rtx4090() -> Comparison:
    return validate(None, YARDSTICK, run="lss_rtx4090_llama31-8b_tp1")


@cache
def rtxpro6000() -> Comparison:
    return validate(None, YARDSTICK, run="lss_rtxpro6000_llama31-8b_tp1")


@cache
def inferencex() -> Comparison:
    return validate(None, YARDSTICK / "inferencex_llama70b_fp8_h200_vllm.csv")


def test_kv_pages_of_the_rtx4090_from_first_principles() -> None:
    pages = rtx4090().pages
    assert pages is not None
    assert pages.recorded == 2588
    assert pages.error is not None
    assert abs(pages.error) <= 0.03


@pytest.mark.parametrize("run", [rtx4090, rtxpro6000], ids=["rtx4090", "rtxpro6000"])
def test_mean_error_of_a_vllm_019_run(run: object) -> None:
    assert callable(run)
    assert run().mean_error() <= MEAN_LIMIT


@pytest.mark.parametrize("run", [rtx4090, rtxpro6000], ids=["rtx4090", "rtxpro6000"])
def test_largest_error_of_a_vllm_019_run(run: object) -> None:
    assert callable(run)
    assert abs(run().worst().error) <= LARGEST_LIMIT


def test_running_and_waiting_follow_the_kv_starved_run() -> None:
    """Of up to 48 running and 234 waiting requests."""
    rms = {s.name: s.rms for s in rtx4090().series}
    assert rms["running"] <= 3
    assert rms["waiting"] <= 6
    assert rms["kv"] <= 0.06


def test_running_and_waiting_follow_the_run_with_enough_kv() -> None:
    """Of up to 128 running and 165 waiting requests."""
    rms = {s.name: s.rms for s in rtxpro6000().series}
    assert rms["running"] <= 3
    assert rms["waiting"] <= 3


@pytest.mark.slow
def test_inferencex_points_outside_kv_saturation() -> None:
    found = inferencex()
    assert len(found.figures) == 120
    assert found.mean_error("tpot") <= 0.08
    assert found.mean_error("ttft") <= 0.15
    assert {f.label for f in found.excluded()} == {"1024/8192 tp1 conc64", "8192/1024 tp1 conc64"}
