"""Formulas of kernels: what each term means, at limits that are known."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.datasheet import device_facts
from costmodel.formats import GEMM_FORMATS, hardware
from costmodel.kernels import (
    EARLIER,
    GEMM_DEFAULTS,
    PREFILL_DEFAULTS,
    gemm_s,
    in_cache,
    prefill_s,
    smooth_max,
)
from costmodel.predict import Kernel
from costmodel.profile import KernelFit

L40S = device_facts("l40s")
HW, HW8 = hardware(L40S), hardware(L40S, GEMM_FORMATS["fp8"])
ROWS = np.array([1.0, 16.0, 17.0, 512.0])


def one(value: float) -> np.ndarray:
    return np.asarray(value)


def test_the_smooth_maximum_is_a_sum_at_power_one_and_the_larger_at_a_high_one() -> None:
    a, b = np.array([3.0, 1e-300, 0.0]), np.array([4.0, 2.0, 0.0])
    assert smooth_max(a, b, 1.0)[:2].tolist() == pytest.approx([7.0, 2.0])
    assert smooth_max(a, b, 2.0)[:2].tolist() == pytest.approx([5.0, 2.0])
    assert smooth_max(a, b, 200.0).tolist() == pytest.approx([4.0, 2.0, 0.0], rel=1e-2, abs=1e-29)


def test_bytes_that_fit_the_cache_come_faster_and_those_that_do_not_as_from_memory() -> None:
    c = {"l2_gain": 1.6, "l2_share": 0.9, "l2_power": 8.0}
    edge = HW.l2_bytes * 0.9
    assert in_cache(c, HW, np.array([0.0, edge / 4, edge, 4 * edge])).tolist() == pytest.approx(
        [2.6, 2.6, 1.8, 1.0], abs=1e-4
    )


def test_a_product_leaves_the_cache_where_all_copies_of_its_weights_do() -> None:
    """One token, and nothing but reading weights: twice as fast while six copies fit."""
    c = {
        **GEMM_DEFAULTS,
        "l2_gain": 1.0,
        "l2_power": 16.0,
        "l2_share": 1.0,
        "launch_s": 1e-12,
        "prologue_s": 1e-12,
        "throttle": 1e-12,
        "occupancy_half": 1e-6,
        "smoothing": 12.0,
    }

    def bytes_per_s(copies: float, n: float) -> float:
        return float(n * 8192 * 2 / gemm_s({**c, "l2_copies": copies}, HW, one(n), one(8192), one(1)))

    n = HW.l2_bytes / (6 * 8192 * 2)  # six copies just fit
    slow, fast = bytes_per_s(6.0, 1.5 * n), bytes_per_s(6.0, 0.7 * n)
    assert fast / slow == pytest.approx(2.0, rel=0.02)
    assert bytes_per_s(1.0, 1.5 * n) == pytest.approx(fast, rel=0.02)


def test_quantising_takes_its_time_a_row_and_only_where_activations_are_quantised() -> None:
    more = {**GEMM_DEFAULTS, "quant_row_s": GEMM_DEFAULTS["quant_row_s"] + 5e-9}
    shape = one(4096), one(4096), ROWS
    assert gemm_s(more, HW8, *shape) - gemm_s(GEMM_DEFAULTS, HW8, *shape) == pytest.approx(5e-9 * ROWS)
    assert gemm_s(more, HW, *shape).tolist() == gemm_s(GEMM_DEFAULTS, HW, *shape).tolist()


def test_a_fit_from_before_a_coefficient_keeps_its_formula() -> None:
    """Priced as the formula then was: no tiles below 64 rows, no rows by themselves, the cache for weights alone."""
    old = {name: value for name, value in GEMM_DEFAULTS.items() if name not in EARLIER["gemm"]}
    fit = KernelFit(kind="gemm", coefficients=old, num_points=1)
    priced = Kernel("gemm", fit, HW8).seconds((4096.0, 4096.0), ROWS)
    assert priced.tolist() == gemm_s({**old, **EARLIER["gemm"]}, HW8, one(4096), one(4096), ROWS).tolist()
    assert (
        priced[1]
        == pytest.approx(priced[2], rel=1e-2)
        != pytest.approx(gemm_s(GEMM_DEFAULTS, HW8, one(4096), one(4096), ROWS)[2], rel=1e-2)
    )
    c = {name: value for name, value in PREFILL_DEFAULTS.items() if not name.startswith("l2_")}
    before = Kernel("prefill", KernelFit(kind="prefill", coefficients=c, num_points=1), HW)
    uncached = {**PREFILL_DEFAULTS, "l2_gain": 0.0}
    assert (
        before.seconds((32.0, 8.0), 1.0, ROWS, 0.0).tolist()
        == prefill_s(uncached, HW, one(32), one(8), one(1), ROWS, one(0)).tolist()
    )
    assert Kernel("gemm", None, HW).coefficients == GEMM_DEFAULTS
