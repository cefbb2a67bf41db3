"""The twin behind the server is the twin of `simulate`, and it loses nothing whatever its deployment is."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from realengine.generation import Sampling
from serving.errors import UsageError
from sim.deployment import simulate
from sim.latency import latencies
from tests.sim.worlds import make_workload
from tests.tokentwin.server.harness import idle, twin
from tokentwin.server.backend import Delta, Generation, GenerationRequest, Refused, Timing
from tokentwin.server.twin import TwinBackend


@dataclass
class Told:
    """Meters that remember."""

    ends: list[tuple[Timing, str]] = field(default_factory=list)
    num_tokens: int = 0

    def step(self, num_tokens: int) -> None: ...
    def first_token(self, ttft_s: float) -> None:
        self.num_tokens += 1

    def tokens(self, count: int, gap_s: float) -> None:
        assert gap_s > 0
        self.num_tokens += count

    def shown_whole(self, count: int, ttft_s: float) -> None:
        self.num_tokens += count

    def ended(self, timing: Timing, reason: str) -> None:
        self.ends.append((timing, reason))


async def read(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation]


def requests(lengths: Sequence[tuple[int, int]], **sampling: Any) -> list[GenerationRequest]:
    """Prompts that share nothing; (prompt tokens, answer tokens) each."""
    return [
        GenerationRequest(str(i), [i, *range(1000, 999 + prompt)], Sampling(max_tokens=answer, **sampling))
        for i, (prompt, answer) in enumerate(lengths)
    ]


def run(
    backend: TwinBackend, asked: Sequence[GenerationRequest], gap_s: float = 0.0
) -> tuple[Told, list[list[Delta]]]:
    """All requests, arriving `gap_s` simulated seconds apart."""
    told = Told()

    async def main() -> list[list[Delta]]:
        await backend.start(told)
        tasks = []
        with before_time(backend):
            for place, request in enumerate(asked):
                with at(backend, 0.1 + place * gap_s):
                    tasks.append(asyncio.ensure_future(read(backend.submit(request))))
        answers = await asyncio.gather(*tasks)
        assert idle(backend)
        await backend.stop()
        return answers

    return told, asyncio.run(asyncio.wait_for(main(), 30))


@contextmanager
def before_time(backend: TwinBackend) -> Iterator[None]:
    """Simulated time begins afterwards, however long this takes."""
    backend._origin_s = math.inf
    yield
    backend._origin_s = time.monotonic()


@contextmanager
def at(backend: TwinBackend, now_s: float) -> Iterator[None]:
    """What is submitted in here arrives at `now_s`, which is to come."""
    assert now_s >= backend.now_s()
    backend.now_s = lambda: now_s  # type: ignore[method-assign]
    yield
    del backend.now_s


@pytest.mark.parametrize(
    "deployment",
    [
        {},
        {"async_scheduling": False},
        {"enable_prefix_caching": False},
        {"policy": "continuous"},
        {"policy": "static", "static_batch_size": 4, "static_max_wait": 0.01},
        {"data_parallel_size": 2},
        {"data_parallel_size": 2, "router": "least_outstanding", "async_scheduling": False},
        {"data_parallel_size": 2, "router": "central", "max_num_seqs": 2},
        {"num_gpu_blocks_override": 20, "max_model_len": 300},
        {"num_gpu_blocks_override": 20, "max_model_len": 300, "async_scheduling": False},
        {"scheduling_policy": "sjf", "max_num_seqs": 2},
        {"frontend_overhead_ms": 5},
    ],
    ids=str,
)
def test_every_answer_is_whole_whatever_the_deployment(deployment: dict[str, Any]) -> None:
    lengths = [(20 + 37 * i % 150, 1 + 29 * i % 90) for i in range(24)]
    backend = twin(**deployment)
    told, answers = run(backend, requests(lengths))
    for (_, wanted), deltas in zip(lengths, answers, strict=True):
        assert sum(len(delta.token_ids) for delta in deltas) == wanted
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert told.num_tokens == sum(wanted for _, wanted in lengths)
    assert sorted(timing.output_tokens for timing, _ in told.ends) == sorted(wanted for _, wanted in lengths)
    if deployment.get("num_gpu_blocks_override"):
        assert backend.stats().preemptions > 0


@pytest.mark.parametrize(
    "deployment", [{}, {"async_scheduling": False}, {"num_gpu_blocks_override": 300}], ids=str
)
def test_times_are_those_that_simulate_gives(deployment: dict[str, Any]) -> None:
    """The same arrivals, seen by `simulate`: every TTFT and TPOT of the server's own clock is the same."""
    limits = {"max_model_len": 4096, "enable_prefix_caching": False} | deployment
    lengths = [(300 + 977 * i % 1800, 2 + 31 * i % 60) for i in range(30)]
    backend = twin(time_scale=1, **limits)
    told, _ = run(backend, requests(lengths), gap_s=0.02)
    ends = sorted((timing for timing, _ in told.ends), key=lambda timing: timing.arrival_s)
    workload = make_workload(
        [timing.arrival_s for timing in ends],
        [timing.prompt_tokens for timing in ends],
        [timing.output_tokens for timing in ends],
    )
    record = simulate(workload, _without_front_end(backend))
    if "num_gpu_blocks_override" in deployment:
        assert backend.stats().preemptions == record.requests.preemptions.sum() > 0
    seen = latencies(record)
    np.testing.assert_allclose([timing.ttft_s for timing in ends], seen.ttft_s, rtol=1e-9)
    np.testing.assert_allclose([timing.mean_itl_s for timing in ends], seen.tpot_s, rtol=1e-9)


def _without_front_end(backend: TwinBackend) -> Any:
    free = {"tokenize_us_per_token": 0.0, "detokenize_us_per_token": 0.0}
    return backend.built.deployment.model_copy(update=free)


def test_the_front_ends_overhead_delays_the_arrival() -> None:
    def ttft_s(**deployment: Any) -> float:
        told, _ = run(twin(**deployment), requests([(100, 2)]))
        return told.ends[0][0].ttft_s

    assert ttft_s(frontend_overhead_ms=70) == pytest.approx(ttft_s() + 0.07)


@pytest.mark.parametrize("router", ["round_robin", "central"])
def test_aborts_in_every_state_leave_nothing_behind(router: str) -> None:
    """Running, preempted, queued, held back by the router, on the way in: pages and seats are free afterwards."""
    backend = twin(
        time_scale=2,
        data_parallel_size=2,
        router=router,
        max_num_seqs=2,
        num_gpu_blocks_override=12,
        max_model_len=176,
        frontend_overhead_ms=1,
    )
    told = Told()

    async def main() -> None:
        await backend.start(told)
        generations = [backend.submit(request) for request in requests([(60, 110)] * 12)]
        for place, generation in enumerate(generations):
            if place % 3:
                generation.abort()
            generation.abort() if place == 4 else None  # twice is once
            await asyncio.sleep(0.012)
        for place, generation in enumerate(generations):
            deltas = [delta async for delta in generation]
            assert sum(len(delta.token_ids) for delta in deltas) == (0 if place % 3 else 110)
        assert idle(backend)
        await backend.stop()

    asyncio.run(asyncio.wait_for(main(), 30))
    reasons = [reason for _, reason in told.ends]
    # One that is told to stop may just have ended, where this machine is slow.
    assert len(reasons) == 12
    assert reasons.count("abort") + reasons.count("length") == 12
    assert reasons.count("abort") >= 4


def test_answers_to_one_prompt_begin_at_different_words() -> None:
    _, (deltas,) = run(twin(), requests([(20, 8)], n=3))
    texts = ["".join(delta.text for delta in deltas if delta.index == index) for index in range(3)]
    assert len(set(texts)) == 3
    assert all(3 * 8 * 0.5 < len(text) < 3 * 8 * 1.5 for text in texts)


def test_what_a_twin_cannot_do_is_refused() -> None:
    backend = twin(max_model_len=100)

    async def main() -> None:
        await backend.start(Told())
        for request in (
            GenerationRequest("a", [1], Sampling(logprobs=1)),
            GenerationRequest("a", [1], Sampling(), priority=1),
            GenerationRequest("a", [1] * 100, Sampling(max_tokens=1)),
            GenerationRequest("a", [], Sampling(max_tokens=1)),
        ):
            with pytest.raises(Refused):
                backend.submit(request)
        await backend.stop()

    asyncio.run(main())
    with pytest.raises(UsageError, match="--time-scale"):
        twin(time_scale=0)
