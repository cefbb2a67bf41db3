"""Dirty tables of every layout: nothing gets through that is no measurement, and nothing disappears uncounted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.assemble import all_samples
from calibration.sources import read_sources
from costmodel.datasheet import device_facts
from serving.errors import UsageError
from tests.calibration.test_importers import write

A100 = device_facts("a100")

CELLS = st.one_of(
    st.sampled_from(["", "nan", "-1", "0", "inf", "1e300", "x", "True", "12.5", "４", "\u2212"]),
    st.text(st.characters(exclude_characters='\r\n",\x00', exclude_categories=["Cs"]), max_size=4),
)


def spoilt(path: Path, column: Callable[[int], int], cells: list[str]) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    header = lines[0].split(",")
    for i, cell in enumerate(cells):
        row = lines[1].split(",")
        row[column(i) % len(header)] = cell
        lines.append(",".join(row))
    path.write_text("\n".join(lines), encoding="utf-8")


@given(
    st.sampled_from(["aic", "lss", "vidur", "bench"]),
    st.lists(CELLS, min_size=1, max_size=30),
    st.integers(0, 9),
)
@settings(deadline=None, max_examples=60)
def test_dirty_cells_are_dropped_and_counted_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, layout: str, cells: list[str], shift: int
) -> None:
    """Whatever stands in a cell: samples stay finite and positive, and every row is kept, counted or refused."""
    folder = tmp_path_factory.mktemp("dirty")
    row = {"aic": 0.5, "lss": 5.0, "vidur": 0.5, "bench": 5e-4}[layout]
    if layout == "aic":
        write(folder / "t.csv", [{"gemm_dtype": "bfloat16", "m": 1, "n": 64, "k": 64, "latency": row}])
    elif layout == "lss":
        folder = folder / "llama-3.1-8b" / "tp1"
        write(folder / "t.csv", [{"layer": "o_proj", "tokens": 8, "time_us": row}])
    elif layout == "vidur":
        names = ("n_embd", "n_q_head", "n_kv_head", "num_tensor_parallel_workers", "batch_size")
        cell = dict.fromkeys(names, 1) | {"prefill_chunk_size": 0, "kv_cache_size": 9, "is_prefill": False}
        write(folder / "t.csv", [cell | {"n_embd": 128, "time_stats.attn_decode.median": row}])
    else:
        cell = {"kind": "gemm", "dtype": "bfloat16", "n": 64, "k": 64, "m": 1}
        write(folder / "t.csv", [cell | {"latency_s": row, "repeats": 3, "noise": 0.1}])
    spoilt(folder / "t.csv", lambda i: i + shift, cells)
    try:
        found = read_sources([folder / "t.csv"], "a100")
        samples = all_samples(found.tables, A100)
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    for some in samples.values():
        assert np.isfinite(some.seconds).all()
        assert (some.seconds > 0).all()
        assert (some.shape > 0).all()
    if layout != "lss":  # a layer of another name is not counted
        kept = sum(len(some) + sum(some.dropped.values()) for some in samples.values())
        left_out = sum(sum(table.dropped.values()) for table in found.tables)
        assert kept + left_out >= len(cells)
