"""`tokentwin run`: a workload on the engine leaves the files of a simulated run, and the two can be compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.results import load_run
from realengine.export import write_folder
from serving.errors import UsageError
from sim.record import Status
from sim.workload import load_workload
from sim.world import Progress
from tests.realengine.engines import TINY, running, tiny_model, tiny_source
from tests.tokentwin.shell import Command
from tokentwin.commands.run import make_plan
from tokentwin.job import make_spec
from tokentwin.replay import Prompts, RealRun, replay, scaled, warm_up

LIMITS = ("--num-gpu-blocks-override", 65, "--max-num-seqs", 8, "--max-num-batched-tokens", 128)
TRAFFIC: dict[str, Any] = {
    "dataset_name": "random",
    "num_prompts": 10,
    "random_prefix_len": 32,
    "random_input_len": 20,
    "random_output_len": 5,
    "request_rate": 100.0,
}
SESSIONS = TRAFFIC | {
    "session_turns_min": 3,
    "session_turns_max": 3,
    "num_prompts": 9,
    "random_prefix_len": 0,
}


def options(flags: dict[str, Any]) -> list[str]:
    return [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_folder(tiny_source(), folder, torch.float32)
    return folder


def run_here(traffic: dict[str, Any], *, warmup: int = 0, progress: Any = None, **limits: Any) -> Any:
    workload = load_workload(make_spec(traffic), seed=3)
    with running(tiny_model(), **limits) as engine:
        if warmup:
            warm_up(engine, workload, TINY.vocab_size, warmup)
        return replay(engine, workload, vocab_size=TINY.vocab_size, seed=3, progress=progress), workload


def check_record(record: Any) -> None:
    r = record.requests
    assert (np.diff(r.sent_s) >= 0).all()
    for row in np.flatnonzero(r.output_tokens):
        times_s = record.token_times_s(row)
        assert len(times_s) == r.output_tokens[row]
        assert (np.diff(times_s) > 0).all()
        assert times_s[0] == r.first_token_s[row]
        assert times_s[-1] == r.last_token_s[row]
        assert r.sent_s[row] <= r.queued_s[row] <= r.scheduled_s[row] < times_s[0]
    assert (record.steps.start_s >= 0).all()


def test_a_run_and_its_twin_leave_the_same_files(tokentwin: Command, tmp_path: Path, model: Path) -> None:
    real, twin = tmp_path / "real", tmp_path / "twin"
    same = ("--model", model, *LIMITS, *options(TRAFFIC), "--save-detailed")
    how = ("--device", "cpu", "--dtype", "float32", "--label", "a")
    answer = tokentwin("run", *same, *how, "-o", real)
    assert answer.code == 0, answer.err
    assert "Run time (s)" in answer.out
    assert tokentwin("simulate", *same, "--replications", "1", "-o", twin).code == 0
    assert {p.name for p in real.iterdir()} == {p.name for p in twin.iterdir()}
    ours, theirs = load_run(real), load_run(twin)
    assert ours.requests().schema.names == theirs.requests().schema.names
    for name in ("prompt_tokens", "output_tokens", "status", "request_id"):
        assert ours.requests().column(name).to_pylist() == theirs.requests().column(name).to_pylist()
    assert ours.result["sim_prefix_hit_rate"] == theirs.result["sim_prefix_hit_rate"] > 0
    assert (ours.result["backend"], theirs.result["backend"]) == ("tokentwin-engine", "sim")
    assert ours.result["completed"] == 10
    assert ours.run["real"] is True
    assert ours.run["engine"]["device"] == "cpu"
    assert ours.run["engine"]["versions"]["torch"]
    assert ours.run["limits"] == theirs.run["limits"]
    answer = tokentwin("diff", real, twin)
    assert answer.code == 0, answer.err
    assert "Mean TTFT" in answer.out


def test_answers_cut_at_the_longest_sequence_are_told_as_the_twin_tells_them(
    tokentwin: Command, tmp_path: Path, model: Path
) -> None:
    """Prompts have 52 tokens, so that 2 of 5 fit."""
    traffic = options(TRAFFIC | {"num_prompts": 2})
    same = ("--model", model, *LIMITS, *traffic, "--max-model-len", 54)
    for command, how in (
        ("run", ("--device", "cpu", "--dtype", "float32")),
        ("simulate", ("--replications", 1)),
    ):
        answer = tokentwin(command, *same, *how, "-o", tmp_path / command)
        assert answer.code == 0, answer.err
        saved = load_run(tmp_path / command)
        assert saved.requests().column("output_tokens").to_pylist() == [2, 2]
        told = "2 of 2 requests ask for more than fits max_model_len 54, and their answers end there"
        assert told in saved.run["warnings"]


def test_what_is_warmed_up_is_not_recorded() -> None:
    record, workload = run_here(TRAFFIC, warmup=2)
    assert len(record.requests) == len(workload) == 10
    assert (record.requests.status == Status.FINISHED).all()
    assert (record.requests.output_tokens == workload.output_tokens).all()
    assert record.tokens.first_step.min() >= 0
    assert record.requests.cached_tokens[0] == 0
    check_record(record)


@pytest.mark.parametrize("seats", [None, 2])
def test_a_session_goes_on_with_what_was_answered(seats: int | None) -> None:
    record, workload = run_here(SESSIONS | {"max_concurrency": seats, "request_rate": None})
    check_record(record)
    r = record.requests
    assert (r.status == Status.FINISHED).all()
    turn = workload.after[r.request_id] >= 0
    before = {int(row): index for index, row in enumerate(r.request_id)}
    for index in np.flatnonzero(turn):
        previous = before[int(workload.after[r.request_id[index]])]
        assert r.sent_s[index] >= r.last_token_s[previous]
        history = int(r.prompt_tokens[previous] + r.output_tokens[previous])
        assert r.cached_tokens[index] == (history - 1) // 16 * 16  # the last token has not been computed
    if seats is not None:
        moments = record.steps.start_s
        in_flight = [((r.sent_s <= t) & (r.last_token_s > t)).sum() for t in moments]
        assert max(in_flight) <= seats


def test_prompts_share_tokens_where_the_workload_says_so() -> None:
    workload = load_workload(make_spec(TRAFFIC), seed=0)
    prompts = Prompts(workload, 50_000, seed=1)
    first, second = prompts.ids(0), prompts.ids(1)
    assert first[:32] == second[:32]
    assert not set(first[32:]) & set(second[32:])
    assert prompts.ids(0) == Prompts(workload, 50_000, seed=1).ids(0)
    assert prompts.ids(0) != Prompts(workload, 50_000, seed=2).ids(0)
    assert 0 <= min(first) <= max(first) < 50_000


def test_an_interrupted_run_keeps_what_happened() -> None:
    def press(state: Progress) -> None:
        if state.done:
            raise KeyboardInterrupt

    record, workload = run_here(TRAFFIC | {"request_rate": 4.0}, progress=press)
    assert record.interrupted
    assert 0 < len(record.requests) < len(workload)
    assert (record.requests.status == Status.FINISHED).any()
    check_record(record)
    assert "had not ended" in record.warnings[-1]


def test_ctrl_c_exits_with_130_and_writes_files(
    tokentwin: Command, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from realengine.engine import Engine

    add = Engine.add

    def interrupted(engine: Engine, *args: Any, **more: Any) -> Any:
        if len(engine.recorder.requests) > 3:
            raise KeyboardInterrupt
        return add(engine, *args, **more)

    monkeypatch.setattr(Engine, "add", interrupted)
    slow = TRAFFIC | {"request_rate": 20.0}
    how = ("--device", "cpu", "--dtype", "float32", "--load-format", "dummy", "-o", tmp_path / "out")
    answer = tokentwin("run", "--model", model, *LIMITS, *options(slow), *how)
    assert answer.code == 130, answer.err
    saved = load_run(tmp_path / "out")
    assert saved.result["partial"] is True
    status = saved.requests().column("status").to_pylist()
    assert 0 < len(status) < 10
    assert set(status) <= {"finished", "unfinished"}


def test_a_faster_clock_scales_arrivals_and_forgets_the_spec() -> None:
    workload = load_workload(make_spec(TRAFFIC), seed=0)
    fast = scaled(workload, 2.0)
    assert np.array_equal(fast.sent_s, workload.sent_s / 2)
    assert fast.meta["request_rate"] == 200
    assert "spec" not in fast.meta
    assert scaled(workload, 1.0) is workload


def test_requests_that_do_not_fit_are_refused_with_a_reason() -> None:
    with pytest.raises(UsageError, match="none of the 10 requests can run"):
        run_here(TRAFFIC | {"random_input_len": 400})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"rtt_ms": 5.0}, "--rtt-ms"),
        ({"time_scale": 0.0}, "--time-scale"),
        ({"warmup": -1}, "--warmup"),
        ({"until": 0.0}, "--until"),
        ({"priority": 3}, "--priority"),
        ({"scheduling_policy": "edf"}, "edf needs deadlines"),
        ({"fail_on_slo": True}, "--fail-on-slo"),
    ],
)
def test_what_would_have_no_effect_is_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan({"model": "tiny"} | TRAFFIC | flags)


def test_a_model_that_is_not_there_is_one_line(tokentwin: Command) -> None:
    assert "--load-format dummy" in tokentwin("run", "--model", "nowhere", *options(TRAFFIC)).error
    assert "--gpu" in tokentwin("run", "--model", "nowhere", "--gpu", "h200").error


def test_without_torch_help_works_and_a_run_says_what_is_missing() -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\nfrom tokentwin.cli import main\n"
        "assert main(['run', '--help']) == 0\nsys.exit(main(['run', '--model', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "--warmup" in done.stdout
    assert "needs torch" in done.stderr
    assert "tokentwin[engine]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_that_is_not_over_has_lost_requests() -> None:
    record, workload = run_here(TRAFFIC | {"num_prompts": 2})
    assert RealRun(record, None, None, len(workload)).num_lost == 0  # type: ignore[arg-type]
    assert RealRun(record, None, None, 5).num_lost == 3  # type: ignore[arg-type]
