"""Capacity: near closed forms for simple servers, monotone, indifferent to where the search starts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from experiments.capacity import Capacity, find_capacity
from experiments.capacity_report import capacity_json, capacity_lines, target_sentence
from experiments.capacity_traffic import Ladder, make_traffic
from experiments.capacity_trial import Promises, judge
from sim.deployment import Built, Deployment, build, simulate
from sim.record import Floats
from sim.saturation import Load
from sim.slo import parse_goodput, parse_slo
from sim.workload import WorkloadSpec, load_workload
from sim.workload.flags import spec_from_flags
from tokentwin.cli import main

SERVICE_S = 0.1


class OneByOne:
    """Every step takes a tenth of a second."""

    def step_s(
        self,
        num_tokens: int,
        num_sampled: int,
        prefills: Sequence[tuple[int, int]],
        num_decodes: int,
        decode_context_sum: int,
        decode_context_max: int,
    ) -> float:
        return SERVICE_S

    def decode_run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> Floats:
        return np.full(num_steps, SERVICE_S)

    def host_s(self, num_seqs: int, num_tokens: int) -> float:
        return 0.0


@pytest.fixture(scope="module")
def counter() -> Built:
    """One request at a time and one step each: with `OneByOne`, a server of constant service time."""
    return build(
        Deployment(
            model="llama-3.2-1b",
            max_num_seqs=1,
            async_scheduling=False,
            tokenize_us_per_token=0,
            detokenize_us_per_token=0,
        )
    )


@pytest.fixture(scope="module")
def server() -> Built:
    return build(Deployment(model="llama-3.1-8b", gpu="h200"))


def find(built: Built, slo: list[str], **options: object) -> Capacity:
    flags = {"dataset_name": "random", "input_len": 64, "output_len": 1}
    flags |= {str(k): v for k, v in dict(options.pop("flags", {})).items()}  # type: ignore[call-overload]
    traffic = make_traffic(spec_from_flags(flags), variable=options.pop("variable", None))  # type: ignore[arg-type]
    promises = Promises(parse_slo(slo))
    return find_capacity(built, traffic, promises, **{"replications": 1, "full": 1024, **options})  # type: ignore[arg-type]


def md1_wait_below(t_s: float, rate: float) -> float:
    """P(wait ≤ t) in M/D/1 (Erlang 1909): (1 − ρ) Σ e^{λ(t − kD)} (−λ(t − kD))^k / k!, k up to t/D."""
    rho = rate * SERVICE_S
    terms = (
        math.exp(rate * (t_s - k * SERVICE_S)) * (-rate * (t_s - k * SERVICE_S)) ** k / math.factorial(k)
        for k in range(int(t_s / SERVICE_S) + 1)
    )
    return (1 - rho) * sum(terms)


def md1_capacity(limit_s: float) -> float:
    """Rate at which 95 % of the requests of M/D/1 have waited and been served within the limit."""
    low, high = 0.01, 1 / SERVICE_S
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if md1_wait_below(limit_s - SERVICE_S, middle) >= 0.95 else (low, middle)
    return low


@pytest.mark.parametrize("limit_ms", [300, 800])
def test_a_batch_of_one_has_the_capacity_of_m_d_1(counter: Built, limit_ms: int) -> None:
    found = find(counter, [f"p95_ttft:{limit_ms}"], pricer=OneByOne(), full=8192)
    # Utilisation 0.62 and 0.84; a quantile of 8,192 dependent waits leaves a few percent of error in the rate.
    assert found.load == pytest.approx(md1_capacity(limit_ms / 1000), rel=0.04)
    assert found.next_load is not None
    assert found.next_load > found.load


def test_without_a_tight_limit_capacity_is_the_service_rate(counter: Built) -> None:
    found = find(counter, ["p95_ttft:600000"], pricer=OneByOne(), full=4096)
    assert found.load == pytest.approx(1 / SERVICE_S, rel=0.03)  # the drift test allows 2 % of growth
    assert found.beyond is not None
    assert found.beyond.saturation.load is Load.SATURATED


def test_capacity_grows_with_the_limit(counter: Built) -> None:
    loads = [find(counter, [f"p95_ttft:{ms}"], pricer=OneByOne()).load for ms in (150, 400, 1500)]
    assert None not in loads
    assert loads == sorted(loads)  # type: ignore[type-var]
    assert len(set(loads)) == 3


def test_the_start_of_the_search_does_not_matter(counter: Built) -> None:
    found = {find(counter, ["p95_ttft:400"], pricer=OneByOne(), start=start).load for start in (0.5, 90)}
    assert len(found) == 1


def test_the_same_seed_gives_the_same_answer(server: Built) -> None:
    flags = {"input_len": 512, "output_len": 8}
    one, two = (
        capacity_json(find(server, ["p95_ttft:200"], flags=flags, full=512, replications=2, jobs=1), server)
        for _ in range(2)
    )
    assert one == two
    low, high = one["capacity_ci95"]
    assert low < one["capacity"] < high
    json.dumps(one, allow_nan=False)


def test_a_lone_request_that_misses_makes_every_rate_infeasible(server: Built) -> None:
    found = find(server, ["p95_tpot:1"], flags={"output_len": 16})
    assert found.load is None
    assert found.infeasible is not None
    assert "have the server to themselves, P95 TPOT is" in found.infeasible
    assert not found.trials
    assert "Infeasible at any load" in "\n".join(capacity_lines(found, server))


def test_requests_too_long_for_the_server_make_every_rate_infeasible() -> None:
    short = build(Deployment(model="llama-3.2-1b", max_model_len=128))
    traffic = make_traffic(
        spec_from_flags(
            {"dataset_name": "random", "input_len": 100, "output_len": 8, "random_range_ratio": "0.5"}
        )
    )
    found = find_capacity(short, traffic, Promises(parse_slo(["p95_ttft:500"])), replications=1)
    assert found.infeasible is not None
    assert "refused" in found.infeasible


def test_a_closed_loop_is_searched_in_whole_users(counter: Built) -> None:
    # With u users the queue is always u − 1 long: everyone waits u services.
    found = find(counter, ["p95_ttft:750"], pricer=OneByOne(), variable="max_concurrency", full=1024)
    assert (found.load, found.next_load) == (7.0, 8.0)
    assert found.requests_per_s == pytest.approx(1 / SERVICE_S, rel=0.01)


def test_a_trace_is_sped_up_as_a_whole(tmp_path: Path, counter: Built) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [json.dumps({"prompt_tokens": 8, "output_tokens": 1, "arrival_s": 0.5 * i}) for i in range(200)]
    path.write_text("\n".join(rows))
    traffic = make_traffic(spec_from_flags({"dataset_name": "custom", "dataset_path": str(path)}))
    found = find_capacity(
        counter, traffic, Promises(parse_slo(["p95_ttft:101"])), pricer=OneByOne(), replications=1
    )
    # Every half second one request of a tenth: nobody waits until the trace runs five times as fast.
    assert found.variable == "rate_scale"
    assert found.load == pytest.approx(5.0, rel=0.02)
    assert found.requests_per_s == pytest.approx(10.0, rel=0.02)


@pytest.mark.parametrize("load", [0.5, 37.0])
def test_what_a_run_says_of_its_traffic_makes_that_traffic_again(tmp_path: Path, load: float) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500 * i, "input_length": 20 + i, "output_length": 4, "hash_ids": [i]} for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    generated = {"dataset_name": "random", "input_len": 60, "output_len": 8, "random_range_ratio": "0.5"}
    for flags in (generated, {"dataset_name": "mooncake", "dataset_path": str(path)}):
        traffic = make_traffic(spec_from_flags(flags))
        workload = traffic.workload(load, 40)
        again = load_workload(WorkloadSpec.model_validate(workload.meta["spec"]), seed=0)
        assert again.sent_s == pytest.approx(workload.sent_s, rel=1e-12)
        assert (again.prompt_tokens == workload.prompt_tokens).all()
    users = make_traffic(spec_from_flags(generated), variable="max_concurrency").workload(3, 40)
    assert "spec" not in users.meta


def test_goodput_counts_requests_that_keep_all_their_limits(counter: Built) -> None:
    traffic = make_traffic(spec_from_flags({"dataset_name": "random", "input_len": 64, "output_len": 1}))
    by_goodput, by_slo = (
        find_capacity(counter, traffic, promises, pricer=OneByOne(), replications=1, full=1024).load
        for promises in (
            Promises(goodput=parse_goodput(["ttft:500"]), attainment=0.9),
            Promises(parse_slo(["p90_ttft:500"])),
        )
    )
    assert by_goodput == pytest.approx(by_slo, rel=0.012)  # a rung at most, for interpolated percentiles


def test_a_queue_that_grows_is_not_sustained_even_within_the_limits(counter: Built) -> None:
    traffic = make_traffic(spec_from_flags({"dataset_name": "random", "input_len": 64, "output_len": 1}))
    record = simulate(traffic.workload(12.0, 2000), counter, pricer=OneByOne())
    trial = judge(record, 12.0, Promises(parse_slo(["p95_ttft:600000"])))
    assert all(outcome.kept for outcome in trial.outcomes)
    assert not trial.sustained
    assert trial.reason.startswith("saturated")


def test_a_target_beyond_capacity_is_said_to_be_so(counter: Built) -> None:
    found = find(counter, ["p95_ttft:300"], pricer=OneByOne())
    assert found.load is not None
    text = target_sentence(found, 4 * found.load + 0.1, 1)
    assert "NOT sustained" in text
    assert "takes 5 such deployments" in text
    assert "sustained, with" in target_sentence(found, found.load / 2, 1)


def test_rungs_are_a_percent_apart_and_whole_numbers_where_users_are_counted() -> None:
    ladder, users = Ladder(), Ladder(whole_numbers=True)
    assert all(ladder.rung(ladder.load(rung)) == rung for rung in range(-600, 600))
    assert all(users.rung(users.load(rung)) == rung for rung in range(1, 600))
    assert [users.load(rung) for rung in range(1, 5)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dataset-name", "random"], "no promise to keep"),
        (["--dataset-name", "random", "--slo", "chat", "--max-concurrency", "4"], "--workload-var"),
        (
            ["--dataset-name", "random", "--slo", "chat", "--slo-attainment", "0.9"],
            "no effect without --goodput",
        ),
        (["--dataset-name", "random", "--goodput", "ttft:9", "--slo-attainment", "95"], "0.95 is 95 %"),
        (["--dataset-name", "random", "--slo", "chat", "--target-concurrency", "4"], "--workload-var"),
        (["--dataset-name", "random", "--slo", "chat", "--rate-points", "0:1,9:2"], "steady load"),
        (["--dataset-name", "random", "--slo", "chat", "--workload-var", "rate_scale"], "needs a trace"),
    ],
)
def test_what_cannot_be_is_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "--model", "llama-3.2-1b", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_model_that_does_not_fit_is_infeasible_at_any_load(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["capacity", "--model", "llama-3.1-70b", "--dataset-name", "random", "--slo", "chat"]
    assert main(arguments) == 2
    assert "infeasible at any load: llama-3.1-70b does not fit" in capsys.readouterr().err


def test_the_command_answers_in_eighty_columns_and_in_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "capacity",
        "--model",
        "llama-3.2-1b",
        "--dataset-name",
        "random",
        "--isl",
        "256",
        "--osl",
        "4",
    ]
    arguments += ["--slo", "p95_ttft:50", "--num-prompts", "512", "--replications", "1"]
    code = main([*arguments, "-o", str(tmp_path), "--target-request-rate", "100000", "--fail-on-slo"])
    assert code == 3
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("Wrote"))
    assert "NOT sustained" in out
    assert "each run's middle" in out
    answer = json.loads((tmp_path / "capacity.json").read_text())
    assert answer["capacity"] > 1
    assert answer["target_sustained"] is False
    assert {p.name for p in tmp_path.iterdir()} >= {"report.html", "result.json", "requests.parquet"}
    again = out[out.index("tokentwin simulate") : out.rindex("=" * 80)].replace("\n", " ").split()
    assert main([*again[1:], "--replications", "1"]) == 0
    assert "Meets P95 TTFT" in capsys.readouterr().out
