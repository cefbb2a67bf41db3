"""Write what the commands of docs/diagnose.md print into the page: python docs/diagnose.py"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

from tokentwin.cli import main

PAGE = Path(__file__).with_name("diagnose.md")
EXAMPLE = re.compile(r"^```console\n((?:\$ .*?[^\\]\n)+)(.*?)^```$", re.S | re.M)


def again(page: str) -> str:
    """The page with what the last command of its example prints now, in an empty folder."""
    found = EXAMPLE.search(page)
    assert found is not None
    commands = re.findall(r"^\$ tokentwin (.*?[^\\])\n", found[1], re.S | re.M)
    printed = ""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for command in commands:
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    code = main(shlex.split(command.replace("\\\n", " ")))
                assert code == 0, command
                printed = out.getvalue()
        finally:
            os.chdir(here)
    return page[: found.start(2)] + printed + page[found.end(2) :]


if __name__ == "__main__":
    PAGE.write_text(again(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
