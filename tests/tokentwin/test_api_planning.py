"""`tt.capacity`, `tt.sweep` and `tt.plan`: tables that agree with the runs behind them."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokentwin as tt

SERVED: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpu": "h200",
    "dataset_name": "random",
    "isl": 512,
    "osl": 16,
}
PRICES = {"h200": 3.5, "l40s": 1.0}


@pytest.fixture(scope="module")
def found() -> tt.CapacityResult:
    return tt.capacity(**SERVED, slo=["p95_ttft:300", "p95_tpot:60"], replications=1, num_prompts=512)


@pytest.fixture(scope="module")
def swept() -> tt.SweepResult:
    return tt.sweep(
        **SERVED,
        num_prompts=24,
        request_rate=[8, 64],
        max_num_seqs=np.array([4, 64]),
        slo=["p95_ttft:300"],
        num_runs=2,
        seed=3,
        jobs=1,
    )


@pytest.fixture(scope="module")
def planned() -> tt.PlanResult:
    return tt.plan(
        model="llama-3.1-8b",
        dataset_name="random",
        isl=512,
        osl=16,
        request_rate=20,
        slo="p95_ttft:500",
        price=PRICES,
        tensor_parallel_sizes=[1],
        quantizations=[None, "fp8"],
        top=4,
        num_prompts=512,
        replications=1,
    )


def test_the_run_at_capacity_keeps_the_promises_and_the_next_load_does_not(found: tt.CapacityResult) -> None:
    trials, load = found.trials(), found.load
    assert load is not None
    whole = trials[trials["full_length"]]
    assert whole[whole["sustained"]]["request_rate"].max() == load
    assert whole[~whole["sustained"]]["request_rate"].min() == found.summary().loc["not_sustained", "value"]
    requests = found.requests
    span_s = requests["sent_s"].iloc[-1] - requests["sent_s"].iloc[0]
    assert len(requests) / span_s == pytest.approx(load, rel=0.01)
    middle = requests[(requests["sent_s"] > span_s / 4) & (requests["sent_s"] < span_s * 3 / 4)]
    assert middle["ttft_s"].quantile(0.95) < 0.36
    assert found.summary().loc["p95_ttft_ms", "value"] <= 300
    assert found.run().verdict.saturated is False


def test_a_capacity_that_is_none_says_why() -> None:
    found = tt.capacity(**SERVED, slo="p95_tpot:1", num_prompts=512)
    assert found.load is None
    assert "P95 TPOT" in (found.infeasible or "")
    assert "Infeasible at any load" in found._repr_html_()
    assert found.summary()["value"].isna().all()
    with pytest.raises(tt.UsageError, match="no run at capacity"):
        found.run()
    assert len(found.plot.latency_vs_load().data[1].x) == 1  # one request at a time


def test_the_capacity_of_a_base_with_a_workload(found: tt.CapacityResult, tmp_path: Path) -> None:
    file = tmp_path / "traffic.yaml"
    file.write_text(
        "tenants: [{dataset: {name: random, input_len: 512, output_len: 16}, num_prompts: 512, "
        "arrivals: {request_rate: 5}}]",
        encoding="utf-8",
    )
    base = tt.Deployment(model="llama-3.1-8b", gpu="l40s")
    same = tt.capacity(
        file, deployment=base, gpu="h200", slo="p95_ttft:300 p95_tpot:60", replications=1, num_prompts=512
    )
    assert same.load is not None
    assert found.load is not None
    assert same.load == pytest.approx(found.load, rel=0.03)  # drawn by a tenant of another name


def test_latency_over_load_shows_every_trial_the_limit_and_the_answer(found: tt.CapacityResult) -> None:
    fig = found.plot.latency_vs_load("p95_ttft")
    drawn = sorted(x for trace in fig.data[:2] for x in trace.x)
    assert drawn == sorted(found.trials()["request_rate"])
    assert set(fig.data[2].y) == {300.0}
    assert fig.layout.shapes[0].x0 == found.load
    with pytest.raises(tt.UsageError, match="'p95_e2el' was not promised"):
        found.plot.latency_vs_load("p95_e2el")


def test_a_sweep_has_a_row_per_run_that_a_simulation_gives_too(swept: tt.SweepResult) -> None:
    table = swept.summary()
    assert len(swept) == len(table) == 2 * 2 * 2
    assert swept.parameters == ("request_rate", "max_num_seqs")
    row = table[(table["request_rate"] == 64) & (table["max_num_seqs"] == 4) & (table["run"] == 1)].iloc[0]
    alone = tt.simulate(
        **SERVED, num_prompts=24, request_rate=64, max_num_seqs=4, slo="p95_ttft:300", seed=3 + 1
    )
    assert row["p95_ttft_ms"] == alone.summary.ttft.at(95.0) * 1000
    again = swept.run(int(row.name))  # type: ignore[arg-type]
    assert again.summary == alone.summary
    assert swept.best("p95_ttft_ms", maximize=True).summary.ttft.at(95.0) * 1000 == table["p95_ttft_ms"].max()


def test_requests_of_a_sweep_are_those_of_its_runs(swept: tt.SweepResult) -> None:
    requests = swept.requests
    assert len(requests) == 8 * 24
    p95_ms = requests.groupby("index")["ttft_s"].quantile(0.95) * 1000
    assert p95_ms.to_numpy() == pytest.approx(swept.summary()["p95_ttft_ms"].to_numpy())


def test_pictures_of_a_sweep(swept: tt.SweepResult) -> None:
    fig = swept.plot.latency_vs_load()
    assert [trace.name for trace in fig.data] == ["max_num_seqs 4", "max_num_seqs 64", "SLO 300 ms"]
    front = swept.plot.pareto("p95_ttft_ms", "output_throughput").data[1]
    table = swept.summary()
    for x, y in zip(front.x, front.y, strict=True):  # nothing is at least as good in both
        better = table[(table["p95_ttft_ms"] < x) & (table["output_throughput"] > y)]
        assert better.empty
    heat = swept.plot.heatmap("request_rate", "max_num_seqs").data[0]
    mean = table[(table["request_rate"] == 8) & (table["max_num_seqs"] == 4)]["p95_ttft_ms"].mean()
    assert heat.z[0][0] == pytest.approx(mean)
    with pytest.raises(
        tt.UsageError, match="'p95_tftt_ms' is not a figure of a run; did you mean 'p95_ttft_ms'"
    ):
        swept.plot.latency_vs_load("p95_tftt_ms")
    with pytest.raises(tt.UsageError, match="'max_num_sqs' does not vary in this sweep; did you mean"):
        swept.plot.heatmap("max_num_sqs", "request_rate")


def test_a_sweep_of_a_dictionary_or_a_file_is_that_of_keywords(swept: tt.SweepResult, tmp_path: Path) -> None:
    spec = {
        "base": {**SERVED, "num_prompts": 24, "slo": "p95_ttft:300", "seed": 3},
        "grid": {"request_rate": [8, 64], "max_num_seqs": [4, 64]},
        "num_runs": 2,
    }
    file = tmp_path / "sweep.yaml"
    file.write_text(repr(spec), encoding="utf-8")  # a dictionary of Python is one of YAML
    for given in (spec, file):
        kept = tt.sweep(given, jobs=1, output_dir=tmp_path / "out", experiment_name=type(given).__name__)
        assert kept.summary().equals(swept.summary())
        assert kept.folder is not None
        assert (kept.folder / "results.parquet").exists()


def test_a_failing_point_is_a_row_with_its_error() -> None:
    swept = tt.sweep(**SERVED, num_prompts=4, gpu_memory_utilization=[0.02, 0.9], jobs=1)
    assert swept.failed == 1
    assert "does not fit" in swept.summary().loc[0, "error"]
    assert "failed" in swept._repr_html_()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_prompts": 4}, "nothing varies"),
        ({"request_rat": [1, 2]}, r"sweep\(\): unknown key 'request_rat'; did you mean 'request_rate'"),
        ({"request_rate": ["fast"]}, r"request_rate: must be a valid number"),
        ({"request_rate": [1], "resume": True}, "resume has no effect without output_dir"),
        ({"max_num_seqs": [4], "isl": 7, "input_len": 8}, "input_len is given twice"),
    ],
)
def test_wrong_sweeps_say_so(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(tt.UsageError, match=words):
        tt.sweep(model="llama-3.1-8b", dataset_name="random", jobs=1, **flags)


def test_a_plan_is_ranked_by_cost_and_priced_by_hand(planned: tt.PlanResult) -> None:
    table = planned.summary()
    assert table["usd_per_month"].is_monotonic_increasing
    for _, row in table.iterrows():
        assert row["usd_per_hour"] == pytest.approx(row["gpus"] * PRICES[row["gpu"]])
        assert row["usd_per_month"] == pytest.approx(730 * row["usd_per_hour"])
        assert row["p95_ttft_ms"] <= 500
        per_million = row["usd_per_hour"] / (row["output_throughput"] * 3600) * 1e6
        assert row["usd_per_million_tokens"] == pytest.approx(per_million)
    assert len(table) + len(planned.pruned()) == 4
    run = planned.run(1)
    assert run.summary.ttft.at(95.0) * 1000 == table.loc[1, "p95_ttft_ms"]
    assert planned.command.startswith("vllm serve meta-llama/Llama-3.1-8B-Instruct")
    bars = planned.plot.cost().data[0]
    assert sorted(bars.x) == sorted(table["usd_per_month"])
    drawn = [x for trace in planned.plot.pareto("ttft").data[:2] for x in trace.x]
    assert sorted(drawn) == sorted(table["usd_per_month"])
    with pytest.raises(tt.UsageError, match="there is no fleet 9"):
        planned.run(9)


def test_the_plan_chooses_what_a_deployment_may_not_set() -> None:
    with pytest.raises(tt.UsageError, match="gpu of the deployment has no effect"):
        tt.plan(deployment=tt.Deployment(model="llama-3.1-8b", gpu="h100"), dataset_name="random", slo="chat")


@pytest.mark.parametrize("name", ["found", "swept", "planned"])
def test_results_survive_pickling_and_show_themselves(name: str, request: pytest.FixtureRequest) -> None:
    result = request.getfixturevalue(name)
    copy = pickle.loads(pickle.dumps(result))
    assert copy.summary().equals(result.summary())
    assert copy.requests.equals(result.requests)
    html = result._repr_html_()
    assert html.count("<tr>") > 2
    assert "#" not in html.replace("&#", "")  # no colour of its own
    assert {"summary", "requests", "plot", "run"} <= set(dir(result))
    for picture in dir(result.plot):
        assert getattr(result.plot, picture).__doc__


@pytest.mark.parametrize("function", [tt.capacity, tt.sweep, tt.plan])
def test_wrong_keywords_fail_with_the_nearest(function: Any) -> None:
    assert "max_num_seqs" in inspect.signature(function).parameters
    with pytest.raises(tt.UsageError, match=r"unknown key 'max_num_sqs'; did you mean 'max_num_seqs'"):
        function(max_num_sqs=4)
