"""How results show themselves in a notebook: one compact card, in whatever colours the page has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_RULE = "1px solid rgba(127,127,127,.35)"
_CELL = f"padding:.2em .7em;border-bottom:{_RULE};text-align:{{side}};font-variant-numeric:tabular-nums"
_TABLE = "border-collapse:collapse;margin:.4em 0;background:none;color:inherit"
MOST_ROWS = 12


def card(
    title: str,
    lines: Iterable[str],
    head: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    *,
    more: str = "",
) -> str:
    """HTML of a title, a list of sentences and a table, all as plain text.

    It sets no colour of its own, so that it can be read on a light page and on a dark one. Rows beyond `MOST_ROWS` are
    counted and not shown; `more` says where they are.
    """
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    listed = f'<ul style="margin:.2em 0;padding-left:1.3em">{items}</ul>' if items else ""
    table = ""
    if rows:
        cells = "".join(_cell("th", text, i) for i, text in enumerate(head))
        body = "".join(
            f"<tr>{''.join(_cell('td', text, i) for i, text in enumerate(row))}</tr>"
            for row in rows[:MOST_ROWS]
        )
        table = (
            '<div style="overflow-x:auto">'
            f'<table style="{_TABLE}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
        )
    if len(rows) > MOST_ROWS:
        table += f"<small>{len(rows) - MOST_ROWS} more rows{escape(f': {more}' if more else '')}</small>"
    return f'<div style="max-width:60em"><b>{escape(title)}</b>{listed}{table}</div>'


def _cell(tag: str, text: str, column: int) -> str:
    style = _CELL.format(side="left" if column == 0 else "right")
    return f'<{tag} style="{style}">{escape(text)}</{tag}>'


def number(value: float, digits: int = 4) -> str:
    """A number in a cell: four digits, thousands separated, a dash where there is none."""
    if value != value:
        return "–"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
