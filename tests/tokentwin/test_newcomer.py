"""What somebody gets wrong at first: found before anything runs, in one line, and nothing is left out in silence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tokentwin.shell import SMALL, Command

KNOWN = ("--model", "llama-3.1-8b", "--dataset-name", "random")
CAPACITY = ("capacity", *KNOWN, "--slo", "chat")
PLAN = ("plan", *KNOWN, "--slo", "chat", "--price", "h200=1")
RATE = ("--request-rate", "5")
NO_RUN = ("tokentwin.commands.capacity.find_capacity", "tokentwin.commands.plan.make_plan")


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("found too late")

    for name in (
        *NO_RUN,
        "tokentwin.commands.policy_test.check_policy",
        "tokentwin.commands.simulate.run_job",
    ):
        monkeypatch.setattr(name, never)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    from tokentwin.cli import main

    folder = tmp_path_factory.mktemp("runs") / "a"
    assert main(["simulate", *SMALL, "--replications", "1", "-o", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # No end, or no number.
        (
            (*CAPACITY, "--target-request-rate", "inf"),
            "--target-request-rate must be a positive, finite number",
        ),
        (
            (*CAPACITY, "--request-rate", "inf"),
            "--request-rate is where the search starts and must be finite",
        ),
        ((*PLAN, *RATE, "--ttft", "0"), "--ttft must be a positive, finite number of ms, got 0"),
        ((*PLAN, *RATE, "--tpot", "inf"), "--tpot must be a positive, finite number of ms, got inf"),
        (("workload", "describe", *KNOWN[2:], "--block-size", "0"), "--block-size must be at least 1, got 0"),
        (("policy-test", "--jobs", "0"), "--jobs must be at least 1, got 0"),
        (("policy-test", "--num-prompts", "0"), "--num-prompts must be at least 1, got 0"),
        (("simulate", *SMALL, "--metrics-port", "-1"), "--metrics-port -1: ports go up to 65535"),
        # Without effect.
        ((*CAPACITY, "--priority", "3"), "--priority has no effect where all requests have the same"),
        ((*CAPACITY, "--router", "central"), "--router has no effect on one replica"),
        ((*CAPACITY, "--rate-scale", "2"), "--rate-scale has no effect on a search over request_rate"),
        ((*CAPACITY, "--duration", "9"), "--duration has no effect on a search over request_rate"),
        ((*PLAN, *RATE, "--priority", "3"), "--priority has no effect where all requests have the same"),
        ((*PLAN, *RATE, "--slo-attainment", "0.9"), "--slo-attainment has no effect without --goodput"),
        (
            (*PLAN, *RATE, "--target-concurrency", "4"),
            "--request-rate and --target-concurrency are both given",
        ),
        ((*PLAN, *RATE, "--tp-sizes", "1", "1"), "--tensor-parallel-sizes: 1 is given twice; keep one"),
        (("workload", "describe", *KNOWN[2:], "--priority", "1"), "--priority has no effect"),
        (("validate", "h200", "--profile", "h100"), "PROFILE_FILE and --profile are both given; keep one"),
        (("simulate", *SMALL, "--save-result", "--metadata", "a=1", "a=2"), "--metadata: a is given twice"),
        # Found late before.
        ((*CAPACITY, "--response-cache", "disk"), "--response-cache 'disk'; use memory, or redis"),
        (("policy-test", "--model", "lama-3.1-8b"), "did you mean 'llama-3.1-8b'"),
        (("policy-test", "--replications", "1"), "--replications must be at least 2 for intervals"),
        (
            ("simulate", *SMALL, "--otlp-traces-endpoint", "http://"),
            "write a URL such as http://localhost:4317",
        ),
        # Other words for the same.
        (
            ("simulate", *SMALL, "--fast-forward", "false"),
            "a switch takes no value: write --NAME or --no-NAME",
        ),
        (
            ("simulate", *SMALL, "--failures", "{schedule: [{time_s: 1, replica: 5}]}"),
            "--failures: replica 5 does not exist; the only one is 0",
        ),
    ],
)
def test_flags(tokentwin: Command, arguments: tuple[str, ...], words: str) -> None:
    answer = tokentwin(*arguments)
    assert answer.code == 2
    assert words in answer.error
    assert answer.out == ""


def test_a_file_in_the_place_of_a_folder(tokentwin: Command, tmp_path: Path, run: Path) -> None:
    """And a folder in the place of a file; said before there is anything to write."""
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    for command in (
        ("simulate", *SMALL, "-o", file),
        (*CAPACITY, "-o", file),
        (*PLAN, *RATE, "-o", file),
        ("policy-test", "-o", file),
        ("diff", run, run, "-o", file),
        ("validate", "--against", run, "-o", file),
        ("compare", run, folder, "-o", file),
        ("report", run, "-o", file / "x.html"),
        ("calibrate", "fit", "x.csv", "--device", "h200", "-o", file / "x.json"),
    ):
        answer = tokentwin(*map(str, command))
        assert answer.code == 2
        assert answer.error.startswith("error: -o: cannot write to ")
        assert "a file; choose another folder" in answer.error
        assert answer.out == ""
    assert (
        "error: --result-dir: " in tokentwin("simulate", *SMALL, "--save-result", "--result-dir", file).error
    )
    name = ("--save-result", "--result-dir", tmp_path, "--result-filename", "folder")
    assert "--result-filename: " in tokentwin("simulate", *SMALL, *name).error
    for command in (
        ("calibrate", "fit", "x.csv", "--device", "h200", "-o", folder),
        ("calibrate", "from-metrics", run, "--profile", "h200", "-o", folder),
    ):
        assert "is a folder; name a file" in tokentwin(*map(str, command)).error


def test_options_of_other_kinds_of_runs(tokentwin: Command, run: Path) -> None:
    for option, words in (
        (("--run", "x"), "it is for a folder of runs or InferenceX points"),
        (("--prefixes", "x"), "it is for a folder of runs"),
        (("--seed", "1"), "it is for InferenceX points"),
    ):
        answer = tokentwin("validate", "--against", run, *option)
        assert answer.code == 2
        assert f"{option[0]} has no effect on {run}; {words}" in answer.error
    assert f"{run} is given twice; name each run once" in tokentwin("report", run, run).error


def test_files_of_options(tokentwin: Command, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(" \n")
    assert "c.yaml: is empty; write lines such as model:" in tokentwin("simulate", "--config", path).error
    path.write_text("# nothing yet\n")
    assert "--model is missing" in tokentwin("simulate", "--config", path).error
    path.write_text("base: {model: llama-3.1-8b}\ngrid: {seed: [1, 2]}\n")
    assert "give a sweep's file to tokentwin sweep" in tokentwin("simulate", "--config", path).error
    away = tokentwin("sweep", path, *KNOWN[2:], "-o", tmp_path / "o", "-e", "..")
    assert "--experiment-name .. must lie in --output-dir; give a name" in away.error
    swept = tokentwin("sweep", path, *KNOWN[2:], "--seed", "4", "-o", tmp_path)
    assert "--seed has no effect: every point has its own seed; leave it out" in swept.error


def test_broken_files_of_runs_and_sweeps(tokentwin: Command, tmp_path: Path, run: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for name in ("run.json", "result.json"):
        kept = (copy / name).read_text()
        for content in ("[1]", "{"):
            (copy / name).write_text(content)
            for command in (("report", copy), ("diff", run, copy), ("reading", copy), ("compare", run, copy)):
                assert f"cannot read {copy / name}: " in tokentwin(*command).error
        (copy / name).write_text(kept)
    assert "there is no such folder; name the folder of a run" in tokentwin("report", tmp_path / "no").error
    assert "it is a file; name the folder of a run" in tokentwin("diff", run, copy / "run.json").error
    swept = tmp_path / "s"
    swept.mkdir()
    (tmp_path / "s.yaml").write_text("grid: {seed: [1, 2]}\n")
    for content in ("[1]", "{"):
        (swept / "sweep.json").write_text(content)
        answer = tokentwin("sweep", tmp_path / "s.yaml", *KNOWN, "-o", tmp_path, "--resume")
        assert answer.code == 2
        assert answer.error.startswith("error: --resume: ")
        assert str(swept / "sweep.json") in answer.error
