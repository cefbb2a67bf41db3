"""Beam searches in the twin: requests, tokens and pages by formula, times by hand, and the rules that no run breaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.beams import Beams
from serving.config import SchedulerConfig
from serving.errors import UsageError
from sim.beam import NextTokens, check_beams
from sim.metrics import summarise
from sim.record import RunRecord, Status
from sim.verdict import what_bounds
from sim.workload.types import Workload
from sim.world import run_world
from tests.sim.test_fast_forward import POLICIES, assert_same, configs
from tests.sim.worlds import LinearPricer, make_workload

SIZE = 16


def searching(widths: list[int], workload: Workload) -> Workload:
    return replace(workload, beam_width=np.array(widths, np.int64), meta={"seed": 3})


def alone(width: int, prompt: int, output: int, **limits: Any) -> RunRecord:
    """One search on an engine of its own, one step at a time."""
    limits = {"num_pages": 512, "page_tokens": SIZE, "max_num_seqs": 16} | limits
    config = SchedulerConfig(async_scheduling=False, **limits)
    return run_world(searching([width], make_workload([0.5], [prompt], [output])), config, LinearPricer())


def computed_by_formula(width: int, prompt: int, output: int, *, caching: bool = True) -> int:
    """The prompt once, then what is not on a full page before a hypothesis' last token."""
    lengths = range(prompt + 1, prompt + output)
    each = [n - (n - 1) // SIZE * SIZE if caching else n for n in lengths]
    return prompt + width * sum(each)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("width", "prompt", "output"), [(1, 37, 20), (2, 1, 40), (4, 64, 33), (8, 100, 50), (3, 15, 1)]
)
def test_requests_steps_and_tokens_by_formula(width: int, prompt: int, output: int, caching: bool) -> None:
    record = alone(width, prompt, output, enable_prefix_caching=caching)
    beams = record.beams
    assert beams is not None
    assert beams.searches == 1
    assert beams.shown_tokens == output == record.requests.output_tokens[0]
    assert beams.requests == 1 + width * (output - 1)
    assert len(record.steps) == output
    assert beams.computed_tokens == record.steps.num_tokens.sum()
    assert beams.computed_tokens == computed_by_formula(width, prompt, output, caching=caching)
    assert record.requests.status[0] == Status.FINISHED


def test_time_by_hand() -> None:
    """Every step costs what the price list says of its chunks, and the client sees nothing before the last."""
    width, prompt, output = 4, 40, 30
    pricer = LinearPricer()
    expected_s = 0.0
    for step in range(output):
        length = prompt + step
        before = (length - 1) // SIZE * SIZE if step else 0
        chunks = [(length - before, before)] * (width if step else 1)
        expected_s += pricer.step_s(sum(c for c, _ in chunks), len(chunks), chunks, 0, 0, 0)
    record = alone(width, prompt, output)
    r = record.requests
    assert r.engine_done_s[0] - r.queued_s[0] == pytest.approx(expected_s, rel=1e-9)
    assert r.first_token_s[0] == r.last_token_s[0] == r.engine_done_s[0]
    assert r.prefill_done_s[0] == record.steps.end_s[0]
    assert (record.token_times_s(0) == r.last_token_s[0]).all()
    assert len(record.token_times_s(0)) == output
    summary = summarise(record)
    assert summary.ttft.mean_s == summary.e2el.mean_s
    assert summary.itl.count == 0


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_pages_lie_between_one_path_and_as_many_as_hypotheses(width: int) -> None:
    prompt, output = 96, 64
    record = alone(width, prompt, output)
    most = int(record.steps.used_pages.max())
    shared, one_path = prompt // SIZE, -(-(prompt + output) // SIZE)
    assert one_path + (width - 1) <= most <= shared + width * (one_path - shared)
    if width == 1:
        assert most == one_path


def test_a_sure_model_keeps_hypotheses_apart() -> None:
    """Each goes on by itself, on pages of its own; where all tokens are alike, the best one's children take all."""
    apart, one_family = most_pages(NextTokens(50.0, 0.1)), most_pages(NextTokens(0.1, 50.0))
    assert one_family <= 160 // 16 + 3
    assert apart > 1.5 * one_family


def most_pages(model: NextTokens) -> int:
    """Distinct pages that the beams of a search hold, at most."""
    beams, rng, most = Beams(4, 160), np.random.default_rng(0), 0
    paths: list[tuple[int, ...]] = [()]
    while not beams.over:
        drawn = model.logprobs(rng, len(beams.live), 8).tolist()
        beams.grow([[(100 * i + j, value) for j, value in enumerate(row)] for i, row in enumerate(drawn)])
        paths = [(*paths[h.parents[-1]], 1000 * beams.num_steps + i) for i, h in enumerate(beams.live)]
        pages = {path[: 16 * (i + 1)] for path in paths for i in range(len(path) // 16)}
        most = max(most, len(pages))
    return most


def test_a_made_up_model_is_a_model() -> None:
    drawn = np.exp(NextTokens().logprobs(np.random.default_rng(0), 5_000, 200))
    assert (np.diff(drawn, axis=1) <= 0).all()
    assert (drawn.sum(axis=1) <= 1 + 1e-9).all()
    # Of 1 - p the first k tokens leave (c - 1) / (c + k - 1).
    c = 1 / drawn[:, 0]
    np.testing.assert_allclose(1 - drawn.sum(axis=1), (c - 1) / (c + 199), atol=1e-9)
    assert drawn[:, 0].mean() == pytest.approx(1.0 / 1.64, abs=0.015)


@pytest.mark.parametrize(
    ("width", "measured"),
    [(2, (1.75, 1.58, 1.38)), (4, (3.24, 2.79, 2.22)), (8, (6.12, 5.09, 3.82))],
)
def test_hypotheses_part_as_those_of_a_model_do(width: int, measured: tuple[float, ...]) -> None:
    """Distinct ancestors 1, 2 and 4 steps back in beams of SmolLM2-135M-Instruct: 8 prompts, 48 steps."""
    found = []
    for seed in range(24):
        beams, rng = Beams(width, 48), np.random.default_rng(seed)
        parents: list[list[int]] = []
        while not beams.over:
            drawn = NextTokens().logprobs(rng, len(beams.live), 2 * width).tolist()
            beams.grow([[(100 * i + j, value) for j, value in enumerate(row)] for i, row in enumerate(drawn)])
            parents.append([h.parents[-1] for h in beams.live])
        found.append([_ancestors(parents, back) for back in (1, 2, 4)])
    for ours, theirs in zip(np.mean(found, axis=0), measured, strict=True):
        assert ours == pytest.approx(theirs, rel=0.15)


def _ancestors(parents: list[list[int]], back: int) -> float:
    counts = []
    for last in range(back, len(parents)):
        places = set(range(len(parents[last])))
        for step in range(last, last - back, -1):
            places = {parents[step][place] for place in places}
        counts.append(len(places))
    return float(np.mean(counts))


def test_the_next_turn_finds_the_best_hypothesis() -> None:
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
    config = SchedulerConfig(num_pages=64, page_tokens=SIZE)
    for widths in ([4, 0], [4, 4], [0, 4], [0, 0]):
        found = run_world(searching(widths, workload), config, LinearPricer()).requests.cached_tokens
        # All but the last answered token was computed.
        assert found.tolist() == [0, (history - 1) // SIZE * SIZE], widths


def test_prompts_in_common_are_found() -> None:
    workload = make_workload([0.0, 5.0], [100, 100], [10, 10], segments=[[(64, 1)], [(64, 1)]])
    record = run_world(
        searching([3, 3], workload), SchedulerConfig(num_pages=64, page_tokens=SIZE), LinearPricer()
    )
    assert record.requests.cached_tokens.tolist() == [0, 64]


@st.composite
def loads(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(1, 7))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.01, 0.2, 1.7]), min_size=count, max_size=count))
    prompts = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    segments = [
        draw(st.sampled_from([[], [(min(p, 40), 1)], [(p + o, 10)]]))
        for p, o in zip(prompts, outputs, strict=True)
    ]
    workload = make_workload(
        np.cumsum(gaps).tolist(),
        prompts,
        outputs,
        segments=segments,
        max_concurrency=draw(st.sampled_from([None, 2])),
    )
    return searching(
        draw(st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=count, max_size=count)), workload
    )


@settings(max_examples=50, deadline=None)
@given(
    loads(), configs(), st.sampled_from(sorted(POLICIES)), st.sampled_from([0.0, 0.004]), st.integers(1, 2)
)
def test_fast_forward_changes_nothing_and_nothing_is_lost(
    workload: Workload, config: SchedulerConfig, policy: str, host_s: float, num_replicas: int
) -> None:
    def run(fast_forward: bool) -> RunRecord:
        return run_world(
            workload,
            config,
            LinearPricer(host_s=host_s),
            make_policy=POLICIES[policy],
            num_replicas=num_replicas,
            fast_forward=fast_forward,
        )

    leapt, stepped = run(True), run(False)
    assert_same(leapt, stepped)
    assert leapt.beams == stepped.beams
    r, widths = leapt.requests, workload.beam_width
    assert widths is not None
    assert set(r.status.tolist()) <= {Status.FINISHED, Status.REJECTED}
    done = r.status == Status.FINISHED
    mine = done & (widths[r.request_id] > 0)
    assert leapt.beams is not None
    assert leapt.beams.searches == mine.sum()
    assert leapt.beams.shown_tokens == r.output_tokens[mine].sum()
    width = widths[r.request_id][mine]
    assert leapt.beams.requests == (1 + width * (r.output_tokens[mine] - 1)).sum()
    assert leapt.beams.computed_tokens <= leapt.steps.num_tokens.sum()
    assert (r.first_token_s[mine] == r.last_token_s[mine]).all()
    for row in np.flatnonzero(done):
        times_s = leapt.token_times_s(int(row))
        assert len(times_s) == r.output_tokens[row]
        assert times_s[-1] == r.last_token_s[row]


@pytest.mark.parametrize("router", ["round_robin", "central", "session", "prefix_hash", "least_kv"])
def test_a_search_stays_where_its_pages_are(router: str) -> None:
    workload = searching([3] * 6, make_workload([0.0, 0.1, 0.2, 0.3, 4.0, 4.1], [50] * 6, [40] * 6))
    config = SchedulerConfig(num_pages=128, page_tokens=SIZE)
    record = run_world(workload, config, LinearPricer(), num_replicas=2, router=router)
    assert record.beams is not None
    assert record.beams.searches == 6
    assert record.beams.computed_tokens == 6 * computed_by_formula(3, 50, 40)
    assert set(record.requests.replica.tolist()) == {0, 1}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_cache_that_is_too_small_preempts_and_loses_nothing(asynchronous: bool) -> None:
    workload = searching([4, 0, 0, 0], make_workload([0.0] * 4, [20, 30, 30, 30], [60, 90, 90, 90]))
    config = SchedulerConfig(
        num_pages=24, page_tokens=8, max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=asynchronous
    )
    record = run_world(workload, config, LinearPricer())
    assert (record.requests.status == Status.FINISHED).all()
    assert record.requests.preemptions.sum() > 0
    assert record.requests.preemptions.sum() == record.steps.preemptions.sum()
    assert record.requests.output_tokens.tolist() == [60, 90, 90, 90]


def test_a_search_that_can_never_run_is_rejected_and_one_that_outgrows_the_context_ends_there() -> None:
    workload = searching([2, 2], make_workload([0.0, 1.0], [120, 80], [5, 50]))
    record = run_world(
        workload, SchedulerConfig(num_pages=64, page_tokens=SIZE, max_model_len=100), LinearPricer()
    )
    assert record.requests.status.tolist() == [Status.REJECTED, Status.FINISHED]
    assert "max_model_len" in record.requests.reason[0]
    assert record.requests.output_tokens[1] == 20


def test_an_interrupted_search_is_unfinished() -> None:
    workload = searching([4], make_workload([0.0], [50], [100]))
    config = SchedulerConfig(num_pages=64, page_tokens=SIZE)
    record = run_world(workload, config, LinearPricer(), until_s=0.3)
    assert record.requests.status.tolist() == [Status.UNFINISHED]
    assert np.isnan(record.requests.first_token_s[0])
    assert record.requests.output_tokens[0] == 0


def test_a_seed_names_the_survivors() -> None:
    workload = searching([6] * 4, make_workload([0.0, 0.3, 0.7, 0.9], [100] * 4, [80] * 4))
    config = SchedulerConfig(num_pages=200, page_tokens=SIZE, max_num_seqs=16)
    first, again, other = (
        run_world(replace(workload, meta={"seed": seed}), config, LinearPricer()) for seed in (1, 1, 2)
    )
    assert_same(first, again)
    assert not np.array_equal(first.steps.used_pages, other.steps.used_pages)


def test_drafts_beside_searches_are_verified_of_the_others() -> None:
    workload = searching([2, 0], make_workload([0.0, 0.0], [5, 5], [5, 5]))
    check_beams(workload, drafts=True)
    check_beams(replace(workload, beam_width=None), drafts=True)
    with pytest.raises(UsageError, match="--speculative-config"):
        check_beams(searching([2], make_workload([0.0], [5], [5])), drafts=True)


def test_a_reading_of_a_run_has_its_own_requests_only() -> None:
    from tokentwin.live import of_world

    readings = []

    def watch(world: object) -> None:
        read = of_world(world)
        world.clock.call_at(1.0, lambda: readings.append(read()))  # type: ignore[attr-defined]

    workload = searching([4, 0, 3], make_workload([0.0, 0.1, 0.9], [50, 20, 30], [30, 200, 400]))
    run_world(workload, SchedulerConfig(num_pages=200, page_tokens=SIZE), LinearPricer(), watch=watch)
    (reading,) = readings
    assert len(reading.status) == len(reading.reason) == len(reading.prompt_tokens) == 3
    assert reading.status.tolist() == [Status.FINISHED, Status.UNFINISHED, Status.UNFINISHED]
    assert np.isnan(reading.times_s["prefill_done_s"]).tolist() == [False, False, True]
    assert reading.times_s["prefill_done_s"][0] == reading.times_s["engine_done_s"][0]


def test_a_search_is_bound_as_decodes_are() -> None:
    record = alone(4, 64, 60)
    bound = what_bounds(record, summarise(record))
    assert bound.kind == "decode_bandwidth"
    prompt_s = record.steps.gpu_s[0] / (record.steps.end_s - record.steps.start_s).sum()
    assert bound.shares["prefill_compute"] == pytest.approx(prompt_s)
