"""docs/diagnose.md shows what its commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from experiments.diagnose_rules import RULES
from tests.tokentwin.shell import caller

PAGE = Path(__file__).parents[2] / "docs" / "diagnose.md"


@pytest.mark.slow
def test_the_example_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    first, _, rest = block.replace("\\\n", " ").partition("\n")
    second, _, shown = rest.partition("\n")
    call = caller(capsys)
    for command in (first, second):
        told = call(*shlex.split(command)[2:])
        assert told.code == 0, told.err
    at = 0
    for part in shown.split("...\n"):
        at = told.out.find(part, at)
        assert at >= 0, f"not printed: {part}"
        at += len(part)


def test_every_rule_and_its_threshold_is_on_the_page() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \|.*\| ([0-9.]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert [(rule.name, f"{rule.threshold:.3g}") for rule in RULES] == rows
