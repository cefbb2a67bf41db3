"""Clients in a world: connections that requests wait for, lines that they share, and clients that do not read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from sim.clients import TOO_SLOW
from sim.latency import inter_token_gaps, latencies, stage_times, token_seconds
from sim.metrics import summarise
from sim.network import Network, delivering
from sim.record import RunRecord, Status, Tenant
from sim.slo import Goodput, Slo
from sim.verdict import what_bounds
from sim.workload.types import Workload
from sim.world import Frontend, run_world
from tests.sim.test_fast_forward import assert_same, configs, workloads
from tests.sim.worlds import LinearPricer, make_workload

STEP_S = 0.25
FLAT = LinearPricer(fixed_s=STEP_S, token_s=0.0, context_s=0.0)
CONFIG = SchedulerConfig(1000)


def run(
    workload: Workload,
    network: Network | None = None,
    *,
    interval: int = 1,
    slice_s: float = 0.0,
    **options: object,
) -> RunRecord:
    net = delivering(network, workload.tenants, interval=interval, slice_s=slice_s)
    settings_ = {"config": CONFIG, "pricer": FLAT} | options
    return run_world(workload, delivering=net, **settings_)  # type: ignore[arg-type]


def test_a_network_that_does_nothing_changes_nothing() -> None:
    workload = replace(make_workload([0.0, 0.3, 0.3], [10] * 3, [20, 5, 1]), tenants=(Tenant(rtt_s=0.1),))
    frontend = Frontend(0.01, 1e-3, 2e-3)
    plain, followed = run(workload, frontend=frontend), run(workload, Network(), frontend=frontend)
    for name, column in plain.requests.columns().items():
        if column.dtype == float:
            np.testing.assert_allclose(followed.requests.columns()[name], column, rtol=1e-12, err_msg=name)
        else:
            assert (followed.requests.columns()[name] == column).all()
    everybody = np.ones(3, bool)
    np.testing.assert_allclose(token_seconds(followed, everybody), token_seconds(plain, everybody))
    a, b = inter_token_gaps(plain), inter_token_gaps(followed)
    np.testing.assert_allclose(np.repeat(a.values_s, a.counts), np.repeat(b.values_s, b.counts))


def test_ttft_and_e2el_are_the_sums_of_their_parts() -> None:
    """40 tokens of 5 bytes up and events of 100 bytes down at 8 kbit/s (1 ms a byte), 100 ms away, with a handshake."""
    network = Network(
        rtt_ms=100, upload_mbit_s=0.008, bandwidth_mbit_s=0.008, token_bytes=5, event_bytes=100,
        gateway_event_us=7000, clients=1, protocol="http/1.1", handshake_round_trips=2,
    )  # fmt: skip
    record = run(make_workload([1.0], [40], [3]), network, frontend=Frontend(0.02, 0.001, 0.003))
    r, stages = record.requests, stage_times(record)
    queued_s = 1.0 + 0.2 + 0.2 + 0.05 + 0.02 + 0.04
    assert r.queued_s[0] == pytest.approx(queued_s)
    out_s = 0.003 + 0.007 + 0.1 + 0.05
    seen_s = [queued_s + STEP_S * k + out_s for k in (1, 2, 3)]
    np.testing.assert_allclose(record.token_times_s(0), seen_s)
    assert r.first_token_s[0] == pytest.approx(seen_s[0])
    assert r.last_token_s[0] == pytest.approx(seen_s[2])
    expected = {"network": 0.2 + 0.2 + 0.1 + 0.1, "gateway": 0.027, "tokenize": 0.04, "queue": 0.0, "prefill": STEP_S,
                "decode": 2 * STEP_S, "detokenize": 0.003, "blocked": 0.0, "reader": 0.0, "stream": 0.0}  # fmt: skip
    assert {name: stages[name][0] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_requests_wait_for_one_of_so_many_connections() -> None:
    """Three that take a second each: of two connections the third gets the first to be free."""
    workload = make_workload([0.0, 0.0, 0.0], [1] * 3, [4] * 3)
    record = run(workload, Network(clients=1, protocol="http/1.1", connections=2))
    assert record.requests.blocked_s.tolist() == [0.0, 0.0, 1.0]
    assert record.requests.last_token_s.tolist() == [1.0, 1.0, 2.0]
    assert latencies(record).ttft_s.tolist() == [STEP_S, STEP_S, 1.0 + STEP_S]
    for network in (
        Network(clients=1),
        Network(clients=1, protocol="http/1.1", connections=3),
        Network(clients=2),
    ):
        assert not run(workload, network).requests.blocked_s.any()


def test_a_slow_reader_blocks_a_pipeline_and_not_a_stream_beside_it() -> None:
    """Eight tokens at four a second, read at two a second: the reader has the last at 3.75 s and is done at 4.25 s."""
    workload = replace(
        make_workload([0.0, 0.0], [1, 1], [8, 2]), tenant=np.array([0, 0]), tenants=(Tenant("app"),)
    )
    slow = {"clients": 1, "reader_tokens_per_s": 2}
    mux = run(workload, Network(**slow))
    assert mux.requests.last_token_s.tolist() == [0.25 + 7 * 0.5, 0.25 + 0.5]
    assert not mux.requests.blocked_s.any()
    assert mux.requests.reader_s.tolist() == [3.75 - 2.0, 0.75 - 0.5]
    pipe = run(workload, Network(protocol="http/1.1-pipelined", **slow))
    assert pipe.requests.last_token_s.tolist() == [3.75, 4.25 + 0.5]
    assert pipe.requests.first_token_s.tolist() == [0.25, 4.25]
    assert pipe.requests.blocked_s.tolist() == [0.0, 4.75 - 0.75]
    # With a connection each nobody waits for the other, although both are pipelined.
    both = run(workload, Network(protocol="http/1.1-pipelined", connections=2, **slow))
    assert both.requests.last_token_s.tolist() == mux.requests.last_token_s.tolist()


def test_one_connection_is_a_queue_with_the_wait_of_pollaczek_and_khinchine() -> None:
    rng = np.random.default_rng(3)
    count, rate = 6000, 0.6
    tokens = rng.geometric(0.25, count)
    sent_s = np.cumsum(rng.exponential(1 / rate, count))
    record = run(
        make_workload(sent_s.tolist(), [1] * count, tokens.tolist()),
        Network(clients=1, protocol="http/1.1", connections=1),
    )
    service_s = tokens * STEP_S
    load = rate * service_s.mean()
    expected = rate * (service_s**2).mean() / (2 * (1 - load))
    assert record.requests.blocked_s.mean() == pytest.approx(expected, rel=0.15)
    assert not latencies(record).queue_s.any()


def test_an_uplink_is_a_queue_with_constant_service() -> None:
    """Prompts of 1,000 bytes at a byte a millisecond: M/D/1 at a load of 0.7 waits ρs/2(1−ρ)."""
    rng = np.random.default_rng(5)
    sent_s = np.cumsum(rng.exponential(1 / 0.7, 8000))
    network = Network(clients=1, upload_mbit_s=0.008, token_bytes=10)
    record = run(make_workload(sent_s.tolist(), [100] * 8000, [1] * 8000), network)
    assert record.requests.blocked_s.mean() == pytest.approx(0.7 / (2 * 0.3), rel=0.15)
    assert record.requests.network_s == pytest.approx(np.ones(8000))


def test_a_closed_loop_and_a_session_wait_for_the_client_and_not_for_the_engine() -> None:
    slow = Network(reader_tokens_per_s=2)
    loop = run(make_workload([0.0, 0.0], [1, 1], [4, 4], max_concurrency=1), slow)
    assert loop.requests.sent_s.tolist() == [0.0, 1.75]
    turns = run(make_workload([0.0, 0.0], [1, 9], [4, 4], after=[-1, 0], think_s=[0.0, 3.0]), slow)
    assert turns.requests.sent_s.tolist() == [0.0, 4.75]


def test_tenants_have_ways_of_their_own() -> None:
    tenants = (Tenant("near", rtt_s=0.02), Tenant("far", "mobile", rtt_s=0.02))
    workload = replace(make_workload([0.0, 0.0], [1, 1], [2, 2]), tenant=np.array([0, 1]), tenants=tenants)
    network = Network(
        bandwidth_mbit_s=8, event_bytes=1000, tenants={"mobile": {"rtt_ms": 300, "bandwidth_mbit_s": 0.08}}
    )
    record = run(workload, network)
    np.testing.assert_allclose(record.requests.network_s, [0.02 + 0.001, 0.3 + 0.1])


def test_one_slow_reader_behind_a_gateway_holds_up_the_readers_of_other_tenants() -> None:
    """The slow one's four tokens are read in a second each. Two more requests come a moment later, of a quick reader."""
    tenants = (Tenant("slow"), Tenant("quick"))
    workload = replace(
        make_workload([0.0, 0.1, 0.1], [1] * 3, [4, 2, 2]), tenant=np.array([0, 1, 1]), tenants=tenants
    )
    ways = {"clients": 1, "shared": True, "tenants": {"slow": {"reader_tokens_per_s": 1}}}
    last = {}
    for protocol, connections in (("http/2", None), ("http/1.1", 2), ("http/1.1-pipelined", 1)):
        r = run(workload, Network(protocol=protocol, connections=connections, **ways)).requests
        assert r.last_token_s[0] == 0.25 + 3
        assert r.reader_s.tolist() == [0.25 + 3 - 1.0, 0.0, 0.0]
        last[protocol] = r.last_token_s[1:].tolist()
    # The engine has both at 0.75 s. Of two connections the slow one keeps its own, so that one waits for the other and
    # joins the step at 1 s. In the pipeline all is read before them, the slow one's last token until 4.25 s.
    assert last == {"http/2": [0.75, 0.75], "http/1.1": [0.75, 1.5], "http/1.1-pipelined": [4.25, 4.25]}


def test_an_answer_behind_one_that_the_end_of_the_run_cuts_off_has_not_ended() -> None:
    workload = make_workload([0.0, 0.1], [1, 1], [40, 2])
    network = Network(clients=1, protocol="http/1.1-pipelined", connections=1)
    record = run(workload, network, until_s=2.1)
    requests = record.requests
    assert requests.status.tolist() == [Status.UNFINISHED, Status.UNFINISHED]
    assert requests.output_tokens.tolist() == [8, 2]
    assert requests.engine_done_s[1] == 0.75
    assert np.isnan(requests.first_token_s[1])
    assert len(record.event_times_s(1)) == 0
    assert summarise(record).completed == 0


def test_gathering_is_seen_between_events_and_not_at_the_ends() -> None:
    workload = make_workload([0.0], [1], [9])
    assert run(workload, interval=4).event_times_s(0).tolist() == [0.25, 1.25, 2.25]
    assert run(workload, slice_s=0.6).event_times_s(0) == pytest.approx([0.25, 0.85, 1.45, 2.05, 2.25])
    gathered = run(workload, interval=4)
    assert inter_token_gaps(gathered).values_s.tolist() == [1.0, 1.0]
    assert latencies(gathered).e2el_s.tolist() == latencies(run(workload)).e2el_s.tolist()


CUT = Network(reader_tokens_per_s=1, window_kib=0.5, event_bytes=256, buffer_kib=1, send_timeout_s=2.0)


def test_a_client_that_does_not_read_is_cut_and_its_engine_stops() -> None:
    """Four tokens a second, of which one a second is read; two fit the window and four the buffer.

    A read makes room for an event: nothing is stuck for two seconds, however full the buffer is.
    """
    assert run(make_workload([0.0], [1], [40]), CUT).requests.status.tolist() == [Status.FINISHED]
    slower = CUT.model_copy(update={"reader_tokens_per_s": 0.25})
    record = run(make_workload([0.0, 0.0], [1, 1], [40, 4]), slower)
    # The first is read at once and the next at 4.25 s: events 2 and 3 fill the window, 4 to 7 the buffer, and the eighth
    # finds it full at 2 s. The step that begins at 4 s is under way.
    r = record.requests
    assert r.status.tolist() == [Status.FAILED, Status.FINISHED]
    assert r.reason[0] == TOO_SLOW
    assert r.engine_done_s[0] == 4.25
    assert r.output_tokens[0] == 17
    assert np.isnan(latencies(record).e2el_s[0])
    assert record.steps.end_s[-1] == 4.25
    assert len(record.token_times_s(0)) == 1


def test_a_client_that_is_cut_after_its_engine_was_done_has_failed_too() -> None:
    slower = CUT.model_copy(update={"reader_tokens_per_s": 0.1})
    record = run(make_workload([0.0, 20.0], [1, 1], [8, 2]), slower)
    assert record.requests.status.tolist() == [Status.FAILED, Status.FINISHED]
    assert record.requests.engine_done_s[0] == 2.0


PROTOCOLS = st.sampled_from(["http/1.1", "http/1.1-pipelined", "http/2"])


@st.composite
def networks(draw: st.DrawFn) -> Network:
    clients = draw(st.sampled_from([None, 1, 2]))
    words: dict[str, object] = {
        "rtt_ms": draw(st.sampled_from([0, 0, 13, 400])),
        "bandwidth_mbit_s": draw(st.sampled_from([None, 0.1, 5])),
        "upload_mbit_s": draw(st.sampled_from([None, 0.01])),
        "reader_tokens_per_s": draw(st.sampled_from([None, 3, 40])),
        "window_kib": draw(st.sampled_from([None, 0.5, 4])),
    }
    if clients is not None:
        words |= {
            "clients": clients,
            "protocol": draw(PROTOCOLS),
            "handshake_round_trips": draw(st.integers(0, 2)),
        }
        if words["protocol"] != "http/2":
            words["connections"] = draw(st.integers(1, 3))
        words["shared"] = draw(st.booleans())
    if words["reader_tokens_per_s"] and draw(st.booleans()):
        words |= {"buffer_kib": 1, "send_timeout_s": draw(st.sampled_from([0.05, 1.0]))}
    return Network(**words)  # type: ignore[arg-type]


@given(
    workloads(), configs(), networks(), st.sampled_from([(1, 0.0), (3, 0.0), (1, 0.1)]), st.integers(1, 2),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_fast_forward_changes_nothing_and_rules_hold(
    workload: Workload,
    config: SchedulerConfig,
    network: Network,
    gathering: tuple[int, float],
    replicas: int,
    cached: bool,
) -> None:
    def one(fast_forward: bool) -> RunRecord:
        return run(
            workload, network, interval=gathering[0], slice_s=gathering[1], config=config, pricer=LinearPricer(),
            num_replicas=replicas, fast_forward=fast_forward, response_cache=cached,
        )  # fmt: skip

    fast, slow = one(True), one(False)
    assert_same(fast, slow)
    for name in ("offsets", "seen_s", "tokens"):
        assert getattr(fast.deliveries, name).tolist() == getattr(slow.deliveries, name).tolist(), name
    r, stages = fast.requests, stage_times(fast)
    done = r.status == Status.FINISHED
    assert len(r) == len(workload)
    assert (r.status != Status.UNFINISHED).all()
    total_s = sum(stages.values(), start=np.zeros(len(r)))
    np.testing.assert_allclose(total_s[done], latencies(fast).e2el_s[done], rtol=1e-9, atol=1e-9)
    for name, times_s in stages.items():
        assert (times_s[done] >= -1e-9).all(), name
    if gathering == (1, 0.0):
        assert not stages["stream"][done].any()
    for row in np.flatnonzero(done).tolist():
        seen_s, engine_s = fast.token_times_s(row), fast.engine_token_times_s(row)
        assert len(seen_s) == r.output_tokens[row]
        assert (seen_s >= engine_s - 1e-12).all()
        assert (np.diff(seen_s) >= 0).all()


def test_a_verdict_names_the_clients_where_they_take_most_of_the_time() -> None:
    workload = make_workload([0.0] * 6, [1] * 6, [4] * 6)
    slow = run(workload, Network(clients=1, protocol="http/1.1", connections=1, reader_tokens_per_s=2))
    bound = what_bounds(slow, summarise(slow))
    assert bound.kind == "clients"
    # An answer takes 0.25 s and three reads of 0.5 s; the sixth waits for five of them.
    blocked_s, reader_s = 1.75 * 2.5, 1.75 - 1.0
    assert bound.shares["clients"] == pytest.approx((blocked_s + reader_s) / (blocked_s + 1.75))
    # Where little is read slowly and a tenth is spent waiting for connections, they are what holds the run back.
    few = run(workload, Network(clients=1, protocol="http/1.1", connections=5))
    bound = what_bounds(few, summarise(few))
    assert bound.kind == "clients"
    assert bound.share == pytest.approx(1 / (6 + 1))
    quick = run(workload, Network(clients=1))
    assert what_bounds(quick, summarise(quick)).kind == "decode_bandwidth"


def test_who_reads_as_fast_as_the_limit_keeps_it() -> None:
    """A reader of 20 tokens a second has a TPOT of 50 ms; that of a late hour is rounded, up for some."""
    fast = LinearPricer(fixed_s=0.01, token_s=0.0, context_s=0.0)
    workload = make_workload([1e5 + 13.7 * i for i in range(20)], [10] * 20, [41] * 20)
    exact, slower = (
        summarise(
            run(workload, Network(reader_tokens_per_s=pace), pricer=fast),
            slos=(Slo("max", "tpot", 0.05),),
            goodput=Goodput(tpot_s=0.05),
        )
        for pace in (20, 19.999)
    )
    assert exact.slos[0].value_s > 0.05
    assert [s.slos[0].met for s in (exact, slower)] == [True, False]
    assert [s.slo_attainment for s in (exact, slower)] == [1.0, 0.0]
