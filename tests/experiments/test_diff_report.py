"""Saved runs come back as they were, and their difference as a table, JSON and a page that loads nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from calibration.diff import PARTS, RunDiff, diff
from experiments.diff_report import diff_html, diff_json, diff_lines, save_diff
from experiments.results import save_run
from experiments.saved import load_record
from serving.errors import UsageError
from sim.deployment import Deployment, build, simulate
from sim.metrics import summarise
from sim.record import RunRecord
from sim.workload import TenantSpec, WorkloadSpec, load_workload

DEPLOYMENT = Deployment(model="qwen3-0.6b", gpu="h200", max_num_seqs=8, max_num_batched_tokens=512)


def run(**changes: object) -> RunRecord:
    tenant = {
        "dataset": {"name": "random", "input_len": 100, "output_len": 10},
        "arrivals": {"request_rate": 100.0},
        "num_prompts": 40,
    }
    spec = WorkloadSpec(tenants=(TenantSpec.model_validate(tenant),))
    return simulate(
        load_workload(spec, seed=2), build(Deployment.model_validate({**DEPLOYMENT.model_dump(), **changes}))
    )


def saved(record: RunRecord, folder: Path) -> Path:
    save_run(record, summarise(record), folder, steps=True, date="2026-01-01")
    return folder


@pytest.fixture(scope="module")
def found() -> RunDiff:
    return diff(run(), run(gpu="a100", max_num_seqs=3))


def test_a_saved_run_is_read_back_as_it_was(tmp_path: Path) -> None:
    made = run()
    back = load_record(saved(made, tmp_path / "a"))
    for table in ("requests", "steps"):
        for name, column in getattr(made, table).columns().items():
            other = getattr(back, table).columns()[name]
            np.testing.assert_array_equal(column, other, err_msg=name)
            assert column.dtype == other.dtype, name
    for name in ("offsets", "first_step", "count"):
        np.testing.assert_array_equal(getattr(made.tokens, name), getattr(back.tokens, name), err_msg=name)
    assert back.meta["profile_hash"] == made.meta["profile_hash"]
    assert (back.num_pages, back.end_s, back.tenants) == (made.num_pages, made.end_s, made.tenants)
    assert summarise(back) == summarise(made)
    assert diff(made, back).worlds == 1


def test_a_folder_that_is_not_a_run_with_steps_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_record(tmp_path)
    folder = saved(run(), tmp_path / "a")
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"num_pages"', '"pages"'))
    with pytest.raises(UsageError, match="not a run saved by this version"):
        load_record(folder)
    (folder / "steps.parquet").unlink()
    with pytest.raises(UsageError, match=r"no steps\.parquet"):
        load_record(folder)


def test_the_table_fits_a_terminal_and_its_parts_add_up(found: RunDiff) -> None:
    lines = diff_lines(found, ("one", "two"))
    table = [line for line in lines if re.match(r"(Mean|P95|Output) .*\d", line)]
    assert len(table) == len(found.splits)
    assert all(len(line) <= 80 for line in table)
    for line in table:
        a, b, total, *parts = (float(cell) for cell in line[17:].split())
        assert total == pytest.approx(b - a, rel=1e-2, abs=2e-4 * max(a, b))
        assert sum(parts) == pytest.approx(total, rel=2e-2, abs=1e-3 * max(a, b))
    assert any(line.startswith("First different step") for line in lines)


def test_more_parts_than_four_are_a_table_of_their_own() -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 2, "acceptance": 0.5}'
    found = diff(run(), run(speculative_config=drafts, data_parallel_size=2))
    lines = diff_lines(found, ("one", "two"))
    (head,) = [index for index, line in enumerate(lines) if "acceptance" in line]
    assert lines[head].split() == [*PARTS, "acceptance", "routing"]
    for line, split in zip(lines[head + 1 :], found.splits, strict=False):
        assert len(line) <= 80
        shown = [float(cell) for cell in line[15:].split()]
        values = [value * (1000 if "(ms)" in line else 1) for value in split.parts.values()]
        assert shown == pytest.approx(values, rel=1e-2, abs=0.5 if "(/s)" in line else 0.01)
    assert "acceptance" in diff_html(found)


def test_json_holds_every_part_in_seconds(found: RunDiff) -> None:
    document = json.loads(json.dumps(diff_json(found, ("one", "two")), allow_nan=False))
    entry = document["metrics"]["mean_tpot"]
    assert set(entry["parts"]) == set(PARTS)
    assert sum(entry["parts"].values()) + entry["unexplained"] == pytest.approx(entry["difference"])
    assert document["first_difference"]["columns"]


def test_the_page_loads_nothing_and_draws_a_waterfall_per_metric(found: RunDiff, tmp_path: Path) -> None:
    page = diff_html(found, ("<one>", "two"))
    assert "default-src 'none'" in page
    assert page.count('"type":"waterfall"') == len(found.splits)
    assert "<one>" not in page
    assert [path.name for path in save_diff(found, tmp_path / "d")] == ["diff.json", "diff.html"]
    with pytest.raises(UsageError, match="cannot write"):
        save_diff(found, tmp_path / "d" / "diff.json")
