"""Fits recover what made the data, cleaning counts what it drops, and a user's own table becomes a
profile."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from calibration.assemble import fit_profile
from calibration.fit import Options, fit_coefficients, fit_kernel, leave_nk_out, measurement_noise
from calibration.table_floor import floor
from calibration.tables import (
    Samples,
    drop_host_floor,
    drop_impossible,
    drop_spikes,
    read_table,
    samples_from,
)
from costmodel.datasheet import device_facts
from costmodel.formats import hardware
from costmodel.kernels import GEMM_DEFAULTS, gemm_s
from serving.errors import UsageError

HW = hardware(device_facts("h200"))
TRUTH = {**GEMM_DEFAULTS, "launch_s": 3e-6, "hbm_efficiency": 0.7, "eff_128x256": 0.66, "throttle": 0.05}


def gemm_samples(noise: float = 0.0, seed: int = 0) -> Samples:
    """A made-up GPU that follows the formula with `TRUTH`, over 25 shapes and 12 token counts."""
    sizes = [512, 1024, 4096, 8192, 16384]
    m = [1, 4, 16, 64, 128, 129, 256, 512, 1024, 2048, 4096, 8192]
    grid = np.array([(n, k, t) for n in sizes for k in sizes for t in m], float)
    seconds = gemm_s(TRUTH, HW, *grid.T)
    seconds = seconds * np.exp(np.random.default_rng(seed).normal(0, noise, len(seconds)))
    return Samples("gemm", grid[:, :2], grid[:, 2:], seconds)


def test_the_fit_recovers_the_coefficients_that_matter() -> None:
    found = fit_coefficients("gemm", gemm_samples(0.01), HW)
    assert found["launch_s"] == pytest.approx(TRUTH["launch_s"], rel=0.1)
    assert found["hbm_efficiency"] == pytest.approx(TRUTH["hbm_efficiency"], rel=0.05)
    assert found["throttle"] == pytest.approx(TRUTH["throttle"], rel=0.3)


def test_held_out_shapes_of_a_noisy_gpu_are_predicted_to_about_its_noise() -> None:
    """The mean absolute error of 4 % normal noise is 3.2 %; a fit to other shapes adds little."""
    error, bias = leave_nk_out(gemm_samples(0.04), HW)
    assert error < 0.045
    assert abs(bias) < 0.01


def test_measured_shapes_are_reproduced_and_noise_is_estimated() -> None:
    samples = gemm_samples(0.05)
    fit = fit_kernel("gemm", samples, HW, options=Options(folds=0))
    assert fit.errors.measured is not None
    assert fit.errors.measured < 1e-3
    assert fit.hull["n"] == (512, 16384)
    assert measurement_noise(samples, gemm_s(TRUTH, HW, *samples.shape.T, *samples.grid.T)) == pytest.approx(
        0.05, rel=0.4
    )


def test_few_shapes_leave_more_to_the_defaults_than_many() -> None:
    """Two shapes: noise moves coefficients less than where only their rows count."""
    samples = gemm_samples(0.05)
    few = samples.subset((samples.shape[:, 0] == 4096) & (samples.shape[:, 1] >= 4096))
    pulled, free = (
        fit_coefficients("gemm", few, HW),
        fit_coefficients("gemm", few, HW, Options(prior_weight=1e-4)),
    )

    def moved(found: dict[str, float]) -> float:
        return float(sum(abs(np.log(found[c] / GEMM_DEFAULTS[c])) for c in GEMM_DEFAULTS))

    assert moved(pulled) < 0.9 * moved(free)


def test_the_fit_is_deterministic() -> None:
    samples = gemm_samples(0.05)
    assert fit_kernel("gemm", samples, HW) == fit_kernel("gemm", samples, HW)


def line(seconds: list[float]) -> Samples:
    """One series of growing problems."""
    count = len(seconds)
    return Samples("gemm", np.full((count, 2), 8.0), 2.0 ** np.arange(count)[:, None], np.array(seconds))


def test_cleaning_is_counted_by_reason() -> None:
    samples = line([1.0, 1.1, 9.0, 1.3, 1.25, 2.0])
    drop_spikes(samples)  # 9.0 is over 1.5 x a larger problem's time; 1.3 > 1.25 is a tile switch and stays
    assert samples.seconds.tolist() == [1.0, 1.1, 1.3, 1.25, 2.0]
    drop_impossible(samples, np.array([0.1, 0.1, 0.1, 0.1, 5.0]))
    assert samples.dropped == Counter({"spike (non-monotone)": 1, "above the physical peak": 1})


def test_a_table_whose_floor_is_the_host_loses_the_floor() -> None:
    samples = line([55e-6, 55e-6, 56e-6, 57e-6, 300e-6, 600e-6])
    drop_host_floor(samples)
    assert samples.seconds.tolist() == [300e-6, 600e-6]
    assert samples.dropped["host-launch floor"] == 4
    fast = line([3e-6, 4e-6, 5e-6])
    drop_host_floor(fast)
    assert len(fast) == 3


def test_a_table_that_shows_little_but_the_host_takes_another_kernels_times_for_the_rest() -> None:
    """The stand-in fills what the host hid and nothing else; what it never timed stays lost."""
    hidden = [55e-6, 55e-6, 56e-6, 57e-6, 58e-6, 300e-6]
    samples, stand_in = (
        line(hidden),
        line([4e-6, 5e-6, 7e-6, 12e-6, 500e-6, 290e-6]).subset(np.arange(6) != 1),
    )
    drop_host_floor(samples, stand_in=stand_in)
    # The last hidden one took the host 55 us to launch, so no more than what hides behind that.
    assert samples.seconds == pytest.approx([4e-6, 7e-6, 12e-6, 1.4 * 55e-6, 300e-6])
    assert samples.dropped["host-launch floor, another kernel timed instead"] == 4
    assert samples.dropped["host-launch floor"] == 1
    mostly_seen = line([55e-6, 55e-6, 200e-6, 300e-6, 600e-6])
    drop_host_floor(mostly_seen, stand_in=line([4e-6] * 5))
    assert mostly_seen.seconds.tolist() == [200e-6, 300e-6, 600e-6]


def test_duplicates_keep_the_median_and_bad_numbers_are_counted() -> None:
    rows = [{"x": "1", "latency_us": v} for v in ("1", "2", "30", "-1", "nan", "what")]
    samples = samples_from("gemm", rows, lambda r: (float(r["x"]),), lambda r: (1.0,))
    assert samples.seconds.tolist() == [2e-6]
    assert samples.dropped == Counter({"duplicate": 2, "not a positive time": 3})


def write_gemm(path: Path) -> Path:
    samples = gemm_samples(0.02)
    lines = ["dtype,m,n,k,latency_us"]
    for (n, k), (m,), s in zip(samples.shape, samples.grid, samples.seconds, strict=True):
        lines.append(f"bfloat16,{m:.0f},{n:.0f},{k:.0f},{s * 1e6}")
    path.write_text("\n".join(lines))
    return path


def test_a_users_own_table_becomes_a_profile(tmp_path: Path) -> None:
    profile = fit_profile([write_gemm(tmp_path / "mine.csv")], "h200")
    assert set(profile.gemm) == {"bfloat16"}
    assert profile.gemm["bfloat16"].source == "mine.csv"
    assert profile.provenance.tables[0].startswith("mine.csv ")
    assert profile.decode == {}


def test_unknown_tables_are_refused_with_their_header(tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match=r"other\.csv: line 1: header \['a', 'b'\]"):
        read_table(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(UsageError, match="did you mean"):
        fit_profile([write_gemm(tmp_path / "mine.csv")], "h2000")


def test_a_table_contradicts_itself_by_its_noise() -> None:
    """Products that follow the formula but for 10 % of normal noise are known to 8 %, its mean size, from all others."""
    samples = gemm_samples(0.1)
    base = gemm_s(TRUTH, HW, *samples.shape.T, *samples.grid.T)
    assert floor(samples, np.log(samples.seconds / base)) == pytest.approx(0.08, abs=0.008)
    assert floor(samples, np.zeros(len(samples))) == 0.0
