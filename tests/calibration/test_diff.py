"""A difference of two runs, taken apart: one changed part is named alone, parts add up, replays are exact."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.diff import METRICS, PARTS, RunDiff, diff
from calibration.recorded import RecordedPrices, rules_of, workload_of
from calibration.step_diff import first_difference
from serving.errors import UsageError
from sim.deployment import Deployment, build, simulate
from sim.noise import StepNoise
from sim.record import RunRecord
from sim.workload import TenantSpec, WorkloadSpec, load_workload
from tests.sim.test_fast_forward import POLICIES, assert_same, configs, workloads
from tests.sim.toy_runs import toy_run
from tests.sim.worlds import LinearPricer

BASE = {"model": "qwen3-0.6b", "gpu": "h200", "max_num_seqs": 8, "max_num_batched_tokens": 1024}


@lru_cache
def run(rate: float = 80.0, noise: float = 0.0, **changes: object) -> RunRecord:
    tenant = {
        "dataset": {"name": "random", "input_len": 200, "output_len": 30, "range_ratio": 0.5},
        "arrivals": {"request_rate": rate},
        "num_prompts": 60,
    }
    spec = WorkloadSpec(tenants=(TenantSpec.model_validate(tenant),))
    built = build(Deployment.model_validate({**BASE, **changes}))
    return simulate(load_workload(spec, seed=1), built, noise=StepNoise(noise, 5) if noise else None)


def assert_adds_up(found: RunDiff) -> None:
    for split in found.splits:
        total = sum(split.parts.values()) + split.unexplained
        assert total == pytest.approx(split.difference, rel=1e-9, abs=1e-12), split.metric


def test_a_run_does_not_differ_from_itself() -> None:
    found = diff(run(), run())
    assert found.worlds == 1
    assert found.first_difference is None
    assert found.identical_steps == len(run().steps)
    assert all(ratio == 1.0 for ratio, _ in found.kernel_ratio.values())
    for split in found.splits:
        assert (split.difference, split.unexplained, *split.parts.values()) == (0.0,) * 6


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("kernel", {"gpu": "a100"}),
        ("schedule", {"max_num_seqs": 4}),
        ("schedule", {"policy": "continuous"}),
        ("host", {"frontend_overhead_ms": 3.0}),
        ("workload", {"rate": 160.0}),
        ("kernel", {"noise": 0.05}),
    ],
)
def test_the_part_that_was_changed_explains_the_difference(part: str, other: dict[str, object]) -> None:
    """Replays repeat both runs exactly, so that nothing is left for the other parts."""
    found = diff(run(), run(**other))  # type: ignore[arg-type]
    assert_adds_up(found)
    for split in found.splits:
        assert split.unexplained == 0.0, split.metric
        for name in PARTS:
            if name != part:
                assert split.parts[name] == 0.0, (split.metric, name)


def test_several_changes_share_the_difference_and_add_up() -> None:
    found = diff(run(), run(160.0, gpu="a100", max_num_seqs=4, frontend_overhead_ms=3.0))
    assert found.worlds == 16
    assert_adds_up(found)
    ttft = next(split for split in found.splits if split.metric == "mean_ttft")
    assert all(ttft.parts[part] > 0 for part in PARTS)
    assert ttft.parts["host"] == pytest.approx(0.003, abs=1e-4)
    assert sum(ttft.share(part) for part in PARTS) == pytest.approx(1.0)


def test_the_split_is_antisymmetric() -> None:
    """Shapley values of B − A and A − B are each other's negatives."""
    a, b = run(), run(gpu="a100", max_num_seqs=4)
    for there, back in zip(diff(a, b).splits, diff(b, a).splits, strict=True):
        for part in PARTS:
            assert there.parts[part] == pytest.approx(-back.parts[part], abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(workloads(), configs(), st.sampled_from(sorted(POLICIES)), st.floats(0.0, 0.3))
def test_a_replay_with_its_own_step_times_repeats_every_step(
    workload: object, config: object, policy: str, noise: float
) -> None:
    """Parity: the same rules under recorded durations make the same plans, noise and all (padding aside)."""
    from sim.world import run_world

    if policy == "static":
        return  # padded rows are priced, but a step table holds the real ones
    made = run_world(
        workload,  # type: ignore[arg-type]
        config,  # type: ignore[arg-type]
        LinearPricer(host_s=0.002),
        make_policy=POLICIES[policy],
        noise=StepNoise(noise, 1),
    )
    if not len(made.steps):
        return
    made = replace(made, meta={"limits": {"async_scheduling": config.async_scheduling}})  # type: ignore[attr-defined]
    prices = RecordedPrices(made)
    again = run_world(
        workload,  # type: ignore[arg-type]
        config,  # type: ignore[arg-type]
        prices,
        make_policy=POLICIES[policy],
        fast_forward=not prices.ambiguous,
    )
    assert_same(made, again)


def test_the_first_different_step_is_shown_with_what_differs() -> None:
    a, b = run(), run(max_num_seqs=4)
    found = first_difference(a, b)
    assert found is not None
    k = found.step
    assert k == diff(a, b).identical_steps
    assert found.a["num_decodes"] == a.steps.num_decodes[k]
    assert found.b["num_decodes"] == b.steps.num_decodes[k]
    assert all(found.a[name] != found.b[name] for name in found.columns)
    longer = first_difference(a, replace(a, steps=_head(a, 10)))
    assert longer is not None
    assert (longer.step, longer.b) == (10, {})


def _head(record: RunRecord, count: int) -> object:
    return replace(record.steps, **{name: column[:count] for name, column in record.steps.columns().items()})


def test_a_run_without_meta_is_replayed_from_its_tables_and_says_so() -> None:
    bare = replace(run(), meta={})
    workload, notes = workload_of(bare)
    assert workload.prompt_tokens.tolist() == run().requests.prompt_tokens.tolist()
    assert any("request table" in note for note in notes)
    rules, notes = rules_of(bare)
    assert rules.limits.async_scheduling
    assert rules.limits.num_pages == run().num_pages
    assert any("defaults" in note for note in notes)
    found = diff(bare, replace(run(gpu="a100"), meta={}))
    assert_adds_up(found)
    tpot = next(split for split in found.splits if split.metric == "mean_tpot")
    assert tpot.parts["kernel"] == pytest.approx(tpot.difference, rel=0.05)
    assert found.notes


def test_a_step_that_was_not_recorded_costs_about_what_the_model_says() -> None:
    """Without the deployment, prices between the recorded steps come from a fit."""
    known = run()
    fitted, model = RecordedPrices(replace(known, meta={})), RecordedPrices(known).model
    assert model is not None
    for step in ((5, 5, (), 5, 5 * 333, 333), (7, 7, (), 7, 7 * 251, 260), (300, 4, [(297, 0)], 3, 700, 250)):
        assert fitted.step_s(*step) == pytest.approx(model.step_s(*step), rel=0.1)  # type: ignore[arg-type]


def test_what_cannot_be_compared_is_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="mean_ttft"):
        diff(run(), run(), metrics=("mean_tft",))
    empty = toy_run([0.0], [10], [5], rejected=(0,))
    with pytest.raises(UsageError, match="no step table"):
        diff(run(), empty)


def test_any_figure_can_be_split() -> None:
    found = diff(run(), run(gpu="a100"), metrics=("p99_itl", *METRICS))
    assert found.splits[0].metric == "p99_itl"
    assert not math.isnan(found.splits[0].parts["kernel"])
