"""Every number of a summary against arithmetic done by hand, numpy, or a law that must hold."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.latency import STAGES, inter_token_gaps, latencies, latency_stats, pooled, stage_times, token_seconds
from sim.metrics import slo_outcomes, summarise
from sim.record import RunRecord, Status, Tenant
from sim.slo import Goodput, Slo
from tests.sim.toy_runs import toy_run


@pytest.fixture
def two() -> RunRecord:
    """Two requests. A: sent at 0, 100 prompt and 3 output tokens; B: sent at 0.025 with 200 and 2.

    A is queued at 0.011; step 0 takes 10 + 10 ms and ends at 0.031, giving A1. B is queued at 0.036, while
    step 1 (0.031 to 0.041) gives A2. Step 2 (30 ms, to 0.071) gives A3 and B1; step 3 (to 0.081) gives B2.
    """
    return toy_run([0.0, 0.025], [100, 200], [3, 2])


def test_latencies_by_hand(two: RunRecord) -> None:
    lat = latencies(two)
    assert lat.ttft_s == pytest.approx([0.041, 0.056])  # 0.031 + 0.010; 0.071 + 0.010 − 0.025
    assert lat.e2el_s == pytest.approx([0.081, 0.066])
    assert lat.tpot_s == pytest.approx([0.020, 0.010])  # (0.081 − 0.041) / 2; (0.066 − 0.056) / 1
    assert lat.queue_s == pytest.approx([0.0, 0.005])
    assert lat.prefill_s == pytest.approx([0.020, 0.030])
    assert lat.decode_s == pytest.approx([0.040, 0.010])


def test_gaps_are_pooled_over_token_events(two: RunRecord) -> None:
    gaps = inter_token_gaps(two)
    assert np.repeat(gaps.values_s, gaps.counts) == pytest.approx([0.010, 0.010, 0.030])  # A 10 and 30, B 10


def test_summary_by_hand(two: RunRecord) -> None:
    s = summarise(two, goodput=Goodput(ttft_s=0.050))
    assert (s.sent, s.completed, s.failed) == (2, 2, 0)
    assert s.duration_s == pytest.approx(0.091)  # from 0 to B's last token at 0.081 + 0.010
    assert s.request_throughput == pytest.approx(2 / 0.091)
    assert s.output_throughput == pytest.approx(5 / 0.091)
    assert s.total_token_throughput == pytest.approx(305 / 0.091)
    assert s.request_goodput == pytest.approx(1 / 0.091)  # A alone keeps 50 ms
    assert s.slo_attainment == 0.5
    assert s.slo_attainment_by_metric == {"ttft": 0.5}
    # Steps: 20 ms with 1 running, 10 with 1, 30 with 2, 10 with 1: 100 ms·sequences over 91 ms × 8 seats.
    assert s.batch_occupancy_mean == pytest.approx(0.100 / (0.091 * 8))
    assert s.batch_occupancy_busy == pytest.approx(0.100 / (0.070 * 8))
    assert s.batch_occupancy_max == 0.25
    # Pages: A needs ceil(103 / 16) = 7 and B ceil(202 / 16) = 13 of 1000.
    assert s.kv_occupancy_mean == pytest.approx((0.060 * 7 + 0.040 * 13) / (0.091 * 1000))
    assert s.kv_occupancy_max == pytest.approx(0.020)
    assert s.gpu_busy_share == pytest.approx((0.070 - 4 * 0.001) / 0.091)
    assert (s.max_concurrent_requests, s.max_in_system, s.max_output_tokens_per_s) == (2, 2, 5.0)


def test_stages_add_up_to_the_end_to_end_time(two: RunRecord) -> None:
    stages = stage_times(two)
    assert tuple(stages) == STAGES
    assert sum(stages.values()) == pytest.approx(latencies(two).e2el_s)
    assert stages["network"] == pytest.approx([0.020, 0.020])
    assert (stages["stream"] == 0).all()
    assert sum(summarise(two).stage_share.values()) == pytest.approx(1)


def test_one_token_has_no_tpot_and_is_left_out_of_its_statistics() -> None:
    run = toy_run([0.0, 1.0], [10, 10], [1, 3])
    assert latencies(run).tpot_s[0] == 0
    assert summarise(run).tpot.count == 1
    assert summarise(run).tpot.mean_s == pytest.approx(0.010)
    only = summarise(toy_run([0.0], [10], [1]), goodput=Goodput(tpot_s=0.001))
    assert only.tpot.count == 0
    assert math.isnan(only.figures()["mean_tpot_ms"])
    assert only.slo_attainment is None  # nobody can be judged by that limit, and there is no other
    assert [line for line in only.warnings if "goodput limit of TPOT judges nobody" in line]
    both = summarise(toy_run([0.0], [10], [1]), goodput=Goodput(ttft_s=1e-6, tpot_s=0.001))
    assert both.slo_attainment_by_metric == {"ttft": 0.0}


def test_failures_are_never_good_and_count_in_their_tenant() -> None:
    tenants = (Tenant("chat", "gold"), Tenant("batch", goodput_ttft_s=10.0))
    run = toy_run(
        [0.0, 0.1, 0.2, 0.3], [10] * 4, [2] * 4, rejected=(1, 3), tenant=[0, 0, 1, 1], tenants=tenants
    )
    s = summarise(run, goodput=Goodput(ttft_s=1e-6))
    assert (s.sent, s.completed, s.rejected) == (4, 2, 2)
    chat, batch = s.tenants
    assert (chat.sent, chat.completed, chat.rejected, chat.slo_attainment) == (2, 1, 1, 0.0)
    assert (batch.sent, batch.completed, batch.rejected, batch.slo_attainment) == (2, 1, 1, 0.5)
    assert batch.goodput_limits.ttft_s == 10.0  # its own limit wins over the common one
    assert s.slo_attainment == 0.25
    assert (chat.name, chat.slo_class) == ("chat", "gold")


def test_a_percentile_slo_counts_rejected_requests() -> None:
    served = toy_run(np.arange(20) * 1.0, [10] * 20, [2] * 20)
    dropped = toy_run(np.arange(20) * 1.0, [10] * 20, [2] * 20, rejected=(3, 4, 5))
    slo = (Slo("p90", "ttft", 0.5), Slo("mean", "ttft", 0.5), Slo("p50", "ttft", 0.5))
    assert [o.met for o in slo_outcomes(served, slo)] == [True, True, True]
    assert [o.met for o in slo_outcomes(dropped, slo)] == [False, True, True]  # 15 % were never served
    assert slo_outcomes(dropped, slo)[0].value_s == np.inf


def test_an_unfinished_request_counts_with_its_wait_so_far() -> None:
    cut = toy_run([0.0, 0.0], [10, 10], [5, 100_000], until_s=60.0)
    assert summarise(cut).unfinished == 1
    (outcome,) = slo_outcomes(cut, [Slo("max", "e2el", 30.0)])
    assert not outcome.met
    assert outcome.value_s == pytest.approx(60.0, abs=0.1)


def test_no_goodput_without_limits(two: RunRecord) -> None:
    s = summarise(two)
    assert (s.request_goodput, s.slo_attainment, s.slo_attainment_by_metric) == (None, None, {})


def test_an_empty_run_has_no_latency() -> None:
    s = summarise(toy_run([], np.array([], np.int64), np.array([], np.int64)))
    assert (s.sent, s.duration_s, s.request_throughput) == (0, 0.0, 0.0)
    assert np.isnan(s.ttft.mean_s)


def test_everything_rejected_is_a_summary_without_latencies() -> None:
    s = summarise(toy_run([0.0, 1.0], [10, 10], [2, 2], rejected=(0, 1)), goodput=Goodput(ttft_s=1.0))
    assert (s.completed, s.rejected, s.slo_attainment, s.request_goodput) == (0, 2, 0.0, 0.0)


def test_p99_of_few_requests_is_flagged() -> None:
    # P99 of 71 samples is the maximum but for interpolation.
    assert any(
        "P99 of 71 requests" in w
        for w in summarise(toy_run(np.arange(71) * 1.0, [9] * 71, [2] * 71)).warnings
    )
    assert not summarise(toy_run(np.arange(100) * 1.0, [9] * 100, [2] * 100)).warnings


def test_prefix_hit_rate_covers_admitted_requests() -> None:
    run = toy_run([0.0, 1.0, 2.0], [100, 300, 999], [2, 2, 2], rejected=(2,))
    cached = replace(run, requests=replace(run.requests, cached_tokens=np.array([0, 100, 0])))
    assert summarise(cached).prefix_hit_rate == pytest.approx(100 / 400)


def test_no_heavy_import() -> None:
    code = (
        "import sys, sim.metrics, sim.verdict; "
        "print([m for m in ('plotly', 'pyarrow', 'scipy', 'rich', 'pydantic') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


durations = st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=60)


@given(durations, st.floats(0.1, 100))
def test_statistics_are_numpys(values: list[float], percentile: float) -> None:
    stats = latency_stats(pooled(np.array(values)), (percentile,))
    assert stats.at(percentile) == pytest.approx(np.percentile(values, percentile))
    assert stats.mean_s == pytest.approx(np.mean(values))
    assert stats.std_s == pytest.approx(np.std(values), abs=1e-9)
    assert stats.median_s == pytest.approx(np.median(values))


arrivals = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 400), st.integers(1, 40), st.booleans()),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(arrivals, st.integers(1, 8), st.floats(0.1, 6))
def test_laws_of_any_run(rows: list[tuple[float, int, int, bool]], seats: int, until_s: float) -> None:
    rows.sort()
    sent, prompt, output, bad = (list(column) for column in zip(*rows, strict=True))
    rejected = tuple(i for i, is_bad in enumerate(bad) if is_bad)
    run = toy_run(sent, prompt, output, max_num_seqs=seats, rejected=rejected, until_s=until_s)
    s, lat = summarise(run, goodput=Goodput(ttft_s=0.1, e2el_s=1.0)), latencies(run)
    assert s.sent == s.completed + s.rejected + s.unfinished
    done = run.requests.status == Status.FINISHED
    assert (lat.ttft_s[done] <= lat.e2el_s[done] + 1e-12).all()
    for stats in (s.ttft, s.tpot, s.itl, s.e2el):
        values = [v for _, v in stats.percentiles_s]
        assert np.isnan(values).all() or (np.diff(values) >= 0).all()
    # Two ways to the gaps: pooled over steps, and token by token.
    by_token = [np.diff(run.engine_token_times_s(i)) for i in np.flatnonzero(done)]
    expected = np.sort(np.concatenate(by_token)) if by_token else np.empty(0)
    gaps = inter_token_gaps(run)
    assert np.repeat(gaps.values_s, gaps.counts) == pytest.approx(expected)
    seconds = [run.token_times_s(i) for i in np.flatnonzero(done)]
    assert token_seconds(run, done) == pytest.approx(np.concatenate(seconds) if seconds else np.empty(0))
    assert 0 <= (s.slo_attainment or 0) <= min([1.0, *s.slo_attainment_by_metric.values()])
