"""Comparisons: equal deployments do not differ, effects have the right sign, and paired intervals cover."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.compare import (
    GAIN,
    LOSS,
    OPEN,
    SAME,
    Change,
    Comparison,
    Metric,
    Question,
    Variant,
    compare_deployments,
)
from experiments.compare_report import comparison_json, comparison_lines, comparison_page, verdict_words
from experiments.compare_saved import FEWEST, bootstrap, compare_saved
from experiments.results import save_run
from serving.errors import UsageError
from sim.deployment import Deployment, build
from sim.metrics import summarise
from sim.workload import spec_from_flags
from tests.sim.toy_runs import toy_run

LONG = {
    "dataset_name": "random",
    "input_len": 8000,
    "output_len": 150,
    "request_rate": 3.0,
    "num_prompts": 100,
}


@pytest.fixture(scope="module")
def chunks() -> Comparison:
    """Chunks of 8192 against 512 tokens, and against the very same, on long prompts."""
    base = build(Deployment(model="llama-3.1-8b", gpu="h200", max_num_batched_tokens=8192))
    small = build(Deployment(model="llama-3.1-8b", gpu="h200", max_num_batched_tokens=512))
    question = Question(spec_from_flags(LONG), replications=4)
    return compare_deployments({"base": base, "small": small, "same": base}, question)


def test_small_chunks_gain_in_tpot_and_lose_in_ttft(chunks: Comparison) -> None:
    """A prompt of 8000 tokens in chunks takes sixteen steps, each dearer per token than one large one, and waits for
    the others' chunks; decodes in between are held up by 512 tokens and no longer by 8192."""
    small = {change.metric.name: change for change in chunks.variants[0].changes}
    assert small["p99_itl"].effect == GAIN
    assert small["p99_itl"].difference < 0
    assert small["p95_tpot"].effect == GAIN
    assert small["mean_queue"].effect == LOSS
    assert small["mean_ttft"].effect == LOSS
    assert small["mean_ttft"].difference > 0
    assert small["request_throughput"].difference == pytest.approx(0.0, abs=0.05)
    assert chunks.variants[0].differs["max_num_batched_tokens"] == (8192, 512)


def test_the_same_deployment_differs_in_nothing(chunks: Comparison) -> None:
    same = chunks.variants[1]
    assert not same.differs
    assert {change.effect for change in same.changes} == {SAME}
    assert all(change.difference == 0.0 for change in same.changes)
    assert "the same deployment as the base" in same.notes


def test_an_option_that_changes_nothing_is_simulated_and_found_equal() -> None:
    """Common random numbers: at a load that never fills 200 seats a limit of 300 leaves every step as it was."""
    wide, wider = (build(Deployment(model="llama-3.1-8b", gpu="h200", max_num_seqs=n)) for n in (240, 248))
    flags = {**LONG, "input_len": 200, "output_len": 20, "num_prompts": 30}
    found = compare_deployments({"a": wide, "b": wider}, Question(spec_from_flags(flags), replications=2))
    (variant,) = found.variants
    assert "max_num_seqs" in variant.differs
    assert {change.effect for change in variant.changes} == {SAME}


@pytest.mark.parametrize(
    ("name", "difference", "low", "high", "effect"),
    [
        ("p95_ttft", -0.1, -0.2, -0.05, GAIN),
        ("p95_ttft", 0.1, 0.05, 0.2, LOSS),
        ("output_throughput", 0.1, 0.05, 0.2, GAIN),
        ("output_throughput", -0.1, -0.2, -0.05, LOSS),
        ("failed_share", 0.1, 0.05, 0.2, LOSS),
        ("p95_ttft", 0.1, -0.05, 0.2, SAME),
        ("p95_ttft", 1e-7, 5e-8, 2e-7, SAME),
        ("p95_ttft", 0.1, None, None, OPEN),
        ("p95_ttft", 0.0, None, None, SAME),
    ],
)
def test_direction(name: str, difference: float, low: float | None, high: float | None, effect: str) -> None:
    assert Change(Metric.of(name), 1.0, 1.0 + difference, low, high).effect == effect


def test_throughput_per_gpu_is_judged_where_the_numbers_of_gpus_differ() -> None:
    one, two = (build(Deployment(model="llama-3.1-8b", gpu="h200", data_parallel_size=n)) for n in (1, 2))
    flags = {**LONG, "input_len": 200, "output_len": 20, "num_prompts": 30}
    found = compare_deployments({"one": one, "two": two}, Question(spec_from_flags(flags), replications=2))
    changes = {change.metric.name: change for change in found.variants[0].changes}
    per_gpu, output = changes["output_throughput_per_gpu"], changes["output_throughput"]
    assert per_gpu.effect == LOSS
    assert per_gpu.variant == pytest.approx(output.variant / 2)


def test_the_terminal_has_gains_beside_losses_within_80_columns(chunks: Comparison) -> None:
    lines = comparison_lines(chunks)
    assert max(map(len, lines)) <= 80
    head = next(i for i, line in enumerate(lines) if line.startswith("Gains"))
    assert "Losses" in lines[head]
    assert "max_num_batched_tokens 8192 -> 512" in "\n".join(lines)
    assert any(line.startswith("No difference in any of") for line in lines)


def test_json_and_page_say_the_same(chunks: Comparison) -> None:
    document = comparison_json(chunks)
    json.dumps(document, allow_nan=False)
    change = document["variants"][0]["changes"]["p99_itl"]
    assert (change["better"], change["effect"]) == ("lower", GAIN)
    assert change["low"] <= change["difference"] <= change["high"] < 0
    text = comparison_page(chunks)
    assert text.count('class="plotly-graph-div"') == 2
    assert "default-src 'none'" in text


# ---- runs that already happened ----------------------------------------------------------------------------


def test_bootstrap_of_independent_pairs_covers_the_true_difference_of_means() -> None:
    """Pairs (x, x + d) with d of mean 0.3: the interval of the mean holds 0.3 in about 95 % of samples, and is much
    narrower than for unpaired samples, because x cancels."""
    rng = np.random.default_rng(1)
    covered, widths = 0, []
    for i in range(60):
        x = rng.exponential(5.0, 200)
        y = x + rng.normal(0.3, 0.5, 200)
        ends = bootstrap(x, y, i)
        assert ends is not None
        low, high = ends[0]
        covered += low <= 0.3 <= high
        widths.append(high - low)
    assert covered >= 50
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(200), rel=0.15)


def test_blocks_widen_the_interval_of_requests_that_follow_one_another() -> None:
    """An AR(1) sequence with coefficient r has (1 + r) / (1 - r) times the variance of the mean."""
    rng = np.random.default_rng(2)
    noise, r = rng.normal(size=4000), 0.8
    d = np.zeros(4000)
    for i in range(1, 4000):
        d[i] = r * d[i - 1] + noise[i]
    ends = bootstrap(np.zeros(4000), d, 0)
    assert ends is not None
    naive = 2 * 1.96 * d.std() / math.sqrt(4000)
    assert (ends[0][1] - ends[0][0]) / naive == pytest.approx(math.sqrt((1 + r) / (1 - r)), rel=0.35)


def test_too_few_requests_are_not_judged() -> None:
    assert bootstrap(np.ones(FEWEST - 1), np.ones(FEWEST - 1), 0) is None


def save(folder: Path, **changes: object) -> Path:
    rng = np.random.default_rng(0)
    n = 120
    record = toy_run(np.cumsum(rng.exponential(0.3, n)), rng.integers(1, 800, n), rng.integers(2, 40, n))
    if changes:
        record = replace(record, requests=replace(record.requests, **changes))  # type: ignore[arg-type]
    save_run(record, summarise(record), folder, steps=True)
    return folder


def test_saved_runs_are_paired(tmp_path: Path) -> None:
    a = save(tmp_path / "a")
    again = compare_saved({"a": a, "b": save(tmp_path / "b")})
    assert {change.effect for change in again.variants[0].changes} == {SAME}
    rng = np.random.default_rng(0)
    sent = np.cumsum(rng.exponential(0.3, 120))
    record = toy_run(sent, rng.integers(1, 800, 120), rng.integers(2, 40, 120))
    later = save(tmp_path / "later", first_token_s=record.requests.first_token_s + 0.05)
    found = compare_saved({"a": a, "later": later})
    changes = {change.metric.name: change for change in found.variants[0].changes}
    ttft = changes["mean_ttft"]
    assert ttft.effect == LOSS
    assert ttft.difference == pytest.approx(0.05)
    assert ttft.low == pytest.approx(0.05)
    assert changes["mean_e2el"].effect == SAME
    assert "bootstrap" in found.method


def test_attainment_is_paired_where_both_runs_had_the_same_limits(tmp_path: Path) -> None:
    """Of 120 requests with TTFT 0.1 s, the variant makes 40, drawn at random, miss a limit of 0.2 s."""
    rng = np.random.default_rng(0)
    sent = np.cumsum(rng.exponential(0.3, 120))
    slow = rng.permutation(np.where(np.arange(120) < 40, 0.5, 0.1))
    runs = {}
    for name, ttft in (("a", np.full(120, 0.1)), ("b", slow)):
        record = toy_run(sent, np.full(120, 10), np.full(120, 2), meta={"goodput_s": {"ttft": 0.2}})
        record = replace(record, requests=replace(record.requests, first_token_s=sent + ttft))
        save_run(record, summarise(record), tmp_path / name, steps=True)
        runs[name] = tmp_path / name
    changes = {change.metric.name: change for change in compare_saved(runs).variants[0].changes}
    attainment = changes["slo_attainment"]
    assert (attainment.base, attainment.variant) == (1.0, pytest.approx(80 / 120))
    assert attainment.effect == LOSS
    assert attainment.low is not None
    assert attainment.low < -1 / 3 < attainment.high < 0


def test_runs_of_other_workloads_are_refused(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a"), save(tmp_path / "b", prompt_tokens=np.full(120, 7))
    with pytest.raises(UsageError, match="not of one workload: prompt_tokens of request 0"):
        compare_saved({"a": a, "b": b})


def test_long_values_and_nested_options_stay_within_80_columns() -> None:
    changes = tuple(
        Change(Metric.of(name), 12345.0, 67890.0, 1.0, 99999.0) for name in ("preemptions", "mean_ttft")
    )
    pools = ([], [{"gpu": "h200", "replicas": 2, "dtype": None}])
    lines = comparison_lines(Comparison("a", (Variant("b", changes, {"pools": pools}),), "method"))
    assert max(map(len, lines)) <= 80
    assert "pools [] -> [{gpu: h200, replicas: 2}]" in lines


def test_a_variant_without_changes_has_a_table() -> None:
    nothing = Variant("x", (), {})
    assert comparison_lines(Comparison("a", (nothing,), "method"))


def test_differences_that_intervals_do_not_tell_apart_are_not_called_none() -> None:
    metric = Metric.of("p95_ttft")
    unsure = Variant("b", (Change(metric, 1.0, 1.2, -0.1, 0.5),), {})
    equal = Variant("b", (Change(metric, 1.0, 1.0, -0.1, 0.1),), {})
    assert (
        verdict_words(unsure)
        == "No difference in any of 1 figures is certain: every interval of one holds 0."
    )
    assert verdict_words(equal) == "No difference in any of 1 figures."
