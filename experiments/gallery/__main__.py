"""Make docs/toolbox.md and its pictures again; `--only NAME` makes one picture and prints its paragraph."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from experiments.gallery.entries import ENTRIES
from experiments.gallery.entry import Entry

DOCS = Path(__file__).parents[2] / "docs"
WIDTH = 900
_WRAP = 128


def main(only: str | None = None) -> None:
    """All entries, or one."""
    pictures = DOCS / "img" / "toolbox"
    pictures.mkdir(parents=True, exist_ok=True)
    made: list[Entry] = []
    for maker in ENTRIES:
        if only is not None and maker.__name__ != only:
            continue
        begun_s = time.perf_counter()
        entry = maker()
        picture(entry, pictures / f"{entry.name}.png")
        sys.stderr.write(f"{entry.name:<18}{time.perf_counter() - begun_s:6.1f} s\n")
        made.append(entry)
    if only is not None:
        sys.stdout.write("".join(f"{entry.words}\n" for entry in made))
        return
    (DOCS / "toolbox.md").write_text(page(made), encoding="utf-8")


def page(entries: list[Entry]) -> str:
    """The page in Markdown."""
    parts = [
        "# The latency toolbox\n",
        "One figure and one paragraph for each technique, made by `make gallery` from simulated runs (an 8B model on an "
        "H100 unless it says otherwise). The options are the same in `simulate`, `run` and `serve` where both have the "
        "technique. `tokentwin compare BASE.yaml VARIANT.yaml` says the same of your own traffic, with intervals.\n",
    ]
    parts[1] = textwrap.fill(parts[1], _WRAP) + "\n"
    for entry in entries:
        words = textwrap.fill(entry.words, _WRAP)
        parts.append(f"## {entry.title}\n\n`{entry.options}`\n\n{words}\n")
        parts.append(f"![{entry.title}](img/toolbox/{entry.name}.png)\n")
    return "\n".join(parts)


def picture(entry: Entry, path: Path) -> None:
    """A PNG of the figure, by the browser that would show it."""
    browser = next(
        (found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None
    )
    if browser is None:
        sys.exit("chromium is not installed; on Debian: apt-get install chromium")
    height = int(entry.figure.layout.height or 360)
    with tempfile.TemporaryDirectory() as folder:
        html = Path(folder) / "figure.html"
        entry.figure.update_layout(width=WIDTH - 16)
        entry.figure.write_html(html, include_plotlyjs=True, config={"displayModeBar": False})
        flags = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--virtual-time-budget=20000", f"--window-size={WIDTH},{height + 24}"),
            f"--user-data-dir={folder}/profile",
        ]
        command = [browser, *flags, f"--screenshot={path.resolve()}", html.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode or not path.exists():
        sys.exit(f"chromium made no picture of {entry.name}: {done.stderr[-400:]}")


if __name__ == "__main__":
    main(sys.argv[2] if sys.argv[1:2] == ["--only"] else None)
