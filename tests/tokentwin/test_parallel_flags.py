"""Parallelism from the command line and from Python: what it counts, what it says, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tokentwin as tt
from experiments.plan import label
from experiments.plan_report import vllm_command
from sim.deployment import Deployment, build
from tests.tokentwin.shell import SMALL, Command
from tokentwin.commands.plan import answer_plan

BIG = ("--model", "llama-3.1-70b", "--gpu", "h100", *SMALL[2:], "--replications", "1")


def test_a_run_says_what_it_is_and_that_nobody_validated_it(tokentwin: Command, tmp_path: Path) -> None:
    answer = tokentwin("simulate", *BIG, "--pp", "4", "-o", tmp_path)
    assert answer.code == 0, answer.err
    assert "Pipeline bubbles (%):" in answer.out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["pipeline_parallel_size"] == 4
    assert 0 < result["sim_pipeline_bubble_share"] < 1
    words = "pipeline parallelism is not validated against measurements"
    assert any(words in warning for warning in result["sim_warnings"])
    assert words in (tmp_path / "report.html").read_text()


def test_what_a_pipeline_changes_is_told_apart(tokentwin: Command, tmp_path: Path) -> None:
    for name, stages in (("a", "1"), ("b", "2")):
        tokentwin("simulate", *SMALL, "--replications", "1", "--pp", stages, "-o", tmp_path / name)
    answer = tokentwin("diff", tmp_path / "a", tmp_path / "b", "-o", tmp_path)
    assert answer.code == 0
    parts = json.loads((tmp_path / "diff.json").read_text())["metrics"]["mean_tpot"]["parts"]
    assert parts["transfer"] > 0
    assert parts["pipeline"] > 0
    assert "unexplained" not in answer.out.lower()


def test_plain_runs_say_nothing_of_pipelines(tokentwin: Command, tmp_path: Path) -> None:
    answer = tokentwin("simulate", *SMALL, "--replications", "1", "-o", tmp_path)
    assert "ipeline" not in answer.out
    assert "sim_pipeline_bubble_share" not in json.loads((tmp_path / "result.json").read_text())


def test_the_same_from_python_and_a_file(tokentwin: Command, tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("model: llama-3.1-70b\ngpu: h100\npipeline_parallel_size: 2\ntensor_parallel_size: 2\n")
    common: dict[str, Any] = {"dataset_name": "random", "num_prompts": 10, "replications": 1}
    ran = tt.simulate(model="llama-3.1-70b", gpu="h100", pp=2, tp=2, request_rate=5, **common)
    words = [word for name, value in common.items() for word in ("--" + name.replace("_", "-"), str(value))]
    answer = tokentwin("simulate", "--config", file, "--request-rate", "5", *words, "-o", tmp_path / "run")
    assert answer.code == 0, answer.err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["mean_tpot_ms"] == pytest.approx(1e3 * ran.summary.tpot.mean_s, rel=1e-12)
    assert "4 x NVIDIA H100" in ran._repr_html_()


def test_a_sweep_prices_each_way_by_itself_and_counts_devices() -> None:
    swept = tt.sweep(
        model="mixtral-8x7b", gpu="h100", tp=4, pp=[1, 2], enable_expert_parallel=[False, True],
        dataset_name="random", num_prompts=10, request_rate=5, replications=1, jobs=1,
    )  # fmt: skip
    table = swept.summary()
    assert table["num_gpus"].tolist() == [4, 4, 8, 8]
    assert table["mean_tpot_ms"].nunique() == 4


def test_a_plan_counts_all_devices_and_prints_the_flags() -> None:
    given = {
        "model": "mixtral-8x7b", "price": ["h100=3"], "tensor_parallel_sizes": ["2"],
        "pipeline_parallel_sizes": ["2"], "enable_expert_parallel": True, "dataset_name": "random",
        "input_len": 512, "output_len": 8, "request_rate": 20.0, "slo": ["p95_ttft:2000"], "num_prompts": 256,
        "replications": 1,
    }  # fmt: skip
    fleet = answer_plan(given).plan.winner
    assert fleet is not None
    assert fleet.gpus == 4 * fleet.replicas
    assert fleet.usd_per_hour == 3 * fleet.gpus
    assert label(fleet.candidate.deployment) == "h100 TP2 PP2 EP mixtral-8x7b"
    command, remarks = vllm_command(fleet)
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 2 --enable-expert-parallel" in command
    assert any("not validated" in remark for remark in remarks)


def test_memory_is_that_of_the_fullest_stage() -> None:
    # 80 layers over 4 stages: 20 layers, and on the last stage the head and the norm; 16 bit.
    built = build(Deployment(model="llama-3.1-70b", gpu="h100", pipeline_parallel_size=4))
    model = built.model
    layers = 20 * (model.linear_params_per_layer() + model.small_params_per_layer())
    expected = 2 * (layers + model.vocab_size * model.hidden_size + model.hidden_size)
    assert built.memory.weight_bytes == expected
    assert built.memory.kv_bytes_per_token == model.kv_bytes_per_token() / 4


MOE = ("--model", "mixtral-8x7b", "--gpu", "h100", "--tp", "2", "--dataset-name", "random")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("simulate", *BIG, "--pp", "81"), "--pipeline-parallel-size must be in 1..80, not 81"),
        (("simulate", *BIG, "--pp", "2", "--policy", "static"), "--policy static"),
        (("simulate", *BIG, "--pp", "2", "--async-scheduling"), "--async-scheduling"),
        (("simulate", *BIG, "--tp", "2", "--enable-expert-parallel"), "has no experts; leave it out"),
        (("simulate", *SMALL, "--expert-load-imbalance", "2"), "has no experts; leave it out"),
        (("simulate", *SMALL, "--collective-overlap", "0.5"), "only with --tensor-parallel-size 2 or more"),
        (("simulate", *MOE[:4], "--enable-expert-parallel"), "only with --tensor-parallel-size 2 or more"),
        (("simulate", *MOE, "--expert-load-imbalance", "4.5"), "can have 1 to 4 times the mean"),
        (("serve", *SMALL[:2], "--engine", "twin", "--pp", "2"), "try it with simulate"),
        (("serve", *SMALL[:2], "--engine", "real", "--enable-expert-parallel"), "only with --engine twin"),
    ],
)
def test_errors_say_what_to_do(tokentwin: Command, command: tuple[str, ...], words: str) -> None:
    answer = tokentwin(*command)
    assert answer.code == 2
    assert words in answer.error
