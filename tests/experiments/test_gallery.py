"""The gallery's own arithmetic, and that its page holds what its entries say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments import theme
from experiments.gallery.__main__ import DOCS, page
from experiments.gallery.entries import ENTRIES
from experiments.gallery.entry import Entry, knee, mixed, run, traffic
from experiments.gallery.memory import paging


def test_the_knee_of_a_hyperbola() -> None:
    """y = 1/x between 1/4 and 4 bends most at x = 1."""
    x = [0.25, 0.5, 1.0, 2.0, 4.0]
    assert knee(x, [1 / v for v in x]) == 2
    assert knee([1.0, 1.0], [2.0, 2.0]) == 0


def test_a_page_of_entries() -> None:
    made = page([Entry("a", "Title", "--flag", "Words.", theme.figure())])
    assert "## Title\n\n`--flag`\n\nWords.\n" in made
    assert "![Title](img/toolbox/a.png)" in made


def test_small_worlds() -> None:
    load = traffic(random_input_len=50, random_output_len=5, num_prompts=10, request_rate=100.0)
    record, summary = run(load)
    assert summary.completed == len(record.requests) == 10
    tenant = {"name": "a", "dataset": {"name": "random", "input_len": 9, "output_len": 2}, "num_prompts": 3}
    assert len(mixed([tenant, {**tenant, "name": "b"}])) == 6


def test_paging_says_what_memory_says() -> None:
    entry = paging()
    assert re.search(r"holds \d+ sequences", entry.words)


@pytest.mark.parametrize("maker", ENTRIES, ids=[maker.__name__ for maker in ENTRIES])
def test_the_page_has_every_entry_and_its_picture(maker: object) -> None:
    text = (DOCS / "toolbox.md").read_text(encoding="utf-8")
    pictures = {Path(name).stem for name in re.findall(r"\(img/toolbox/(\w+\.png)\)", text)}
    name = maker.__name__  # type: ignore[attr-defined]
    assert name in pictures
    assert (DOCS / "img" / "toolbox" / f"{name}.png").is_file()
