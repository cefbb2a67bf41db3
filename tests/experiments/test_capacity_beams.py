"""Capacity of beam searches and best-of: shorter runs for more work each, and promises that they can keep."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments.capacity import find_capacity
from experiments.capacity_lengths import DRAWN, FULL, LONE, LONGEST, SHORT, Lengths
from experiments.capacity_report import capacity_json, capacity_lines
from experiments.capacity_traffic import make_traffic
from experiments.capacity_trial import Promises
from experiments.plan_report import plan_json, plan_lines
from sim.deployment import Deployment, build, simulate
from sim.slo import parse_slo
from sim.workload import Workload, load_workload
from sim.workload.flags import spec_from_flags
from tests.tokentwin.shell import Command, caller
from tokentwin import plan

RANDOM = {"dataset_name": "random", "input_len": 64, "num_prompts": 20}
COMMAND = ("--model", "llama-3.2-1b", "--dataset-name", "random", "--isl", "64")


@pytest.fixture
def tokentwin(capsys: pytest.CaptureFixture[str]) -> Command:
    return caller(capsys)


def load(**flags: object) -> Workload:
    return load_workload(spec_from_flags({**RANDOM, **flags}), seed=0)


def test_runs_are_as_many_times_shorter_as_an_answer_is_requests() -> None:
    assert Lengths.of(load()) == Lengths(SHORT, FULL, LONGEST, LONE, DRAWN)
    assert Lengths.of(load(best_of=2)) == Lengths(256, 2048, 32_768, 64, 512)
    # Four hypotheses of 32 tokens are 125 requests; below an eighth there is too little to judge a P95 by.
    assert Lengths.of(load(beam_width=4, output_len=32)) == Lengths(64, 512, 8192, 32, 128)
    assert Lengths.of(load(beam_width=4, output_len=32), 5000).full == 5000
    assert Lengths.of(load(best_of=2), 10).full == 256


@pytest.mark.parametrize("flags", [{"beam_width": 3, "output_len": 5}, {"best_of": 4}, {}])
def test_requests_to_the_engine_are_those_that_a_run_has(flags: dict[str, object]) -> None:
    workload = load(request_rate=50, **flags)
    run = simulate(workload, Deployment(model="llama-3.2-1b"))
    counted = len(workload)
    if run.beams is not None:
        counted = run.beams.requests
    elif run.candidates is not None:
        counted = run.candidates.answers
    assert workload.engine_requests().sum() == counted
    assert workload.come_whole().tolist() == [bool(flags)] * len(workload)


def test_the_answer_rests_on_a_run_of_that_length_and_progress_is_told() -> None:
    flags = {key: value for key, value in RANDOM.items() if key != "num_prompts"}
    traffic = make_traffic(spec_from_flags({**flags, "output_len": 4, "beam_width": 4}))
    built = build(Deployment(model="llama-3.2-1b"))
    told: list[str] = []
    found = find_capacity(
        built, traffic, Promises(parse_slo(["p95_e2el:25"])), replications=2, jobs=1, progress=told.append
    )
    assert found.at is not None
    assert found.beyond is not None
    # Twice as many, and twice again, where the drift test cannot tell.
    whole = {FULL // 8 * 2**doubled for doubled in range(5)}
    assert max(whole) == LONGEST // 8
    assert {trial.num_requests for trial in found.trials} <= {SHORT // 8, SHORT // 2, *whole}
    assert found.at.num_requests in whole
    assert found.at.sustained
    assert not found.beyond.sustained
    assert any("of 512 requests" in words for words in told)
    assert "states of the world" in told[-1]
    assert found.interval is not None
    assert np.isfinite([found.interval.low, found.interval.high]).all()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--beam-width", "4", "--slo", "p95_itl:50"), "--slo p95_itl: every answer comes whole"),
        (("--best-of", "4", "--slo", "mean_tpot:50"), "--slo mean_tpot: every answer comes whole"),
        (("--beam-width", "4", "--goodput", "tpot:50"), "a goodput limit of tpot: every answer comes whole"),
        (("--osl", "1", "--slo", "p95_itl:50"), "--slo p95_itl: every answer has one token"),
    ],
)
@pytest.mark.parametrize("command", ["capacity", "plan"])
def test_a_pace_is_no_promise_for_what_comes_whole(
    tokentwin: Command, command: str, flags: tuple[str, ...], said: str
) -> None:
    rate = ("--request-rate", "4") if command == "plan" else ()
    answer = tokentwin(command, *COMMAND, *rate, *flags)
    assert answer.code == 2
    assert said in answer.error
    assert "limit on E2EL instead" in answer.error


def test_of_answers_of_one_token_the_limit_on_tpot_is_neither_kept_nor_broken() -> None:
    flags = {"model": "llama-3.2-1b", "dataset_name": "random", "isl": 64, "osl": 1, "num_prompts": 64}
    found = plan(
        **flags, slo="chat", replications=1, request_rate=20, price={"h200": 3}, tp_sizes=[1], top=1
    ).answer.plan
    assert " nan" not in "\n".join(plan_lines(found))
    (fleet,) = json.loads(json.dumps(plan_json(found), allow_nan=False))["fleets"]
    assert fleet["p95_tpot_ms"] is None
    assert fleet["p95_ttft_ms"] == fleet["p95_e2el_ms"]
    assert found.winner is not None
    assert found.winner.capacity is not None
    said = " ".join(" ".join(capacity_lines(found.winner.capacity, found.winner.built)).split())
    assert "P95 TPOT cannot be judged, because no answer has one" in said
    assert "infinite" not in said
    promises = capacity_json(found.winner.capacity, found.winner.built)["at_capacity"]["promises"]
    assert (promises["p95_ttft"]["kept"], promises["p95_tpot"]["kept"]) == (True, None)
