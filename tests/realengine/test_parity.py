"""A run of the real engine, replayed in the twin: the same arrivals, step times and tokens give the same plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from realengine.answer import Output
from realengine.engine import Engine
from realengine.generation import Sampling
from realengine.models import Model
from serving.policies import Adaptive, BatchPolicy, Chunked, Continuous, Static
from sim.record import RequestTable, RunRecord, Status, StepTable, Tenant, TokenRanges
from tests.realengine.engines import running, smollm2, tiny_model
from tests.realengine.replay import Decision, Twin, watch


@dataclass
class Load:
    """Random requests sent while the engine works, some of them aborted on the way."""

    seed: int = 0
    count: int = 26
    vocab_size: int = 61
    longest_prompt: int = 50
    longest_answer: int = 40
    aborts: int = 4
    finished: list[Output] = field(default_factory=list)

    def send(self, engine: Engine, gap_s: float) -> None:
        rng = np.random.default_rng(self.seed)
        shared = rng.integers(3, self.vocab_size, 64).tolist()
        aborted = set(rng.choice(self.count, self.aborts, replace=False).tolist())
        total = 0
        for number in range(self.count):
            # Half of the prompts begin alike, for the prefix cache.
            start = shared[: int(rng.integers(0, self.longest_prompt // 2))] if number % 2 else []
            tail = rng.integers(3, self.vocab_size, int(rng.integers(1, self.longest_prompt // 2))).tolist()
            sampling = Sampling(
                max_tokens=int(rng.integers(1, self.longest_answer)),
                temperature=1.0,
                seed=number,
                n=1 + (number % 7 == 3),
            )
            total += sampling.n
            requests = engine.add(
                [*start, *tail],
                sampling,
                self._listen,
                priority=int(rng.integers(3)),
                deadline_s=float(rng.random()),
                tenant=number % 3,
                weight=1.0 + number % 3,
                turn=(number % 4, number // 4),
            )
            if number in aborted:
                time.sleep(gap_s)
                engine.abort(requests[0])
            if number % 6 == 5:
                time.sleep(4 * gap_s * float(rng.random()))
        limit_s = time.monotonic() + 60
        while len(self.finished) < total:
            assert engine.fault is None
            assert time.monotonic() < limit_s, "the engine does not get done"
            time.sleep(0.002)

    def _listen(self, output: Output) -> None:
        if output.finish_reason is not None:
            self.finished.append(output)


def record_and_replay(
    model: Model, load: Load, policy: Callable[[], BatchPolicy], gap_s: float, **limits: Any
) -> tuple[Engine, list[Decision], Twin]:
    with running(model, policy=policy(), start=False, record_events=True, **limits) as engine:
        decided = watch(engine.scheduler)
        engine.start()
        load.send(engine, gap_s)
    engine.scheduler.check()
    assert engine.scheduler.pool.num_free == engine.config.num_pages
    twin = Twin(engine, policy())
    twin.run()
    return engine, decided, twin


def assert_same_plans(decided: Sequence[Decision], replayed: Sequence[Decision]) -> None:
    for theirs, ours in zip(decided, replayed, strict=False):
        assert ours == theirs, f"step {theirs['index']}"
    assert len(decided) == len(replayed)


TINY_CACHE = {"num_pages": 12, "page_tokens": 8, "max_num_seqs": 6, "max_num_batched_tokens": 24}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("policy", "limits"),
    [
        pytest.param(Chunked, {}, id="chunked"),
        pytest.param(Chunked, {"queue_order": "priority"}, id="chunked by priority"),
        pytest.param(Chunked, {"queue_order": "edf", "watermark": 0.1}, id="chunked by deadline"),
        pytest.param(Chunked, {"enable_prefix_caching": False}, id="without prefix cache"),
        pytest.param(Chunked, {"queue_order": "sjf", "num_pages": 64}, id="shortest first, enough memory"),
        pytest.param(Chunked, {"swap_pages": 12}, id="swapped to the host"),
        pytest.param(
            Chunked, {"queue_order": "fair", "kv_eviction": "lfu"}, id="fair, least frequent evicted"
        ),
        pytest.param(Chunked, {"kv_eviction": "session", "session_keep_s": 0.05}, id="conversations held"),
        pytest.param(Chunked, {"kv_eviction": "cost", "attention_tokens": 32.0}, id="dear pages held"),
        pytest.param(Chunked, {"swap_pages": 12, "swap_costs": (1e-3, 0.0, 5e-5)}, id="swapped if cheaper"),
        pytest.param(Chunked, {"host_cache_pages": 20}, id="forgotten pages kept on the host"),
        pytest.param(Chunked, {"host_cache_pages": 6, "swap_pages": 8}, id="both homes on the host"),
        pytest.param(lambda: Adaptive(((40, 2), (60, 1)), 150, 0.5), {}, id="adaptive"),
        pytest.param(Continuous, {"max_num_batched_tokens": 96}, id="continuous"),
        # The wait is a sum of powers of two, so that replayed times are exact.
        pytest.param(lambda: Static(4, max_wait_s=0.015625), {}, id="static"),
    ],
)
def test_the_twin_repeats_every_plan(
    policy: Callable[[], BatchPolicy], limits: dict[str, Any], asynchronous: bool
) -> None:
    load = Load(seed=len(limits))
    _, decided, twin = record_and_replay(
        tiny_model(), load, policy, 0.003, **{**TINY_CACHE, "async_scheduling": asynchronous, **limits}
    )
    assert_same_plans(decided, twin.decisions)
    reasons = {output.finish_reason for output in load.finished}
    assert reasons >= {"stop", "length"}
    if policy is Chunked and "num_pages" not in limits:
        assert any(decision["preempted"] for decision in decided), "the cache was meant to be too small"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_engine_and_twin_write_the_same_record(asynchronous: bool) -> None:
    load = Load(seed=5, aborts=0)
    engine, _, twin = record_and_replay(
        tiny_model(), load, Chunked, 0.003, **TINY_CACHE, async_scheduling=asynchronous
    )
    ours = engine.recorder
    steps = twin.replica.steps.matrix()
    from sim.log import STEP_COLUMNS

    columns = ours.step_columns()
    for i, name in enumerate(STEP_COLUMNS):
        if name not in ("gpu_s", "host_s"):
            assert columns[name].tolist() == steps[:, i].tolist(), name
    requests = ours.request_columns()
    for name in ("scheduled_s", "prefill_done_s", "engine_done_s", "output_tokens", "preemptions", "status"):
        assert requests[name].tolist() == getattr(twin.log, name), name
    ranges = [(row, 0, first, count) for row, r in enumerate(ours.requests) for first, count in r.ranges]
    assert ranges == sorted(twin.log.ranges)


def test_the_recorders_columns_are_those_of_a_run_record() -> None:
    with running(tiny_model()) as engine:
        load = Load(count=8, aborts=0)
        load.send(engine, 0.002)
        engine.add([3] * 300, Sampling(), lambda output: None)  # longer than the model's context
    recorder, config = engine.recorder, engine.config
    record = RunRecord(
        requests=RequestTable(**recorder.request_columns()),
        steps=StepTable(**recorder.step_columns()),
        tokens=TokenRanges(**recorder.token_columns()),
        tenants=(Tenant(),),
        num_pages=config.num_pages,
        page_tokens=config.page_tokens,
        num_replicas=1,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        end_s=recorder.steps[-1].end_s,
    )
    statuses = record.requests.status.tolist()
    assert statuses == [Status.FINISHED] * (len(statuses) - 1) + [Status.REJECTED]
    for row, count in enumerate(record.requests.output_tokens.tolist()):
        times_s = record.token_times_s(row)
        assert len(times_s) == count
        assert (np.diff(times_s) > 0).all()
        if count:
            assert times_s[0] == record.requests.first_token_s[row]
            assert times_s[-1] == record.requests.last_token_s[row]
    assert record.requests.output_tokens.sum() == record.steps.num_decodes.sum() + np.count_nonzero(
        record.requests.output_tokens
    )
    for columns in (record.requests.columns(), record.steps.columns()):
        assert {column.dtype.kind for column in columns.values()} <= {"i", "f", "O"}


def test_the_twin_repeats_a_run_of_smollm2() -> None:
    _, model = smollm2(torch.float32)
    load = Load(seed=1, count=10, vocab_size=49152, longest_prompt=40, longest_answer=40, aborts=1)
    _, decided, twin = record_and_replay(
        model, load, Chunked, 0.02, num_pages=12, page_tokens=8, max_num_seqs=6, max_num_batched_tokens=32
    )
    assert_same_plans(decided, twin.decisions)
    assert any(decision["preempted"] for decision in decided)
