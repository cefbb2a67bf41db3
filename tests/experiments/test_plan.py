"""Plans: bounds that bound, the cheapest fleet whoever is left out, and answers that a simulation confirms."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodel.profile import list_profiles
from experiments.capacity_traffic import Closed, make_traffic
from experiments.capacity_trial import Promises, judge
from experiments.explore import payload
from experiments.explore_data import load_space
from experiments.plan import Plan, front_point, make_candidates, make_plan, servers
from experiments.plan_bounds import bounds_of, broken
from experiments.plan_report import flips, plan_json, plan_lines, repository, vllm_command
from experiments.prices import load_prices
from serving.errors import UsageError
from sim.deployment import Deployment, build, simulate
from sim.latency import latencies
from sim.slo import parse_goodput, parse_slo
from sim.workload.flags import spec_from_flags
from tests.sim.worlds import make_workload
from tokentwin.cli import main
from tokentwin.commands.plan import answer_plan

TRAFFIC = {"dataset_name": "random", "input_len": 512, "output_len": 8, "request_rate": 200.0}
PROMISES = Promises(parse_slo(["p95_ttft:100"]))
BASE = Deployment(model="llama-3.2-1b")


def plan(
    prices: dict[str, float] | None = None,
    *,
    top: int = 3,
    load: float = 200.0,
    replications: int = 1,
    **axes: list[object],
) -> Plan:
    candidates = make_candidates(
        BASE, prices or {"l40s": 1.0, "h100": 2.9}, {"tensor_parallel_size": [1], **axes}
    )
    traffic = make_traffic(spec_from_flags(TRAFFIC))
    return make_plan(
        candidates, traffic, load, PROMISES, top=top, full=512, replications=replications, jobs=1
    )


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What `small` says while it is worked out."""
    return []


@pytest.fixture(scope="module")
def small(said: list[str]) -> Plan:
    """All of two GPUs and two degrees of tensor parallelism, with the winner's headroom and intervals."""
    candidates = make_candidates(BASE, {"l40s": 1.0, "h100": 2.9}, {"tensor_parallel_size": [1, 2]})
    traffic = make_traffic(spec_from_flags(TRAFFIC))
    return make_plan(
        candidates,
        traffic,
        200.0,
        PROMISES,
        top=2,
        headroom=1,
        full=512,
        replications=2,
        jobs=1,
        told=said.append,
        progress=said.append,
    )


def test_every_run_for_a_candidate_says_how_far_it_is(small: Plan, said: list[str]) -> None:
    """In order: the candidate, a request at a time on it, then fleets of it; at last headroom and intervals."""
    first = [line for line in said if line.startswith("1 of 4: l40s llama-3.2-1b")]
    assert first[0] == "1 of 4: l40s llama-3.2-1b"
    assert first[1].startswith("1 of 4: l40s llama-3.2-1b: one request at a time: ")
    assert any(": 1 replica: 200 requests/s: 512 of 512 requests" in line for line in first)
    rest = [line for line in said if " of 4: " not in line]
    for what in ("headroom of", "intervals of"):
        assert any(line.startswith(what) and ": " in line for line in rest)
    runs = [line.split(": ")[-1].split(" of ") for line in said if line.endswith(" requests")]
    assert all(int(done.replace(",", "")) <= int(total.split()[0].replace(",", "")) for done, total in runs)


@pytest.mark.parametrize("gpu", list_profiles())
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_no_request_is_faster_than_its_bounds(gpu: str, quantization: str | None) -> None:
    built = build(Deployment(model="llama-3.2-3b", gpu=gpu, quantization=quantization))
    flags = {"dataset_name": "random", "input_len": 600, "output_len": 12, "random_range_ratio": "0.9"}
    workload = Closed(make_traffic(spec_from_flags(flags))).workload(1, 24)
    record = simulate(workload, built)
    bounds, lat, row = bounds_of(built, workload), latencies(record), record.requests.request_id
    assert (bounds.ttft_s[row] <= lat.ttft_s).all()
    assert (bounds.tpot_s[row] <= lat.tpot_s)[record.requests.output_tokens > 1].all()
    assert (bounds.e2el_s[row] <= lat.e2el_s).all()
    # All of them at once: no replica does more work in a second than its peaks allow.
    together = simulate(Closed(make_traffic(spec_from_flags(flags))).workload(10**6, 200), built)
    assert bounds_of(built, workload).work_s * 200 <= together.end_s * 1.05


def test_a_promise_below_the_bounds_is_broken_without_simulating() -> None:
    built = build(BASE)
    workload = make_traffic(spec_from_flags(TRAFFIC)).workload(1.0, 64)
    bounds = bounds_of(built, workload)
    assert broken(bounds, workload, Promises(parse_slo(["p95_ttft:100"]))) is None
    assert "P95 TTFT is at least" in str(broken(bounds, workload, Promises(parse_slo(["p95_ttft:0.1"]))))
    assert "at most 0.0%" in str(broken(bounds, workload, Promises(goodput=parse_goodput(["tpot:0.01"]))))


def test_the_fleet_sustains_the_load_and_one_replica_fewer_does_not(small: Plan) -> None:
    winner = small.winner
    assert winner is not None
    traffic = make_traffic(spec_from_flags(TRAFFIC))
    for replicas, kept in ((winner.replicas, True), (winner.replicas - 1, False)):
        if replicas:
            deployment = winner.candidate.deployment.model_copy(update={"data_parallel_size": replicas})
            record = simulate(traffic.workload(200.0, 2048), deployment)
            assert judge(record, 200.0, PROMISES).sustained is kept
    room = winner.headroom(200.0)
    assert room is not None
    assert room > -0.02


def test_leaving_candidates_out_early_does_not_change_the_winner(small: Plan) -> None:
    every = plan(top=99, tensor_parallel_size=[1, 2])
    assert every.winner is not None
    assert small.winner is not None
    assert small.winner.candidate == every.winner.candidate
    assert small.winner.usd_per_hour == min(fleet.usd_per_hour for fleet in every.fleets)
    assert len(every.fleets) + len(every.pruned) == 4


def test_servers_of_a_mixture_are_on_their_own_and_their_deployment_says_so() -> None:
    one = build(Deployment(model="qwen3-30b-a3b", gpu="h200", max_model_len=4096))
    three = servers(one, 3)
    sent, prompts, outputs = np.arange(60) * 0.005, [200, 300, 500, 40] * 15, [3, 20, 9] * 20
    workload = make_workload(sent.tolist(), prompts, outputs)
    record, again = simulate(workload, three), simulate(workload, Deployment(**three.deployment.model_dump()))
    assert np.array_equal(record.requests.last_token_s, again.requests.last_token_s)
    assert three.limits.num_pages == one.limits.num_pages
    # Each is as if it were alone with every third request.
    alone = simulate(make_workload(sent[1::3].tolist(), prompts[1::3], outputs[1::3]), one)
    assert np.array_equal(np.sort(record.requests.last_token_s[1::3]), np.sort(alone.requests.last_token_s))


def test_costs_follow_from_gpus_and_prices(small: Plan) -> None:
    for fleet in small.fleets:
        price = fleet.candidate.usd_per_gpu_hour
        assert fleet.usd_per_hour == pytest.approx(fleet.gpus * price)
        assert fleet.usd_per_month == pytest.approx(fleet.gpus * price * 730)
        per_hour = fleet.summary.output_throughput * 3600
        assert fleet.usd_per_million_tokens == pytest.approx(fleet.usd_per_hour / per_hour * 1e6)
        watts = fleet.built.profile.facts.tdp_w * fleet.gpus
        assert 0 < fleet.joules_per_token <= watts / fleet.summary.output_throughput
    costs = [fleet.usd_per_hour for fleet in small.fleets]
    assert costs == sorted(costs)


def test_the_cheapest_fleet_is_on_the_front_and_a_beaten_one_is_not(small: Plan) -> None:
    assert small.fleets[0].on_front
    points = [front_point(fleet) for fleet in small.fleets]
    for fleet, point in zip(small.fleets, points, strict=True):
        beaten = any(
            all(a <= b for a, b in zip(other, point, strict=True)) and other != point for other in points
        )
        assert fleet.on_front is not beaten


def test_the_price_that_would_flip_the_choice_does() -> None:
    before = plan({"l40s": 1.0, "h100": 9.0})
    assert before.winner is not None
    assert before.winner.candidate.deployment.gpu == "l40s"
    other = next(f for f in before.fleets if f.candidate.deployment.gpu == "h100")
    sentence = next(text for text in flips(before) if text.startswith("Price:"))
    turn = before.winner.usd_per_hour / other.gpus
    assert f"less than ${turn:.2f} an hour" in sentence
    after = plan({"l40s": 1.0, "h100": turn * 0.99})
    assert after.winner is not None
    assert after.winner.candidate.deployment.gpu == "h100"


def test_every_reason_for_leaving_out_is_said() -> None:
    base = {"model": "llama-3.1-8b", **TRAFFIC, "price": ["rtx4090=0.5", "a100=1.5"], "replications": 1}
    base |= {"quantizations": ["none", "fp8"], "tensor_parallel_sizes": ["1", "3"], "num_prompts": 512}
    found = answer_plan({**base, "ttft": 0.2, "models": None}).plan
    assert found.winner is None
    why = {p.why: p for p in found.pruned}
    assert set(why) == {"memory", "format", "roofline", "invalid"} or set(why) == {
        "format",
        "roofline",
        "invalid",
    }
    assert len(found.pruned) == 8
    text = "\n".join(plan_lines(found))
    assert "No candidate sustains" in text
    assert "a100 has no fp8 arithmetic" in text


def test_intervals_and_json_are_complete(small: Plan) -> None:
    content = json.loads(json.dumps(plan_json(small), allow_nan=False))
    first = content["fleets"][0]
    low, high = first["p95_ttft_ms_ci95"]
    assert low <= first["p95_ttft_ms"] <= high
    assert first["replicas"] * 1 <= first["gpus"]
    assert content["vllm_serve"].startswith("vllm serve meta-llama/Llama-3.2-1B-Instruct ")


VLLM_FLAGS = {
    *("--tensor-parallel-size", "--dtype", "--quantization", "--kv-cache-dtype", "--max-num-seqs"),
    *("--max-num-batched-tokens", "--max-model-len", "--gpu-memory-utilization", "--block-size"),
    *("--scheduling-policy", "--enable-prefix-caching", "--no-enable-prefix-caching"),
    *("--no-enable-chunked-prefill", "--enforce-eager"),
}


def test_the_command_has_only_flags_that_vllm_has(small: Plan) -> None:
    assert small.winner is not None
    command, _ = vllm_command(small.winner)
    flags = {word for word in shlex.split(command) if word.startswith("--")}
    assert flags <= VLLM_FLAGS
    continuous = plan({"h100": 2.9}, policy=["continuous"]).winner
    assert continuous is not None
    said = "vLLM has no --policy continuous; there is no command to serve this fleet with."
    assert vllm_command(continuous) == ("", [said])


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
        ("llama-2-70b", "meta-llama/Llama-2-70b-hf"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M"),
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("mixtral-8x22b", "mistralai/Mixtral-8x22B-Instruct-v0.1"),
        ("my/own-model", "my/own-model"),
    ],
)
def test_shipped_shapes_have_repositories(model: str, name: str) -> None:
    assert repository(model) == name


def test_prices_come_from_examples_a_file_or_the_command_line(tmp_path: Path) -> None:
    examples = load_prices()
    assert set(examples) == set(list_profiles())
    assert all(price.example for price in examples.values())
    path = tmp_path / "mine.yaml"
    path.write_text("prices: {h100: 2.0, h200: {usd: 3.0, source: contract}}")
    mine = load_prices(path, ["h200=2.5"])
    assert {gpu: price.usd_per_hour for gpu, price in mine.items()} == {"h100": 2.0, "h200": 2.5}
    assert not any(price.example for price in mine.values())
    for wrong in (["h100"], ["h100=free"], ["h100=-1"]):
        with pytest.raises(UsageError, match="--price"):
            load_prices(None, wrong)


def test_a_curve_is_planned_at_its_peak() -> None:
    flags = {"model": "llama-3.2-1b", "dataset_name": "random", "input_len": 64, "output_len": 4}
    flags |= {"rate_points": "0:10,60:40,120:10", "price": ["h100=2.9"], "replications": 1, "ttft": 12.0}
    answer = answer_plan({**flags, "num_prompts": 512, "tensor_parallel_sizes": ["1"]})
    assert answer.plan.load == 40.0
    assert "its mean is 25" in answer.plan.notes[0]


def test_users_can_be_planned_for_instead_of_a_rate() -> None:
    flags = {"model": "llama-3.2-1b", "dataset_name": "random", "input_len": 64, "output_len": 4}
    flags |= {"target_concurrency": 12.0, "price": ["h100=2.9"], "replications": 1, "ttft": 12.0, "top": 1}
    found = answer_plan({**flags, "num_prompts": 512, "tensor_parallel_sizes": ["1"]}).plan
    assert (found.variable, found.load) == ("max_concurrency", 12.0)
    assert found.winner is not None
    assert np.isfinite(found.winner.usd_per_million_tokens)


def check_click_through(folder: Path, fleets: list[dict[str, Any]]) -> None:
    """`tokentwin explore` shows the plan's figures, and each fleet's link leads to the run that they are of."""
    assert main(["explore", str(folder)]) == 0
    data = payload(load_space(folder), folder, {})
    assert data["figure"]["p95_ttft_ms"] == pytest.approx([f["p95_ttft_ms"] for f in fleets], rel=1e-5)
    assert data["prices"]["l40s"] == {"usd": 1.0, "example": False}
    assert data["limits"] == {"ttft": {"statistic": "p95", "ms": 200.0}}
    assert all(data["has"])
    for href, fleet in zip(data["report"], fleets, strict=True):
        result = json.loads((folder / href).with_name("result.json").read_text())
        assert result["p95_ttft_ms"] == pytest.approx(fleet["p95_ttft_ms"])
        assert result["sim_meets_slos"]
        assert fleet["not_measured"] == result["sim_extrapolations"]


def test_the_command_fits_the_terminal_and_writes_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--model", "llama-3.2-1b", "--dataset-name", "random", "--isl", "64", "--osl", "4"]
    arguments += [
        "--request-rate",
        "100",
        "--slo",
        "autocomplete",
        "--price",
        "h100=2.9",
        "l40s=1",
        "--top",
        "2",
    ]
    arguments += ["--tp-sizes", "1", "--num-prompts", "512", "--replications", "1"]
    assert main([*arguments, "-o", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines() if str(tmp_path) not in line)
    assert "vllm serve meta-llama/Llama-3.2-1B-Instruct" in out
    fleets = json.loads((tmp_path / "plan.json").read_text())["fleets"]
    assert len(list(tmp_path.glob("*/report.html"))) == len(fleets) == 2
    check_click_through(tmp_path, fleets)
    assert (
        main([*arguments[:-4], "--total-gpus", "1", "--ttft", "1", "--slo", "p95_tpot:5", "--fail-on-slo"])
        == 3
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--slo", "chat"], "no rate to plan for"),
        (["--request-rate", "5"], "no promise to keep"),
        (
            ["--request-rate", "5", "--slo", "chat", "--gpus", "h300"],
            "--gpus 'h300' is not a shipped profile",
        ),
        (["--request-rate", "5", "--slo", "chat", "--price", "h100=1", "--gpus", "h200"], "no price"),
        (["--request-rate", "5", "--slo", "chat", "--tp-sizes", "two"], "not a whole number"),
        (
            ["--request-rate", "5", "--slo", "chat", "--tp-sizes", "3"],
            "no candidate can be configured: --tensor",
        ),
        (["--request-rate", "5", "--slo", "chat", "--quantizations", "none", "fp9"], "did you mean 'fp8'"),
        (["--request-rate", "5", "--slo", "chat", "--policies", "chunkd"], "did you mean 'chunked'"),
        (["--request-rate", "5", "--slo", "p95_ttft:9", "--ttft", "5"], "keep one"),
        (
            ["--request-rate", "5", "--slo", "chat", "--quantization", "fp8", "--quantizations", "fp8"],
            "keep one",
        ),
    ],
)
def test_what_cannot_be_is_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3.2-1b", "--dataset-name", "random", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error, error
    assert error.count("\n") == 1


def test_drafting_is_a_candidate_and_its_bound_is_lower() -> None:
    """Alone on a large model, drafts that mostly stand beat none, and no bound forbids what the plan finds."""
    config = '{"method": "ngram", "num_speculative_tokens": 4, "acceptance": 0.9}'
    found = answer_plan(
        {
            "model": "llama-3.1-8b",
            "price": ["h100=2.9"],
            "tensor_parallel_sizes": ["1"],
            "dataset_name": "random",
            "input_len": 256,
            "output_len": 128,
            "request_rate": 2.0,
            "slo": ["p95_tpot:4.5"],
            "speculative_configs": ["none", config],
            "num_prompts": 256,
            "replications": 1,
        }
    ).plan
    assert found.winner is not None
    assert found.winner.candidate.deployment.speculative_config is not None
    assert [p.why for p in found.pruned] == ["roofline"] or len(found.pruned) == 1
    command, _ = vllm_command(found.winner)
    words = shlex.split(command)
    drafting = json.loads(words[words.index("--speculative-config") + 1])
    assert drafting == {"method": "ngram", "num_speculative_tokens": 4}
    plain, drafted = (
        bounds_of(build(Deployment(model="llama-3.1-8b", gpu="h100", speculative_config=c)), load_of())
        for c in (None, config)
    )
    assert np.nanmean(drafted.tpot_s) == pytest.approx(np.nanmean(plain.tpot_s) / 5, rel=0.01)


def load_of() -> Any:
    from sim.workload import load_workload

    spec = spec_from_flags({"dataset_name": "random", "input_len": 256, "output_len": 128, "num_prompts": 32})
    return load_workload(spec, seed=0)
