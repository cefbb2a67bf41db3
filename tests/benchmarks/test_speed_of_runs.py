"""Whole runs: requests per CPU-second, memory, what fast-forward saves, and the time to read and to write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from experiments.report import write_report
from experiments.results import save_run
from sim.deployment import Built, simulate
from sim.metrics import summarise
from sim.record import RunRecord
from sim.verdict import verdict
from sim.workload.flags import spec_from_flags
from sim.workload.load import load_workload
from sim.workload.types import Workload
from tests.benchmarks.azure import CONVERSATIONS, MOONCAKE, RATE_SCALE, conversations
from tests.benchmarks.conftest import Note

PEAK_MIB = 600
REQUESTS_PER_S = 5_000
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.shared
def test_requests_per_cpu_second(
    benchmark: BenchmarkFixture, azure: Workload, built: Built, note: Note
) -> None:
    record = benchmark.pedantic(simulate, (azure, built), rounds=5, warmup_rounds=1)
    rate = len(azure) / benchmark.stats.stats.median
    note(
        f"requests simulated, rate-scale {RATE_SCALE}",
        f"{rate:,.0f} /s",
        f"target {REQUESTS_PER_S:,}; {len(record.steps) / benchmark.stats.stats.median:,.0f} steps/s",
    )


@pytest.mark.shared
@pytest.mark.parametrize("rate_scale", [1.0, 4.0])
def test_requests_per_cpu_second_at_other_loads(
    benchmark: BenchmarkFixture, azure: Workload, built: Built, rate_scale: float, note: Note
) -> None:
    workload = conversations(rate_scale)
    record = benchmark.pedantic(simulate, (workload, built), rounds=3)
    median_s = benchmark.stats.stats.median
    note(
        f"requests simulated, rate-scale {rate_scale}",
        f"{len(workload) / median_s:,.0f} /s",
        f"{len(record.steps) / median_s:,.0f} steps/s",
    )


@pytest.mark.shared
def test_peak_memory(azure: Workload, note: Note) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.peak_memory"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    note(
        "peak memory of that run",
        f"{float(out[0]):,.0f} MiB",
        f"limit {PEAK_MIB}; record and summary included",
    )
    assert int(out[1]) == len(azure)
    assert float(out[0]) < PEAK_MIB


def test_what_fast_forward_saves(benchmark: BenchmarkFixture, built: Built, note: Note) -> None:
    # Long answers at a light load are what it is for; the runs are identical (tests/sim/test_fast_forward.py).
    flags = {
        "dataset_name": "random",
        "input_len": 256,
        "output_len": 1024,
        "num_prompts": 200,
        "request_rate": 2.0,
    }
    workload = load_workload(spec_from_flags(flags), seed=0)
    timer = benchmark._timer
    start = timer()
    simulate(workload, built, fast_forward=False)
    stepped_s = timer() - start
    benchmark.pedantic(simulate, (workload, built), rounds=3)
    saved = stepped_s / benchmark.stats.stats.median
    note("fast-forward, 200 answers of 1,024 tokens", f"{saved:.1f} x", "as fast as step by step")


@pytest.mark.shared
@pytest.mark.parametrize("name", ["azure", "mooncake"])
def test_reading_a_trace(benchmark: BenchmarkFixture, name: str, note: Note) -> None:
    path = {"azure": CONVERSATIONS, "mooncake": MOONCAKE}[name]
    if not path.exists():
        pytest.skip(f"needs {path}")
    spec = spec_from_flags({"dataset_name": name, "dataset_path": str(path)})
    workload = benchmark.pedantic(load_workload, (spec,), {"seed": 0}, rounds=5)
    note(f"reading {path.name}", f"{len(workload) / benchmark.stats.stats.median:,.0f} rows/s", "")


@pytest.mark.shared
def test_summary(benchmark: BenchmarkFixture, azure_run: RunRecord, note: Note) -> None:
    summary = benchmark.pedantic(summarise, (azure_run,), rounds=5)
    note(
        "summary of that run",
        f"{benchmark.stats.stats.median * 1e3:,.0f} ms",
        f"{summary.completed:,} requests",
    )


@pytest.mark.shared
def test_result_files(benchmark: BenchmarkFixture, azure_run: RunRecord, tmp_path: Path, note: Note) -> None:
    summary = summarise(azure_run)
    judged = verdict(azure_run, summary)
    benchmark.pedantic(save_run, (azure_run, summary, tmp_path), {"verdict": judged}, rounds=3)
    note("JSON and Parquet of that run", f"{benchmark.stats.stats.median * 1e3:,.0f} ms", "")


@pytest.mark.shared
def test_report(benchmark: BenchmarkFixture, azure_run: RunRecord, tmp_path: Path, note: Note) -> None:
    summary = summarise(azure_run)
    judged = verdict(azure_run, summary)
    benchmark.pedantic(write_report, (azure_run, summary, judged, tmp_path / "report.html"), rounds=3)
    size = (tmp_path / "report.html").stat().st_size / 1e6
    note("HTML report of that run", f"{benchmark.stats.stats.median * 1e3:,.0f} ms", f"{size:.1f} MB")
