"""Residuals: exact where measured, fading with distance, linear in between."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.profile import ResidualTable
from costmodel.residual import Residuals, clipped, covariance, interpolate, kriging_weights

TABLE = ResidualTable(
    shapes=[[1024, 1024], [4096, 1024]],
    grid=[[1, 3, 7]],
    log_ratio_e4=[[1000, 2000, 3000], [0, 0, -1000]],
    length_scales=[2.0, 2.0],
    nugget=0.05,
)


def test_a_measured_shape_keeps_its_own_residuals() -> None:
    residuals = Residuals(TABLE)
    assert residuals.measured((1024, 1024))
    assert not residuals.measured((2048, 1024))
    assert residuals.at((1024, 1024), [np.array([1.0, 3.0, 7.0])]).tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_between_grid_points_it_is_linear_in_the_logarithm_and_flat_outside() -> None:
    """log1p doubles from 1 to 3 to 7: the middle of a cell is at 1 + x = 2^1.5."""
    at = np.array([2.0**1.5 - 1, 0.0, 100.0])
    assert Residuals(TABLE).at((1024, 1024), [at]).tolist() == pytest.approx([0.15, 0.1, 0.3])


def test_far_from_every_shape_the_formula_stands_alone() -> None:
    far = Residuals(TABLE).at((1e12, 1e12), [np.array([1.0])])
    assert abs(float(far[0])) < 1e-4


def test_a_shape_between_two_takes_from_both() -> None:
    between = float(Residuals(TABLE).at((2048, 1024), [np.array([3.0])])[0])
    assert 0.0 < between < 0.2


def test_kriging_weights_of_a_known_point_without_noise_are_one_and_zero() -> None:
    shapes = np.log(np.array([[1.0], [10.0], [100.0]]))
    weights = kriging_weights(shapes, shapes[1:2], np.array([1.0]), 0.0)
    assert weights[0].tolist() == pytest.approx([0.0, 1.0, 0.0], abs=1e-12)


def test_interpolation_in_two_axes_is_exact_on_the_grid() -> None:
    axes = [np.array([1.0, 2.0, 5.0]), np.array([0.0])]
    table = np.array([[1.0], [2.0], [4.0]])
    assert interpolate(axes, table, [axes[0], np.zeros(3)]).tolist() == [1.0, 2.0, 4.0]


def test_cityblock_distances_make_a_product_of_one_factor_per_axis() -> None:
    rng = np.random.default_rng(0)
    a, b, scales = rng.normal(size=(5, 2)), rng.normal(size=(4, 2)), np.array([0.7, 3.0])
    axes = [covariance(a[:, d : d + 1], b[:, d : d + 1], scales[d : d + 1], "euclidean") for d in (0, 1)]
    assert covariance(a, b, scales, "cityblock") == pytest.approx(axes[0] * axes[1])


def test_what_sets_a_row_apart_is_the_error_of_kriging_it_from_all_others() -> None:
    """The closed form against leaving each row out in turn: a clip of nothing leaves what the others say."""
    rng = np.random.default_rng(1)
    shapes, rows, scales = rng.normal(size=(7, 2)), rng.normal(size=(7, 3)), np.array([1.0, 2.0])
    told = [
        kriging_weights(np.delete(shapes, i, 0), shapes[i : i + 1], scales, 0.1, "cityblock")
        @ np.delete(rows, i, 0)
        for i in range(7)
    ]
    assert clipped(rows, shapes, scales, 0.1, "cityblock", 0.0) == pytest.approx(np.concatenate(told))
    assert clipped(rows, shapes, scales, 0.1, "cityblock", 1e9) == pytest.approx(rows)


def test_a_clipped_table_keeps_its_timings_and_carries_one_that_stands_out_less_far() -> None:
    sizes = [512, 1024, 2048, 4096, 8192]
    shapes = [[n, k] for n in sizes for k in sizes]
    log_ratio = [[5000 if shape == [2048, 2048] else 10 * i] for i, shape in enumerate(shapes)]
    plain = ResidualTable(
        shapes=shapes,
        grid=[[1]],
        log_ratio_e4=log_ratio,
        length_scales=[3.0, 3.0],
        nugget=0.05,
        metric="cityblock",
    )
    robust = Residuals(plain.model_copy(update={"clip": 2.5}))
    one = [np.array([1.0])]
    assert float(robust.at((2048, 2048), one)[0]) == pytest.approx(0.5)
    near = (2100, 2100)
    assert float(Residuals(plain).at(near, one)[0]) > 0.3 > 0.15 > float(robust.at(near, one)[0]) > 0.0
