"""The trace: well-formed events that nest, the same bytes for the same run, and a bounded size."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from experiments.perfetto import trace, write_trace
from serving.errors import UsageError
from sim.record import RunRecord
from tests.sim.toy_runs import toy_run


@pytest.fixture
def run() -> RunRecord:
    """Twelve requests; the third is rejected and the run is cut before the last is done."""
    return toy_run(np.arange(12) * 0.1, [20] * 12, [10] * 11 + [1000], rejected=(2,), until_s=3.0)


def test_steps_are_slices_with_their_numbers(run: RunRecord) -> None:
    steps = [e for e in trace(run)["traceEvents"] if e["ph"] == "X"]
    assert len(steps) == len(run.steps)
    # The first request joins at 11 ms; its step takes 10 + 2 ms.
    assert (steps[0]["ts"], steps[0]["dur"], steps[0]["name"]) == (11000, 12000, "prefill 20")
    assert steps[1]["name"] == "decode 1"
    assert steps[0]["args"]["num_prefill_tokens"] == 20


def test_requests_nest_their_stages(run: RunRecord) -> None:
    events = [e for e in trace(run)["traceEvents"] if e["ph"] in "be"]
    for number in (0, 11):  # one finished, one unfinished
        mine = [e for e in events if e["id"] == number]
        assert [e["name"] for e in mine if e["ph"] == "b"] == [
            f"request {number}",
            "queue",
            "prefill",
            "decode",
        ]
        assert [e["ts"] for e in mine] == sorted(e["ts"] for e in mine)
        stack = []
        for event in mine:
            if event["ph"] == "b":
                stack.append(event["name"])
            else:
                assert stack.pop() == event["name"]
        assert not stack
    # sent 0; queued and scheduled 11; first token out 23; ninth more 113; with the client 10 later (ms).
    first = [e["ts"] for e in events if e["id"] == 0]
    assert first == pytest.approx([0, 11000, 11000, 11000, 23000, 23000, 113000, 123000])


def test_rejections_and_counters_are_there(run: RunRecord) -> None:
    events = trace(run)["traceEvents"]
    (rejected,) = [e for e in events if e["ph"] == "i"]
    assert rejected["name"] == "rejected 2"
    assert rejected["args"]["reason"] == "prompt is longer than max_model_len"
    counters = Counter(e["name"] for e in events if e["ph"] == "C")
    assert set(counters) == {"requests", "KV pages"}
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert names == {"clients", "replica 0", "steps"}


def test_the_same_run_gives_the_same_bytes_that_json_reads(run: RunRecord, tmp_path: Path) -> None:
    a, b = write_trace(run, tmp_path / "a.json.gz"), write_trace(run, tmp_path / "b.json.gz")
    assert a.read_bytes() == b.read_bytes()
    assert json.loads(gzip.decompress(a.read_bytes())) == json.loads(json.dumps(trace(run)))


def test_a_long_run_is_cut_in_time(run: RunRecord) -> None:
    short = trace(run, max_events=200)
    cut_us = short["otherData"]["cut_at_s"] * 1e6
    assert len(short["traceEvents"]) <= 200 + 5  # and the names of tracks
    assert all(e["ts"] < cut_us for e in short["traceEvents"] if e["ph"] in "Xib")
    assert "cut_at_s" not in trace(run)["otherData"]


def test_an_empty_run_has_a_trace() -> None:
    nothing = np.array([], np.int64)
    assert len(trace(toy_run([], nothing, nothing))["traceEvents"]) == 5


def test_an_unwritable_path_is_one_line(run: RunRecord, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        write_trace(run, tmp_path)
