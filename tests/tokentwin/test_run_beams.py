"""`tokentwin run` with beam searches: one row for each in the record, and the counts of its twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from realengine.beam import beam_search, best_of
from realengine.generation import Sampling
from serving.config import SchedulerConfig
from serving.errors import UsageError
from sim.metrics import summarise
from sim.record import Status
from sim.workload import load_workload
from sim.world import run_world
from tests.realengine.engines import TINY, running, tiny_model
from tests.sim.worlds import LinearPricer
from tests.tokentwin.test_run import TRAFFIC, run_here
from tokentwin.job import make_spec
from tokentwin.replay import Prompts, replay

ALONE: dict[str, Any] = TRAFFIC | {"max_concurrency": 1, "num_prompts": 4, "random_output_len": 20}


def test_a_run_counts_what_its_twin_counts() -> None:
    """One search at a time, so that nothing depends on when clients answer."""
    record, workload = run_here(ALONE | {"beam_width": 3}, page_tokens=8)
    twin = run_world(
        workload, SchedulerConfig(num_pages=64, page_tokens=8, max_model_len=256), LinearPricer()
    )
    assert record.beams == twin.beams
    assert len(record.steps) == len(twin.steps)
    for name in ("output_tokens", "cached_tokens", "prompt_tokens", "max_output_tokens", "status"):
        assert getattr(record.requests, name).tolist() == getattr(twin.requests, name).tolist(), name
    for name in ("num_tokens", "num_prefills"):
        assert getattr(record.steps, name).tolist() == getattr(twin.steps, name).tolist(), name
    r = record.requests
    assert (r.first_token_s == r.last_token_s).all()
    assert (r.sent_s <= r.queued_s).all()
    assert (r.scheduled_s < r.prefill_done_s).all()
    assert (r.prefill_done_s < r.engine_done_s).all()
    for row in range(len(r)):
        assert record.token_times_s(row).tolist() == [r.last_token_s[row]] * 20
    summary = summarise(record)
    assert summary.total_output_tokens == 80
    assert summary.ttft.mean_s == summary.e2el.mean_s


def test_searches_beside_plain_requests() -> None:
    workload = load_workload(make_spec(TRAFFIC), seed=3)
    widths = np.array([2, 0] * 5, np.int64)
    with running(tiny_model()) as engine:
        record = replay(engine, replace(workload, beam_width=widths), vocab_size=TINY.vocab_size, seed=3)
    r = record.requests
    assert (r.status == Status.FINISHED).all()
    assert sorted(r.request_id.tolist()) == list(range(10))
    assert (np.diff(r.sent_s) >= 0).all()
    for row in range(10):
        times_s = record.token_times_s(row)
        assert len(times_s) == r.output_tokens[row] == workload.output_tokens[r.request_id[row]]
        assert times_s[-1] == r.last_token_s[row]
        assert (len(set(times_s.tolist())) == 1) == bool(widths[r.request_id[row]])
    assert record.beams is not None
    assert record.beams.searches == 5


def test_a_conversation_goes_on_with_the_best_hypothesis() -> None:
    flags = ALONE | {"session_turns_min": 2, "session_turns_max": 2, "num_prompts": 2, "random_prefix_len": 0}
    workload = load_workload(make_spec(flags | {"beam_width": 4}), seed=3)
    heard: list[list[int]] = []
    with running(tiny_model()) as engine:
        add = engine.add

        def listening_add(prompt: Any, *args: Any, **how: Any) -> Any:
            heard.append(list(prompt))
            return add(prompt, *args, **how)

        engine.add = listening_add  # type: ignore[method-assign]
        replay(engine, workload, vocab_size=TINY.vocab_size, seed=3)
    first = Prompts(workload, TINY.vocab_size, 3).ids(0)
    with running(tiny_model()) as engine:
        best = beam_search(engine, first, width=4, max_tokens=20)[0]
    second = next(prompt for prompt in heard if len(prompt) == int(workload.prompt_tokens[1]))
    assert second[: len(first) + 20] == [*first, *best.token_ids]


def test_best_of_counts_what_its_twin_counts() -> None:
    record, workload = run_here(ALONE | {"best_of": 3}, page_tokens=8)
    twin = run_world(
        workload, SchedulerConfig(num_pages=64, page_tokens=8, max_model_len=256), LinearPricer()
    )
    assert record.candidates == twin.candidates
    assert len(record.steps) == len(twin.steps)
    for name in ("output_tokens", "cached_tokens", "prompt_tokens", "max_output_tokens", "status"):
        assert getattr(record.requests, name).tolist() == getattr(twin.requests, name).tolist(), name
    for name in ("num_tokens", "num_decodes", "used_pages"):
        assert getattr(record.steps, name).tolist() == getattr(twin.steps, name).tolist(), name
    for row in range(4):
        assert record.token_times_s(row).tolist() == [record.requests.last_token_s[row]] * 20


def test_a_conversation_goes_on_with_the_likeliest_answer() -> None:
    flags = ALONE | {"session_turns_min": 2, "session_turns_max": 2, "num_prompts": 2, "random_prefix_len": 0}
    workload = load_workload(make_spec(flags | {"best_of": 4}), seed=3)
    heard: list[list[int]] = []
    with running(tiny_model()) as engine:
        add = engine.add

        def listening_add(prompt: Any, *args: Any, **how: Any) -> Any:
            heard.append(list(prompt))
            return add(prompt, *args, **how)

        engine.add = listening_add  # type: ignore[method-assign]
        replay(engine, workload, vocab_size=TINY.vocab_size, seed=3)
    first = Prompts(workload, TINY.vocab_size, 3).ids(0)
    with running(tiny_model()) as engine:
        best = best_of(engine, first, Sampling(20, 1.0, seed=0, ignore_eos=True), 4)
    assert heard[1][: len(first) + 20] == [*first, *best.token_ids]


def test_what_the_engine_cannot_search_is_said() -> None:
    with pytest.raises(UsageError, match="--beam-width: must be less than or equal to 10"):
        run_here(TRAFFIC | {"beam_width": 11})
