"""Published results beside the twin's: the facts are whole, and the page has what the command makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.public_results import compare, main, read, split, table
from serving.errors import UsageError
from sim.deployment import build

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
DATA = ROOT.parent / "shared" / "data"


def test_every_run_is_a_deployment_of_shipped_profiles_on_the_page() -> None:
    runs = read()
    assert len(runs) >= 15
    assert len({run.flags["gpu"] for run in runs}) >= 4
    assert len({run.flags["model"] for run in runs}) >= 5
    for run in runs:
        deployment, workload = split(run.flags, DATA)
        built = build(deployment).deployment  # ranks that share experts have a router of their own by default
        assert built.model_copy(update={"router": deployment.router}) == deployment
        assert workload.tenants[0].dataset.name == run.flags["dataset_name"]
        assert run.figures
        assert f"| {run.source} | {run.label} |" in PAGE
        assert f"| [{run.source}]({run.page}) | {run.measured} | {run.engine} | {run.unknown} |" in PAGE


def test_the_page_has_what_the_command_makes() -> None:
    """One prompt and one decode, both quick; the rest only by the command."""
    quick = [run for run in read() if run.label in ("prompt of 128", "TP 8 1 decode after 4096")]
    assert len(quick) == 2
    made = table([found for run in quick for found in compare(run, DATA)])
    rows = [line for line in made.splitlines() if any(f"| {run.label} |" in line for run in quick)]
    assert len(rows) == 2
    for row in rows:
        assert row in PAGE, "run python -m experiments.public_results --write docs/validation.md"


def test_facts_that_are_something_else_and_runs_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("- {source: a, page: b}", encoding="utf-8")
    with pytest.raises(UsageError, match="no list of published results"):
        read(tmp_path / "a.yaml")
    assert main(["--only", "no such run"]) == 2
    assert capsys.readouterr().err.startswith("error: --only 'no such run' is in no source or label of ")
    assert main(["--only", "Mistral", "--commands"]) == 0
    assert "tokentwin simulate --model mistral-7b --gpu rtx4090" in capsys.readouterr().out
