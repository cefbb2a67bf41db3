"""Answers that come whole over a network: one message at their end, so that TTFT is E2EL at the client too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from serving.errors import UsageError
from sim.deployment import Deployment, simulate
from sim.fleet.plan import FleetPlan
from sim.latency import inter_token_gaps, latencies, stage_times
from sim.metrics import summarise
from sim.network import Network
from sim.record import RunRecord, Status, Tenant
from sim.workload import load_workload
from sim.workload.flags import spec_from_flags
from sim.workload.types import Workload
from tests.sim.fleet.test_fleet_searches import mixed
from tests.sim.fleet.worlds import pool
from tests.sim.test_beam import searching
from tests.sim.test_best_of import sampling
from tests.sim.test_clients import STEP_S, networks, run
from tests.sim.test_fast_forward import assert_same, configs
from tests.sim.worlds import LinearPricer, make_workload

KINDS = {"search": lambda w: searching([3] * len(w), w), "best of": lambda w: sampling([3] * len(w), w)}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_one_message_of_the_whole_answer(kind: str) -> None:
    """Events of 100 bytes and 5 for each further token at a byte a millisecond, 50 ms away."""
    network = Network(rtt_ms=100, bandwidth_mbit_s=0.008, token_bytes=5, event_bytes=100)
    workload = KINDS[kind](make_workload([1.0], [40], [9]))
    config = SchedulerConfig(1000, async_scheduling=False)
    record, plain = run(workload, network, config=config), run(workload, config=config)
    r, deliveries = record.requests, record.deliveries
    assert deliveries is not None
    assert deliveries.tokens.tolist() == [9]
    steps = 9 if kind == "search" else 10
    done_s = 1.0 + 0.05 + steps * STEP_S
    assert r.engine_done_s[0] == pytest.approx(done_s)
    seen_s = done_s + (100 + 8 * 5) / 1000 + 0.05
    assert r.first_token_s[0] == r.last_token_s[0] == pytest.approx(seen_s)
    assert latencies(record).ttft_s.tolist() == latencies(record).e2el_s.tolist()
    assert latencies(record).tpot_s.tolist() == [0.0]
    assert record.token_times_s(0).tolist() == [r.last_token_s[0]] * 9
    assert inter_token_gaps(record).size == 0
    # The engine did what it does without a network, half a round trip later.
    np.testing.assert_allclose(record.steps.start_s, plain.steps.start_s + 0.05)
    stages = stage_times(record)
    assert stages["network"][0] == pytest.approx(0.1 + 0.14)
    assert stages["stream"][0] == 0.0
    assert sum(times[0] for times in stages.values()) == pytest.approx(latencies(record).e2el_s[0])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_network_that_does_nothing_changes_nothing(kind: str) -> None:
    workload = replace(make_workload([0.0, 0.3, 0.3], [10] * 3, [20, 5, 1]), tenants=(Tenant(rtt_s=0.1),))
    workload = KINDS[kind](workload)
    plain, followed = run(workload), run(workload, Network())
    for name, column in plain.requests.columns().items():
        if column.dtype == float:
            np.testing.assert_allclose(followed.requests.columns()[name], column, rtol=1e-12, err_msg=name)
        else:
            assert (followed.requests.columns()[name] == column).all(), name
    assert plain.beams == followed.beams
    assert plain.candidates == followed.candidates
    a, b = summarise(plain), summarise(followed)
    assert a.ttft.mean_s == pytest.approx(a.e2el.mean_s) == b.ttft.mean_s == b.e2el.mean_s


def test_a_connection_is_free_when_the_whole_answer_is_there() -> None:
    """Searches of four steps over one connection of HTTP/1.1: one after the other, and the answer 0.2 s away."""
    workload = searching([2] * 3, make_workload([0.0] * 3, [1] * 3, [4] * 3))
    network = Network(clients=1, protocol="http/1.1", connections=1, rtt_ms=400)
    record = run(workload, network, config=SchedulerConfig(1000, async_scheduling=False))
    each_s = 0.4 + 4 * STEP_S
    np.testing.assert_allclose(record.requests.blocked_s, [0.0, each_s, 2 * each_s])
    np.testing.assert_allclose(latencies(record).ttft_s, [each_s, 2 * each_s, 3 * each_s])


def test_a_whole_answer_waits_behind_a_stream_in_a_pipeline() -> None:
    """The plain answer is read at two tokens a second until 3.75 s and half a second more; then the search is taken."""
    workload = searching([0, 2], make_workload([0.0, 0.0], [1, 1], [8, 2]))
    network = Network(clients=1, reader_tokens_per_s=2, protocol="http/1.1-pipelined")
    record = run(workload, network)
    assert record.requests.last_token_s.tolist() == [3.75, 4.25]
    assert record.requests.first_token_s.tolist() == [0.25, 4.25]
    assert record.requests.reader_s.tolist() == [3.75 - 2.0, 0.0]


def test_an_answer_that_is_not_whole_at_the_end_has_shown_nothing() -> None:
    workload = searching([3], make_workload([0.0], [10], [40]))
    record = run(workload, Network(), until_s=2.0)
    assert record.requests.status.tolist() == [Status.UNFINISHED]
    assert record.requests.output_tokens.tolist() == [0]
    assert len(record.event_times_s(0)) == 0


def test_gathering_is_of_streams() -> None:
    workload = make_workload([0.0, 0.0], [1, 1], [9, 9])
    record = run(searching([2, 0], workload), interval=4)
    assert record.event_times_s(0).tolist() == [record.requests.engine_done_s[0]]
    assert len(record.event_times_s(1)) == 3
    for options, words in (({"interval": 4}, "--stream-interval"), ({"slice_s": 0.1}, "--stream-slice-ms")):
        with pytest.raises(UsageError, match=words):
            run(searching([2, 2], workload), **options)  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(mixed(), configs(), networks(), st.sampled_from(["plain", "fleet", "apart"]), st.booleans())
def test_fast_forward_changes_nothing_and_every_answer_comes_once(
    workload: Workload, config: SchedulerConfig, network: Network, shape: str, cached: bool
) -> None:
    fleet = None
    if shape != "plain":
        network = network.model_copy(update={"buffer_kib": None, "send_timeout_s": None})
        apart = (
            pool(config, role="prefill", name="p", kv_bytes_per_token=1e6),
            pool(config, role="decode", name="d", replicas=2),
        )
        fleet = FleetPlan(
            (pool(config, replicas=2),) if shape == "fleet" else apart, router="least_outstanding"
        )

    def one(fast_forward: bool) -> RunRecord:
        options: dict[str, Any] = {"fast_forward": fast_forward, "response_cache": cached, "fleet": fleet}
        return run(workload, network, config=config, pricer=LinearPricer(), **options)

    fast, slow = one(True), one(False)
    assert_same(fast, slow)
    assert fast.deliveries is not None
    assert slow.deliveries is not None
    for name in ("offsets", "seen_s", "tokens"):
        assert getattr(fast.deliveries, name).tolist() == getattr(slow.deliveries, name).tolist(), name
    r, whole = fast.requests, workload.come_whole()
    done = r.status == Status.FINISHED
    assert len(r) == len(workload)
    assert (r.status != Status.UNFINISHED).all()
    total_s = sum(stage_times(fast).values(), start=np.zeros(len(r)))
    np.testing.assert_allclose(total_s[done], latencies(fast).e2el_s[done], rtol=1e-9, atol=1e-9)
    events = np.diff(fast.deliveries.offsets)
    mine = whole[r.request_id]
    assert (events[mine] == done[mine]).all()
    assert (r.first_token_s == r.last_token_s)[done & mine].all()
    assert (r.last_token_s >= r.engine_done_s)[done].all()
    tokens = np.bincount(fast.deliveries.owners(), fast.deliveries.tokens, len(r))
    assert tokens[done].tolist() == r.output_tokens[done].tolist()


@pytest.mark.parametrize("searches", [{"beam_width": 3}, {"best_of": 3}], ids=["beams", "best of"])
def test_a_deployment_with_pools_and_a_network(searches: dict[str, int]) -> None:
    flags = {
        "dataset_name": "random",
        "input_len": 200,
        "output_len": 20,
        "num_prompts": 12,
        "request_rate": 8.0,
    }
    workload = load_workload(spec_from_flags(flags | searches), seed=1)
    deployment = Deployment(
        model="llama-3.1-8b",
        gpu="h200",
        network={"clients": 2, "rtt_ms": 30, "bandwidth_mbit_s": 2},
        pools=[{"gpu": "h200", "role": "prefill"}, {"gpu": "h200", "role": "decode"}],
        admission={"max_waiting": 100},
    )
    fast, slow = (simulate(workload, deployment, fast_forward=on) for on in (True, False))
    assert_same(fast, slow)
    assert (fast.requests.status == Status.FINISHED).all()
    assert fast.fleet is not None
    assert not np.isnan(fast.fleet.kv_transfer_s).any()
    assert latencies(fast).ttft_s.tolist() == latencies(fast).e2el_s.tolist()
