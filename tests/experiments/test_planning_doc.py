"""docs/planning.md: every command is one, and prints what the page says."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from tokentwin.cli import main

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """docs/planning.py."""
    spec = importlib.util.spec_from_file_location("docs_planning", DOCS / "planning.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_commands_and_files_of_the_page_are_valid(
    maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = maker.PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    rows = [f"2023-11-16 18:15:{second:02d}.0000000,{100 + second},20" for second in range(40)]
    trace = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    (tmp_path / maker.TRACE.name).write_text(trace, encoding="utf-8")
    for file, content in maker.YAML.findall(page):
        (tmp_path / file).write_text(content, encoding="utf-8")
    commands = [line[2:] for line in page.splitlines() if line.startswith("$ tokentwin ")]
    assert len(commands) == 6
    for command in commands:
        assert main([*shlex.split(command)[1:], "--print-config"]) == 0, command


@pytest.mark.shared
@pytest.mark.slow
def test_figures_of_the_page_are_what_its_commands_print(maker: ModuleType) -> None:
    """All but those of `plan`, which takes as long as all the others; `make planning` makes them too."""
    if not maker.TRACE.exists():
        pytest.skip(f"no {maker.TRACE.name} in ../shared/data/traces: the page's commands cannot be run")
    page = maker.PAGE.read_text(encoding="utf-8")
    assert maker.again(page, maker.TRACE, without="tokentwin plan") == page, (
        "run python docs/planning.py and look at what changed"
    )
