"""Values of a sweep that cannot be are found before its first point, in one line with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

import tokentwin as tt
from serving.errors import UsageError
from tests.tokentwin.shell import Command
from tokentwin.commands.plan import AXES
from tokentwin.commands.sweep import BASE_FLAGS
from tokentwin.flag_tables import DEPLOYMENT, TRAFFIC
from tokentwin.sweep_point import run_point
from tokentwin.value_checks import check_value

BASE = "base: {model: llama-3.2-1b, dataset_name: random, isl: 64, osl: 4, num_prompts: 40}\n"


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ("grid: {request_rate: [5, -1]}", "grid.request_rate: must be a positive number, got -1"),
        ("grid: {request_rate: [5, .nan]}", "grid.request_rate: must be a positive number, got nan"),
        ("grid: {num-prompts: [5, 0]}", "grid.num-prompts: must be greater than or equal to 1, got '0'"),
        ("grid: {gpu: [h200, h1000]}", "grid.gpu: 'h1000' is not a shipped profile; did you mean 'h100'"),
        ("grid: {kv_eviction: [lru, lruu]}", "grid.kv_eviction: must be 'lru', 'lfu', 'cost' or 'session'"),
        ("grid: {pools: [[{gpu: h200}], [{gpu: h1000}]]}", "grid.pools: pool pool0: --gpu 'h1000' is not"),
        ("grid: {network: [{}, {clients: 0}]}", "grid.network.clients: must be greater than or equal to 1"),
        ("grid: {seed: [1, -1]}", "grid.seed: must not be negative, got -1"),
        (
            "grid: {goodput: [[ttft:100], [tfft:1]]}",
            "grid.goodput: unknown metric 'tfft'; did you mean 'ttft'",
        ),
        (
            "grid: {dataset_path: [/no.csv], dataset_name: [azure]}",
            "grid.dataset_path: /no.csv: no such file",
        ),
        (
            "grid: {tenants.default.num_prompts: [3, 0]}",
            "grid.tenants.default.num_prompts: must be greater than",
        ),
        ("grid: {tenants.defaul.num_prompts: [3]}", "no such tenant; did you mean 'default'"),
        ("points: [{isl: 3}, {isl: -3}]", "points.1.isl: must be greater than or equal to 0, got '-3'"),
        (
            "random: {points: 5, space: {osl: {low: -9, high: 0}}}",
            "random.space.osl: must be greater than or",
        ),
        (  # ends, and values of a list, that none of the points has
            "random: {points: 1, space: {osl: {low: -1, high: 1000000}}}",
            "random.space.osl: must be greater than or equal to 1, got '-1'",
        ),
        (
            "random: {points: 1, space: {gpu_memory_utilization: {low: 0.5, high: 1.0001}}}",
            "random.space.gpu_memory_utilization: must be less than or equal to 1, got '1.0001'",
        ),
        (
            "random: {points: 1, space: {gpu: [h200, h200, h200, h200, h200, h200, h1000]}}",
            "random.space.gpu: 'h1000' is not a shipped profile; did you mean 'h100'",
        ),
        ("grid: {priority: [1, 2]}", "no point can run: --priority has no effect"),
        ("grid: {tp: [3]}", "no point can run: --tensor-parallel-size 3 does not divide llama-3.2-1b"),
    ],
)
def test_a_value_that_cannot_be(tokentwin: Command, tmp_path: Path, points: str, words: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(BASE + "\n" + points + "\n")
    answer = tokentwin("sweep", path, "-o", tmp_path / "out")
    assert answer.code == 2
    where = f"error: {path}: " + ("" if "no point" in words else "line 3: ")
    assert answer.error.startswith(where)
    assert words in answer.error
    assert not (tmp_path / "out").exists()


def test_both_ends_of_a_searched_range_are_looked_at(tokentwin: Command, tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs the extra sweep")
    path = tmp_path / "s.yaml"
    space = "gpu_memory_utilization: {low: 0.5, high: 1.5}"
    path.write_text(BASE + f"optuna: {{trials: 2, minimize: p95_ttft_ms, space: {{{space}}}}}\n")
    error = tokentwin("sweep", path, "-o", tmp_path / "out").error
    assert "line 2: optuna.space.gpu_memory_utilization: must be less than or equal to 1, got '1.5'" in error


def test_parameter_files_are_told_apart(tokentwin: Command, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    base = ("--model", "llama-3.2-1b", "--dataset-name", "random")
    for option, key in (("--serve-params", "max_num_seqs"), ("--bench-params", "max_concurrency")):
        path.write_text(f'[{{"{key}": 2}}, {{"{key}": 0}}]')
        error = tokentwin("sweep", option, path, *base, "-o", tmp_path / "out").error
        assert error == f"error: {option}: {key}: must be greater than or equal to 1, got '0'"


def test_values_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("a point was run")

    monkeypatch.setattr("tokentwin.commands.sweep.run_point", never)
    known = {"model": "llama-3.2-1b", "dataset_name": "random"}
    with pytest.raises(UsageError, match=r"sweep\(\): request_rate: must be a positive number, got -2"):
        tt.sweep(**known, request_rate=[1, -2])
    with pytest.raises(UsageError, match=r"sweep\(\): gpu: 'h1000' is not a shipped profile"):
        tt.sweep(**known, gpu=["h200", "h1000"])


def test_values_wrong_only_together_stay_with_their_points(tokentwin: Command, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(BASE + "points: [{session_turns_min: 3}, {session_turns_min: 2, session_turns_max: 2}]\n")
    answer = tokentwin("sweep", path, "-o", tmp_path / "out", "--jobs", "1")
    assert answer.code == 1
    assert "1 of 2 runs done; 1 failed." in answer.out
    assert "--session-turns-min 3 exceeds --session-turns-max 1" in answer.out


GOOD = {
    "kv_transfer": {"latency_ms": 2},
    "cold_start": {"seconds": 3},
    "pools": [{"role": "prefill"}],
    "router": "prefix_hash",
    "size_classes": "256:64,inf:8",
    "static_batch_size": 4,
    "swap_space": 2.0,
    "session_keep": 30.0,
    "response_cache": "memory",
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    "burstiness": 0.5,
    "ramp_up_strategy": "linear",
    "ramp_up_end_rps": 9.0,
    "daily_curve": "office",
    "period": 60.0,
    "duration": 5.0,
    "rate_scale": 2.0,
    "rate_points": "0:2,600:10",
    "think_time": 1.0,
    "think_distribution": "constant",
    "session_turns_min": 3,
    "shared_prefix_len": 0,
    "input_len": 0,
    "random_range_ratio": '{"input": 0.3, "output": 0.5}',
    "prefix_repetition_prefix_len": 0,
    "mooncake_block_tokens": 128,
    "timed_trace_sec_multiplier": 0.001,
    "sharegpt_multi_turn": True,
    "custom_output_len": 5,
    "max_concurrency": 3,
    "goodput": ["ttft:500"],
    "slo": ["chat"],
}
"""Values that make a run with others only."""


def test_what_takes_others_passes_by_itself() -> None:
    for name, value in GOOD.items():
        assert name in BASE_FLAGS
        check_value(name, value)


def test_what_is_refused_fails_as_a_run_too() -> None:
    """No value is refused that a run would take."""
    base = {
        "model": "llama-3.2-1b",
        "dataset_name": "random",
        "input_len": 8,
        "output_len": 2,
        "num_prompts": 2,
    }
    refused = 0
    for flag in (*DEPLOYMENT, *TRAFFIC):
        for value in (-1, 0, float("nan")):
            if flag.kind not in (int, float, int | None, float | None):
                continue
            if value != value and flag.kind in (int, int | None):
                continue
            try:
                check_value(flag.name, value)
            except UsageError:
                refused += 1
                with pytest.raises(UsageError):
                    run_point(base, {flag.name: value}, 0)
    assert refused > 60


def test_axes_of_a_plan_are_looked_at_alike(tokentwin: Command) -> None:
    plan = (
        "plan",
        "--model",
        "llama-3.1-8b",
        "--dataset-name",
        "random",
        "--request-rate",
        "5",
        "--slo",
        "chat",
    )
    config = '{"method": "ngrm", "num_speculative_tokens": 3}'
    error = tokentwin(*plan, "--speculative-configs", "none", config).error
    assert error == "error: --speculative-configs: method is 'ngrm'; did you mean 'ngram'?"
    assert set(AXES.values()) <= {flag.name for flag in DEPLOYMENT}
