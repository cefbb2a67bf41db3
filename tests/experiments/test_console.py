"""The table of a run: vLLM's row names, 80 columns, plain when it is not a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from experiments.console import print_run
from sim.deployment import Deployment, build, simulate
from sim.metrics import summarise
from sim.record import RunRecord, Tenant
from sim.slo import Goodput, parse_slo
from sim.verdict import verdict
from tests.sim.toy_runs import toy_run
from tests.sim.worlds import make_workload


def printed(run: RunRecord, width: int = 200, *, terminal: bool = False) -> str:
    out = io.StringIO()
    summary = summarise(run, goodput=Goodput(ttft_s=0.05), slos=parse_slo(["p95_ttft:40", "p95_tpot:8"]))
    console = Console(file=out, width=width, force_terminal=terminal)
    print_run(run, summary, verdict(run, summary), console=console)
    return out.getvalue()


@pytest.fixture
def run() -> RunRecord:
    tenants = (Tenant("chat"), Tenant("a tenant with a very long name"))
    tenant = np.arange(100) % 2
    return toy_run(
        np.arange(100) * 1.0, [10] * 100, [20] * 100, rejected=(99,), tenant=tenant, tenants=tenants
    )


def test_rows_have_the_names_of_vllm_bench_serve(run: RunRecord) -> None:
    lines = printed(run).splitlines()
    values = {line[:40].strip(): line[41:51].strip() for line in lines if line[:41].strip().endswith(":")}
    assert values["Successful requests:"] == "99"
    assert values["Failed requests:"] == "1"
    assert values["Mean TTFT (ms):"] == "32.00"
    assert values["Median TPOT (ms):"] == "10.00"
    assert values["P99 E2EL (ms):"] == "222.00"
    assert values["SLO attainment (%):"] == "99.00"
    for name in (
        "Benchmark duration (s):",
        "Total input tokens:",
        "Total generated tokens:",
        "Request throughput (req/s):",
        "Request goodput (req/s):",
        "Output token throughput (tok/s):",
        "Peak output token throughput (tok/s):",
        "Peak concurrent requests:",
        "Total token throughput (tok/s):",
        "P95 ITL (ms):",
        "Queue (ms):",
        "KV occupancy, max (%):",
        "Batch occupancy, mean (%):",
        "Prefix cache hit rate (%):",
        "Preemptions:",
    ):
        assert name in values


def test_the_verdict_and_the_formulas_are_printed(run: RunRecord) -> None:
    text = printed(run)
    assert "Misses P95 TPOT ≤ 8 ms: it is 10 ms, 25% above the limit." in text
    assert "(E2EL - TTFT) / (tokens - 1)" in text
    assert "gap between stream events" in text
    assert "Warning: P99 of 99 requests" in text
    assert "partial" in printed(replace(run, interrupted=True))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_80_columns_and_is_plain_off_a_terminal(run: RunRecord, width: int) -> None:
    text = printed(run, width)
    assert max(map(len, text.splitlines())) <= min(width, 80)
    assert "\x1b" not in text
    assert "\x1b" in printed(run, terminal=True)


def test_limits_in_which_pools_differ_are_a_range() -> None:
    pools = [{"name": "a", "max_num_seqs": 128}, {"name": "b", "num_gpu_blocks_override": 2001}]
    fields = {"model": "llama-3.1-8b", "gpu": "h200", "pools": pools, "max_num_seqs": 16}
    text = printed(
        simulate(make_workload([0.0, 0.0], [20, 20], [2, 2]), build(Deployment.model_validate(fields))), 80
    )
    assert "running / 16 to 128\n" in text
    assert "pages held / 2000 to " in text


def test_an_ascii_terminal_gets_ascii(run: RunRecord) -> None:
    raw = io.BytesIO()
    summary = summarise(run, slos=parse_slo(["p95_ttft:40"]))
    out = io.TextIOWrapper(raw, encoding="ascii")
    print_run(run, summary, verdict(run, summary), console=Console(file=out, width=80))
    out.flush()
    assert b"Meets P95 TTFT <= 40 ms" in raw.getvalue()


def test_a_run_without_results_prints_dashes() -> None:
    assert "Mean TTFT (ms):                          -" in printed(toy_run([0.0], [10], [2], rejected=(0,)))
