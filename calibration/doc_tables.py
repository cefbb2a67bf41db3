"""Tables that commands put into pages: Markdown rows, and the text between two marks of a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from serving.errors import UsageError


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def between(page: str, section: str, text: str) -> str:
    """`page` with `text` between its marks `<!-- section -->` and `<!-- end of section -->`."""
    begin, end = f"<!-- {section} -->", f"<!-- end of {section} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise UsageError(f"the page lacks the lines {begin} and {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def write_between(path: Path, section: str, text: str) -> None:
    """Put `text` into the file's section; `UsageError` when the file or its marks are missing."""
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    path.write_text(between(page, section, text), encoding="utf-8")


def page_command(
    prog: str,
    description: str | None,
    section: str,
    table: Callable[[Path], str],
    data: str,
    arguments: list[str] | None,
) -> int:
    """A command that prints `table` of a folder (`--data`), and puts it between its marks in a page (`--write`)."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--data", type=Path, default=Path(data))
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="put the table between its marks in this page"
    )
    given = parser.parse_args(arguments)
    try:
        text = table(given.data)
        if given.write is not None:
            write_between(given.write, section, text)
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(text + "\n")
    return 0
