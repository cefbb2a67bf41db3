"""Every command with options prints its configuration, and what is printed gives the same configuration again."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.tokentwin.shell import SMALL, Command
from tokentwin import schema

MODEL = ("--model", "llama-3.1-8b")
TRAFFIC = ("--dataset-name", "random", "--isl", "64", "--request-rate", "3")
DUMMY = ("--model", "llama-3.2-1b", "--load-format", "dummy")
PRICED = ("--price", "h200=3.5", "l40s=1", "--quantizations", "none", "fp8", "--tp-sizes", "1", "2")
COMMANDS: dict[str, tuple[str, ...]] = {
    "simulate": (*SMALL, "--goodput", "ttft:500", "--slo", "chat", "--no-fast-forward"),
    "capacity": (*MODEL, *TRAFFIC, "--slo", "chat", "--jobs", "2"),
    "plan": (*MODEL, *TRAFFIC, "--slo", "chat", *PRICED),
    "sweep sweep.yaml": ("--jobs", "1", "--max-num-seqs", "4"),
    "memory": (*MODEL, "--tp", "2", "--json"),
    "workload describe": (*TRAFFIC, "--seed", "3"),
    "serve": (*MODEL, "--engine", "twin", "--port", "0", "--time-scale", "2"),
    "run": (*DUMMY, *TRAFFIC, "--warmup", "0"),
    "validate": ("--against", "runs/x", "--tolerance", "3"),
    "calibrate": (*DUMMY, "-o", "here.json", "--budget", "10s"),
    "calibrate fit table.csv": ("--device", "h200", "-o", "h.json"),
    "calibrate from-metrics run.json": ("--profile", "h200", "-o", "h.json", *MODEL),
    "compare a b": (*MODEL, "--seed", "3", "-o", "out"),
    "diagnose run": MODEL,
    "explore results": ("-o", "page.html", "--price", "h200=3.5"),
    "policy-test my_module:MyPolicy": ("--seed", "3"),
    "report a": ("-o", "page.html"),
    "diff a b": ("--metric", "p95_ttft", "mean_tpot", "-o", "out"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a sweep file, as the current one."""
    (tmp_path / "sweep.yaml").write_text(
        "{base: {model: llama-3.1-8b, dataset_name: random}, grid: {request_rate: [1, 2]}}", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_printed_prints_the_same_again(tokentwin: Command, here: Path, command: str) -> None:
    if command == "run":
        pytest.importorskip("torch")
    words = command.split()
    printed = tokentwin(*words, *COMMANDS[command], "--print-config")
    assert printed.code == 0, printed.err
    (here / "again.yaml").write_text(printed.out, encoding="utf-8")
    assert tokentwin(*words, "--config", "again.yaml", "--print-config").out == printed.out
    content = yaml.safe_load(printed.out)
    for option in COMMANDS[command]:
        if option.startswith("--") and option not in ("--tp", "--tp-sizes", "--isl", "--no-fast-forward"):
            assert option.lstrip("-").replace("-", "_") in content
    own = command.split()[0] if command.split()[0] != "calibrate" else None
    name = "workload describe" if own == "workload" else own
    jsonschema.validate(content, schema.schema("config", name), jsonschema.Draft202012Validator)


def test_limits_are_worked_out_where_the_device_is_known(tokentwin: Command, here: Path) -> None:
    for command in ("capacity", "memory", "serve"):
        printed = yaml.safe_load(tokentwin(command, *COMMANDS[command], "--print-config").out)
        assert printed["max_num_seqs"] == 1024  # vLLM's default on an H200
        assert printed["max_num_batched_tokens"] == 8192


def test_one_file_describes_a_deployment_to_every_command(tokentwin: Command, here: Path) -> None:
    (here / "deployment.yaml").write_text("model: qwen3-8b\ngpu: l40s\nrouter: central\n", encoding="utf-8")
    for words in (("simulate", *TRAFFIC, "--dp", "2"), ("capacity", *TRAFFIC, "--slo", "chat", "--dp", "2")):
        assert "gpu: l40s" in tokentwin(*words, "--config", "deployment.yaml", "--print-config").out
    answer = tokentwin("memory", "--config", "deployment.yaml")
    assert "qwen3-8b on one NVIDIA L40S" in answer.out
    assert answer.err == "note: deployment.yaml: no effect here of router\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("seed: 1\nmodle: x", "line 2: unknown key 'modle'; did you mean 'model'"),
        ("model: a\nseed: 1\nmodel: b", "line 3: model is given twice, first in line 1"),
        ("\nisl: 3\ninput-len: 4", "line 3: input_len is given twice, first in line 2"),
        (
            "deployment:\n  model: x\n  gpu: y",
            "line 1: deployment is no flag, and below it are flags one level too deep (model, gpu); move them",
        ),
        (
            "seed: 1\nmodel:\n  name: x\n  gpu: y",
            "line 2: model has keys below it (name, gpu), one level too deep",
        ),
        ("max_num_seqs:\n  most: 4", "line 1: max_num_seqs has keys below it (most), and takes one value"),
        ("model: [a, b]", "line 1: model: must be a valid string"),
        ("engine_version: 0.10", "line 1: engine_version: must be text in quotes"),
    ],
)
def test_errors_name_the_line_and_say_what_was_meant(
    tokentwin: Command, here: Path, content: str, words: str
) -> None:
    (here / "bad.yaml").write_text(content, encoding="utf-8")
    assert words in tokentwin("simulate", "--config", "bad.yaml").error


def test_a_flag_of_another_command_is_named_as_such(tokentwin: Command, here: Path) -> None:
    (here / "bad.yaml").write_text("model: qwen3-8b\nrequest_rate: 4\n", encoding="utf-8")
    error = tokentwin("memory", "--config", "bad.yaml").error
    assert "line 2: request_rate is a flag of tokentwin simulate that this command does not take" in error


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (
            "s.yaml",
            "base: {}\ngrid:\n  request_rat: [1]\n",
            "line 3: grid: unknown key 'request_rat'; did you mean",
        ),
        ("s.yaml", "grid: {seed: [1]}\nrequest_rate: 4\n", "line 2: unknown key 'request_rate'"),
        (
            "s.yaml",
            "points:\n- {seed: 1}\n- {sede: 2}\n",
            "line 3: points.1: unknown key 'sede'; did you mean 'seed'",
        ),
    ],
)
def test_sweep_files_name_the_line(
    tokentwin: Command, here: Path, file: str, content: str, words: str
) -> None:
    (here / file).write_text(content, encoding="utf-8")
    assert words in tokentwin("sweep", file, "--dry-run").error


@pytest.mark.parametrize(
    ("tenant", "words"),
    [
        ("request_rate: 4", "request_rate belongs below arrivals of a tenant"),
        ("arrivals: {num_prompts: 4}", "num_prompts belongs to the tenant itself, beside its dataset"),
        ("max_concurrency: 4", "max_concurrency belongs at the top of the file, beside tenants"),
        ("arivals: {}", "did you mean 'arrivals'"),
    ],
)
def test_workload_files_name_the_line_and_where_a_key_belongs(
    tokentwin: Command, here: Path, tenant: str, words: str
) -> None:
    (here / "w.yaml").write_text(
        f"name: x\ntenants:\n- name: a\n  dataset: {{name: random}}\n  {tenant}\n", encoding="utf-8"
    )
    error = tokentwin("workload", "describe", "--dataset-path", "w.yaml").error
    assert "w.yaml: line 5: unknown key" in error
    assert words in error
