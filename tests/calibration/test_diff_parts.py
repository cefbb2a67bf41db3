"""Drafts, fleets and pipelines taken apart: what one part changes shows up in that part alone, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import costmodel
from calibration.diff import RunDiff, Split, diff
from calibration.recorded_drafts import RecordedAcceptance
from calibration.take_apart import take_apart
from serving.errors import UsageError
from sim.deployment import Deployment, build, simulate
from sim.noise import StepNoise
from sim.record import RunRecord
from sim.workload import TenantSpec, WorkloadSpec, load_workload

BASE = {"model": "qwen3-0.6b", "gpu": "h200", "max_num_seqs": 8, "max_num_batched_tokens": 1024}
METRICS = ("mean_ttft", "p95_tpot", "p95_e2el", "output_throughput")


def drafts(method: str = "ngram", **keys: object) -> str:
    return json.dumps({"method": method, "num_speculative_tokens": 3, "acceptance": 0.6, **keys})


POOLS = [{"name": "fast", "weight": 1.0}, {"name": "cheap", "gpu": "l40s", "replicas": 2, "weight": 0.4}]
APART = [{"role": "prefill"}, {"role": "decode"}]
SELF, DEEPER = drafts("self", num_layers=4), drafts("self", num_layers=9)
LONGER = drafts("self", num_layers=4, num_speculative_tokens=6)


def run(
    seed: int,
    noise: float = 0.0,
    rate: float = 80.0,
    count: int = 16,
    beam_width: int | None = None,
    best_of: int = 1,
    **changes: Any,
) -> RunRecord:
    tenant = {
        "dataset": {"name": "random", "input_len": 150, "output_len": 20, "range_ratio": 0.5},
        "arrivals": {"request_rate": rate},
        "num_prompts": count,
        "beam_width": beam_width,
        "best_of": best_of,
    }
    spec = WorkloadSpec(tenants=(TenantSpec.model_validate(tenant),))
    built = build(Deployment.model_validate({**BASE, **changes}))
    jitter = StepNoise(noise, seed) if noise else None
    return simulate(load_workload(spec, seed=seed), built, seed=seed, noise=jitter)


def assert_alone(found: RunDiff, part: str) -> None:
    """The whole difference is in one part, and nothing at all in the others; there is one for at least one metric."""
    for split in found.splits:
        assert split.parts[part] == pytest.approx(split.difference, rel=1e-9, abs=1e-12), split
        assert split.unexplained == 0.0
        assert not any(value for name, value in split.parts.items() if name != part), split
    assert any(split.difference for split in found.splits)


NGRAM, PIPELINE = {"speculative_config": drafts()}, {"pipeline_parallel_size": 2}
LINES = {"bandwidth_mbit_s": 2, "clients": 2, "protocol": "http/1.1"}
OUTAGE = {"schedule": [{"time_s": 0.1, "replica": 0, "down_s": 0.1}]}
ALONE: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("luck of drafts", "acceptance", NGRAM, {"speculative_config": drafts(acceptance=0.95)}),
    ("spread of luck", "acceptance", NGRAM, {"speculative_config": drafts(acceptance={"beta": [2, 2]})}),
    ("luck by position", "acceptance", NGRAM, {"speculative_config": drafts(acceptance=[0.9, 0.5, 0.2])}),
    ("length of drafts", "schedule", {"speculative_config": SELF}, {"speculative_config": LONGER}),
    ("draft passes", "kernel", {"speculative_config": SELF}, {"speculative_config": DEEPER}),
    ("jitter under drafts", "kernel", {"speculative_config": SELF, "step_jitter": 0.2}, {}),
    ("recorded steps with drafts", "kernel", {"speculative_config": SELF, "noise": 0.2}, {}),
    ("seats under drafts", "schedule", {**NGRAM, "max_num_seqs": 3}, {}),
    ("front end before drafts", "host", {**NGRAM, "frontend_overhead_ms": 3.0}, {}),
    ("replicas", "routing", {"data_parallel_size": 2}, {"data_parallel_size": 3}),
    ("router of replicas", "routing", {"data_parallel_size": 3, "router": "random"}, {}),
    ("router of pools", "routing", {"pools": POOLS, "router": "least_outstanding"}, {}),
    ("seats of pools", "schedule", {"pools": POOLS, "max_num_seqs": 2}, {}),
    ("recorded steps of pools", "kernel", {"pools": POOLS, "noise": 0.2}, {}),
    ("front end of pools", "host", {"pools": POOLS, "frontend_overhead_ms": 3.0}, {}),
    ("failures", "routing", {"data_parallel_size": 2}, {"cold_start": {"seconds": 0.1}, "failures": OUTAGE}),
    ("door", "routing", {"rate": 400.0}, {"admission": {"max_waiting": 1}}),
    ("lines to clients", "network", {"network": LINES}, {"network": {**LINES, "bandwidth_mbit_s": 20}}),
    ("clients without lines", "network", {"network": LINES}, {}),
    ("link of KV", "transfer", {"pools": APART}, {"kv_transfer": {"bandwidth_gb_per_s": 1}}),
    ("jitter of a pipeline", "kernel", {**PIPELINE, "step_jitter": 0.2}, {}),
    ("recorded steps of a pipeline", "kernel", {**PIPELINE, "noise": 0.2}, {}),
    ("seats of a pipeline", "schedule", {**PIPELINE, "max_num_seqs": 2}, {}),
    ("traffic of a pipeline", "workload", {**PIPELINE, "rate": 200.0}, {}),
    ("searches", "workload", {"beam_width": 2}, {"beam_width": 3}),
    ("answers to choose from", "workload", {}, {"best_of": 3}),
    ("searches on a fleet", "workload", {"pools": POOLS}, {"pools": POOLS, "beam_width": 2}),
    ("seats of searches", "schedule", {"beam_width": 2, "max_num_seqs": 4}, {}),
    ("seats and CUDA graphs", "schedule", {"max_num_seqs": 3}, {}),
]
"""Name, part, and two deployments: B has A's settings but for its own, or with none of its own lacks A's last one."""


def pair(a: dict[str, Any], b: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return a, {**a, **b} if b else dict(list(a.items())[:-1])


@pytest.mark.parametrize("case", ALONE, ids=[case[0] for case in ALONE])
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(seed=st.integers(0, 10_000))
def test_what_one_part_changes_is_in_that_part_alone(case: Any, seed: int) -> None:
    _, part, *settings_of = case
    a, b = pair(*settings_of)
    assert_alone(diff(run(seed, **a), run(seed, **b), metrics=METRICS), part)


@pytest.mark.parametrize("second", [{"weight": 8.0}, {"best_of": 2}, {"rtt_ms": 30.0}], ids=str)
def test_what_a_tenant_is_owed_and_asks_for_is_workload(second: dict[str, Any]) -> None:
    def record(**fields: Any) -> RunRecord:
        tenant = {
            "dataset": {"name": "random", "input_len": 150, "output_len": 20},
            "arrivals": {"request_rate": 200.0},
            "num_prompts": 12,
        }
        tenants = ({"name": "a", **tenant}, {"name": "b", **tenant, **fields})
        spec = WorkloadSpec(tenants=tuple(map(TenantSpec.model_validate, tenants)))
        built = build(Deployment.model_validate({**BASE, "max_num_seqs": 3, "scheduling_policy": "fair"}))
        return simulate(load_workload(spec, seed=0), built, seed=0)

    assert_alone(diff(record(), record(**second), metrics=METRICS), "workload")


DEPLOYMENTS: list[dict[str, Any]] = [
    {},
    {"max_num_seqs": 3},
    {"speculative_config": drafts()},
    {"speculative_config": SELF, "gpu": "a100"},
    {"data_parallel_size": 2, "router": "power_of_two"},
    {"pools": POOLS, "policy": "continuous"},
    {"pools": APART},
    {"pools": POOLS, "speculative_config": SELF},
    {"data_parallel_size": 2, "noise": 0.1},
    {"network": LINES},
]


@settings(max_examples=4, deadline=None)
@given(st.sampled_from(DEPLOYMENTS), st.sampled_from(DEPLOYMENTS), st.integers(0, 99), st.integers(0, 99))
def test_parts_add_up_and_turn_their_sign(a: Any, b: Any, first: int, second: int) -> None:
    """Whatever two runs are: the parts and what replays miss are the difference; B − A mirrors A − B."""
    runs = run(first, count=10, **a), run(second, count=10, **b)
    there, back = diff(*runs, metrics=METRICS), diff(*runs[::-1], metrics=METRICS)
    for split, mirrored in zip(there.splits, back.splits, strict=True):
        total = sum(split.parts.values()) + split.unexplained
        assert total == pytest.approx(split.difference, rel=1e-9, abs=1e-12)
        for part, value in split.parts.items():
            assert value == pytest.approx(-mirrored.parts[part], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    "changes",
    [*DEPLOYMENTS, {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "data_parallel_size": 2, "noise": 0.1}],
    ids=str,
)  # fmt: skip
def test_a_run_differs_from_itself_by_exactly_nothing(changes: Any) -> None:
    found = diff(run(3, **changes), run(3, **changes), metrics=METRICS)
    assert found.worlds == 1
    assert found.first_difference is None
    for split in found.splits:
        assert not any((split.difference, split.unexplained, *split.parts.values())), split


SCALING = {
    "autoscaler": {"outstanding": 3, "max_replicas": 4, "interval_s": 0.05},
    "cold_start": {"seconds": 0.05},
}
TIGHT = {"num_gpu_blocks_override": 60, "max_model_len": 300}
OTHERS: list[dict[str, Any]] = [
    SCALING,
    {**SCALING, "pools": POOLS, "router": "power_of_two"},
    {"data_parallel_size": 3, "failures": {"mtbf_s": 0.2, "mttr_s": 0.05}, "cold_start": {"seconds": 0.02}},
    {"admission": {"token_bucket": {"rate": 40, "burst": 3}}},
    {"response_cache": "memory"},
    {"data_parallel_size": 2, "router": "prefix_hash"},
    {"preemption_mode": "swap", **TIGHT},
    {"preemption_mode": "auto", **TIGHT},
    {"kv_offloading_size": 1.0, **TIGHT},
    {"policy": "static"},
    {"policy": "adaptive", "prefill_share": 0.3},
    {"step_jitter": 0.1, "stall_rate": 0.1, "stall_ms": 3},
    {"kv_cache_dtype": "fp8", "kv_cache_recent_tokens": 64},
    {"model": "mixtral-8x7b", "gpu": "h100", "tensor_parallel_size": 4, "enable_expert_parallel": True},
    {"speculative_config": drafts(acceptance={"rates": [0.8, 0.5, 0.3], "draft_rate": 0.4})},
    {
        "speculative_config": drafts("draft_model", model="qwen3-0.6b", disable_by_batch_size=4),
        "model": "qwen3-8b",
    },
    {"pools": APART, "speculative_config": SELF},
    {"pools": [{"role": "prefill"}, {"role": "decode", "pipeline_parallel_size": 2}]},
]


@pytest.mark.parametrize("changes", [*(c for c in DEPLOYMENTS if "noise" not in c), *OTHERS], ids=str)
def test_a_run_of_the_twin_is_made_again_to_the_bit(changes: Any) -> None:
    assert take_apart(run(5, rate=150.0, **changes), "A").made_again is not None


def part_of(found: RunDiff, metric: str) -> Split:
    return next(split for split in found.splits if split.metric == metric)


def test_alone_in_a_pipeline_a_request_pays_hand_overs_and_the_host() -> None:
    """Alone, a decode step passes all stages: hand-overs come on top, and the host no longer works beside the device."""
    found = diff(run(1, rate=0.2), run(1, rate=0.2, pipeline_parallel_size=2), metrics=("mean_tpot",))
    split = found.splits[0]
    hand_over_s = build(Deployment.model_validate({**BASE, "pipeline_parallel_size": 2})).pricer.transfer_s(1)  # type: ignore[attr-defined]
    assert split.parts["transfer"] == pytest.approx(hand_over_s, rel=1e-6)
    host_s = build(Deployment.model_validate(BASE)).pricer.host_s(1, 1)
    assert split.parts["pipeline"] == pytest.approx(host_s, rel=0.02)


def test_the_link_between_stages_is_the_transfer_alone(tmp_path: Path) -> None:
    slow = json.loads((Path(costmodel.__file__).parent / "profiles" / "h200.json").read_text())
    slow["facts"]["link_bytes_per_s"] /= 1000.0
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(slow))
    both = {"pipeline_parallel_size": 2}
    assert_alone(diff(run(2, **both), run(2, **both, gpu=str(path)), metrics=METRICS), "transfer")


@pytest.mark.parametrize("back", [False, True])
def test_drafts_against_none_set_what_they_cost_against_what_they_gain(back: bool) -> None:
    """Lookups take little, so that the luck of n-grams is about what sets them apart from useless ones."""
    none, ngrams = run(1, count=25), run(1, count=25, **NGRAM)
    useless = run(1, count=25, speculative_config=drafts(acceptance=0.0))
    found = diff(*((ngrams, none) if back else (none, ngrams)), metrics=METRICS)
    lucky = diff(*((ngrams, useless) if back else (useless, ngrams)), metrics=METRICS)
    for split, luck in zip(found.splits, lucky.splits, strict=True):
        assert split.parts["acceptance"] == pytest.approx(luck.difference, rel=0.1)
        assert split.parts["kernel"] == 0.0
    passes = run(1, count=25, speculative_config=SELF)
    found = diff(*((passes, none) if back else (none, passes)), metrics=METRICS)
    parts, sign = part_of(found, "p95_tpot").parts, -1 if back else 1
    assert sign * parts["schedule"] > 0
    assert sign * parts["kernel"] > 0
    assert sign * parts["acceptance"] < 0


@pytest.mark.parametrize("back", [False, True])
def test_apart_costs_the_way_of_the_kv(back: bool) -> None:
    """Alone, bytes over bandwidth and latency; the rest of the difference is who serves it."""
    together, apart = run(1, rate=0.2, data_parallel_size=2), run(1, rate=0.2, pools=APART)
    found = diff(*((apart, together) if back else (together, apart)), metrics=("mean_e2el",))
    split = found.splits[0]
    built = build(Deployment.model_validate(BASE))
    num_bytes = built.memory.kv_bytes_per_token * float(apart.requests.prompt_tokens.mean())
    way_s = num_bytes / 50e9 + 1e-3
    assert split.parts["transfer"] == pytest.approx(-way_s if back else way_s, rel=1e-6)
    assert split.parts["transfer"] + split.parts["routing"] == pytest.approx(split.difference, rel=1e-9)


# ---- without the deployment ------------------------------------------------------------------------------------


def bare(record: RunRecord) -> RunRecord:
    """As of an engine: limits and nothing of prices or luck."""
    return replace(record, meta={"limits": record.meta["limits"], "workload": record.meta["workload"]})


def test_drafts_that_only_their_tokens_tell_of_are_replayed_to_the_step() -> None:
    same = {"speculative_config": SELF, "tokenize_us_per_token": 0.0, "detokenize_us_per_token": 0.0}
    made = run(4, **same)
    side = take_apart(bare(made), "A")
    assert side.made_again is None
    again = diff(bare(made), bare(run(4, **same, noise=0.2)), metrics=METRICS)
    for split in again.splits:
        assert split.unexplained == pytest.approx(0.0, abs=1e-9)
        assert split.parts["kernel"] == pytest.approx(split.difference, rel=1e-6, abs=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.floats(0.0, 1.0))
def test_recorded_luck_is_what_happened(seed: int, num_tokens: int, rate: float) -> None:
    """Asked at the places of the run itself, the tokens of each step come out."""
    config = drafts("self", num_layers=4, num_speculative_tokens=num_tokens, acceptance=rate)
    record = run(seed, speculative_config=config)
    luck = RecordedAcceptance(record, num_tokens)
    several = record.tokens.per_step
    assert several is not None
    for row, request in enumerate(record.requests.request_id.tolist()):
        ranges = slice(int(record.tokens.offsets[row]), int(record.tokens.offsets[row + 1]))
        given_at = np.repeat(several[ranges], record.tokens.count[ranges])
        position = int(given_at[0])
        for tokens in given_at[1:].tolist():
            asked = (np.array([request]), np.array([position]), np.array([num_tokens]))
            assert luck.accepted(*asked)[0] == tokens - 1
            position += tokens


def refused(make: Callable[[], object], *words: str) -> None:
    with pytest.raises(UsageError) as raised:
        make()
    assert all(word in str(raised.value) for word in words), raised.value
    assert "\n" not in str(raised.value)


def test_what_cannot_be_replayed_is_refused_in_a_sentence() -> None:
    pipeline, fleet = run(1, pipeline_parallel_size=2), run(1, pools=POOLS)
    refused(lambda: diff(run(1, speculative_config=SELF), pipeline), "B has a pipeline and A drafts")
    refused(lambda: diff(pipeline, run(1, policy="static")), "A has a pipeline and B static batches")
    searches = run(1, beam_width=2)
    refused(lambda: diff(run(1, **NGRAM), searches), "B has beam searches and A drafts")
    changed = replace(pipeline, meta={**pipeline.meta, "profile_hash": "another"})
    refused(lambda: diff(run(1), changed), "B ran in a pipeline", "not at hand")
    staged = run(1, pools=[{"name": "a", "pipeline_parallel_size": 2}])
    changed = replace(staged, meta={**staged.meta, "profile_hash": "another"})
    refused(lambda: diff(run(1), changed), "B ran in a pipeline", "not at hand")
    unknown = replace(fleet, meta={**fleet.meta, "deployment": None})
    refused(lambda: diff(unknown, run(1)), "A ran on a fleet")


def test_a_fleet_whose_profile_changed_is_replayed_from_its_steps() -> None:
    fleet = run(1, pools=POOLS)
    old = replace(fleet, meta={**fleet.meta, "profile_hash": "another"})
    for split in diff(fleet, old, metrics=METRICS).splits:
        assert split.difference == 0.0
        assert split.unexplained == pytest.approx(0.0, abs=1e-9)
