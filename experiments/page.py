"""The shell of a self-contained page: style, plotly.js and a policy that lets it load nothing.

It opens from a mail attachment, follows the reader's light or dark scheme, and prints light.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from experiments import theme
from experiments.results import writable

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
CONFIG = {"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["lasso2d", "select2d"]}


def page(title: str, body: Iterable[str], *, css: str = "", script: str = "") -> str:
    """An HTML document; `title` is plain text, `body` are finished HTML parts, `css` and `script` come last."""
    offline: Any = import_module("plotly.offline")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)} · TokenTwin</title>
<style>{theme.CSS}{css}</style>
<script>{offline.get_plotlyjs()}</script>
</head>
<body>
<main>
<noscript><p>The numbers are below; the pictures need JavaScript.</p></noscript>
{chr(10).join(body)}
</main>
<script>{asset("settle.js")}{script}</script>
</body>
</html>
"""


def write_page(text: str, path: str | Path) -> Path:
    """Write a page, its folder too, and return the path. Raises UsageError when that is not possible."""
    target = Path(path)
    with writable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return target


def asset(name: str) -> str:
    """A style sheet or script that lies beside this module."""
    return (resources.files("experiments") / name).read_text(encoding="utf-8")


def plot(fig: Any, name: str | int) -> str:
    """The picture as a part of a page, `plot-<name>` by id."""
    plotly_io: Any = import_module("plotly.io")
    html: str = plotly_io.to_html(
        fig,
        config=CONFIG,
        include_plotlyjs=False,
        full_html=False,
        div_id=f"plot-{name}",
        default_width="100%",
        default_height=f"{fig.layout.height}px",
    )
    return html


def plot_section(index: int, heading: str, words: str, fig: Any) -> str:
    """A heading, how to read the picture, and the picture."""
    return (
        f'<section aria-labelledby="h-{index}"><h2 id="h-{index}">{escape(heading)}</h2>'
        f'<p>{escape(words)}</p><figure aria-label="{escape(heading)}">{plot(fig, index)}</figure></section>'
    )


def list_section(heading: str, lines: Iterable[tuple[str, str]]) -> str:
    """Sentences under a heading, each with its mark: good, bad, warn or plain."""
    items = "".join(f'<li class="{mark}">{escape(text)}</li>' for mark, text in lines)
    return f'<section class="verdict"><h2>{escape(heading)}</h2><ul>{items}</ul></section>'


def table_section(heading: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table under a heading; cells are plain text, and a head of empty ones is left out."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    titles = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return framed(heading, f"<table>{titles}<tbody>{lines}</tbody></table>")


def framed(heading: str, table: str) -> str:
    """A finished table under a heading, which scrolls by itself where the page is narrower (with the keyboard too)."""
    name = escape(heading)
    return (
        f'<section><h2>{name}</h2><div class="scroll" tabindex="0" role="region" aria-label="{name}">'
        f"{table}</div></section>"
    )
