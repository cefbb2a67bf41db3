"""Best-of in the twin: tokens, steps and pages by formula, and the rules that no run breaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import SchedulerConfig
from serving.errors import UsageError
from sim.best_of import check_best_of
from sim.metrics import summarise
from sim.record import RunRecord, Status
from sim.slo import Slo
from sim.verdict import verdict
from sim.workload import load_workload
from sim.workload.flags import spec_from_flags
from sim.workload.types import Workload
from sim.world import run_world
from tests.sim.test_beam import loads
from tests.sim.test_fast_forward import POLICIES, assert_same, configs
from tests.sim.worlds import LinearPricer, make_workload

SIZE = 16


def sampling(counts: list[int], workload: Workload) -> Workload:
    return replace(workload, best_of=np.array(counts, np.int64))


def alone(count: int, prompt: int, output: int, **limits: Any) -> RunRecord:
    config = SchedulerConfig(
        num_pages=512, page_tokens=SIZE, max_num_seqs=16, async_scheduling=False, **limits
    )
    return run_world(sampling([count], make_workload([0.5], [prompt], [output])), config, LinearPricer())


@pytest.mark.parametrize(("count", "prompt", "output"), [(2, 37, 20), (5, 64, 33), (8, 1, 1), (4, 100, 2)])
def test_tokens_steps_and_pages_by_formula(count: int, prompt: int, output: int) -> None:
    """A fork waits for the prompt's step and computes its last token again: it is a step behind."""
    record = alone(count, prompt, output)
    assert record.candidates is not None
    assert record.candidates.requests == 1
    assert record.candidates.answers == count
    assert record.candidates.generated_tokens == count * output
    assert record.candidates.shown_tokens == output == record.requests.output_tokens[0]
    if output > 1:
        assert len(record.steps) == output + 1
        assert record.steps.num_tokens.sum() == prompt + (output - 1) + (count - 1) * output
        shared, path = (prompt - 1) // SIZE, -(-(prompt + output - 1) // SIZE)
        most = int(record.steps.used_pages.max())
        assert most <= prompt // SIZE + count * (-(-(prompt + output) // SIZE) - shared)
        assert most >= shared + count * (path - shared) - 1
    r = record.requests
    assert r.status.tolist() == [Status.FINISHED]
    assert r.first_token_s[0] == r.last_token_s[0] == r.engine_done_s[0] == record.steps.end_s[-1]
    assert record.token_times_s(0).tolist() == [r.last_token_s[0]] * output
    assert summarise(record).itl.count == 0


def test_one_answer_is_no_best_of() -> None:
    flags = {"dataset_name": "random", "num_prompts": 5, "request_rate": 2.0}
    assert load_workload(spec_from_flags(flags | {"best_of": 1}), seed=0).best_of is None
    found = load_workload(spec_from_flags(flags | {"best_of": 3}), seed=0).best_of
    assert found is not None
    assert found.tolist() == [3] * 5
    with pytest.raises(UsageError, match="--best-of"):
        spec_from_flags(flags | {"best_of": 0})


def test_the_next_turn_finds_the_answer_that_was_shown() -> None:
    prompt, output = 40, 30
    history = prompt + output
    workload = make_workload(
        [0.0, 0.0],
        [prompt, history + 20],
        [output, 5],
        segments=[[(history, 7)], [(history + 25, 7)]],
        after=[-1, 0],
    )
    config = SchedulerConfig(num_pages=64, page_tokens=SIZE)
    found = run_world(sampling([3, 2], workload), config, LinearPricer()).requests.cached_tokens
    assert found.tolist() == [0, (history - 1) // SIZE * SIZE]


@settings(max_examples=50, deadline=None)
@given(loads(), configs(), st.sampled_from(sorted(POLICIES)), st.integers(1, 2), st.data())
def test_fast_forward_changes_nothing_and_nothing_is_lost(
    workload: Workload, config: SchedulerConfig, policy: str, num_replicas: int, data: st.DataObject
) -> None:
    """Beside beam searches as well."""
    assert workload.beam_width is not None
    drawn = data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=len(workload), max_size=len(workload)))
    counts = np.where(workload.beam_width > 0, 1, drawn)
    workload = sampling(counts.tolist(), workload)

    def run(fast_forward: bool) -> RunRecord:
        return run_world(
            workload,
            config,
            LinearPricer(),
            make_policy=POLICIES[policy],
            num_replicas=num_replicas,
            fast_forward=fast_forward,
        )

    leapt, stepped = run(True), run(False)
    assert_same(leapt, stepped)
    assert leapt.candidates == stepped.candidates
    assert leapt.candidates is not None
    r = leapt.requests
    done = r.status == Status.FINISHED
    assert (done | (r.status == Status.REJECTED)).all()
    mine = done & (counts[r.request_id] > 1)
    assert leapt.candidates.requests == mine.sum()
    assert leapt.candidates.answers == counts[r.request_id][mine].sum()
    assert leapt.candidates.shown_tokens == r.output_tokens[mine].sum()
    assert (r.first_token_s[mine] == r.last_token_s[mine]).all()
    for row in np.flatnonzero(done):
        assert len(leapt.token_times_s(int(row))) == r.output_tokens[row]


@pytest.mark.parametrize("router", ["round_robin", "central"])
def test_on_several_replicas(router: str) -> None:
    workload = sampling([3] * 6, make_workload([0.0, 0.1, 0.2, 0.3, 4.0, 4.1], [50] * 6, [40] * 6))
    config = SchedulerConfig(num_pages=128, page_tokens=SIZE, max_num_seqs=4)
    record = run_world(workload, config, LinearPricer(), num_replicas=2, router=router)
    assert (record.requests.status == Status.FINISHED).all()
    assert record.candidates is not None
    assert record.candidates.answers == 18


def test_an_interrupted_request_has_shown_nothing() -> None:
    workload = sampling([3], make_workload([0.0], [50], [100]))
    record = run_world(
        workload, SchedulerConfig(num_pages=64, page_tokens=SIZE), LinearPricer(), until_s=1.01
    )
    assert record.requests.status.tolist() == [Status.UNFINISHED]
    assert record.requests.output_tokens.tolist() == [0]
    assert np.isnan(record.requests.first_token_s[0])


def test_a_search_samples_nothing() -> None:
    workload = sampling([2], make_workload([0.0], [5], [5]))
    with pytest.raises(UsageError, match="--beam-width"):
        check_best_of(replace(workload, beam_width=np.array([2], np.int64)))


@pytest.mark.parametrize("count", [3, 1])
def test_a_limit_on_the_pace_of_an_answer_that_comes_whole_is_neither_met_nor_missed(count: int) -> None:
    slos = (Slo("p95", "tpot", 0.05), Slo("mean", "itl", 0.05), Slo("p95", "e2el", 5.0))
    record = alone(count, 37, 20)
    summary = summarise(record, slos=slos)
    found = verdict(record, summary)
    whole = count > 1
    assert [o.met for o in summary.slos] == ([None, None, True] if whole else [True] * 3)
    assert found.meets_slos is (None if whole else True)
    assert verdict(record, summary, [slos[0], Slo("p95", "e2el", 1e-6)]).meets_slos is False
    assert [line for line in found.sentences if line.startswith("Cannot judge P95 TPOT ≤ 50 ms: ")] == (
        [found.sentences[0]] if whole else []
    )
