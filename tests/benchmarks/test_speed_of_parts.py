"""The parts a run is made of: a scheduler step, the page pool, and the prices of steps."""

from __future__ import annotations

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from serving.config import SchedulerConfig
from serving.pages import PagePool
from serving.request import Request
from serving.scheduler import Scheduler
from sim.deployment import Built
from tests.benchmarks.conftest import Note

STEPS = 200


def _decoding(batch: int, prompt_tokens: int = 1024) -> Scheduler:
    """A scheduler with `batch` sequences past their prompts."""
    config = SchedulerConfig(num_pages=200_000, max_num_seqs=2 * batch, max_num_batched_tokens=1 << 20)
    scheduler = Scheduler(config)
    for i in range(batch):
        scheduler.add(Request(i, prompt_tokens + i, 100_000, keys=()))
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert len(plan) == batch
    scheduler.commit(plan)
    return scheduler


@pytest.mark.parametrize("batch", [64, 256])
def test_plan_and_commit_of_decodes(benchmark: BenchmarkFixture, batch: int, note: Note) -> None:
    scheduler = _decoding(batch)

    def steps() -> None:
        for _ in range(STEPS):
            plan = scheduler.plan(0.0)
            assert plan is not None
            scheduler.commit(plan)

    benchmark.pedantic(steps, rounds=20, warmup_rounds=1)
    us = benchmark.stats.stats.median / STEPS * 1e6
    note(f"plan + commit, {batch} decodes", f"{us:,.1f} µs", f"{us * 1e3 / batch:,.0f} ns a sequence")


@pytest.mark.parametrize("batch", [64, 256])
def test_plan_and_commit_with_a_prompt_in_each_step(
    benchmark: BenchmarkFixture, batch: int, note: Note
) -> None:
    scheduler = _decoding(batch)
    ids = iter(range(batch, 1 << 40))

    def steps() -> None:
        for _ in range(STEPS):
            scheduler.add(Request(next(ids), 512, 1, keys=()))
            plan = scheduler.plan(0.0)
            assert plan is not None
            assert plan.num_tokens == batch + 512
            scheduler.commit(plan)

    benchmark.pedantic(steps, rounds=20, warmup_rounds=1)
    us = benchmark.stats.stats.median / STEPS * 1e6
    note(f"the same, and a prompt comes and goes, {batch}", f"{us:,.1f} µs", "")


@pytest.mark.parametrize("count", [1, 128])
def test_pages_taken_and_released(benchmark: BenchmarkFixture, count: int, note: Note) -> None:
    pool = PagePool(56_096)

    def cycle() -> None:
        for _ in range(STEPS):
            pool.release(pool.take(count), count // 2)

    benchmark.pedantic(cycle, rounds=50, warmup_rounds=5)
    us = benchmark.stats.stats.median / STEPS * 1e6
    note(f"take and release {count} pages", f"{us:,.2f} µs", "")


def test_price_of_a_decode_step(benchmark: BenchmarkFixture, built: Built, note: Note) -> None:
    price = built.pricer.step_s

    def steps() -> None:
        for context in range(STEPS):
            price(64, 64, (), 64, 64_000 + context, 2_000 + context)

    benchmark.pedantic(steps, rounds=50, warmup_rounds=5)
    note("price of a decode step", f"{benchmark.stats.stats.median / STEPS * 1e6:,.2f} µs", "")


def test_price_of_a_mixed_step(benchmark: BenchmarkFixture, built: Built, note: Note) -> None:
    price = built.pricer.step_s
    prefills = [(1024, 0), (512, 2048)]

    def steps() -> None:
        for context in range(STEPS):
            price(1600, 65, prefills, 64, 64_000 + context, 2_000 + context)

    benchmark.pedantic(steps, rounds=50, warmup_rounds=5)
    note("price of a step with two chunks", f"{benchmark.stats.stats.median / STEPS * 1e6:,.2f} µs", "")


def test_price_of_a_run_of_decodes(benchmark: BenchmarkFixture, built: Built, note: Note) -> None:
    price = built.pricer.decode_run_s
    expected = [built.pricer.step_s(64, 64, (), 64, 64_000 + 64 * j, 2_000 + j) for j in range(256)]
    np.testing.assert_array_equal(price(64, 64_000, 2_000, 256), expected)
    benchmark.pedantic(price, (64, 64_000, 2_000, 256), rounds=200, warmup_rounds=10)
    note("price of 256 decode steps at once", f"{benchmark.stats.stats.median * 1e6:,.1f} µs", "")
