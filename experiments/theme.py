"""How every picture looks: one palette, one layout, one style sheet.

Colours are those of Okabe and Ito (Color Universal Design, 2008), told apart with any colour vision.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, INK, RULE = "#8A8F98", "#1B1F24", "#E3E6EA"

SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, BLACK)
LIMIT = VERMILLION
STAGES = {
    "blocked": VERMILLION,
    "network": GREY,
    "gateway": BLACK,
    "tokenize": YELLOW,
    "queue": ORANGE,
    "prefill": BLUE,
    "decode": SKY,
    "detokenize": "#B8A400",
    "stream": PURPLE,
    "reader": GREEN,
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def translucent(colour: str, alpha: float) -> str:
    """A palette colour with an opacity, as CSS."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def layout(*, height: int = 360, **changes: Any) -> dict[str, Any]:
    """Layout of a figure: white, thin grid, legend above the plot so that a phone keeps the width."""
    return {
        "template": {"layout": {"xaxis": _axis(), "yaxis": _axis()}},
        "height": height,
        "margin": {"l": 64, "r": 16, "t": 12, "b": 52},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "font": {"family": FONT, "size": 13, "color": INK},
        "colorway": list(SERIES),
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        "modebar": {"orientation": "v"},
        "hoverlabel": {"font": {"family": FONT}},
    } | changes


def figure(*, height: int = 360, **changes: Any) -> Any:
    """An empty figure."""
    go: Any = import_module("plotly.graph_objects")
    return go.Figure(layout=layout(height=height, **changes))


def stacked(rows: int, *, height: int) -> Any:
    """Plots one above the other over one x axis."""
    subplots: Any = import_module("plotly.subplots")
    fig = subplots.make_subplots(rows=rows, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    return fig.update_layout(layout(height=height))


def beside(cols: int, *, height: int, spacing: float = 0.06) -> Any:
    """Plots side by side over one y axis, `spacing` of the width apart."""
    subplots: Any = import_module("plotly.subplots")
    fig = subplots.make_subplots(rows=1, cols=cols, shared_yaxes=True, horizontal_spacing=spacing)
    return fig.update_layout(layout(height=height))


def _axis() -> dict[str, Any]:
    return {
        "gridcolor": RULE,
        "linecolor": GREY,
        "zeroline": False,
        "ticks": "outside",
        "tickcolor": GREY,
        "automargin": True,
        "title": {"standoff": 8},
    }


CSS = f"""
:root {{ color-scheme: light dark; --ink: {INK}; --soft: #555C66; --rule: {RULE}; --page: #F6F7F9; --card: #FFFFFF; }}
:root {{ --good: #00704F; --bad: #B04400; --warn: #8A5A00; --accent: {BLUE}; }}
@media screen and (prefers-color-scheme: dark) {{
  :root {{ --ink: #E4E7EB; --soft: #A9B1BC; --rule: #343A42; --page: #111418; --card: #1B1F24; }}
  :root {{ --good: #35C99A; --bad: #FF9A5C; --warn: #F0B840; --accent: {SKY}; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 {FONT}; }}
main {{ max-width: 1120px; margin: 0 auto; padding: 20px 16px 48px; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 8px 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1rem; margin: 0 0 4px; }}
a {{ color: var(--accent); }}
:focus-visible {{ outline: 3px solid var(--accent); outline-offset: 2px; }}
.sub {{ color: var(--soft); margin: 0 0 16px; overflow-wrap: anywhere; }}
section, .card {{ background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }}
section {{ padding: 16px; margin: 0 0 16px; }}
section > p {{ margin: 0 0 8px; color: var(--soft); font-size: .92rem; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }}
.cards {{ margin: 0 0 16px; }}
.card {{ padding: 10px 14px; }}
.card b {{ display: block; font-size: 1.45rem; line-height: 1.3; font-variant-numeric: tabular-nums; }}
.card span {{ color: var(--soft); font-size: .85rem; }}
.verdict ul {{ margin: 6px 0 0; padding: 0; list-style: none; }}
.verdict li {{ padding: 3px 0 3px 1.7em; text-indent: -1.7em; overflow-wrap: anywhere; }}
.verdict li::before {{ content: "•"; display: inline-block; width: 1.7em; text-indent: 0; }}
.verdict li::before {{ font-weight: 700; }}
.verdict li.good::before {{ content: "✓"; color: var(--good); }}
.verdict li.bad::before {{ content: "✗"; color: var(--bad); }}
.verdict li.warn::before {{ content: "!"; color: var(--warn); }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }}
.grid {{ gap: 0 16px; }}
.grid > section {{ min-width: 0; }}
figure {{ margin: 0; min-width: 0; overflow: hidden; }}
table {{ border-collapse: collapse; width: 100%; font-size: .92rem; }}
td {{ font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: 5px 8px; border-bottom: 1px solid var(--rule); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; white-space: normal; }}
.scroll {{ overflow-x: auto; }}
footer {{ color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }}
@media (hover: none) {{ .modebar {{ display: none !important; }} }}
@media print {{
  @page {{ margin: 12mm; }}
  body {{ background: white; font-size: 12px; }}
  main {{ padding: 0; }}
  section {{ padding: 10px; }}
  figure > div:not([id]) {{ height: auto !important; }}
  th, td {{ white-space: normal; }}
  section, .card {{ break-inside: avoid; border-color: #bbb; }}
  .modebar {{ display: none !important; }}
  .grid {{ display: block; }}
}}
"""
