"""Whole workloads: tenants side by side, sessions, shared prefixes, how many requests, determinism."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import UsageError
from sim.workload import Workload, describe, load_workload, parse_spec, shared_prefix_tokens, spec_from_flags

RANDOM = {"name": "random", "input_len": 100, "output_len": 20, "range_ratio": 0.5}


def load(*tenants: dict[str, Any], seed: int = 0, **other: Any) -> Workload:
    return load_workload(parse_spec({"tenants": list(tenants), **other}), seed=seed)


def columns(workload: Workload, tenant: int) -> list[bytes]:
    mine = workload.tenant == tenant
    names = ("sent_s", "prompt_tokens", "output_tokens", "priority", "think_s")
    return [getattr(workload, name)[mine].tobytes() for name in names]


CHAT = {
    "name": "chat",
    "dataset": RANDOM,
    "arrivals": {"request_rate": 2},
    "num_prompts": 60,
    "sessions": {"turns_min": 1, "turns_max": 5, "think_s": 3},
    "shared_prefix": {"group": "system", "tokens": 70},
}
CODE = {
    "name": "code",
    "dataset": RANDOM,
    "arrivals": {"request_rate": 5, "burstiness": 0.5},
    "num_prompts": 80,
    "priority": 3,
}


def test_adding_a_tenant_changes_nobody_elses_draws() -> None:
    alone, after, before = load(CHAT), load(CHAT, CODE), load(CODE, CHAT)
    assert columns(alone, 0) == columns(after, 0) == columns(before, 1)
    assert columns(load(CODE), 0) == columns(after, 1)


def test_an_option_of_one_purpose_does_not_shift_the_draws_of_another() -> None:
    slow = load(CODE | {"arrivals": {"request_rate": 1}})
    assert columns(slow, 0)[1:3] == columns(load(CODE), 0)[1:3]


def test_tenants_are_merged_by_time_and_keep_their_promises() -> None:
    workload = load(
        CHAT | {"slo_class": "fast", "goodput": {"ttft": 300, "tpot": 25}, "rtt_ms": 40},
        CODE,
        max_concurrency=8,
    )
    assert len(workload) == 140
    assert (np.diff(workload.sent_s) >= 0).all()
    assert workload.priority[workload.tenant == 1].tolist() == [3] * 80
    chat = workload.tenants[0]
    assert (chat.slo_class, chat.goodput_ttft_s, chat.goodput_tpot_s, chat.goodput_e2el_s) == (
        "fast",
        0.3,
        0.025,
        None,
    )
    assert chat.rtt_s == 0.04
    assert workload.closed_loop is not None
    assert workload.closed_loop.max_concurrency == 8
    json.dumps(workload.meta, allow_nan=False)


def test_equal_times_keep_the_order_of_the_tenants() -> None:
    workload = load(
        {"name": "b", "dataset": RANDOM, "num_prompts": 3}, {"name": "a", "dataset": RANDOM, "num_prompts": 3}
    )
    assert workload.tenant.tolist() == [0, 0, 0, 1, 1, 1]


def sessions_of(workload: Workload) -> list[list[int]]:
    sessions: dict[int, list[int]] = {}
    root: dict[int, int] = {}
    for row, after in enumerate(workload.after.tolist()):
        root[row] = row if after < 0 else root[after]
        sessions.setdefault(root[row], []).append(row)
    return list(sessions.values())


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(0, 40), st.integers(1, 33))
@settings(deadline=None, max_examples=40)
def test_a_turns_prompt_is_the_whole_history_and_new_tokens(
    seed: int, turns: int, prefix: int, page: int
) -> None:
    dataset = RANDOM | {"prefix_len": prefix}
    tenant = CHAT | {
        "dataset": dataset,
        "sessions": {"turns_min": turns, "turns_max": turns + 2, "think_s": 1},
    }
    workload = load(tenant, seed=seed)
    assert len(workload) == 60
    common = (70 + prefix) // page
    for rows in sessions_of(workload):
        assert workload.after[rows].tolist() == [-1, *rows[:-1]]
        for row, nxt in itertools.pairwise(rows):
            history = int(workload.prompt_tokens[row] + workload.output_tokens[row])
            assert 50 <= workload.prompt_tokens[nxt] - history <= 150
            assert workload.sent_s[nxt] == pytest.approx(workload.sent_s[row] + workload.think_s[nxt])
            keys, longer = workload.page_keys(row, page), workload.page_keys(nxt, page)
            assert len(keys) == history // page
            assert longer[: len(keys)] == keys
    first = [workload.page_keys(rows[0], page) for rows in sessions_of(workload)]
    for keys in first[1:]:
        assert keys[:common] == first[0][:common]
        assert not set(keys[common:]) & set(first[0][common:])


def test_think_time_has_the_mean_asked_for_and_none_before_a_first_turn() -> None:
    tenant = CHAT | {"num_prompts": 4000, "sessions": {"turns_min": 20, "turns_max": 20, "think_s": 5}}
    workload = load(tenant)
    later = workload.after >= 0
    assert (workload.think_s[~later] == 0).all()
    pauses = workload.think_s[later]
    assert abs(pauses.mean() - 5) < 4 * 5 / math.sqrt(len(pauses))
    constant = load(tenant | {"sessions": {"turns_max": 3, "think_s": 2, "think_distribution": "constant"}})
    assert set(constant.think_s.tolist()) == {0.0, 2.0}


def test_tenants_that_name_one_group_share_its_tokens_even_at_two_lengths() -> None:
    one = {"name": "one", "dataset": RANDOM, "num_prompts": 1, "shared_prefix": {"group": "g", "tokens": 64}}
    two = {"name": "two", "dataset": RANDOM, "num_prompts": 1, "shared_prefix": {"group": "g", "tokens": 40}}
    other = {
        "name": "three",
        "dataset": RANDOM,
        "num_prompts": 1,
        "shared_prefix": {"group": "h", "tokens": 64},
    }
    workload = load(one, two, other)
    long, short, foreign = (workload.page_keys(row, 16) for row in range(3))
    assert long[:2] == short
    assert len(long) == 4
    assert not set(long) & set(foreign)


def test_random_lengths_are_uniform_integers_with_both_ends() -> None:
    dataset = {
        "name": "random",
        "input_len": 10,
        "output_len": 3,
        "range_ratio": {"input": 0.25, "output": 0.5},
        "prefix_len": 7,
    }
    workload = load({"dataset": dataset, "num_prompts": 6000})
    # floor(7.5) … ceil(12.5), floor(1.5) … ceil(4.5)
    values, counts = np.unique(workload.prompt_tokens - 7, return_counts=True)
    assert values.tolist() == list(range(7, 14))
    assert abs(counts - 6000 / 7).max() < 4 * math.sqrt(6000 / 7)
    assert np.unique(workload.output_tokens).tolist() == [1, 2, 3, 4, 5]
    assert workload.page_keys(0, 7) == workload.page_keys(1, 7)


def test_prefix_repetition_makes_as_many_prompts_for_each_prefix() -> None:
    dataset = {
        "name": "prefix_repetition",
        "num_prefixes": 4,
        "prefix_len": 32,
        "suffix_len": 5,
        "output_len": 6,
    }
    workload = load({"dataset": dataset, "num_prompts": 14, "arrivals": {"request_rate": 2}})
    assert len(workload) == 12
    assert workload.sent_s[-1] == 12 / 2
    prefixes = [tuple(workload.page_keys(row, 16)) for row in range(12)]
    assert sorted(prefixes.count(p) for p in set(prefixes)) == [3, 3, 3, 3]
    assert prefixes != sorted(prefixes)
    with pytest.raises(UsageError, match="3 prompts are fewer than 4 prefixes"):
        load({"dataset": dataset, "num_prompts": 3})


@pytest.fixture
def lengths(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"{i},{i}\n" for i in range(1, 11)))
    return {"name": "lengths", "path": str(path)}


def test_a_short_file_is_used_again_from_the_top_and_says_so(lengths: dict[str, Any]) -> None:
    workload = load({"dataset": lengths, "num_prompts": 25, "arrivals": {"request_rate": 1}})
    assert workload.prompt_tokens.tolist() == [*range(1, 11), *range(1, 11), *range(1, 6)]
    assert workload.warnings == ("10 rows used again from the top to make 25 requests",)


def test_a_file_may_be_shuffled_or_sampled_with_the_seed(lengths: dict[str, Any]) -> None:
    shuffled = load({"dataset": lengths | {"order": "shuffle"}, "num_prompts": 20})
    assert sorted(shuffled.prompt_tokens[:10].tolist()) == list(range(1, 11))
    assert shuffled.prompt_tokens[:10].tolist() == shuffled.prompt_tokens[10:].tolist()
    sampled = load({"dataset": lengths | {"order": "sample"}, "num_prompts": 1000})
    assert set(sampled.prompt_tokens.tolist()) == set(range(1, 11))
    assert sampled.warnings == ()
    assert columns(sampled, 0) != columns(
        load({"dataset": lengths | {"order": "sample"}, "num_prompts": 1000}, seed=1), 0
    )


def test_a_file_without_limits_is_sent_whole(lengths: dict[str, Any]) -> None:
    assert len(load({"dataset": lengths})) == 10
    assert len(load({"dataset": lengths, "num_prompts": 4})) == 4
    assert len(load({"dataset": lengths, "arrivals": {"request_rate": 3, "duration_s": 5}})) == 15
    assert len(load({"dataset": lengths, "sessions": {"turns_min": 3, "turns_max": 3}})) == 10
    sessions = load(
        {
            "dataset": lengths,
            "sessions": {"turns_min": 2, "turns_max": 2},
            "arrivals": {"request_rate": 1, "duration_s": 7},
        }
    )
    assert len(sessions) == 14


@pytest.fixture
def azure(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "azure.csv"
    rows = "".join(f"2023-11-16 18:15:{i:02d}.1234567,{i + 1},5\n" for i in range(20))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    return {"name": "azure", "path": str(path)}


def test_a_trace_is_replayed_at_its_times_divided_by_rate_scale(azure: dict[str, Any]) -> None:
    assert load({"dataset": azure}).sent_s.tolist() == list(range(20))
    assert load({"dataset": azure, "arrivals": {"rate_scale": 2}}).sent_s.tolist() == [
        i / 2 for i in range(20)
    ]
    cut = load({"dataset": azure, "arrivals": {"rate_scale": 2, "duration_s": 5}})
    assert cut.sent_s.tolist() == [i / 2 for i in range(10)]
    assert load({"dataset": azure, "num_prompts": 7}).sent_s.tolist() == list(range(7))


def test_more_requests_than_a_replayed_trace_has_is_a_warning_not_an_invention(azure: dict[str, Any]) -> None:
    workload = load({"dataset": azure, "num_prompts": 30})
    assert len(workload) == 20
    assert workload.warnings == ("30 requests asked for, but the trace has 20; all of them are sent",)


def test_a_trace_with_a_rate_gives_its_lengths_alone(azure: dict[str, Any]) -> None:
    workload = load({"dataset": azure, "arrivals": {"request_rate": 4}})
    assert workload.sent_s[-1] == 5
    assert workload.prompt_tokens.tolist() == list(range(1, 21))


@pytest.mark.parametrize(
    ("tenant", "message"),
    [
        (
            {"arrivals": {"rate_scale": 2}},
            "arrivals.rate_scale scales a trace's own times and lengths has none",
        ),
        ({"arrivals": {"duration_s": 2}}, "duration_s needs times"),
        ({"arrivals": {"request_rate": 0.01, "duration_s": 2}}, "no request is sent"),
        ({"arrivals": {"request_rate": 1e9, "duration_s": 1e9}}, "more than"),
    ],
)
def test_options_a_file_cannot_meet_are_refused(
    lengths: dict[str, Any], tenant: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load({"dataset": lengths} | tenant)


def test_order_and_sessions_have_no_place_in_a_replay(azure: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="order has no effect"):
        load({"dataset": azure | {"order": "shuffle"}})
    with pytest.raises(UsageError, match="sessions need arrivals"):
        load({"dataset": azure, "sessions": {"turns_max": 2}})


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(UsageError, match="--seed"):
        load(CODE, seed=-1)


DIGEST = """
import hashlib, json
from sim.workload import load_workload, spec_from_flags
w = load_workload(spec_from_flags({"dataset_name": "sample"}), seed=5)
h = hashlib.sha256()
for name in w.__slots__:
    value = getattr(w, name)
    h.update(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode())
print(h.hexdigest())
"""


def test_the_same_seed_gives_the_same_bytes_in_every_process() -> None:
    digests = set()
    for hash_seed in ("0", "1", "4242"):
        env = os.environ | {"PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True, check=True
        )
        digests.add(run.stdout)
    assert len(digests) == 1
    assert len(hashlib.sha256().hexdigest()) == len(digests.pop().strip())


def test_the_sample_is_a_few_minutes_of_three_tenants() -> None:
    workload = load_workload(spec_from_flags({"dataset_name": "sample"}), seed=0)
    summary = describe(workload)
    assert 550 <= summary["num_requests"] <= 650
    assert 120 <= summary["duration_s"] <= 180
    assert [tenant["name"] for tenant in summary["tenants"]] == ["chat", "documents", "code"]
    assert all(t.goodput_ttft_s for t in workload.tenants)
    assert 0.2 < summary["shared_prefix_share"] < 0.6
    json.dumps(summary, allow_nan=False)


def test_describe_knows_rates_gaps_and_lengths() -> None:
    dataset = {"name": "random", "input_len": 100, "output_len": 20}
    summary = describe(
        load({"dataset": dataset, "num_prompts": 50, "arrivals": {"request_rate": 4, "burstiness": math.inf}})
    )
    assert summary["request_rate"] == pytest.approx(4)
    assert summary["gap_cv"] == pytest.approx(0, abs=1e-9)
    assert summary["duration_s"] == 12.5
    assert (summary["total_prompt_tokens"], summary["p99_output_tokens"]) == (5000, 20)
    assert describe(load({"dataset": dataset}))["request_rate"] is None


@given(st.integers(0, 500), st.integers(1, 40))
@settings(deadline=None, max_examples=30)
def test_shared_prefix_tokens_are_the_pages_an_infinite_cache_finds(seed: int, page: int) -> None:
    workload = load(CHAT, CODE | {"shared_prefix": {"group": "system", "tokens": 33}}, seed=seed)
    cache: set[int] = set()
    for row, found in enumerate(shared_prefix_tokens(workload, page_tokens=page).tolist()):
        keys = workload.page_keys(row, page)
        hit = next((i for i, key in enumerate(keys) if key not in cache), len(keys))
        assert found == min(hit, (int(workload.prompt_tokens[row]) - 1) // page) * page
        cache.update(keys)


DATASETS = st.sampled_from(
    [
        RANDOM,
        RANDOM | {"prefix_len": 48},
        {"name": "prefix_repetition", "num_prefixes": 3, "prefix_len": 40, "suffix_len": 9, "output_len": 4},
    ]
)
ARRIVALS = st.sampled_from(
    [
        {},
        {"request_rate": 3, "burstiness": 0.3},
        {"request_rate": 3, "duration_s": 9},
        {"ramp_up_strategy": "exponential", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9},
        {"rate_points": [[0, 0], [5, 8], [10, 2]]},
        {"daily_curve": "consumer", "request_rate": 2, "period_s": 30, "duration_s": 20, "burstiness": 4},
    ]
)
OPTIONAL: dict[str, Any] = {
    "num_prompts": st.integers(3, 60),
    "sessions": st.sampled_from([{"turns_max": 4, "think_s": 2}, {"turns_min": 3, "turns_max": 3}]),
    "shared_prefix": st.sampled_from([{"group": "a", "tokens": 33}, {"group": "b", "tokens": 64}]),
    "priority": st.integers(-3, 3),
}
TENANTS = st.builds(
    lambda fixed, more: fixed | more,
    st.fixed_dictionaries({"dataset": DATASETS, "arrivals": ARRIVALS}),
    st.fixed_dictionaries({}, optional=OPTIONAL),
)


@given(st.lists(TENANTS, min_size=1, max_size=3), st.integers(0, 99))
@settings(deadline=None, max_examples=80)
def test_every_workload_keeps_the_invariants_of_its_columns(tenants: list[dict[str, Any]], seed: int) -> None:
    workload = load(*(tenant | {"name": str(i)} for i, tenant in enumerate(tenants)), seed=seed)
    n = len(workload)
    assert n > 0
    assert all(
        len(getattr(workload, name)) == n for name in ("prompt_tokens", "output_tokens", "after", "think_s")
    )
    assert (np.diff(workload.sent_s) >= 0).all()
    assert workload.sent_s[0] >= 0
    assert min(workload.prompt_tokens.min(), workload.output_tokens.min()) >= 1
    assert (workload.after < np.arange(n)).all()
    assert workload.segment_offsets[-1] == len(workload.segment_ends) == len(workload.segment_streams)
    for row in range(n):
        ends = workload.segment_ends[workload.segment_offsets[row] : workload.segment_offsets[row + 1]]
        assert (np.diff(ends) > 0).all()
        assert len(ends) == 0 or ends[-1] <= workload.prompt_tokens[row] + workload.output_tokens[row]
    for index, tenant in enumerate(tenants):
        assert int((workload.tenant == index).sum()) <= tenant.get("num_prompts", math.inf)
    for column in (
        workload.tenant,
        workload.priority,
        workload.after,
        workload.segment_streams,
        workload.segment_offsets,
    ):
        assert column.dtype == np.int64


SAVED_ARRIVALS = st.one_of(
    ARRIVALS, st.sampled_from([{"request_rate": "inf"}, {"request_rate": 2, "burstiness": "inf"}])
)
SAVED_TENANTS = st.builds(
    lambda fixed, more: fixed | more,
    st.fixed_dictionaries({"dataset": DATASETS, "arrivals": SAVED_ARRIVALS}),
    st.fixed_dictionaries({}, optional=OPTIONAL | {"rtt_ms": st.floats(0, 50), "slo_class": st.just("gold")}),
)


@given(st.lists(SAVED_TENANTS, min_size=1, max_size=3), st.sampled_from([None, 4]), st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_a_saved_spec_is_read_back_as_the_same_spec(
    tenants: list[dict[str, Any]], max_concurrency: int | None, seed: int
) -> None:
    """A run's record holds its spec with every default filled in; that text makes the same workload again."""
    given_spec: dict[str, Any] = {
        "name": "saved",
        "tenants": [tenant | {"name": str(i)} for i, tenant in enumerate(tenants)],
    }
    try:
        spec = parse_spec(given_spec | {"max_concurrency": max_concurrency})
    except UsageError:  # a closed loop that these arrivals exclude
        spec = parse_spec(given_spec)
    workload = load_workload(spec, seed=seed)
    saved = json.loads(json.dumps(workload.meta["spec"], allow_nan=False))
    again = parse_spec(saved)
    assert again == spec
    assert (load_workload(again, seed=seed).sent_s == workload.sent_s).all()


def test_conversations_by_first_row_and_turn() -> None:
    """Rows 0, 2 and 3 are one conversation, 1 stands alone, 4 and 5 are another."""
    from tests.sim.worlds import make_workload

    workload = make_workload([0.0] * 6, [5] * 6, [5] * 6, after=[-1, -1, 0, 2, -1, 4])
    first, turn = workload.conversations()
    assert first.tolist() == [0, -1, 0, 0, 4, 4]
    assert turn.tolist() == [0, 0, 1, 2, 0, 1]
