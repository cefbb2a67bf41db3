"""Products of one or two tokens against float64, on every number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from realengine import few_rows as products
from realengine.few_rows import MOST_BYTES, MOST_ROWS, MOST_WIDTH, few_rows
from realengine.glue import cpu_ops

SHAPES = [(1, 32), (31, 64), (33, 576), (576, 1536), (96, MOST_WIDTH)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
def test_is_the_product_rounded_once(outputs: int, width: int, biased: bool) -> None:
    weight, bias = random(outputs, width), random(outputs) if biased else None
    run = few_rows(weight, bias)
    assert run is not None
    seen = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in range(1, MOST_ROWS + 1):
            x = random(MOST_ROWS, width)[:rows]
            terms = x.double().unsqueeze(1) * weight.double()
            exact = terms.sum(2) + (0 if bias is None else bias.double())
            # float32 sums of `width` terms, then one rounding to the 8 bits of bfloat16.
            allowed = 2**-24 * width * terms.abs().sum(2) + 2**-8 * exact.abs() * 1.01
            got = run(x)
            assert got.dtype is torch.bfloat16
            assert got.shape == (rows, outputs)
            assert bool(((got.double() - exact).abs() <= allowed).all())
            seen += [got[0]]
    # A row has the same bits whoever is beside it and however many threads there are.
    assert all(torch.equal(seen[0], one) for one in seen)


def test_none_stays_none_and_infinity_infinite() -> None:
    weight = random(8, 64)
    run = few_rows(weight, None)
    assert run is not None
    x = random(2, 64)
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    got = run(x)
    assert bool(got[0].isnan().all())
    assert torch.equal(got[1], torch.sign(weight[:, 7]) * float("inf"))


def test_rows_that_are_not_beside_each_other() -> None:
    weight, wide = random(16, 64), random(2, 128)
    run = few_rows(weight, None)
    assert run is not None
    assert torch.equal(run(wide[:, 64:]), run(wide[:, 64:].clone()))


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (torch.zeros(4, 48), "width"),
        (torch.zeros(4, MOST_WIDTH + 32), "width"),
        (torch.zeros(MOST_BYTES // 64 + 1, 32), "bytes"),
    ],
)
def test_other_matrices_are_left_to_onednn(weight: Tensor, why: str) -> None:
    assert few_rows(weight.bfloat16(), None) is None
    assert few_rows(weight, None) is None
    assert why


def test_float32_is_left_to_onednn() -> None:
    assert few_rows(torch.zeros(4, 64), None) is None


@pytest.mark.parametrize("rows", [0, 1, MOST_ROWS, MOST_ROWS + 1, 40])
def test_operators_take_any_number_of_rows(rows: int) -> None:
    angles = torch.zeros(4, 8)
    weight, bias = random(64, 96), random(64)
    linear = cpu_ops(angles, angles, torch.bfloat16).linear(weight, bias)
    x = random(rows, 96)
    exact = x.double() @ weight.double().T + bias.double()
    assert torch.allclose(linear(x).double(), exact, rtol=2**-8, atol=2**-8)


def test_without_openmp_one_thread_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random(33, 64), random(1, 64)
    run = few_rows(weight, None)
    monkeypatch.setattr(products, "_parallel", lambda: 0)
    alone = few_rows(weight, None)
    assert run is not None
    assert alone is not None
    torch.set_num_threads(2)
    assert torch.equal(run(x), alone(x))


def test_threads_of_its_own_may_call_it_at_once() -> None:
    """Nothing is kept between calls that two engines of one process could share."""
    from concurrent.futures import ThreadPoolExecutor

    weight = random(576, 576)
    run = few_rows(weight, None)
    assert run is not None
    rows = [random(1, 576) * i for i in range(1, 9)]
    right = [run(x) for x in rows]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            assert all(map(torch.equal, pool.map(run, rows), right))
