"""MFU and MBU against sums done by hand; windows add up to the run; the minute table counts every request once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import tokentwin as tt
from costmodel.model import load_model
from costmodel.work import step_work
from experiments.minutes import DEVICE, minute_columns, write_minutes
from experiments.observe_figures import observed_panels
from experiments.observed import UTILISATION, observed_json, utilisation_rows
from experiments.report_figures import Roofline, step_roofline
from experiments.utilisation import engine_work, rates_by_window, step_shares, utilisation
from sim.record import RunRecord
from tests.sim.toy_runs import toy_run


@pytest.fixture
def run() -> RunRecord:
    rng = np.random.default_rng(0)
    n = 200
    return toy_run(
        np.cumsum(rng.exponential(1.0, n)), rng.integers(1, 500, n), rng.integers(1, 60, n), rejected=(3,)
    )


def work_of(run: RunRecord, flops: float = 5e9, moved: float = 2e9) -> Roofline:
    count = len(run.steps)
    return Roofline(np.full(count, flops), np.full(count, moved), 1e12, 1e12, "toy")


def test_a_dense_step_does_two_flops_per_weight_and_token_and_reads_each_weight_once() -> None:
    """Kaplan et al. 2020: a forward pass takes 2 N FLOPs per token, attention apart. One token of Llama-3.1-8B at an
    empty context reads all weights but the embedding, of which it reads a row."""
    model = load_model("llama-3.1-8b")
    matrices = model.num_layers * model.linear_params_per_layer() + model.vocab_size * model.hidden_size
    flops, moved = step_work(model, [1, 7], [1, 7], [0.0, 0.0], [0, 0], [0, 0])
    assert flops[0] == pytest.approx(2 * matrices, rel=1e-3)
    assert flops[1] == pytest.approx(7 * flops[0])
    assert moved[0] == pytest.approx(2 * matrices, rel=2e-3)
    assert moved[1] < 1.01 * moved[0]


def test_decode_at_batch_one_is_bound_by_memory_and_mbu_is_time_over_the_weights_time() -> None:
    """One request at a time: each decode step must read 15 GB of weights, so MBU is that time over the step's time, and
    MFU is smaller by the ratio of intensities, 1 FLOP a byte over the device's peak FLOPs per byte."""
    asked = {"model": "llama-3.1-8b", "gpu": "h200", "dataset_name": "random", "isl": 64, "osl": 200}
    run = tt.simulate(**asked, num_prompts=3, max_concurrency=1)
    work = step_roofline(run.record, run.built)
    mfu, mbu = step_shares(run.record, work)
    decodes = (run.record.steps.num_prefills == 0) & (run.record.steps.num_decodes == 1)
    length = (run.record.steps.end_s - run.record.steps.start_s)[decodes]
    weights = 2 * (run.built.model.num_params - run.built.model.vocab_size * run.built.model.hidden_size)
    np.testing.assert_allclose(mbu[decodes], weights / work.peak_bytes_per_s / length, rtol=0.01)
    assert 0.5 < mbu[decodes].mean() < 1.0
    intensity = work.flops[decodes] / work.bytes[decodes]
    np.testing.assert_allclose(intensity, 1.0, rtol=0.02)
    np.testing.assert_allclose(
        mfu[decodes] / mbu[decodes], intensity * work.peak_bytes_per_s / work.peak_flops_per_s
    )
    assert (mfu < 1).all()
    assert (mbu < 1).all()


def test_means_are_sums_over_times(run: RunRecord) -> None:
    found = utilisation(run, work_of(run))
    s = run.steps
    busy = float((s.end_s - s.start_s).sum())
    assert found.mfu == pytest.approx(len(s) * 5e9 / busy / 1e12)
    assert found.mbu == pytest.approx(len(s) * 2e9 / busy / 1e12)
    wall = run.end_s - run.requests.sent_s.min()
    assert found.mfu_wall == pytest.approx(len(s) * 5e9 / wall / 1e12)
    assert found.flops_per_s == pytest.approx(found.mfu * 1e12)


def test_windows_add_up_to_the_run(run: RunRecord) -> None:
    work = work_of(run)
    edges = np.linspace(-1.0, run.end_s + 1.0, 38)
    flops, moved = rates_by_window(run, work, edges)
    assert (flops * np.diff(edges)).sum() == pytest.approx(work.flops.sum())
    assert (moved * np.diff(edges)).sum() == pytest.approx(work.bytes.sum())
    idle = rates_by_window(run, work, np.array([-5.0, -1.0]))
    assert idle[0].tolist() == [0.0]


def test_replicas_share_the_peak(run: RunRecord) -> None:
    """Two replicas that do the same at once use each device as one alone does."""
    s = run.steps
    twice = {name: np.concatenate([column, column]) for name, column in s.columns().items()}
    twice["replica"] = np.repeat([0, 1], len(s))
    both = replace(run, steps=type(s)(**twice), num_replicas=2)
    edges = np.array([0.0, 50.0, 100.0])
    one, two = rates_by_window(run, work_of(run), edges)[0], rates_by_window(both, work_of(both), edges)[0]
    np.testing.assert_allclose(one, two)
    assert utilisation(both, work_of(both)).mfu_wall == pytest.approx(utilisation(run, work_of(run)).mfu_wall)


def test_unknown_peaks_leave_rates(run: RunRecord) -> None:
    found = utilisation(run, replace(work_of(run), peak_flops_per_s=np.nan, peak_bytes_per_s=np.nan)).json()
    assert set(found) == {"flops_per_s", "bytes_per_s"}
    shown = replace(run, meta={UTILISATION: found})
    assert [row[0] for row in utilisation_rows(shown)] == [
        "Achieved GFLOP/s, while busy:",
        "Achieved GB/s, while busy:",
    ]
    assert set(observed_json(shown)) == {"sim_flops_per_s", "sim_bytes_per_s"}


def test_work_of_a_run_of_the_engine_is_counted_from_its_shape(run: RunRecord) -> None:
    assert engine_work(run) is None
    shape = load_model("llama-3.2-1b")
    facts = {"shape": shape.model_dump(mode="json"), "bytes_per_number": 4.0, "device": "CPU"}
    work = engine_work(replace(run, meta={"engine": {"work": facts}}))
    assert work is not None
    assert np.isnan(work.peak_flops_per_s)
    least = 4.0 * shape.num_layers * shape.linear_params_per_layer()
    assert (work.bytes > least).all()


def test_every_request_is_in_one_minute(run: RunRecord, tmp_path: Path) -> None:
    columns = minute_columns(run, work_of(run))
    assert columns["arrived"].sum() == len(run.requests)
    assert columns["completed"].sum() == (run.requests.status == 1).sum()
    assert columns["failed"].sum() == 1
    assert len({len(column) for column in columns.values()}) == 1
    r = run.requests
    first = (r.first_token_s > r.sent_s.min()) & (r.first_token_s <= r.sent_s.min() + 60)
    expected = np.percentile((r.first_token_s - r.sent_s)[first], 95)
    assert columns["p95_ttft_s"][0] == pytest.approx(expected)
    table = pq.read_table(write_minutes(run, work_of(run), tmp_path))
    assert table.column("arrived").to_pylist() == columns["arrived"].tolist()
    assert "power_w" not in table.column_names


def test_what_the_driver_said_stands_beside_it(run: RunRecord) -> None:
    at = np.arange(0.0, run.end_s, 1.0)
    said = {"time_s": at.tolist(), "power_w": np.where(at < 60, 300.0, 500.0).tolist()}
    columns = minute_columns(replace(run, meta={DEVICE: said}), work_of(run))
    assert columns["power_w"][-1] == 500.0
    assert 300.0 <= columns["power_w"][0] < 305.0


def test_panels_are_there_for_what_is_known(run: RunRecord) -> None:
    assert not observed_panels(run, None)
    alerted = replace(run, meta={"alerts": ["ttft:p95:1m > 1ms for 1m", "waiting:max:30s > 1000"]})
    headings = [panel[0] for panel in observed_panels(alerted, work_of(run))]
    assert headings == ["Share of the device's peaks", "Alerts"]
    figure = observed_panels(alerted, None)[0][2]
    assert len(figure.layout.shapes) == 1  # the first rule fires once, for good
