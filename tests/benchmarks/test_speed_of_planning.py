"""Planning: a capacity has 20 s of one core, a sweep of 1,000 points of 2,000 requests ten minutes of two."""

from __future__ import annotations

import time
from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

from experiments.capacity import Capacity, find_capacity
from experiments.capacity_traffic import make_traffic
from experiments.capacity_trial import Promises
from experiments.sweep import run_sweep
from experiments.sweep_backends import Local
from experiments.sweep_store import Store
from sim.deployment import Built
from sim.slo import parse_slo
from sim.workload.flags import spec_from_flags
from tests.benchmarks.conftest import Note
from tokentwin.commands.sweep import SERVING, kinds, sweep_spec
from tokentwin.sweep_point import run_point

CAPACITY_S = 20.0
SWEEP_S = 600.0
POINTS = 20


def test_capacity_of_an_8b_model(benchmark: BenchmarkFixture, built: Built, note: Note) -> None:
    def search() -> Capacity:
        traffic = make_traffic(spec_from_flags({"dataset_name": "random"}))
        return find_capacity(built, traffic, Promises(parse_slo(["chat"])), jobs=1)

    found = benchmark.pedantic(search, rounds=1)
    seconds = benchmark.stats.stats.median
    note(
        "capacity of llama-3.1-8b on one H200, chat, with interval",
        f"{seconds:.1f} s",
        f"limit {CAPACITY_S:g}; {found.simulated_requests:,} requests searched",
    )
    assert seconds < CAPACITY_S


def test_a_sweep_of_2000_requests_a_point(tmp_path: Path, note: Note) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "base: {model: llama-3.1-8b, dataset_name: random, num_prompts: 2000, slo: chat}\n"
        "random:\n"
        f"  points: {POINTS}\n"
        "  space: {request_rate: {low: 4, high: 40.0}, max_num_batched_tokens: [1024, 2048, 8192]}\n"
    )
    spec = sweep_spec(path, {})
    store = Store(tmp_path / "out", kinds(spec), SERVING)
    store.open({"base": {}}, resume=False)
    before_s = time.process_time()
    end = run_sweep(spec, store, run_point, Local(1))
    each_s = (time.process_time() - before_s) / POINTS
    assert (end.total, end.failed) == (POINTS, 0)
    whole_s = each_s * 1000 / 2
    note(
        "sweep of 2,000 requests a point",
        f"{each_s * 1e3:,.0f} ms a point",
        f"1,000 points on two cores: {whole_s:,.0f} s; limit {SWEEP_S:g}",
    )
    assert whole_s < SWEEP_S
