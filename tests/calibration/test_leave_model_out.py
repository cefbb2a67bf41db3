"""A model's steps predicted by fits that saw none of its shapes, and the tables that commands put into pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibration import kernel_errors
from calibration.doc_tables import between, markdown
from calibration.leave_model_out import Left, gemm_shapes, leave_out, main, table
from costmodel.model import load_model
from serving.errors import UsageError

KERNELS = Path(__file__).resolve().parents[3] / "shared" / "data" / "kernels"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "validation.md"


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.skipif(
    not KERNELS.is_dir(), reason="the measured kernel tables (../shared/data/kernels) are absent"
)
def test_steps_of_qwen3_8b_on_h200_without_any_of_its_shapes() -> None:
    """Three of its deployments have all four linear layers measured; decode and prefill steps within 3 %."""
    found = leave_out("h200", KERNELS, ["qwen3-8b"])
    assert [(left.tp, left.products) for left in found] == [(1, 3), (2, 4), (4, 4), (8, 4)]
    for steps in ([left.decode for left in found], [left.prefill for left in found]):
        errors = np.concatenate(steps)
        assert len(errors) >= 40
        assert 0.001 < np.mean(np.abs(errors)) < 0.03  # 0 would mean that its own shapes were in the fit
        assert abs(np.mean(errors)) < 0.015


def test_the_shapes_of_a_model_are_those_of_its_layers() -> None:
    """Llama-3.1-8B on two ranks: (32 + 2 x 8) / 2 heads of 128 from 4,096, and an MLP of 14,336 / 2."""
    shapes = gemm_shapes(load_model("llama-3.1-8b"), 2)
    assert shapes == [(3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168)]


def test_the_table_has_a_row_per_model_and_one_over_all() -> None:
    a = Left("h200", "a", 1, 4, np.array([0.01, -0.03]), np.array([0.02]))
    b = Left("h200", "b", 2, 3, np.array([0.05]), np.array([-0.02]))
    rows = table([a, b]).splitlines()[2:]
    assert rows[0] == "| h200 | a | 1 (4) | 2.0% (-1.0%, worst -3%) | 2.0% (+2.0%, worst +2%) |"
    assert rows[2] == "| h200 | all |  | 3.0% (+1.0%, worst +5%) | 2.0% (+0.0%, worst +2%) |"


def test_missing_tables_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path), "--device", "a100"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_text_goes_between_the_marks_of_its_section() -> None:
    page = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n"
    assert between(page, "x", "new") == "a\n<!-- x -->\n\nnew\n\n<!-- end of x -->\nb\n"
    assert between(between(page, "x", "1"), "x", "new") == between(page, "x", "new")
    with pytest.raises(UsageError, match="lacks the lines <!-- y -->"):
        between(page, "y", "new")
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_the_page_shows_the_errors_of_the_shipped_profiles() -> None:
    shown = kernel_errors.table() in PAGE.read_text(encoding="utf-8")
    assert shown, "run python -m calibration.kernel_errors --write docs/validation.md"
