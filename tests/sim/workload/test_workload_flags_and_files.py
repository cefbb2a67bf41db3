"""Flags and YAML files: what a user writes becomes a spec, or one line that says what to change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.errors import UsageError
from sim.workload import detect_format, load_workload, read_workload_file, sample_path, spec_from_flags
from sim.workload.flags import scale_rates

same_file = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)


def one_line(error: UsageError) -> None:
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "no workload"),
        ({"dataset_name": "azur"}, "unknown dataset 'azur'; did you mean 'azure'?"),
        ({"dataset_name": "azure"}, "--dataset-name azure needs --dataset-path"),
        ({"dataset_name": "random", "dataset_path": "x.csv"}, "--dataset-path has no effect"),
        ({"dataset_name": "sample", "dataset_path": "x.csv"}, "--dataset-path has no effect"),
        ({"dataset_name": "sample", "num_prompts": 5}, "--num-prompts has no effect"),
        ({"dataset_name": "sample", "rate_scale": 0}, "--rate-scale"),
        (
            {"dataset_name": "random", "request_rate": 0},
            "--request-rate: must be a positive number, got 0; inf sends",
        ),
        (
            {"dataset_name": "random", "request_rate": math.nan},
            "--request-rate: must be a positive number, got nan",
        ),
        (
            {"dataset_name": "random", "request_rate": 1, "burstiness": 0},
            "--burstiness: must be a positive number",
        ),
        ({"dataset_name": "random", "burstiness": 2}, "burstiness has no effect"),
        ({"dataset_name": "random", "max_concurrency": 0}, "--max-concurrency: must be greater"),
        ({"dataset_name": "random", "num_prompts": 0}, "--num-prompts: must be greater"),
        (
            {"dataset_name": "random", "random_range_ratio": 1},
            "--random-range-ratio: range ratio must be in [0, 1)",
        ),
        ({"dataset_name": "random", "random_range_ratio": "x"}, "--random-range-ratio: must be a number or"),
        ({"dataset_name": "random", "random_input_len": 0}, "--random-input-len"),
        ({"dataset_name": "random", "output_len": 0}, "--output-len"),
        ({"dataset_name": "random", "input_len": 5, "random_input_len": 6}, "twice"),
        ({"dataset_name": "random", "sharegpt_output_len": 6}, "--sharegpt-output-len has no effect"),
        (
            {"dataset_name": "random", "goodput": {"tfft": 5}},
            "unknown key 'tfft' in --goodput; did you mean 'ttft'",
        ),
        ({"dataset_name": "random", "goodput": {"ttft": -5}}, "--goodput"),
        (
            {"dataset_name": "random", "reqest_rate": 5},
            "unknown flag --reqest-rate; did you mean 'request_rate'",
        ),
        ({"dataset_name": "mooncake", "dataset_path": "x", "think_time": 5}, "sessions"),
    ],
)
def test_wrong_flags_are_one_line_that_names_the_flag(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_workload(spec_from_flags(flags), seed=0)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flags_reach_their_fields() -> None:
    spec = spec_from_flags(
        {
            "dataset_name": "random",
            "input_len": 512,
            "random_output_len": 64,
            "random_range_ratio": '{"input": 0.3, "output": 0.5}',
            "request_rate": 8,
            "burstiness": 0.5,
            "num_prompts": 40,
            "max_concurrency": 16,
            "goodput": {"ttft": 500, "tpot": 50},
            "session_turns_min": 2,
            "session_turns_max": 3,
            "think_time": 1.5,
            "shared_prefix_len": 100,
            "rtt_ms": 10,
        }
    )
    tenant = spec.tenants[0]
    assert tenant.dataset.model_dump()["range_ratio"] == {"input": 0.3, "output": 0.5}
    assert (tenant.arrivals.request_rate, tenant.arrivals.burstiness) == (8, 0.5)
    assert tenant.goodput.ttft == 500
    assert tenant.sessions is not None
    assert tenant.sessions.think_s == 1.5
    assert spec.max_concurrency == 16
    assert len(load_workload(spec, seed=0)) == 40


def test_a_workload_file_takes_limits_and_load_from_flags() -> None:
    flags = {"dataset_name": "sample", "goodput": {"ttft": 100}, "max_concurrency": 4, "rate_scale": 2}
    fast = load_workload(spec_from_flags(flags), seed=0)
    slow = load_workload(spec_from_flags({"dataset_name": "sample"}), seed=0)
    assert fast.tenants[0].goodput_ttft_s == 0.1
    assert fast.tenants[0].goodput_tpot_s is None
    assert fast.tenants[0].rtt_s == 0.03
    assert fast.closed_loop is not None
    code = fast.tenant == 2
    assert fast.sent_s[code][-1] == pytest.approx(slow.sent_s[slow.tenant == 2][-1] / 2)


def test_scaling_a_curve_scales_its_rates(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(
        "tenants: [{dataset: {name: random}, arrivals: {rate_points: [[0, 1], [10, 2]]}},"
        " {name: day, dataset: {name: random},"
        " arrivals: {daily_curve: office, request_rate: 1, period_s: 60}}]"
    )
    scaled = scale_rates(read_workload_file(path), 3)
    assert scaled.tenants[0].arrivals.rate_points == ((0, 3), (10, 6))
    assert scaled.tenants[1].arrivals.request_rate == 3
    assert len(load_workload(scaled, seed=0)) > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a: [", "line 1: not YAML"),
        ("- 1", "is not a workload"),
        ("{}", "tenants is missing; add it"),
        ("model: llama-3.1-8b", "is a file of options and no workload; give it to --config"),
        ("tenants: [{dataset: random}]", "tenants[0].dataset: must be a mapping of keys"),
        ("tenants: []", "tenants: the list is empty"),
        (
            "tenants: [{dataset: {name: random}}]\ntenants: []",
            "line 2: key 'tenants' is given twice",
        ),
        (
            "tenants: [{dataset: {name: rndom}}]",
            "tenants[0].dataset: unknown dataset 'rndom'; did you mean 'random'?",
        ),
        ("tenants: [{dataset: {}}]", "tenants[0].dataset.name is missing"),
        ("tenants: [{dataset: {name: azure}}]", "tenants[0].dataset.path is missing; add it"),
        (
            "tenants: [{dataset: {name: random}, arivals: {}}]",
            "unknown key tenants[0].arivals; did you mean 'arrivals'",
        ),
        (
            "tenants: [{dataset: {name: random}, arrivals: {request_rate: 0}}]",
            "tenants[0].arrivals.request_rate: must be a positive number, got 0",
        ),
        (
            "tenants: [{dataset: {name: random}}, {dataset: {name: random}}]",
            "two tenants are called 'default'",
        ),
        ("tenants: [{dataset: {name: random, range_ratio: 2}}]", "range ratio must be in [0, 1), got 2"),
        ("tenants: [{dataset: {name: random}, rtt_ms: -1}]", "tenants[0].rtt_ms"),
        ("when: 2024-99-99\ntenants: 3", "not YAML"),
    ],
)
def test_wrong_workload_files_are_one_line_that_names_the_place(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_workload_file(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


YAML_WORDS = st.sampled_from(
    [
        *(
            "tenants: ",
            "dataset: ",
            "name: random",
            "arrivals: ",
            "request_rate: ",
            "1",
            ".nan",
            ".inf",
            "2024-01-01",
        ),
        *("- ", "  ", "\n", "{", "}", "[", "]", "'", '"', "? ", ": ", "%", "&a ", "*a", "<<: *a"),
        *("!!python/object:os.system ", "!!binary a", "!!timestamp x"),
    ]
)


@given(st.lists(YAML_WORDS, max_size=14).map("".join) | st.text(max_size=60))
@same_file
def test_fuzzed_workload_files_raise_nothing_but_usage_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        read_workload_file(path)
    except UsageError as error:
        one_line(error)


def test_paths_in_a_workload_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("num_prefill_tokens,num_decode_tokens\n5,6\n")
    (tmp_path / "w.yaml").write_text("tenants: [{dataset: {name: lengths, path: pairs.csv}}]")
    workload = load_workload(read_workload_file(tmp_path / "w.yaml"), seed=0)
    assert workload.name == "w"
    assert workload.prompt_tokens.tolist() == [5]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n", "azure"),
        (
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
            "burstgpt",
        ),
        ("num_prefill_tokens,num_decode_tokens\n", "lengths"),
        ('\n{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1, 2]}', "mooncake"),
        ('{"prompt": "a", "output_tokens": 3}', "custom"),
        ('[\n  {"conversations": []}]', "sharegpt"),
    ],
)
def test_formats_are_recognised_by_header_or_keys_whatever_the_name(
    tmp_path: Path, text: str, name: str
) -> None:
    path = tmp_path / "file.txt"
    path.write_text(text)
    assert detect_format(path) == name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "time unit and block size",
        ),
        (b'{"timestamp": 0, "input_length": 513, "output_length": 1}', "set --dataset-name timed_trace"),
        (b'{"a": 1}', "not recognised by its keys (a)"),
        (b"a,b,c\n", "not recognised by its first line"),
        (b"{broken", "not a JSON object"),
        (b"", "is empty"),
        (b"\x00\x01", "binary"),
    ],
)
def test_what_cannot_be_recognised_is_not_guessed(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        detect_format(path)
    assert message in str(caught.value)


@given(st.binary(max_size=80))
@same_file
def test_recognising_fuzzed_bytes_raises_nothing_but_usage_errors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    try:
        detect_format(path)
    except UsageError as error:
        one_line(error)


def test_bundled_workloads_exist_and_unknown_ones_have_neighbours() -> None:
    assert sample_path("sample").is_file()
    assert detect_format(sample_path("sample")) == "workload"
    with pytest.raises(UsageError, match="did you mean 'sample'"):
        sample_path("sampel")
