"""Perturbed prices keep the pricer's contract, and spreads say what they are taken from."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.datasheet import datasheet_profile, device_facts
from costmodel.model import load_model
from costmodel.pricer import StepPricer
from costmodel.profile import load_profile
from costmodel.uncertainty import (
    HOST_LOG_STD,
    UNFITTED_LOG_STD,
    Factors,
    PerturbedPricer,
    Spread,
    spread_of,
)

FACTORS = Factors(engine=1.01, linear=1.07, prefill=0.9, decode=1.13, mixed=1.4, host=0.8)


@lru_cache
def base() -> StepPricer:
    return StepPricer(load_model("qwen3-0.6b"), load_profile("h200"), max_num_batched_tokens=2048)


def spread(gpu: str = "h200", model: str = "llama-3.1-8b", tp: int = 1, **formats: str) -> Spread:
    return spread_of(load_model(model), load_profile(gpu), tensor_parallel_size=tp, **formats)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(1, 3000), st.integers(0, 9000), st.integers(1, 40))
def test_a_run_of_decodes_costs_exactly_its_steps(batch: int, mean: int, extra: int, steps: int) -> None:
    perturbed = PerturbedPricer(base(), FACTORS)
    total, longest = batch * mean + extra % batch, mean + extra
    run = perturbed.decode_run_s(batch, total, longest, steps)
    alone = [perturbed.step_s(batch, batch, (), batch, total + j * batch, longest + j) for j in range(steps)]
    assert run.tolist() == alone


def test_each_factor_scales_its_own_group() -> None:
    p = base()
    step = (600 + 8, 9, [(600, 100)], 8, 8000, 1500)
    linear, prefill = p.step_s(608, 9, (), 0, 0, 0), p.step_s(608, 9, [(600, 100)], 0, 0, 0)
    decode = p.step_s(8, 8, (), 8, 8000, 1500) - p.step_s(8, 8, (), 0, 0, 0)
    expected = {
        "linear": linear,
        "prefill": prefill - linear,
        "mixed": p.step_s(*step) - prefill,
        "decode": 0.0,
        "host": 0.0,
        "engine": p.step_s(*step),
    }
    for group, seconds in expected.items():
        grown = PerturbedPricer(p, Factors(**{group: 1.5})).step_s(*step)
        assert grown - p.step_s(*step) == pytest.approx(0.5 * seconds, abs=1e-12), group
    grown = PerturbedPricer(p, Factors(decode=1.5)).step_s(8, 8, (), 8, 8000, 1500)
    assert grown - p.step_s(8, 8, (), 8, 8000, 1500) == pytest.approx(0.5 * decode, rel=1e-9)
    assert PerturbedPricer(p, FACTORS).host_s(3, 9) == pytest.approx(0.8 * p.host_s(3, 9))


def test_no_perturbation_is_the_same_price() -> None:
    p, same = base(), PerturbedPricer(base(), Factors())
    for step in ((608, 9, [(600, 100)], 8, 8000, 1500), (64, 64, (), 64, 64_000, 2000)):
        assert same.step_s(*step) == pytest.approx(p.step_s(*step), rel=1e-12)  # type: ignore[arg-type]


def test_measured_shapes_are_surer_than_others_and_unfitted_kernels_the_least_sure() -> None:
    measured, other = spread("rtx4090"), spread("rtx4090", "qwen2.5-14b")
    assert measured.scale()["rtx4090/decode/bfloat16"] < other.scale()["rtx4090/decode/bfloat16"]
    assert measured.scale()["rtx4090/linear/bfloat16"] < other.scale()["rtx4090/linear/bfloat16"]
    bare = spread_of(load_model("llama-3.1-8b"), datasheet_profile(device_facts("h200")))
    scale = bare.scale()
    assert scale["h200/decode/bfloat16"] == UNFITTED_LOG_STD
    assert scale["h200/linear/bfloat16"] > max(other.scale()["rtx4090/linear/bfloat16"], 0.1)
    assert scale["host"] == HOST_LOG_STD


def test_deployments_share_the_errors_of_what_they_share() -> None:
    """Two deployments on one GPU meet one calibration error; another format or GPU meets its own."""
    a, b = spread(), spread(tp=2)
    assert a.draw(1, 5) == b.draw(1, 5) != a.draw(1, 6)
    fp8, h100 = spread(quantization="fp8").draw(1, 5), spread("h100").draw(1, 5)
    assert fp8["h200/decode/bfloat16"] == a.draw(1, 5)["h200/decode/bfloat16"]
    assert set(fp8) - set(a.draw(1, 5)) == {"h200/linear/fp8"}
    assert set(h100) & set(a.draw(1, 5)) == {"host"}
    assert h100["host"] == a.draw(1, 5)["host"]


def test_drawn_factors_have_median_one_and_the_stated_spread() -> None:
    s = spread()
    key, scale = "h200/linear/bfloat16", s.scale()["h200/linear/bfloat16"]
    logs = np.log([s.factors(s.draw(0, i)).linear for i in range(2000)])
    assert np.median(logs) == pytest.approx(0.0, abs=4 * 1.25 * scale / np.sqrt(2000))
    assert logs.std() == pytest.approx(scale, rel=0.07)
    assert s.factors({key: 1.0}) == Factors(linear=float(np.exp(scale)))


def test_reasons_name_what_the_error_is_taken_from() -> None:
    reasons = {g.group: g.reason for g in spread("rtxpro6000", "qwen3-30b-a3b", 2).groups}
    assert "shapes not measured" in reasons["linear"]
    assert "held-out error" in reasons["decode"]
    assert "not measured" in {g.group: g.reason for g in spread("a100").groups}["mixed"]


@pytest.mark.parametrize("formats", [{}, {"quantization": "fp8"}, {"quantization": "nvfp4"}])
def test_products_err_together_unless_an_engine_version_has_its_own(formats: dict[str, str]) -> None:
    """A paired comparison draws one error for what is priced by the same fit: 8-bit products are of one version."""
    shipped = load_profile("rtxpro6000")
    keys = [
        {g.group: g.key for g in spread_of(load_model("llama-3.1-8b"), profile, **formats).groups}
        for profile in (shipped, shipped.for_engine("0.20", 1), shipped.for_engine("0.19", 1))
    ]
    assert keys[0] == keys[1]
    differing = {name for name in keys[0] if keys[0][name] != keys[2][name]}
    assert differing == (set() if formats == {"quantization": "fp8"} else {"linear"})
