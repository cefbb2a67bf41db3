"""Wrong input is one line on stderr that names the culprit, exit code 2, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tokentwin.shell import SMALL, Command

MODEL = ("--model", "llama-3.1-8b")
PLAN = ("plan", "--dataset-name", "random", "--request-rate", "5", "--slo", "chat")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # Unknown names, with the nearest.
        (("--model", "lama-3.1-8b"), "did you mean 'llama-3.1-8b'"),
        ((*MODEL, "--gpu", "h20"), "did you mean 'h200'"),
        ((*MODEL, "--dataset-name", "azur"), "did you mean 'azure'"),
        ((*SMALL, "--policy", "chunkd"), "did you mean 'chunked'"),
        ((*SMALL, "--policy", "nowhere:Policy"), "cannot import 'nowhere'"),
        ((*SMALL, "--dp", "2", "--router", "least_outstandin"), "did you mean 'least_outstanding'"),
        ((*SMALL, "--quantization", "fp9"), "did you mean 'fp8'"),
        ((*SMALL, "--kv-cache-dtype", "fp9"), "did you mean 'fp8'"),
        ((*SMALL, "--scheduling-policy", "lifo"), "Choose from"),
        ((*SMALL, "--slo", "chatt"), "did you mean 'chat'"),
        ((*SMALL, "--goodput", "tft:500"), "did you mean 'ttft'"),
        ((*SMALL, "--percentile-metrics", "ttf"), "did you mean 'ttft'"),
        ((*SMALL, "--max-num-sqs", "4"), "Did you mean --max-num-seqs?"),
        ((*SMALL, "--slo-attainment", "0.9"), "--slo-attainment. It is an option of capacity, plan."),
        ((*SMALL, "extra"), "unexpected 'extra'"),
        # Out of range, or not a number.
        ((*SMALL[:-1], "0"), "--request-rate: must be a positive number, got 0"),
        ((*SMALL, "--max-num-seqs", "0"), "--max-num-seqs"),
        ((*SMALL, "--max-num-seqs", "few"), "--max-num-seqs"),
        (
            (*SMALL, "--max-num-seqs", "1.5"),
            "--max-num-seqs must be a whole number, got '1.5'",
        ),
        ((*SMALL, "--until", "soon"), "--until must be a number, got 'soon'"),
        ((*SMALL, "--step-jitter", "much"), "--step-jitter must be a number or profile, got 'much'"),
        ((*SMALL, "--fast-forward=maybe"), "--fast-forward must be true or false, got 'maybe'"),
        ((*SMALL, "--gpu-memory-utilization", "1.5"), "--gpu-memory-utilization"),
        ((*SMALL, "--seed", "-1"), "--seed"),
        ((*SMALL, "--until", "0"), "--until"),
        ((*SMALL, "--metric-percentiles", "0,50"), "--metric-percentiles"),
        ((*SMALL, "--metric-percentiles", "a"), "--metric-percentiles"),
        ((*SMALL, "--slo", "p95_ttft"), "--slo"),
        ((*MODEL, "--dataset-name", "random", "--num-prompts", "0"), "--num-prompts"),
        # Cannot run.
        (("--model", "llama-3.1-405b", "--dataset-name", "random"), "does not fit NVIDIA H200"),
        ((*SMALL, "--max-model-len", "512"), "prompt of 1024 tokens leaves no room in max_model_len 512"),
        ((*SMALL, "--num-gpu-blocks-override", "40"), "prompt of 1024 tokens"),
        ((*SMALL, "--max-model-len", "200000"), "beyond the 131072 positions"),
        ((*SMALL, "--max-model-len", "9000", "--num-gpu-blocks-override", "40"), "lower it to 624"),
        ((*SMALL, "--tp", "3"), "--tensor-parallel-size 3 does not divide"),
        # Missing.
        (("--dataset-name", "random"), "--model is missing"),
        (MODEL, "no workload"),
        ((*MODEL, "--dataset-path", "/nowhere/trace.csv"), "/nowhere/trace.csv"),
        ((*MODEL, "--dataset-path", "/"), "/: is a folder"),
        ((*SMALL, "--gpu", "/nowhere/gpu.json"), "/nowhere/gpu.json: no such file"),
        (("--model", "/nowhere/config.json"), "/nowhere/config.json: no such file"),
        (("--pools", "{gpu: h200}", *SMALL), "--pools: must be a list"),
        (
            ("--pools", "[]", *SMALL),
            "--pools: the list is empty; name a pool, such as [{gpu: h200, replicas: 2}]",
        ),
        # Without effect.
        ((*SMALL, "--fail-on-slo"), "--fail-on-slo has no effect without --slo"),
        ((*SMALL, "--append-result"), "--append-result has no effect without --save-result"),
        ((*SMALL, "--result-dir", "x"), "--result-dir has no effect without --save-result"),
        ((*SMALL, "--result-filename", "x"), "--result-filename has no effect without --save-result"),
        ((*SMALL, "--label", "x"), "--label has no effect without -o or --save-result"),
        ((*SMALL, "--metadata", "a=b"), "--metadata has no effect without"),
        ((*SMALL, "--save-detailed"), "--save-detailed has no effect without"),
        ((*SMALL, "--plot-timeline"), "--plot-timeline has no effect without"),
        ((*SMALL, "--save-result", "--append-result"), "--append-result needs --result-filename"),
        ((*SMALL, "--think-time", "5"), "--think-time has no effect on sessions of one turn"),
        ((*SMALL, "--router", "central"), "--router has no effect on one replica"),
        (
            (*SMALL, "--router", "central", "--pools", "[{replicas: 1}]"),
            "--router has no effect on one replica; give the pool 2 or more replicas",
        ),
        (
            (*SMALL, "--router", "central", "--pools", "[{role: prefill}]"),
            "pools: role prefill without a pool of role decode; add one, or leave role out",
        ),
        (
            (*SMALL, "--pools", "[{role: prefill}, {role: decode}, {gpu: l40s}]"),
            "pools: pool2 has role both (the default) beside pools of role decode and prefill; give it prefill",
        ),
        ((*SMALL, "--static-batch-size", "4"), "only with --policy static"),
        ((*SMALL, "--dataset-path", "x.csv"), "--dataset-path has no effect with --dataset-name random"),
        ((*SMALL, "--mooncake-block-tokens", "16"), "--mooncake-block-tokens has no effect"),
        ((*SMALL, "--num-prompts"), "--num-prompts"),
    ],
)
def test_one_line_and_exit_code_2(tokentwin: Command, arguments: tuple[str, ...], words: str) -> None:
    answer = tokentwin("simulate", *arguments)
    assert answer.code == 2
    assert words in answer.error
    assert answer.out == ""


@pytest.mark.parametrize("flag", ["-o", "--result-dir"])
def test_an_unwritable_folder_fails_before_the_simulation(tokentwin: Command, flag: str) -> None:
    more = ("--save-result",) if flag == "--result-dir" else ()
    answer = tokentwin("simulate", *SMALL, *more, flag, "/dev/null/runs")
    assert answer.code == 2
    assert "cannot write to /dev/null/runs" in answer.error
    assert answer.out == ""


def test_metadata_must_be_pairs(tokentwin: Command, tmp_path: Path) -> None:
    answer = tokentwin("simulate", *SMALL, "-o", tmp_path, "--metadata", "speed")
    assert answer.code == 2
    assert "'speed' is not KEY=VALUE" in answer.error
    assert answer.out == ""


def test_a_file_that_is_not_text_is_named_as_unreadable(tokentwin: Command, tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xd0\xd0\xd0\x00")
    for arguments in (
        ("--model", binary, "--dataset-name", "random"),
        (*SMALL, "--gpu", binary),
        (*MODEL, "--dataset-path", binary),
        (*SMALL, "--config", binary),
    ):
        answer = tokentwin("simulate", *arguments)
        assert answer.code == 2
        assert answer.error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("simulte",), 'Did you mean "simulate"?'),
        (("profile", "show", "h20"), "did you mean 'h200'"),
        (("profile", "show"), "requires an argument"),
        (("model", "show", "lama-3.1-8b"), "did you mean 'llama-3.1-8b'"),
        (("memory", "--model", "llama-3.1-405b"), "does not fit"),
        (("memory",), "--model is missing"),
        (("memory", "--model", "llama-3.1-8b", "--router", "central"), "--router"),
        (("workload", "describe"), "no workload"),
        (("workload", "describe", "--dataset-name", "random", "--goodput", "ttft:1"), "--goodput"),
        ((*PLAN, "--price", "h1000=2"), "--price 'h1000' is not a shipped profile; did you mean 'h100'"),
        ((*PLAN, "--gpus", "h1000"), "--gpus 'h1000' is not a shipped profile; did you mean 'h100'"),
        ((*PLAN, "--models", "lama-3.1-8b"), "--models 'lama-3.1-8b'"),
        (("conformance", "/nowhere"), "/nowhere is not a folder"),
        (("calibrate", "fit", "--device", "h200", "-o", "p.json"), "name one or more CSV files"),
        (("calibrate", "fit", "/nowhere.csv", "--device", "h200", "-o", "/dev/null/p"), "/dev/null/p"),
    ],
)
def test_other_commands_fail_alike(tokentwin: Command, arguments: tuple[str, ...], words: str) -> None:
    answer = tokentwin(*arguments)
    assert answer.code == 2
    assert words in answer.error


def test_a_bug_keeps_its_traceback(tokentwin: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("tokentwin.commands.simulate.run_job", broken)
    with pytest.raises(ZeroDivisionError):
        tokentwin("simulate", *SMALL)
