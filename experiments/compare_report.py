"""A comparison for the terminal (at most 80 columns), as JSON and as a page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from experiments import theme
from experiments.compare import GAIN, LOSS, OPEN, SAME, Change, Comparison, Variant
from experiments.page import page, plot_section, table_section

WIDTH = 80
_COLUMN = 39
_COLOURS = {GAIN: theme.GREEN, LOSS: theme.VERMILLION, SAME: theme.GREY, OPEN: theme.GREY}


def comparison_lines(found: Comparison) -> list[str]:
    """Gains and losses side by side, then every figure; one block per variant."""
    lines = [f"Base: {found.base}", f"Workload: {found.workload}"]
    for variant in found.variants:
        lines += ["", f" {variant.name} ".center(WIDTH, "=")]
        lines += _wrapped(differs_words(variant))
        lines += [line for note in variant.notes for line in _wrapped(f"Note: {note}.")]
        lines += ["", *_beside(variant), "", *_table(variant)]
    return [*lines, "", *_wrapped(found.method + ".")]


def differs_words(variant: Variant) -> str:
    """What is set otherwise: `max_num_batched_tokens 8192 -> 512`."""
    parts = [f"{name} {_plain(a)} -> {_plain(b)}" for name, (a, b) in variant.differs.items()]
    return "; ".join(parts) if parts else "Nothing is set otherwise."


def verdict_words(variant: Variant) -> str:
    """In a sentence: how many figures gain and lose."""
    counts = {effect: len(variant.having(effect)) for effect in (GAIN, LOSS, SAME)}
    if not counts[GAIN] and not counts[LOSS]:
        told = f"No difference in any of {counts[SAME]} figures"
        changed = [c for c in variant.having(SAME) if c.metric.text(c.base) != c.metric.text(c.variant)]
        return f"{told} is certain: every interval of one holds 0." if changed else f"{told}."
    return f"{counts[GAIN]} gains, {counts[LOSS]} losses, {counts[SAME]} without a difference."


def comparison_json(found: Comparison) -> dict[str, Any]:
    """Everything as JSON values: latencies in seconds, rates per second, shares in 0 to 1."""
    return {
        "base": found.base,
        "workload": found.workload,
        "method": found.method,
        "lost": found.lost,
        "variants": [
            {
                "name": variant.name,
                "differs": {name: list(pair) for name, pair in variant.differs.items()},
                "notes": list(variant.notes),
                "changes": {change.metric.name: _change_json(change) for change in variant.changes},
            }
            for variant in found.variants
        ],
    }


def comparison_page(found: Comparison) -> str:
    """A page with a picture and a table per variant."""
    body = [
        f"<h1>{_escaped(found.base)} and {len(found.variants)} variant{'s' * (len(found.variants) > 1)}</h1>"
    ]
    body.append(f'<p class="sub">{_escaped(found.workload)}. {_escaped(found.method)}.</p>')
    for index, variant in enumerate(found.variants):
        words = f"{differs_words(variant)}. {verdict_words(variant)} Change of each figure with its 95 % interval."
        body.append(plot_section(index, variant.name, words, forest(variant)))
        rows = [_cells(change) for change in variant.changes]
        body.append(table_section(f"{variant.name}: every figure", ("", *_HEAD), rows))
    return page(f"{found.base} compared", body)


def forest(variant: Variant) -> Any:
    """Relative change of each figure that has one, with its interval; colour says gain or loss, and so does the shape."""
    shapes = {GAIN: "triangle-up", LOSS: "triangle-down", SAME: "circle", OPEN: "x"}
    kept = [c for c in variant.changes if c.relative(c.difference) is not None]
    fig = theme.figure(height=120 + 24 * max(len(kept), 1))
    for effect in (GAIN, LOSS, SAME, OPEN):
        mine = [c for c in kept if c.effect == effect]
        if not mine:
            continue
        x = [100 * (c.relative(c.difference) or 0.0) for c in mine]
        high = [
            100 * ((c.high if c.high is not None else c.difference) - c.difference) / c.base for c in mine
        ]
        low = [100 * (c.difference - (c.low if c.low is not None else c.difference)) / c.base for c in mine]
        fig.add_scatter(
            x=x,
            y=[c.metric.label for c in mine],
            name=effect,
            mode="markers",
            marker={"color": _COLOURS[effect], "symbol": shapes[effect], "size": 9},
            error_x={"type": "data", "array": high, "arrayminus": low, "color": _COLOURS[effect]},
            hovertemplate="%{y}: %{x:+.1f} %",
        )
    order = [c.metric.label for c in reversed(kept)]
    fig.update_yaxes(categoryorder="array", categoryarray=order)
    fig.add_vline(x=0, line_color=theme.INK, line_width=1)
    return fig.update_xaxes(title_text="Change from the base (%)")


_HEAD = ("base", "variant", "change", "95% interval", "effect")


def _cells(change: Change) -> list[str]:
    """Label, base, variant, change, interval of the change, effect."""
    metric = change.metric
    return [
        metric.label,
        metric.text(change.base),
        metric.text(change.variant),
        _signed(change, change.difference),
        _interval(change),
        change.effect,
    ]


def _interval(change: Change) -> str:
    if change.low is None or change.high is None:
        return ""
    return f"[{_signed(change, change.low)}, {_signed(change, change.high)}]"


def _signed(change: Change, difference: float) -> str:
    """In percent of the base, or in its unit where the base is 0."""
    share = change.relative(difference)
    if share is None:
        value = difference * change.metric.scale
        return f"{value:+.2f}" if math.isfinite(value) else "-"
    return f"{share:+.1%}".replace("-0.0%", "+0.0%") if share < 10 else f"{1 + share:,.0f}x"


def _table(variant: Variant) -> Iterable[str]:
    yield f"{'':<24}{'base':>10}{'variant':>10}{'change':>8}  {'95% interval':<17} effect".rstrip()
    for change in variant.changes:
        label, base, value, difference, interval, effect = _cells(change)
        mark = {GAIN: "gain", LOSS: "LOSS", OPEN: "?"}.get(effect, "=")
        yield f"{label[:23]:<24}{base:>10}{value:>10}{difference:>8}  {interval:<19}{mark:>5}".rstrip()
    yield (
        "= no difference   ? one pair of runs cannot judge it" if variant.having(OPEN) else "= no difference"
    )


def _beside(variant: Variant) -> Iterable[str]:
    gains, losses = variant.having(GAIN), variant.having(LOSS)
    if not gains and not losses:
        yield verdict_words(variant)
        return
    yield f"{'Gains':<{_COLUMN}}  Losses"
    left, right = ([_short(c) for c in some] or ["none"] for some in (gains, losses))
    for one, other in zip_longest(left, right, fillvalue=""):
        yield f"{one:<{_COLUMN}}  {other}".rstrip()
    same = [change.metric.label for change in variant.having(SAME)]
    if same:
        yield from _wrapped(f"No difference: {', '.join(same)}.")


def _short(change: Change) -> str:
    short = f"{change.metric.label} {_signed(change, change.difference)}"
    whole = f"{short} ({change.metric.text(change.base)}->{change.metric.text(change.variant)})"
    return whole if len(whole) <= _COLUMN else short


def _change_json(change: Change) -> dict[str, Any]:
    values = {
        "base": change.base,
        "variant": change.variant,
        "difference": change.difference,
        "low": change.low,
        "high": change.high,
    }
    strict = {k: v if v is None or math.isfinite(v) else None for k, v in values.items()}
    better = "higher" if change.metric.better > 0 else "lower"
    return {**strict, "better": better, "effect": change.effect}


def _plain(value: object) -> str:
    """A value as a configuration file has it, without what was left open."""
    if isinstance(value, dict):
        parts = [f"{name}: {_plain(each)}" for name, each in value.items() if each is not None]
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_plain(each) for each in value) + "]"
    return "default" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _escaped(text: str) -> str:
    from html import escape

    return escape(text)
