"""Prefill apart from decode: what crosses the link, when tokens come, and what each side computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from serving.config import SchedulerConfig
from sim.fleet.spec import Failures, KvTransfer, Outage
from sim.record import Status
from tests.sim.fleet.worlds import fleet_of, pool, run_fleet
from tests.sim.worlds import LinearPricer, make_workload

ENGINE = SchedulerConfig(num_pages=400, max_num_seqs=8, max_num_batched_tokens=512)
PRICES = LinearPricer(0.01, 1e-4, 0.0)
LINK = KvTransfer(bandwidth_gb_per_s=1.0, latency_ms=2.0)


def apart(prefill: int = 1, decode: int = 1, config: SchedulerConfig = ENGINE) -> tuple:
    return (
        pool(config, PRICES, replicas=prefill, role="prefill", kv_bytes_per_token=1e5, name="prefill"),
        pool(config, PRICES, replicas=decode, role="decode", name="decode"),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_request_by_hand(asynchronous: bool) -> None:
    config = replace(ENGINE, async_scheduling=asynchronous)
    run = run_fleet(make_workload([0.0], [100], [11]), *apart(config=config), kv_transfer=LINK)
    # A prompt of 100 tokens: 0.01 + 0.01 s. Its KV: 100 tokens of 1e5 bytes at 1e9 bytes/s is 0.01 s, and 2 ms.
    # Ten more tokens in ten steps of 0.0101 s.
    times = run.token_times_s(0)
    assert times[0] == pytest.approx(0.02)
    np.testing.assert_allclose(times[1:], 0.02 + 0.012 + 0.0101 * np.arange(1, 11))
    fleet = fleet_of(run)
    assert fleet.kv_transfer_s[0] == pytest.approx(0.012)
    assert fleet.prefill_replica.tolist() == [0]
    assert run.requests.replica.tolist() == [1]
    # The decode side computed one token of prompt length 1 a step and never the prompt.
    decode = run.steps.replica == 1
    assert run.steps.num_tokens[decode].tolist() == [1] * 10
    assert run.steps.num_prefill_tokens[~decode].tolist() == [100]


def test_a_single_token_needs_no_transfer() -> None:
    run = run_fleet(make_workload([0.0], [100], [1]), *apart(), kv_transfer=LINK)
    assert run.requests.status[0] == Status.FINISHED
    assert np.isnan(fleet_of(run).kv_transfer_s[0])
    assert run.requests.replica.tolist() == [0]


def test_transfers_queue_for_the_link() -> None:
    # Two prompts end in the same step: the second transfer waits for the first.
    run = run_fleet(make_workload([0.0, 0.0], [100, 100], [5, 5]), *apart(), kv_transfer=LINK)
    assert sorted(fleet_of(run).kv_transfer_s) == pytest.approx([0.012, 0.022])


def test_a_fast_link_only_takes_prompts_out_of_the_way_of_decodes() -> None:
    """The point of it: beside long prompts, gaps between tokens are those of pure decode steps."""
    rng = np.random.default_rng(0)
    count = 60
    workload = make_workload(np.cumsum(rng.exponential(0.15, count)).tolist(), [450] * count, [20] * count)
    link = KvTransfer(bandwidth_gb_per_s=1e6, latency_ms=0)
    two = run_fleet(workload, *apart(), kv_transfer=link)
    same = run_fleet(workload, pool(ENGINE, PRICES, replicas=2), router="least_outstanding")
    gaps = [np.concatenate([np.diff(r.token_times_s(i))[1:] for i in range(count)]) for r in (two, same)]
    # A decode step takes at most 0.01 + 8 tokens; a step with a prompt 0.045 more.
    assert gaps[0].max() <= 0.01 + 8e-4 + 1e-9
    assert gaps[1].max() > 0.05


def test_shared_prefixes_share_pages_on_the_decode_side_too() -> None:
    count = 6
    workload = make_workload([0.0] * count, [96] * count, [60] * count, segments=[[(80, 1)]] * count)
    run = run_fleet(workload, *apart(), kv_transfer=LINK)
    decode = run.steps.replica == 1
    # Five shared pages once; of its own each has what 96 + 60 tokens need beyond them.
    assert run.steps.used_pages[decode].max() <= 5 + count * (-(-156 // 16) - 5)


def test_preempted_on_the_decode_side_a_request_is_computed_again_there() -> None:
    tight = replace(ENGINE, num_pages=13)
    workload = make_workload([0.0, 0.0], [64, 64], [60, 60])
    pools = (apart()[0], pool(tight, PRICES, role="decode", name="decode"))
    run = run_fleet(workload, *pools, kv_transfer=LINK)
    assert (run.requests.status == Status.FINISHED).all()
    assert run.requests.preemptions.sum() > 0
    decode = run.steps.replica == 1
    assert run.steps.num_prefill_tokens[decode].max() > 1


def test_kv_on_its_way_is_lost_with_the_sender() -> None:
    slow = KvTransfer(bandwidth_gb_per_s=0.01, latency_ms=0)  # a second for this prompt
    run = run_fleet(
        make_workload([0.0], [100], [5]),
        *apart(prefill=2),
        kv_transfer=slow,
        failures=Failures(schedule=(Outage(time_s=0.5, replica=0, down_s=9),)),
    )
    fleet = fleet_of(run)
    assert fleet.retries.tolist() == [1]
    assert fleet.prefill_replica.tolist() == [1]
    assert run.token_times_s(0)[0] == pytest.approx(0.5 + 0.02)
    assert run.requests.status[0] == Status.FINISHED
