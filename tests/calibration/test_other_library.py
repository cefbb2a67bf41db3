"""Products of another library, timed on another card: brought to this card's pace, and no further."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from calibration.lss import layer_samples
from calibration.other_library import DATA, LLAMA_UP, at_pace, other_samples, pace
from calibration.tables import Samples, read_table
from costmodel.datasheet import device_facts
from costmodel.formats import hardware
from costmodel.predict import Kernel
from costmodel.profile import load_profile
from serving.errors import UsageError

KERNELS = Path(__file__).resolve().parents[3] / "shared" / "data" / "kernels"
FACTS = device_facts("rtxpro6000")
STEM = "gemm_rtxpro6000_cuda12"


def samples(series: dict[tuple[float, float], dict[int, float]]) -> Samples:
    rows = [(n, k, m, s) for (n, k), times in series.items() for m, s in times.items()]
    n, k, m, s = (np.array(column, float) for column in zip(*rows, strict=True))
    return Samples("gemm", np.column_stack([n, k]), m[:, None], s, Counter())


def stairs(scale: float, tokens: range) -> dict[int, float]:
    return {m: scale * (1 + m // 256) for m in tokens}


def test_pace_is_the_factor_between_two_cards_that_run_the_same_kernel() -> None:
    """Twice as deep takes 1.9 times as long; the other card is 1.25 times as slow, at 64 tokens by another factor."""
    theirs = samples(
        {
            LLAMA_UP.deeper: {64: 99.0, **stairs(1.9 * 1.25, range(576, 3073, 64))},
            LLAMA_UP.shape: stairs(1.25, range(2112, 3073, 64)),
        }
    )
    ours = samples({LLAMA_UP.shape: {64: 1.0, **stairs(1.0, range(576, 2049, 64))}})
    assert pace(theirs, ours) == pytest.approx(1.25, rel=1e-12)


def test_tables_without_a_product_in_common_say_so() -> None:
    ours = samples({LLAMA_UP.shape: stairs(1.0, range(576, 2049, 64))})
    theirs = samples({LLAMA_UP.deeper: stairs(1.9, range(576, 3073, 64)), LLAMA_UP.shape: {64: 1.0}})
    with pytest.raises(UsageError, match="from 2049 to inf in both tables"):
        pace(theirs, ours)


def test_reading_weights_takes_no_less_on_a_faster_card() -> None:
    read_s = 4096.0 * 4096 * 2 / (hardware(FACTS).hbm_bytes_per_s * 0.95)
    shape = (4096.0, 4096.0)
    slow = samples({shape: {1: 0.9 * read_s, 2: read_s, 8: 1.1 * read_s, 2048: 10 * read_s}})
    found = at_pace(slow, 1.25, FACTS).seconds / read_s
    assert found == pytest.approx([0.9, 1.0, 1.0, 8.0])


def test_the_table_holds_each_product_once_and_slower_with_more_tokens() -> None:
    rows = read_table(DATA / f"{STEM}.csv").rows
    keys = [(r["n"], r["k"], r["m"]) for r in rows]
    assert len(set(keys)) == len(keys)
    assert {r["cuda"] for r in rows} == {"12.8", "12.9"}
    for shape in {key[:2] for key in keys}:
        series = sorted((int(r["m"]), float(r["latency_us"])) for r in rows if (r["n"], r["k"]) == shape)
        flops = np.array([2.0 * m * float(shape[0]) * float(shape[1]) for m, _ in series])
        us = np.array([t for _, t in series])
        assert np.all(flops / (us * 1e-6) < FACTS.peak_flops["bfloat16"])
        if series[0][0] == 1:
            assert us[-1] > 3 * us[0]


def test_choosing_a_library_changes_no_product_that_reads_its_weights_much() -> None:
    """One to 16 tokens: the memory binds with either library, within what a small grid of blocks costs."""
    old, new = (load_profile("rtxpro6000").for_engine(version, 1) for version in ("0.19", "0.20"))
    tokens = np.arange(1.0, 17.0)
    for shape in ((28672.0, 4096.0), (128256.0, 4096.0)):
        both = [
            Kernel("gemm", p.gemm["bfloat16"], hardware(FACTS)).seconds(shape, tokens) for p in (old, new)
        ]
        assert both[0] == pytest.approx(both[1], rel=0.06)


@pytest.mark.shared
@pytest.mark.skipif(
    not KERNELS.is_dir(), reason="the measured kernel tables (../shared/data/kernels) are absent"
)
def test_the_two_cards_differ_by_seven_percent_wherever_they_run_the_same_kernel() -> None:
    """At every number of tokens from 576 on, to 2 %, and as the profile says; which it prices so as well."""
    tables = [read_table(path) for path in sorted(KERNELS.glob("kernels_lss_rtxpro6000_*_dense.csv"))]
    ours = layer_samples(tables, FACTS)["gemm"]
    _, slower = other_samples(STEM, ours, FACTS)
    assert slower == pytest.approx(1.07, abs=0.01)
    assert f"{slower:.3f} times as slow" in load_profile("rtxpro6000").other_gemms["0.19"]["bfloat16"].source
    theirs = {
        (int(r["n"]), int(r["k"]), int(r["m"])): float(r["latency_us"])
        for r in read_table(DATA / f"{STEM}.csv").rows
    }
    depth = [theirs[28672, 4096, m] / theirs[28672, 8192, m] for m in range(2064, 3073, 16)]
    assert np.std(depth) < 0.004
    mine = {
        int(m): s * 1e6
        for (n, k), (m,), s in zip(ours.shape, ours.grid, ours.seconds, strict=True)
        if (n, k) == LLAMA_UP.shape
    }
    ratios = [np.median(depth) * theirs[28672, 8192, m] / mine[m] for m in range(576, 2049, 16)]
    assert np.quantile(np.abs(np.array(ratios) / slower - 1), 0.9) < 0.02
    # The fit has no timing of this shape: what it carries there from the others is what both libraries take.
    kernel = Kernel(
        "gemm", load_profile("rtxpro6000").for_engine("0.19", 1).gemm["bfloat16"], hardware(FACTS)
    )
    tokens = np.arange(576.0, 2049.0, 16.0)
    errors = kernel.seconds(LLAMA_UP.shape, tokens) * 1e6 / np.array([mine[int(m)] for m in tokens]) - 1
    assert np.mean(np.abs(errors)) < 0.03
    assert np.max(np.abs(errors)) < 0.08
