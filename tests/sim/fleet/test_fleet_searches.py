"""Beam searches and best-of on fleets: one request to routers, doors and failures, several to the engine that has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from sim.admission import Admission, Shedding, TokenBucket
from sim.fleet.plan import PoolPlan
from sim.fleet.record import ReplicaState
from sim.fleet.spec import Autoscaler, Failures, KvTransfer, Outage
from sim.record import RunRecord, Status
from sim.router import router_names
from sim.workload.types import Workload
from sim.world import run_world
from tests.sim.fleet.test_fleet_properties import check_ended, fleets
from tests.sim.fleet.worlds import fleet_of, pool, run_fleet
from tests.sim.test_beam import computed_by_formula, loads, searching
from tests.sim.test_best_of import sampling
from tests.sim.test_fast_forward import assert_same, configs
from tests.sim.worlds import LinearPricer, make_workload

ENGINE = SchedulerConfig(num_pages=400, max_num_seqs=8, max_num_batched_tokens=256, async_scheduling=False)


@st.composite
def mixed(draw: st.DrawFn) -> Workload:
    """Searches, best-of and plain requests."""
    workload = draw(loads())
    assert workload.beam_width is not None
    drawn = draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=len(workload), max_size=len(workload)))
    return sampling(np.where(workload.beam_width > 0, 1, drawn).tolist(), workload)


def of_width(width: int, **columns: Any) -> Workload:
    """Searches of one width; `columns` are those of `make_workload`."""
    return searching([width] * len(columns["sent_s"]), make_workload(**columns))


def check_left(world: Any) -> None:
    """Nobody is under way any more, and nobody holds a page."""
    assert not world.server._whose
    assert not world.fleet.live
    for slot in world.fleet.slots:
        if slot.state in (ReplicaState.READY, ReplicaState.DRAINING):
            assert slot.replica.scheduler.num_unfinished == slot.replica.scheduler.used_pages == 0
            assert slot.replica.is_empty
            assert slot.replica.coming == 0


def run_both_ways(workload: Workload, *pools: PoolPlan, **plan: Any) -> RunRecord:
    records = []
    for fast_forward in (True, False):
        worlds: list[Any] = []
        records.append(run_fleet(workload, *pools, fast_forward=fast_forward, watch=worlds.append, **plan))
        check_left(worlds[0])
    fast, slow = records
    assert_same(fast, slow)
    assert fast.beams == slow.beams
    assert fast.candidates == slow.candidates
    for name in ("event_s", "event_replica", "event_state", "retries", "prefill_replica", "kv_transfer_s"):
        np.testing.assert_array_equal(getattr(fast.fleet, name), getattr(slow.fleet, name), err_msg=name)
    assert fleet_of(fast).lost_tokens == fleet_of(slow).lost_tokens
    return fast


def check_counts(record: RunRecord, workload: Workload) -> None:
    """What was asked of the engines, by formula, where no attempt was lost."""
    r, whole = record.requests, workload.come_whole()
    done = r.status == Status.FINISHED
    assert workload.beam_width is not None
    assert workload.best_of is not None
    assert not (workload.beam_width[workload.best_of > 1]).any()
    width, count = workload.beam_width[r.request_id], workload.best_of[r.request_id]
    beams, candidates = record.beams, record.candidates
    assert beams is not None
    assert candidates is not None
    mine = done & (width > 0)
    assert beams.searches == mine.sum()
    assert beams.shown_tokens == r.output_tokens[mine].sum()
    assert beams.requests == (1 + width * (r.output_tokens - 1))[mine].sum()
    mine = done & (count > 1)
    assert candidates.requests == mine.sum()
    assert candidates.answers == count[mine].sum()
    assert candidates.generated_tokens == (count * r.output_tokens)[mine].sum()
    assert (r.first_token_s == r.last_token_s)[done & whole[r.request_id]].all()


# ---- against the plain run -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(mixed(), configs(), st.sampled_from([0.0, 0.004]), st.booleans())
def test_a_fleet_of_one_is_the_plain_replica(
    workload: Workload, config: SchedulerConfig, host_s: float, fast_forward: bool
) -> None:
    """To the bit; but that a door's refusal names no replica."""
    pricer = LinearPricer(host_s=host_s)
    plain = run_world(workload, config, pricer, fast_forward=fast_forward)
    fleet = run_fleet(workload, pool(config, pricer), fast_forward=fast_forward)
    refused = plain.requests.status == Status.REJECTED
    replica = np.where(refused, -1, plain.requests.replica)
    assert_same(replace(plain, requests=replace(plain.requests, replica=replica)), fleet)
    assert plain.beams == fleet.beams
    assert plain.candidates == fleet.candidates


@pytest.mark.parametrize("router", router_names())
def test_a_fleet_without_events_is_the_plain_run(router: str) -> None:
    rng = np.random.default_rng(0)
    workload = make_workload(
        np.cumsum(rng.exponential(0.1, 40)).tolist(),
        rng.integers(20, 120, 40).tolist(),
        rng.integers(1, 30, 40).tolist(),
        segments=[[(20, int(g))] for g in rng.integers(1, 6, 40)],
    )
    workload = searching(rng.choice([0, 2, 4], 40).tolist(), workload)
    workload = sampling(np.where(workload.beam_width == 0, rng.choice([1, 3], 40), 1).tolist(), workload)
    plain = run_world(workload, ENGINE, LinearPricer(), num_replicas=3, router=router)
    fleet = run_fleet(workload, pool(ENGINE, replicas=3), router=router)
    assert_same(plain, fleet)
    assert plain.beams == fleet.beams
    assert plain.candidates == fleet.candidates


# ---- whatever happens to replicas ----------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(mixed(), fleets())
def test_no_search_is_lost_and_fast_forward_changes_nothing(
    workload: Workload, fleet: tuple[tuple[PoolPlan, ...], dict[str, Any]]
) -> None:
    pools, plan = fleet
    record = run_both_ways(workload, *pools, **plan)
    check_ended(record, workload, plan["failures"])
    if plan["failures"] is None:
        check_counts(record, workload)


def test_a_failed_replica_takes_the_search_with_it_and_it_begins_again_as_a_whole() -> None:
    """Of a search of 3 that is in its eleventh step, 1 + 3 × 9 tokens are lost; the second attempt is the first again."""
    workload = of_width(3, sent_s=[0.5], prompt_tokens=[40], output_tokens=[30])
    pools = pool(ENGINE, replicas=2)
    calm = run_fleet(workload, pools)
    at_s = float(calm.steps.end_s[9]) + 1e-3
    record = run_both_ways(workload, pools, failures=Failures(schedule=(Outage(time_s=at_s, replica=0),)))
    r, fleet = record.requests, fleet_of(record)
    assert r.status.tolist() == [Status.FINISHED]
    assert r.replica.tolist() == [1]
    assert fleet.retries.tolist() == [1]
    assert fleet.lost_tokens == 1 + 3 * 9
    assert r.last_token_s[0] == pytest.approx(at_s + calm.requests.last_token_s[0] - 0.5)
    # Each attempt's own steps; of the lost one ten were over.
    assert np.bincount(record.steps.replica).tolist() == [10, 30]
    second = record.steps.replica == 1
    for name in ("num_tokens", "num_prefills", "used_pages"):
        assert getattr(record.steps, name)[second].tolist() == getattr(calm.steps, name).tolist()
    assert record.beams is not None
    assert record.beams.searches == 1
    assert record.beams.requests == 1 + 3 * 29 + 1 + 3 * 10


def test_a_failure_between_two_steps_of_a_search() -> None:
    """At the very boundary, where for a moment the engine has nothing to do."""
    workload = of_width(2, sent_s=[0.0], prompt_tokens=[20], output_tokens=[8])
    flat = LinearPricer(fixed_s=0.25, token_s=0.0, context_s=0.0)
    for replica in (0, 1):
        record = run_both_ways(
            workload,
            pool(ENGINE, flat, replicas=2),
            failures=Failures(schedule=(Outage(time_s=1.0, replica=replica),)),
        )
        # Failures come before boundaries of the same time: of the search's fourth step nothing is left.
        assert record.requests.last_token_s.tolist() == [2.0 if replica else 3.0]
        assert fleet_of(record).lost_tokens == (0 if replica else 1 + 2 * 2)


def test_a_search_that_has_no_retry_left_fails_once() -> None:
    workload = of_width(3, sent_s=[0.0], prompt_tokens=[40], output_tokens=[30])
    outages = tuple(Outage(time_s=t, replica=0, down_s=0.01) for t in (0.1, 0.2, 0.3))
    record = run_both_ways(workload, pool(ENGINE), failures=Failures(schedule=outages, max_retries=2))
    assert record.requests.status.tolist() == [Status.FAILED]
    assert record.requests.output_tokens.tolist() == [0]
    assert fleet_of(record).retries.tolist() == [2]
    assert record.beams is not None
    assert record.beams.searches == 0


def test_a_drained_replica_finishes_its_search() -> None:
    """A burst brings a second replica, which is given the last of it and is then one too many."""
    workload = make_workload([0.0, 0.0, 0.15], [30] * 3, [20, 60, 60])
    scaler = Autoscaler(outstanding=4, max_replicas=2, interval_s=0.1, scale_down_cooldown_s=0)
    record = run_both_ways(
        searching([4, 2, 2], workload), pool(ENGINE, autoscaler=scaler), router="least_outstanding"
    )
    fleet, r = fleet_of(record), record.requests
    assert (r.status == Status.FINISHED).all()
    assert r.replica.tolist() == [0, 0, 1]
    second = fleet.event_replica == 1
    assert fleet.event_state[second].tolist()[-2:] == [ReplicaState.DRAINING, ReplicaState.STOPPED]
    begins_s, ends_s = fleet.event_s[second][-2:]
    assert begins_s < ends_s == r.engine_done_s[2]
    assert ((record.steps.start_s > begins_s) & (record.steps.replica == 1)).sum() > 10


# ---- routers and doors ---------------------------------------------------------------------------------------


def test_a_router_that_weighs_load_counts_hypotheses() -> None:
    """A search of 4 weighs as much as four requests: the next four go to the other replica."""
    workload = searching([4, 0, 0, 0, 0], make_workload([0.0, 0.1, 0.1, 0.1, 0.1], [20] * 5, [60] * 5))
    record = run_fleet(workload, pool(ENGINE, replicas=2), router="least_outstanding")
    assert record.requests.replica.tolist() == [0, 1, 1, 1, 1]


def test_a_prompt_that_nobody_shares_goes_where_load_is_least() -> None:
    """Names of its own, by which its hypotheses find its pages, are nothing to a router of prefixes."""
    workload = of_width(3, sent_s=[0.0, 0.1, 0.2, 0.3], prompt_tokens=[40] * 4, output_tokens=[60] * 4)
    record = run_fleet(workload, pool(ENGINE, replicas=4), router="prefix_hash")
    assert record.requests.replica.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["beams", "candidates"])
def test_a_door_counts_one_request(kind: str) -> None:
    """Two tokens of the bucket let two in, of eight requests to the engine each."""
    workload = make_workload([0.0, 0.2, 0.3, 0.4], [20] * 4, [40] * 4)
    workload = searching([8] * 4, workload) if kind == "beams" else sampling([8] * 4, workload)
    bucket = TokenBucket(rate=1e-9, burst=2)
    record = run_both_ways(workload, pool(ENGINE), admission=Admission(token_bucket=bucket))
    assert record.requests.status.tolist() == [Status.FINISHED] * 2 + [Status.REJECTED] * 2


def test_an_autoscaler_and_a_door_see_a_first_token_when_the_answer_is_shown() -> None:
    workload = of_width(2, sent_s=[0.0, 0.2], prompt_tokens=[20] * 2, output_tokens=[20, 60])
    flat = LinearPricer(fixed_s=0.1, token_s=0.0, context_s=0.0)
    seen: list[Any] = []

    def watch(world: Any) -> None:
        view = world.fleet.view
        for time_s in (2.0, 6.0):
            world.clock.call_at(time_s, lambda: seen.append((view.num_without_token, view.ttfts(0.0))))

    scaler = Autoscaler(p95_ttft_ms=1e6, max_replicas=1)
    record = run_fleet(workload, pool(ENGINE, flat, autoscaler=scaler), watch=watch)
    first_s = float(record.requests.engine_done_s[0])
    assert 2.0 < first_s < 6.0
    assert seen == [(2, ([], [2.0, 1.8])), (1, ([first_s], [5.8]))]


def test_a_queue_limit_does_not_count_what_a_search_has_made() -> None:
    """Of a search that runs, hypotheses wait for seats all the time; nobody who was sent does."""
    workload = of_width(6, sent_s=[0.0, 0.3], prompt_tokens=[20] * 2, output_tokens=[40] * 2)
    record = run_both_ways(
        workload, pool(replace(ENGINE, max_num_seqs=2)), admission=Admission(max_waiting=1)
    )
    assert (record.requests.status == Status.FINISHED).all()
    assert record.steps.num_waiting.max() >= 4


@settings(max_examples=25, deadline=None)
@given(
    mixed(),
    configs(),
    st.sampled_from(
        [
            Admission(token_bucket=TokenBucket(rate=2.0, burst=2)),
            Admission(max_waiting=2),
            Admission(deadline_ms=60, deadline_window_s=0.5),
            Admission(shed=Shedding(ttft_ms=40, window_s=0.1)),
        ]
    ),
)
def test_the_door_refuses_the_same_with_and_without_fast_forward(
    workload: Workload, config: SchedulerConfig, admission: Admission
) -> None:
    record = run_both_ways(workload, pool(config, replicas=2), admission=admission)
    assert not (record.requests.status == Status.UNFINISHED).any()
    check_counts(record, workload)


# ---- prefill apart from decode -------------------------------------------------------------------------------


def disaggregated(workload: Workload, **limits: Any) -> RunRecord:
    config = replace(ENGINE, **limits)
    return run_both_ways(
        workload,
        pool(config, role="prefill", name="p", kv_bytes_per_token=1e6),
        pool(config, role="decode", name="d"),
        kv_transfer=KvTransfer(bandwidth_gb_per_s=1.0, latency_ms=2.0),
    )


@pytest.mark.parametrize(("width", "prompt", "output"), [(1, 37, 20), (4, 64, 33), (3, 15, 2), (2, 50, 1)])
def test_pages_are_sent_once_and_the_search_goes_on_from_them(width: int, prompt: int, output: int) -> None:
    """The prompt is computed in one pool; in the other all as without it, but for what lay on a partly filled page."""
    record = disaggregated(of_width(width, sent_s=[0.5], prompt_tokens=[prompt], output_tokens=[output]))
    r, fleet, beams = record.requests, fleet_of(record), record.beams
    assert beams is not None
    assert r.status.tolist() == [Status.FINISHED]
    assert r.output_tokens.tolist() == [output]
    assert beams.requests == 1 + width * (output - 1)
    here = record.steps.replica == 0
    assert record.steps.num_tokens[here].tolist() == [prompt]
    if output == 1:
        assert np.isnan(fleet.kv_transfer_s).all()
        return
    assert fleet.kv_transfer_s.tolist() == pytest.approx([prompt * 1e6 / 1e9 + 0.002])
    assert fleet.prefill_replica.tolist() == [0]
    assert r.replica.tolist() == [1]
    assert len(record.steps) == output
    partly = prompt % 16
    assert (
        record.steps.num_tokens[~here].sum() == computed_by_formula(width, prompt, output) - prompt - partly
    )
    assert r.first_token_s[0] == r.last_token_s[0] == record.steps.end_s[-1]
    # In the first step there they share the prompt, and each has a page for its token.
    assert record.steps.used_pages[~here][0] == prompt // 16 + width


@pytest.mark.parametrize("asynchronous", [False, True])
def test_candidates_share_the_pages_that_were_sent(asynchronous: bool) -> None:
    prompt, output, count = 40, 20, 4
    workload = sampling([count], make_workload([0.5], [prompt], [output]))
    record = disaggregated(workload, async_scheduling=asynchronous)
    assert record.candidates is not None
    assert record.candidates.generated_tokens == count * output
    there = record.steps.replica == 1
    # Each fork computes the last token of the prompt again; the first has its first token from the other pool.
    assert record.steps.num_tokens[there].sum() == (output - 1) + (count - 1) * output
    assert record.requests.last_token_s[0] == record.steps.end_s[-1]


def test_what_leaves_room_for_one_token_ends_where_its_prompt_was_computed() -> None:
    workload = of_width(3, sent_s=[0.0, 1.0, 2.0], prompt_tokens=[99] * 3, output_tokens=[20] * 3)
    workload = sampling([1, 1, 4], searching([0, 3, 0], workload))
    record = disaggregated(workload, max_model_len=100)
    r = record.requests
    assert r.status.tolist() == [Status.FINISHED] * 3
    assert r.output_tokens.tolist() == [1, 1, 1]
    assert r.replica.tolist() == [0, 0, 0]
    assert np.isnan(fleet_of(record).kv_transfer_s).all()
    assert (r.first_token_s == r.last_token_s).all()
    check_counts(record, workload)


def test_an_answer_out_of_the_cache_is_shown_whole_too() -> None:
    workload = make_workload([0.0, 5.0], [40, 40], [20, 20], segments=[[(40, 1)], [(40, 1)]])
    for kind in (searching([3, 3], workload), sampling([3, 3], workload)):
        assert kind.repeats().tolist() == [0, 0]
        record = run_world(kind, ENGINE, LinearPricer(), response_cache=True)
        assert record.requests.output_tokens.tolist() == [20, 20]
        assert record.requests.replica.tolist() == [0, -1]
        assert record.token_times_s(1).tolist() == [5.0] * 20


def test_the_survivors_are_those_of_one_replica() -> None:
    """Where a prompt was computed says nothing of what is likely after it."""
    workload = of_width(5, sent_s=[0.0], prompt_tokens=[48], output_tokens=[40])
    apart_, together = disaggregated(workload), run_fleet(workload, pool(ENGINE))
    pages = apart_.steps.used_pages[apart_.steps.replica == 1]
    assert pages.tolist() == together.steps.used_pages[1:].tolist()


def test_the_next_turn_finds_the_best_hypothesis_on_its_replica() -> None:
    prompt, output = 40, 30
    history = prompt + output
    workload = make_workload(
        [0.0, 0.0],
        [prompt, history + 20],
        [output, 5],
        segments=[[(history, 7)], [(history + 25, 7)]],
        after=[-1, 0],
        think_s=[0.0, 1.0],
    )
    record = run_fleet(searching([4, 4], workload), pool(ENGINE))
    assert record.requests.cached_tokens.tolist() == [0, (history - 1) // 16 * 16]
