"""What a network did to a run, in its trace, its spans, its files, its table and its report."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from experiments.console import sections
from experiments.perfetto import trace
from experiments.results import save_run
from experiments.saved import load_record, open_run
from experiments.spans import REQUEST, run_spans
from serving.config import SchedulerConfig
from sim.latency import stage_times
from sim.metrics import summarise
from sim.network import Network, delivering
from sim.record import RunRecord, Tenant
from sim.world import run_world
from tests.sim.worlds import LinearPricer, make_workload


@pytest.fixture(scope="module")
def run() -> RunRecord:
    """Three requests over one connection, to a client that reads slowly."""
    workload = make_workload([0.0, 0.05, 0.1], [10] * 3, [30, 20, 10])
    network = Network(clients=1, protocol="http/1.1", connections=1, rtt_ms=20, bandwidth_mbit_s=1,
                      reader_tokens_per_s=50, gateway_event_us=100)  # fmt: skip
    return run_world(
        workload,
        SchedulerConfig(100),
        LinearPricer(),
        delivering=delivering(network, (Tenant(),), interval=1, slice_s=0.0),
    )


def test_slices_of_the_trace_follow_one_another_and_add_up(run: RunRecord) -> None:
    events = [e for e in trace(run)["traceEvents"] if e["ph"] in "be"]
    for row in range(3):
        mine = [e for e in events if e["id"] == row]
        begins = {e["name"]: e["ts"] for e in mine if e["ph"] == "b"}
        ends = {e["name"]: e["ts"] for e in mine if e["ph"] == "e"}
        names = ["send", "queue", "prefill", "decode", "deliver"]
        if row:
            names.insert(0, "blocked")
        assert list(begins)[1:] == names
        for before, after in pairwise(names):
            assert ends[before] == pytest.approx(begins[after], abs=0.002)
        whole = f"request {row}"
        assert begins[names[0]] == begins[whole]
        assert (
            ends["deliver"] == ends[whole] == pytest.approx(run.requests.last_token_s[row] * 1e6, abs=0.002)
        )
        if row:
            blocked_us = ends["blocked"] - begins["blocked"]
            assert blocked_us == pytest.approx(run.requests.blocked_s[row] * 1e6, abs=0.01)
        shown = next(e["args"] for e in mine if e["name"] == whole and e["ph"] == "b")
        assert shown["reader_ms"] == pytest.approx(run.requests.reader_s[row] * 1e3, abs=1e-5)


def test_spans_of_a_request_cover_it(run: RunRecord) -> None:
    for row, spans in enumerate(run_spans(run, 0)):
        by_name = {span.name: span for span in spans}
        assert ("blocked" in by_name) == (row > 0)
        parts = [
            by_name[n] for n in ("blocked", "send", "queue", "prefill", "decode", "deliver") if n in by_name
        ]
        whole = by_name[REQUEST]
        assert sum(s.end_ns - s.start_ns for s in parts) == pytest.approx(
            whole.end_ns - whole.start_ns, abs=10
        )
        assert whole.attributes["tokentwin.blocked_s"] == run.requests.blocked_s[row]


def test_a_saved_run_opens_with_what_its_clients_saw(run: RunRecord, tmp_path: Path) -> None:
    save_run(run, summarise(run), tmp_path, steps=True)
    again = load_record(tmp_path)
    for name, column in run.requests.columns().items():
        np.testing.assert_array_equal(again.requests.columns()[name], column, err_msg=name)
    assert again.deliveries is not None
    assert run.deliveries is not None
    for name in ("offsets", "seen_s", "tokens"):
        np.testing.assert_array_equal(getattr(again.deliveries, name), getattr(run.deliveries, name))
    page = open_run(tmp_path).report(tmp_path / "page.html").read_text()
    for name in ("blocked", "reader", "gateway"):
        assert f"Stage: {name}" in page
    # A run without a network that is saved in the same place leaves nothing of the other.
    plain = run_world(make_workload([0.0], [10], [5]), SchedulerConfig(100), LinearPricer())
    save_run(plain, summarise(plain), tmp_path, steps=True)
    assert load_record(tmp_path).deliveries is None


def test_the_table_names_the_stages_that_there_are(run: RunRecord) -> None:
    def stages(record: RunRecord) -> dict[str, float]:
        found = dict(sections(record, summarise(record)))
        return {name: float(value) for name, value, _ in found["Stages (mean)"]}

    shown, means = stages(run), {name: float(t.mean() * 1e3) for name, t in stage_times(run).items()}
    assert shown["Blocked (ms):"] == pytest.approx(means["blocked"], abs=0.01)
    assert shown["Reader (ms):"] == pytest.approx(means["reader"], abs=0.01)
    assert shown["Gateway (ms):"] == pytest.approx(0.1)
    plain = run_world(make_workload([0.0], [10], [5]), SchedulerConfig(100), LinearPricer())
    assert "Blocked (ms):" not in stages(plain)
