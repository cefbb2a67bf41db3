"""Preemption by recomputing, by swapping and by the cheaper of the two, in the twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import sim.deployment_limits as limits_module
from costmodel.swap import host_link_bytes_per_s, recompute_coefficients
from serving.errors import UsageError
from sim.deployment import Deployment, build, simulate
from sim.record import RunRecord, Status
from tests.sim.worlds import make_workload

SCARCE = {"model": "llama-3.1-8b", "gpu": "h100", "num_gpu_blocks_override": 220, "max_model_len": 1024}


def run(
    link: float | None = None, monkeypatch: pytest.MonkeyPatch | None = None, **options: Any
) -> RunRecord:
    if link is not None:
        assert monkeypatch is not None
        monkeypatch.setattr(limits_module, "host_link_bytes_per_s", lambda facts: link)
    workload = make_workload([0.01 * i for i in range(16)], [400] * 16, [250] * 16)
    return simulate(workload, Deployment(**{**SCARCE, **options}))


def test_every_mode_answers_everything() -> None:
    for mode in ("recompute", "swap", "auto"):
        record = run(preemption_mode=mode)
        assert (record.requests.status == Status.FINISHED).all()
        assert record.requests.preemptions.sum() > 0, "the cache is not scarce enough to test anything"


def test_intervals_price_swapping_too() -> None:
    """Draws of the profile's errors wrap the price list."""
    import tokentwin as tt

    options = {**SCARCE, "dataset_name": "random", "random_input_len": 400, "random_output_len": 250}
    run = tt.simulate(**options, num_prompts=16, request_rate=100, preemption_mode="swap", replications=3)
    assert run.record.requests.preemptions.sum() > 0


def test_swapping_costs_what_the_bytes_take() -> None:
    """Two runs with different links have the same schedule; their device times differ by bytes over rates."""
    built = build(Deployment(**SCARCE, preemption_mode="swap"))
    page_bytes = 16 * 2 * 32 * 8 * 128 * 2  # tokens x (K and V) x layers x KV heads x head size x bytes
    assert built.pricer.page_move_s == pytest.approx(page_bytes / (0.8 * 64e9))
    assert built.limits.swap_pages == int(4 * 2**30 / page_bytes)
    assert built.pricer.move_s(7) == pytest.approx(7 * page_bytes / (0.8 * 64e9))


def test_pages_moved_by_a_step_without_rows_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests on four pages: one gives way while the other's last token is in flight, so that nothing is computed.

    Its two pages go out and come back: four pages over the link, in runs that differ by nothing else.
    """
    options = {"model": "llama-3.1-8b", "gpu": "h100", "num_gpu_blocks_override": 5, "max_model_len": 64}
    options |= {"scheduling_policy": "priority", "preemption_mode": "swap", "enable_prefix_caching": False}
    workload = make_workload([0.0, 0.0], [31, 31], [9, 2], priority=[1, 0])
    rates = (1e6, 4e6)
    moved_s = []
    for rate in rates:
        monkeypatch.setattr(limits_module, "host_link_bytes_per_s", lambda facts, rate=rate: rate)
        record = simulate(workload, Deployment(**options))
        assert record.requests.preemptions.tolist() == [1, 0]
        moved_s.append(float(record.steps.gpu_s.sum()))
    page_bytes = 16 * 2 * 32 * 8 * 128 * 2  # tokens x (K and V) x layers x KV heads x head size x bytes
    assert moved_s[0] - moved_s[1] == pytest.approx(4 * page_bytes * (1 / rates[0] - 1 / rates[1]))


def test_auto_is_recompute_on_a_slow_link_and_swap_on_a_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, never = run(1e6, monkeypatch, preemption_mode="auto"), run(preemption_mode="recompute")
    np.testing.assert_array_equal(slow.steps.end_s, never.steps.end_s)
    fast = run(1e15, monkeypatch, preemption_mode="auto")
    always = run(1e15, monkeypatch, preemption_mode="swap")
    np.testing.assert_array_equal(fast.steps.end_s, always.steps.end_s)
    assert len(fast.steps) != len(never.steps) or (fast.steps.end_s != never.steps.end_s).any()


def test_a_swapped_sequence_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is computed once: prompts, and of each answer all but the last."""
    record = run(1e15, monkeypatch, preemption_mode="swap")
    requests = record.requests
    once = int((requests.prompt_tokens + requests.output_tokens - 1).sum())
    assert int(record.steps.num_tokens.sum()) == once
    assert int(run(preemption_mode="recompute", enable_prefix_caching=False).steps.num_tokens.sum()) > once


def test_coefficients_of_a_price_that_is_quadratic() -> None:
    """A device that takes a n + b n^2 in all for n tokens, however they are cut."""
    a, b = 20e-6, 3e-10

    class Quadratic:
        def step_s(self, num_tokens: int, sampled: int, prefills: Any, *rest: int) -> float:
            ((chunk, context),) = prefills
            return a * chunk + b * ((context + chunk) ** 2 - context**2)

    assert recompute_coefficients(Quadratic(), 512) == pytest.approx((a, b))  # type: ignore[arg-type]


def test_a_profile_without_a_host_link_is_an_error() -> None:
    facts = build(Deployment(**SCARCE)).profile.facts
    with pytest.raises(UsageError, match="host_link_bytes_per_s"):
        host_link_bytes_per_s(replace_facts(facts))


def replace_facts(facts: Any) -> Any:
    return facts.model_copy(update={"name": "unheard-of", "host_link_bytes_per_s": None})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"swap_space": 2.0}, "--preemption-mode swap"),
        ({"preemption_mode": "swap", "policy": "static"}, "never preempts"),
        ({"preemption_mode": "swap", "swap_space": 1e-6}, "holds no KV page"),
    ],
)
def test_options_without_effect(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(Deployment(**{**SCARCE, **options}))


def test_swap_costs_need_swap_pages() -> None:
    limits = build(Deployment(**SCARCE)).limits
    with pytest.raises(UsageError, match="swap_costs"):
        replace(limits, swap_costs=(1.0, 1.0, 0.0))


def test_prefixes_kept_on_the_host_are_copied_instead_of_computed() -> None:
    """Eight prefixes that the device cannot hold together, asked for in turn: on the host they are found."""
    prefixes = [[(1600, 10 + i % 8)] for i in range(48)]
    workload = make_workload([0.4 * i for i in range(48)], [1700] * 48, [20] * 48, segments=prefixes)
    options = {"model": "llama-3.1-8b", "gpu": "h100", "num_gpu_blocks_override": 500, "max_model_len": 4096}
    plain = simulate(workload, Deployment(**options))
    tiered = simulate(workload, Deployment(**options, kv_offloading_size=8.0))
    assert plain.requests.cached_tokens.sum() < 0.1 * 48 * 1600
    assert tiered.requests.cached_tokens[8:].min() == 1600
    ttft = [np.median(r.requests.first_token_s - r.requests.sent_s) for r in (plain, tiered)]
    assert ttft[1] < 0.7 * ttft[0]
    # What is copied takes its time: 100 pages of 2 MiB over the link.
    slowest = tiered.steps.gpu_s[tiered.steps.num_prefills > 0].max()
    assert slowest > 100 * 2 * 2**20 / (0.8 * 64e9)
