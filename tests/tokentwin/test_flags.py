"""Every field and every flag of the packages below is reachable from the command line, and explained."""

from __future__ import annotations

import pytest

from sim.deployment import Deployment
from sim.fleet.build import FLEET_FIELDS
from sim.workload.flags import known_flags
from tests.tokentwin.shell import Command
from tokentwin.flag_tables import DEPLOYMENT, SIMULATE, TRAFFIC


def test_every_field_of_a_deployment_is_a_flag() -> None:
    assert {flag.name for flag in DEPLOYMENT} == set(Deployment.model_fields)


def test_every_traffic_flag_of_the_workloads_is_a_flag() -> None:
    assert {flag.name for flag in TRAFFIC} == known_flags() - {"goodput"}
    assert "goodput" in SIMULATE


def test_names_and_aliases_are_unique() -> None:
    names = [name for flag in SIMULATE.values() for name in (flag.option, *flag.aliases)]
    assert len(names) == len(set(names))


def test_every_flag_is_explained_in_a_sentence() -> None:
    for flag in SIMULATE.values():
        assert flag.help.endswith("."), flag.name
        assert 10 < len(flag.help) < 200, flag.name


def test_help_names_every_flag_within_80_columns(tokentwin: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = tokentwin("simulate", "--help").out
    for flag in SIMULATE.values():
        assert flag.option in text
    assert max(map(len, text.splitlines())) <= 80
    assert "--no-enable-prefix-caching" in text
    assert "Exit codes" in text


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (("--tp", "2"), "tensor_parallel_size: 2"),
        (("--dp", "3"), "data_parallel_size: 3"),
        (("--max_num_seqs", "7"), "max_num_seqs: 7"),
        (("--max-num-seqs=7",), "max_num_seqs: 7"),
        (("--no-enable-prefix-caching",), "enable_prefix_caching: false"),
        (("--no-async-scheduling",), "async_scheduling: false"),
        (("--no-fast-forward",), "fast_forward: false"),
        (("--request-count", "9"), "num_prompts: 9"),
        (("--concurrency", "4"), "max_concurrency: 4"),
        (("--isl", "64"), "input_len: 64"),
        (("--osl", "16"), "output_len: 16"),
        (("--request-rate", "inf"), "request_rate: .inf"),
        (("--goodput", "ttft:500", "tpot:50"), "goodput:\n- ttft:500\n- tpot:50"),
        (("--slo", "chat", "p99_e2el:9000"), "slo:\n- chat\n- p99_e2el:9000"),
    ],
)
def test_spellings(tokentwin: Command, given: tuple[str, ...], meant: str) -> None:
    base = ("--model", "llama-3.1-8b", "--dataset-name", "random", "--print-config")
    answer = tokentwin("simulate", *base, *given)
    assert answer.code == 0, answer.err
    assert meant in answer.out


WITH_PREFIX_CACHE = {
    "model": "qwen3-8b",
    "gpu": "h100",
    "policy": "adaptive",
    "size_classes": "256:64,inf:8",
    "max_running_tokens": "40000",
    "prefill_share": "0.5",
    "kv_eviction": "session",
    "session_keep": "30.0",
    "session_decay": "0.5",
    "preemption_mode": "auto",
    "swap_space": "2.0",
    "kv_offloading_size": "3.0",
    "response_cache": "memory",
    "step_jitter": "profile",
    "stall_rate": "0.001",
    "stall_ms": "40.0",
}
"""Fields that go together with prefix caching and a policy that preempts."""


PARALLEL = {
    "model": "mixtral-8x7b",
    "tensor_parallel_size": "2",
    "pipeline_parallel_size": "2",
    "collective_overlap": "0.5",
    "enable_expert_parallel": "true",
    "expert_load_imbalance": "1.5",
    "engine_version": "0.19.1",
    "disable_custom_all_reduce": "true",
    "stream_slice_ms": "20.0",
}
"""Fields of which most are nothing without the others."""


def test_each_deployment_field_can_be_set_by_its_flag(tokentwin: Command) -> None:
    """Every field at a value other than its default, in the resolved configuration."""
    values = {
        "model": "qwen3-8b",
        "gpu": "h100",
        "tensor_parallel_size": "2",
        "data_parallel_size": "2",
        "router": "least_outstanding",
        "dtype": "float16",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "kv_cache_recent_tokens": "64",
        "policy": "static",
        "scheduling_policy": "sjf",
        "static_batch_size": "4",
        "static_max_wait": "0.5",
        "max_num_seqs": "17",
        "max_num_batched_tokens": "4099",
        "max_model_len": "4097",
        "gpu_memory_utilization": "0.8",
        "block_size": "32",
        "num_gpu_blocks_override": "999",
        "enable_prefix_caching": "false",
        "enable_chunked_prefill": "false",
        "long_prefill_token_threshold": "11",
        "async_scheduling": "false",
        "semantics": "vllm-2025",
        "enforce_eager": "true",
        "frontend_overhead_ms": "1.5",
        "tokenize_us_per_token": "2.5",
        "detokenize_us_per_token": "3.5",
        "stream_interval": "4",
    }
    elsewhere = {*FLEET_FIELDS, "router_prefix_tokens", "router_load_factor"}  # test_fleet_commands.py
    elsewhere |= {"speculative_config"}  # test_speculation_flags.py
    elsewhere |= {"network"}  # test_network_flags.py
    assert set(values) | set(WITH_PREFIX_CACHE) | set(PARALLEL) | elsewhere == set(Deployment.model_fields)
    for some in (values, WITH_PREFIX_CACHE, PARALLEL):
        check_flags(tokentwin, some)


def check_flags(tokentwin: Command, values: dict[str, str]) -> None:
    arguments: list[str] = []
    for name, value in values.items():
        option = SIMULATE[name].option
        if value in ("true", "false"):
            arguments.append(option if value == "true" else "--no-" + option[2:])
        else:
            arguments += [option, value]
    answer = tokentwin("simulate", *arguments, "--dataset-name", "random", "--print-config")
    assert answer.code == 0, answer.err
    for name, value in values.items():
        assert f"\n{name}: {value}\n" in answer.out
