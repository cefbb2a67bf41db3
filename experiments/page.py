"""The shell of a self-contained page: style, plotly.js and a policy that lets it load nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import import_module
from typing import Any

from experiments import theme
from experiments.report import CONFIG, POLICY, SETTLE


def page(title: str, body: Iterable[str]) -> str:
    """An HTML document; `title` is plain text, `body` are finished HTML parts."""
    offline: Any = import_module("plotly.offline")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)} · TokenTwin</title>
<style>{theme.CSS}</style>
<script>{offline.get_plotlyjs()}</script>
</head>
<body>
<main>
<noscript><p>The numbers are below; the pictures need JavaScript.</p></noscript>
{chr(10).join(body)}
</main>
<script>{SETTLE}</script>
</body>
</html>
"""


def plot_section(index: int, heading: str, words: str, fig: Any) -> str:
    """A heading, how to read the picture, and the picture."""
    plotly_io: Any = import_module("plotly.io")
    plot = plotly_io.to_html(
        fig,
        config=CONFIG,
        include_plotlyjs=False,
        full_html=False,
        div_id=f"plot-{index}",
        default_width="100%",
        default_height=f"{fig.layout.height}px",
    )
    return (
        f'<section aria-labelledby="h-{index}"><h2 id="h-{index}">{escape(heading)}</h2>'
        f'<p>{escape(words)}</p><figure aria-label="{escape(heading)}">{plot}</figure></section>'
    )


def table_section(heading: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table under a heading; cells are plain text."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<section><h2>{escape(heading)}</h2><div class="scroll"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div></section>"
    )
