"""docs/diagnose.md shows what its commands print."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from experiments.diagnose_rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "diagnose.md"


@pytest.mark.slow
def test_the_example_prints_what_the_page_shows() -> None:
    spec = importlib.util.spec_from_file_location("docs_diagnose", PAGE.with_suffix(".py"))
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    page = PAGE.read_text(encoding="utf-8")
    assert maker.again(page) == page, "run python docs/diagnose.py and look at what changed"


def test_every_rule_and_its_threshold_is_on_the_page() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \|.*\| ([0-9.]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert [(rule.name, f"{rule.threshold:.3g}") for rule in RULES] == rows
