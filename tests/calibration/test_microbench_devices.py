"""Collectives over processes, graphs against launches, and staying on one core."""

from __future__ import annotations

import os

import pytest
import torch

from calibration.microbench_collectives import measure_all_reduce
from calibration.microbench_fit import rows_of
from calibration.microbench_graphs import measure_launches
from calibration.microbench_run import Store
from calibration.microbench_steps import Composition, StepBench
from calibration.pinning import pinned
from costmodel.datasheet import device_facts
from costmodel.swap import LINK_SHARE, host_link_bytes_per_s
from realengine.cuda import Recording
from realengine.runner import StepRunner, allocate_caches
from serving.errors import UsageError
from tests.realengine.engines import CPU, TINY, tiny_model


def test_an_all_reduce_over_two_processes() -> None:
    """More bytes take longer: 16 MiB over loopback cannot be as fast as 4 KiB."""
    rows = measure_all_reduce(2, "cpu", sizes=(4096, 1 << 24), repeats=5)
    assert [(ranks, size) for ranks, size, _ in rows] == [(2, 4096), (2, 1 << 24)]
    assert 0 < rows[0][2] < rows[1][2]
    store = Store({}, extras={"collectives": rows})
    (small, large) = rows_of(store, TINY)
    assert {small.kind, large.kind} == {"all_reduce"}
    assert {small.point, large.point} == {((2.0,), (4096.0,)), ((2.0,), (float(1 << 24),))}


def test_all_reduce_errors() -> None:
    with pytest.raises(UsageError, match="at least 2 ranks"):
        measure_all_reduce(1, "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="as many GPUs"):
            measure_all_reduce(2, "cuda")


def test_graphs_and_launches_compute_the_same_and_are_both_timed() -> None:
    model = tiny_model()
    caches = allocate_caches(model, 33, 16, device=CPU, dtype=torch.float32)
    step = StepRunner(model, caches, None, 8, CPU)
    bench = StepBench(step, 16)
    calls: list[int] = []

    def record(forward):  # type: ignore[no-untyped-def]
        result = forward()

        def again() -> None:
            calls.append(1)
            result.copy_(forward())

        recording: Recording = (again, result)
        return recording

    found = measure_launches(step, bench, (1, 4, 4096), 4, repeats=2, recorder=record)
    assert [row.rows for row in found] == [1, 4], "a size that the cache cannot hold is left out"
    assert calls
    assert all(row.eager_s > 0 and row.graph_s > 0 for row in found)
    assert "replayed from a graph" in str(found[0])
    assert not bench.fits(Composition((64,) * 4096))


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system lets no process choose its cores"
)
def test_pinned_to_one_core_and_back() -> None:
    before = os.sched_getaffinity(0)
    with pinned() as core:
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before


def test_a_measured_link_is_taken_as_it_is() -> None:
    facts = device_facts("h100")
    assert host_link_bytes_per_s(facts) == LINK_SHARE * 64e9
    sources = {**facts.sources, "host_link": "measured by copies of pages both ways, the slower of the two"}
    own = facts.model_copy(update={"host_link_bytes_per_s": 21e9, "sources": sources})
    assert host_link_bytes_per_s(own) == 21e9
