"""Odd input of a newcomer: each is an error in one line that names what was given; no traceback and no silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tokentwin as tt
from serving.errors import UsageError
from tests.tokentwin.shell import SMALL, Command

PLAN = (
    *("plan", "--model", "llama-3.1-8b", "--dataset-name", "random", "--request-rate", "5"),
    *("--slo", "chat", "--price", "h200=1"),
)
CAPACITY = ("capacity", "--model", "llama-3.1-8b", "--dataset-name", "random", "--slo", "chat")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # Numbers that no machine holds.
        (("--request-rate", "1e-300"), "--request-rate"),
        (
            ("--num-gpu-blocks-override", "999999999999"),
            "--num-gpu-blocks-override: must be less than or equal",
        ),
        (("--swap-space", "inf", "--preemption-mode", "swap"), "--swap-space: must be a finite number"),
        (("--swap-space", "1e9", "--preemption-mode", "swap"), "--swap-space: must be less than or equal"),
        (("--kv-offloading-size", "1e9"), "--kv-offloading-size: must be less than or equal"),
        (("--frontend-overhead-ms", "inf"), "--frontend-overhead-ms: must be a finite number"),
        (("--frontend-overhead-ms", "1e300"), "--frontend-overhead-ms: must be less than or equal"),
        (("--rtt-ms", "1e300"), "--rtt-ms: must be less than or equal"),
        (("--session-turns-max", "2", "--think-time", "1e300"), "--think-time: must be less than or equal"),
        (("--data-parallel-size", "1000000"), "--data-parallel-size: must be less than or equal"),
        (("--pools", "[{replicas: 1000000}]"), "--pools[0].replicas: must be less than or equal"),
        (("--failures", "{mtbf_s: .inf, mttr_s: 1}"), "--failures.mtbf_s: must be a finite number"),
        (
            ("--block-size", "10000000"),
            "a page of 10000000 tokens takes 1310.7 GB, two of which must fit; lower --block",
        ),
        (("--beam-width", "11"), "--beam-width: must be less than or equal to 10, got '11'"),
        # Keys that are given twice, at any depth.
        (("--pools", "[{gpu: h200, gpu: h100}]"), "--pools: key 'gpu' is given twice; keep one"),
        (
            ("--speculative-config", '{"method": "ngram", "method": "self"}'),
            "--speculative-config: key 'method' is given twice; keep one",
        ),
        # Nothing where something is needed.
        (("--slo",), "--slo"),
        (("--goodput",), "--goodput"),
        (("--gpu", ""), "--gpu is empty"),
        (("-o", ""), "-o is empty; give a path, and . for the current folder"),
        (("--save-result", "--result-dir", ""), "--result-dir is empty; give a path"),
        # Options that other ones leave without effect.
        (
            ("--gpu", "h100", "--pools", "[{gpu: h200}, {gpu: l40s}]"),
            "--gpu has no effect: every pool has its own",
        ),
        (("--tp", "2", "--pools", "[{tensor_parallel_size: 1}]"), "--tensor-parallel-size has no effect"),
        (
            ("--session-turns-max", "2", "--think-distribution", "constant"),
            "--think-distribution has no effect",
        ),
        # The flag is named.
        (("--policy", "adaptive", "--size-classes", "x"), "--size-classes: 'x' is not"),
        (("--pools", "[1]"), "--pools[0]: must be a mapping of keys, got '1'"),
    ],
)
def test_simulate(tokentwin: Command, arguments: tuple[str, ...], words: str) -> None:
    answer = tokentwin("simulate", *SMALL, *arguments)
    assert answer.code == 2
    assert words in answer.error
    assert answer.out == ""


def test_an_option_that_some_pools_take_has_an_effect_and_a_printed_file_can_be_used(
    tokentwin: Command, tmp_path: Path
) -> None:
    some = tokentwin(
        "simulate", *SMALL, "--gpu", "h100", "--pools", "[{gpu: h200}, {}]", "--replications", "1"
    )
    assert some.code == 0
    printed = tokentwin("simulate", *SMALL, "--pools", "[{gpu: h200}, {gpu: l40s}]", "--print-config")
    path = tmp_path / "again.yaml"
    path.write_text(printed.out)
    again = tokentwin("simulate", "--config", path, "--print-config")
    assert again.code == 0
    assert again.out == printed.out


PATH = "is empty; give a path, and . for the current folder"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("report", ""), f"RUNS {PATH}"),
        (("report", "a", ""), f"RUNS {PATH}"),
        (("diff", "a", ""), f"B {PATH}"),
        (("compare", "", "b"), f"BASE {PATH}"),
        (("compare", "a", ""), f"VARIANTS {PATH}"),
        (("conformance", ""), f"FOLDER {PATH}"),
        (("diagnose", ""), f"RUN {PATH}"),
        (("explore", ""), f"RESULTS {PATH}"),
        (("reading", ""), f"RUN {PATH}"),
        (("sweep", ""), f"SPEC {PATH}"),
        (("calibrate", "text", ""), f"TOKENIZER {PATH}"),
        (("calibrate", "from-metrics", ""), f"REQUESTS {PATH}"),
        (("calibrate", "fit", "", "--device", "h200", "-o", "x.json"), f"TABLES {PATH}"),
        (("diff", "a", "b", "-o", ""), f"-o {PATH}"),
        (("simulate", "--config", ""), f"--config {PATH}"),
        (("validate", ""), "PROFILE_FILE is empty; give a value"),
        (("profile", "show", ""), "NAME is empty; give a value"),
        (("policy-test", ""), "POLICY is empty; give a value"),
        (("run", "--model", ""), "--model is empty; name one (tokentwin model list) or give its folder"),
        (("measure-acceptance", "--model", ""), "--model is empty; name one (tokentwin model list) or give"),
        (("simulate", *SMALL, "--slo", ""), "--slo is empty; give a value, or leave it out"),
        (("simulate", *SMALL, "--goodput="), "--goodput is empty; give a value, or leave it out"),
        (("serve", "--api-key", ""), "--api-key is empty; give a value, or leave it out"),
    ],
)
def test_nothing_is_not_taken_for_the_current_folder_or_for_no_option(
    command: tuple[str, ...], words: str, tokentwin: Command
) -> None:
    """It comes of a shell variable that is not set."""
    answer = tokentwin(*command)
    assert answer.code == 2
    assert answer.error.startswith(f"error: {words}")


def test_an_empty_model_is_not_taken_for_the_current_folder(tokentwin: Command, tmp_path: Path) -> None:
    assert "--model is empty" in tokentwin("simulate", "--model", "", "--dataset-name", "random").error
    path = tmp_path / "c.yaml"
    path.write_text("dataset_name: random\nmodel: ''\n")
    assert "line 2: model: is empty; name one" in tokentwin("simulate", "--config", path).error
    with pytest.raises(UsageError, match=r"simulate\(\): gpu: is empty; name one \(tokentwin profile list\)"):
        tt.simulate(model="llama-3.1-8b", gpu="", dataset_name="random")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*PLAN[:-2], "--price", "h200=1", "h200=2"), "--price: h200 is given twice; keep one"),
        ((*PLAN, "--gpus"), "--gpus"),
        ((*PLAN, "--total-gpus", "0"), "--total-gpus must be at least 1, got 0"),
        ((*PLAN, "--total-gpus", "-3"), "--total-gpus must be at least 1, got -3"),
        ((*PLAN, "--replications", "0"), "--replications must be at least 1, got 0"),
        ((*PLAN, "--num-prompts", "0"), "--num-prompts must be at least 1, got 0"),
        ((*PLAN, "--jobs", "0"), "--jobs must be at least 1, got 0"),
        ((*PLAN, "--seed", "-1"), "--seed must be at least 0, got -1"),
        ((*PLAN, "--speculative-configs", "x"), "--speculative-configs: 'x' is not a mapping"),
        (
            (*PLAN[:5], "--ttft", "500", "--target-concurrency", "inf"),
            "--target-concurrency must be a whole number of users, got inf",
        ),
        ((*CAPACITY, "--replications", "0"), "--replications must be at least 1, got 0"),
        ((*CAPACITY, "--num-prompts", "0"), "--num-prompts must be at least 1, got 0"),
        ((*CAPACITY, "--jobs", "-5"), "--jobs must be at least 1, got -5"),
    ],
)
def test_planning(tokentwin: Command, arguments: tuple[str, ...], words: str) -> None:
    answer = tokentwin(*arguments)
    assert answer.code == 2
    assert words in answer.error
    assert answer.out == ""


@pytest.mark.parametrize(
    ("command", "content", "words"),
    [
        (
            ("simulate", "--config"),
            "model: llama-3.1-8b\npools:\n- gpu: h200\n  gpu: h100\n",
            "line 4: key 'gpu' is given twice; keep one",
        ),
        (("simulate", "--config"), "model: llama-3.1-8b\nslo: []\n", "line 2: slo: the list is empty"),
        (
            ("simulate", "--model", "llama-3.1-8b", "--dataset-path"),
            "tenants: []\n",
            "line 1: tenants: the list is empty; give at least 1",
        ),
        (
            ("sweep",),
            "base:\n  model: llama-3.1-8b\n  model: qwen3-8b\ngrid: {seed: [1]}\n",
            "line 3: key 'model' is given twice; keep one",
        ),
        (
            ("sweep",),
            "base: {model: llama-3.1-8b}\nnum_runs: true\ngrid: {seed: [1]}\n",
            "num_runs must be a whole number from 1, got True",
        ),
        ((*PLAN[:-2], "--prices"), "prices: {h200: 1, h200: 2}\n", "key 'h200' is given twice; keep one"),
        ((*PLAN[:-2], "--prices"), b"\xff\xfe\x00\x01", "not UTF-8 text"),
    ],
)
def test_files(
    tokentwin: Command, tmp_path: Path, command: tuple[str, ...], content: str | bytes, words: str
) -> None:
    path = tmp_path / "given.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    answer = tokentwin(*command, path)
    assert answer.code == 2
    assert words in answer.error
    assert str(path) in answer.error


def test_a_long_list_of_known_names_is_cut(tokentwin: Command, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("zzz: 1\n")
    assert len(tokentwin("simulate", "--config", path).error) < 500


def test_an_empty_folder_is_none_in_files_and_from_python_either(tokentwin: Command, tmp_path: Path) -> None:
    """`-o $UNSET` would write beside whatever is in the current folder."""
    (tmp_path / "a.yaml").write_text('output_dir: ""\n')
    answer = tokentwin("simulate", *SMALL, "--config", tmp_path / "a.yaml")
    assert answer.code == 2
    assert "line 1: output_dir: is empty; give a path" in answer.error
    with pytest.raises(UsageError, match=r"sweep\(\): output_dir: is empty"):
        tt.sweep(model="llama-3.1-8b", dataset_name="random", request_rate=[1, 2], output_dir="")
    for command in (("diff", "a", "b"), ("explore", "a"), ("report", "a")):
        assert "-o is empty; give a path" in tokentwin(*command, "-o", "").error


def test_a_label_is_no_folder(tokentwin: Command, tmp_path: Path) -> None:
    one = ("--replications", "1", "--save-result", "--result-dir", tmp_path, "--label", "a/b")
    assert tokentwin("simulate", *SMALL, *one).code == 0
    assert [path.name.startswith("a-b-8.0qps-llama-3.1-8b-") for path in tmp_path.iterdir()] == [True]


@pytest.mark.parametrize("function", [tt.simulate, tt.capacity])
@pytest.mark.parametrize("given", [3, {"tenants": []}, ["a.yaml"]])
def test_what_is_no_workload_or_deployment_is_one_line(
    function: Callable[..., object], given: object
) -> None:
    """Only paths, and objects of the right kind, stand in for flags."""
    name = f"{function.__name__}()"
    with pytest.raises(UsageError) as found:
        function(given, model="llama-3.1-8b", slo="chat")
    assert str(found.value).startswith(f"{name}: workload must be a Workload")
    with pytest.raises(UsageError) as found:
        function(deployment=given, dataset_name="random", slo="chat")
    assert str(found.value).startswith(f"{name}: deployment must be a Deployment, ")
    assert f"got {given!r} ({type(given).__name__})" in str(found.value)


def test_a_plan_of_what_is_no_deployment_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"plan\(\): deployment must be a Deployment.*got 'h200' \(str\)"):
        tt.plan(deployment="h200", dataset_name="random", request_rate=5, slo="chat")


@pytest.mark.parametrize("text", ["abc", "-1", "1.5", "²", "9" * 30])
@pytest.mark.parametrize("where", [("-o", "out"), ("--save-result",), ("--otlp-file", "a.jsonl")])
def test_a_source_date_that_is_no_number_is_refused_before_anything_runs(
    tokentwin: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, where: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    answer = tokentwin("simulate", *SMALL, *where)
    assert answer.code == 2
    assert answer.error.startswith(f"error: SOURCE_DATE_EPOCH={text} is not a number of seconds since 1970")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("traffic", "rate"),
    [
        ((), "inf"),
        (("--request-rate", "inf"), "inf"),
        (("--max-concurrency", "4"), "inf"),
        (("--request-rate", "8"), "8.0"),
        (("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "2", "--ramp-up-end-rps", "9.5"), None),
        (("--rate-points", "0:3,10:9"), "trace"),
    ],
)
def test_the_file_of_a_result_is_named_as_vllm_names_it(
    tokentwin: Command, tmp_path: Path, traffic: tuple[str, ...], rate: str | None
) -> None:
    """`{label}-{rate}qps…`, where the rate of all at once is inf, or `{label}-ramp-up-{how}-{from}qps-{to}qps…`."""
    deployed = ("--model", "llama-3.1-8b", "--gpu", "h200", "--dataset-name", "random", "--num-prompts", "9")
    where = ("--save-result", "--result-dir", tmp_path, "--date", "d", "--replications", "1")
    answer = tokentwin("simulate", *deployed, *traffic, *where)
    assert answer.code == 0, answer.err
    head = "sim-ramp-up-linear-2qps-9.5qps" if rate is None else f"sim-{rate}qps"
    busy = "-concurrency4" if "--max-concurrency" in traffic else ""
    assert [path.name for path in tmp_path.iterdir()] == [f"{head}{busy}-llama-3.1-8b-d.json"]
