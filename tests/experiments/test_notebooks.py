"""Notebooks run from top to bottom in a kernel of their own, and show figures and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

nbformat: Any = pytest.importorskip("nbformat")
nbclient: Any = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).parents[2] / "experiments" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FIGURE = "application/vnd.plotly.v1+json"
FIGURES = {
    "00_quick_start": 3,
    "02_slo_tradeoffs": 5,
    "03_capacity_plan_azure": 3,
    "04_write_a_policy": 1,
}
PRINTED = {"01_calibrate_and_trust": "median absolute error", "03_capacity_plan_azure": "vllm serve"}
"""What a reader must have seen."""
SHORTER = {
    "03_capacity_plan_azure": ("REQUESTS = 1200", "REQUESTS = 600"),
}
"""Less work for the same cells, and all that they assert."""


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(notebook: Path) -> None:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    nbformat.validate(content)
    assert content["nbformat"] == 4
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in content["cells"])


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(notebook: Path, tmp_path: Path) -> None:
    if notebook.stem.startswith("01"):
        pytest.importorskip("torch")
    content = nbformat.read(notebook, as_version=4)
    if (change := SHORTER.get(notebook.stem)) is not None:
        cell = next(cell for cell in content.cells if cell.cell_type == "code" and change[0] in cell.source)
        cell.source = cell.source.replace(*change)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(content, timeout=600, kernel_name="python3", resources=where).execute()
    outputs = [each for cell in content.cells for each in cell.get("outputs", ())]
    shown = [kind for each in outputs for kind in each.get("data", ())]
    assert shown.count(FIGURE) == FIGURES.get(notebook.stem, 0)
    printed = "".join(each.text for each in outputs if each.output_type == "stream" and each.name == "stdout")
    assert PRINTED.get(notebook.stem, "") in printed


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_between_notebooks_and_to_documents_lead_somewhere(notebook: Path) -> None:
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        for part in text.split("](")[1:] if cell["cell_type"] == "markdown" else ():
            assert (FOLDER / part.split(")")[0]).exists(), part
        for word in text.replace("`", " ").replace("(", " ").split():
            if word.startswith("docs/"):
                assert (FOLDER.parents[1] / word.rstrip(".,:);")).exists(), word
