"""The README shows what the program prints, and its Python runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs" / "example.py"), "--check"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


def test_the_first_example_is_what_make_demo_runs() -> None:
    (example,) = re.findall(r"^\$ tokentwin (.*?[^\\])\n", README, re.S | re.M)
    (recipe,) = re.findall(
        r"^\t@\$\(BIN\)/tokentwin (.*?[^\\])\n", (ROOT / "Makefile").read_text(), re.S | re.M
    )
    assert (
        recipe.replace("\\", "").replace("$(DEMO)", "runs/demo").split() == example.replace("\\", "").split()
    )


def test_the_python_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"^```python\n(.*?)^```$", README, re.S | re.M):
        exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "runs" / "python" / "report.html").exists()


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
    ],
)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
