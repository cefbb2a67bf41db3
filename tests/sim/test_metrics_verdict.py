"""The drift test's error rates on queues whose answer is known, and the verdict's sentences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.metrics import summarise
from sim.record import RunRecord
from sim.saturation import Load, saturation
from sim.slo import parse_slo
from sim.verdict import verdict
from tests.sim.toy_runs import queue_run, toy_run

SEEDS = 60


def share_saturated(rho: float, num_requests: int) -> float:
    loads = [saturation(queue_run(rho, num_requests, seed)).load for seed in range(SEEDS)]
    assert set(loads) <= {Load.STABLE, Load.SATURATED}
    return loads.count(Load.SATURATED) / SEEDS


@pytest.mark.parametrize("rho", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("num_requests", [500, 3000])
def test_a_stable_queue_is_not_called_saturated(rho: float, num_requests: int) -> None:
    # At most 2.5 % by design (a one-sided test); 5 of 60 would happen once in 60 runs at exactly that rate.
    assert share_saturated(rho, num_requests) <= 4 / SEEDS


@pytest.mark.parametrize(
    ("rho", "num_requests", "power"), [(1.1, 3000, 0.85), (1.1, 6000, 0.97), (1.5, 500, 0.99)]
)
def test_a_queue_above_capacity_is(rho: float, num_requests: int, power: float) -> None:
    # At rho 1.1 the queue gains 0.1/1.1 per arrival with a deviation of √(2.1/1.1) per √arrival, so that 3000
    # arrivals put its growth at 3.6 standard errors and 6000 at 5.1, against 2.1 for the decision.
    assert share_saturated(rho, num_requests) >= power


def test_a_long_but_stable_queue_is_not_drift() -> None:
    # Thirty requests wait all the time: a threshold on the length would call this saturated.
    run = queue_run(0.5, 2000, seed=1)
    steady = replace(run.requests, queued_s=run.requests.sent_s - 60, sent_s=run.requests.sent_s - 60)
    assert saturation(replace(run, requests=steady)).load == Load.STABLE


def test_a_closed_loop_is_never_saturated_by_drift() -> None:
    run = toy_run(np.zeros(100), [10] * 100, [5] * 100, meta={"max_concurrency": 100})
    assert saturation(run).load == Load.CLOSED_LOOP
    assert verdict(run, summarise(run)).saturated is False


def test_an_unreached_concurrency_limit_leaves_the_loop_open() -> None:
    run = queue_run(0.5, 1000, seed=0, meta={"max_concurrency": 10_000})
    assert saturation(run).load == Load.STABLE


def test_a_burst_or_a_short_run_says_nothing() -> None:
    assert saturation(toy_run(np.zeros(100), [10] * 100, [5] * 100)).load == Load.INCONCLUSIVE
    short = queue_run(2.0, 20, seed=0)
    assert saturation(short).load == Load.INCONCLUSIVE
    assert verdict(short, summarise(short)).saturated is None


def test_a_rising_load_that_is_served_is_not_saturated() -> None:
    # Arrivals speed up from 1/s to 9/s; 256 seats serve them all at once.
    sent = np.sqrt(np.linspace(0.01, 1, 2000)) * 400
    run = toy_run(sent, [10] * 2000, [100] * 2000, max_num_seqs=256)
    assert saturation(run).load == Load.STABLE


def bound_of(run: RunRecord) -> str:
    return verdict(run, summarise(run)).bound.kind


def test_a_full_batch_bounds() -> None:
    assert bound_of(toy_run(np.zeros(50), [10] * 50, [20] * 50, max_num_seqs=4)) == "max_num_seqs"


def test_pages_bound() -> None:
    run = toy_run(np.zeros(50), [160] * 50, [20] * 50, max_num_seqs=4)  # 12 pages each: 48 of 50 in use
    assert bound_of(replace(run, max_num_seqs=256, num_pages=50)) == "kv_pages"


def test_the_token_budget_bounds() -> None:
    run = toy_run(np.arange(200) * 0.02, [500] * 200, [1] * 200, max_num_seqs=1)
    assert bound_of(replace(run, max_num_seqs=256, max_num_batched_tokens=500)) == "token_budget"


def test_steps_bound_when_nobody_waits() -> None:
    one_decode = toy_run([0.0], [10], [500])
    assert bound_of(one_decode) == "decode_bandwidth"
    steps = one_decode.steps
    assert bound_of(replace(one_decode, steps=replace(steps, gpu_s=steps.gpu_s * 0.1))) == "host"
    assert bound_of(toy_run([0.0], [50_000], [2])) == "prefill_compute"


def test_under_load_nothing_bounds() -> None:
    assert bound_of(toy_run(np.arange(50) * 1.0, [10] * 50, [20] * 50)) == "idle"


def test_the_network_can_take_most_of_the_time() -> None:
    assert bound_of(toy_run(np.arange(50) * 1.0, [1] * 50, [1] * 50)) == "network"


def test_the_sentences_of_a_verdict() -> None:
    # TTFT is 10 + 1 + 10 + 1 + 10 = 32 ms and a further token 10 ms, always.
    run = toy_run(np.arange(100) * 1.0, [10] * 100, [20] * 100, rejected=(99,))
    v = verdict(run, summarise(run, slos=parse_slo(["p95_ttft:40", "p95_tpot:8"])))
    assert v.meets_slos is False
    assert v.sentences[:3] == (
        "Meets P95 TTFT ≤ 40 ms: it is 32 ms, 20% below the limit.",
        "Misses P95 TPOT ≤ 8 ms: it is 10 ms, 25% above the limit.",
        "1 of 100 requests rejected.",
    )
    assert v.sentences[3].startswith("Not saturated: ")
    assert v.sentences[4].startswith("Bound by nothing: it is under-loaded: steps ran in ")


def test_a_gross_miss_is_told_in_seconds_and_times() -> None:
    run = toy_run(
        np.zeros(200), [1000] * 200, [20] * 200, max_num_seqs=1
    )  # each takes 110 + 190 ms: 60 s in all
    v = verdict(run, summarise(run), parse_slo(["p50_ttft:100"]))
    assert v.sentences[0] == "Misses P50 TTFT ≤ 100 ms: it is 30.0 s, 300 times the limit."


@pytest.mark.parametrize(
    ("limit", "words"),
    [("9.9999", "under 1% above"), ("10", "under 1% below"), ("8", "25% above"), ("20", "50% below")],
)
def test_what_lies_at_its_limit_is_not_zero_percent_off(limit: str, words: str) -> None:
    run = toy_run(np.arange(100) * 1.0, [10] * 100, [20] * 100)  # a further token takes 10 ms, always
    assert (
        verdict(run, summarise(run, slos=parse_slo([f"p95_tpot:{limit}"])))
        .sentences[0]
        .endswith(f"it is 10 ms, {words} the limit.")
    )
