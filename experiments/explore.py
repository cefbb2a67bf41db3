"""One page of a sweep or a plan: limits to move, what keeps them, the front, each point, heatmaps, capacity for money.

The points lie in the page as columns; the scripts beside this module draw them. Nothing is loaded from anywhere.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from experiments import theme
from experiments.explore_notes import without_figure
from experiments.explore_space import Space
from experiments.page import asset, framed, list_section, page
from experiments.prices import Price
from experiments.results import METRICS
from experiments.sweep_spec import canonical
from sim.slo import PRESETS

SCRIPTS = ("explore_model.js", "explore_plots.js", "explore_tables.js", "explore_view.js")
LOADS = ("request_rate", "rate_scale", "max_concurrency")
"""Knobs that are a load, most usual first: capacity is the highest of their values that keeps the promises."""
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
KNOB_NAMES = {
    "request_rate": ("Request rate (req/s)", "{} req/s"),
    "rate_scale": ("Scale of the rate", "rate × {}"),
    "max_concurrency": ("Concurrent clients", "{} clients"),
    "max_num_seqs": ("Batch limit", "batch {}"),
    "max_num_batched_tokens": ("Chunk", "chunk {}"),
    "tensor_parallel_size": ("Tensor parallel size", "TP{}"),
    "data_parallel_size": ("Replicas", "{} replicas"),
    "replicas": ("Replicas", "{} replicas"),
    "gpu": ("GPU", "{}"),
    "model": ("Model", "{}"),
    "quantization": ("Weights", "weights {}"),
    "kv_cache_dtype": ("KV cache", "KV {}"),
    "policy": ("Batch policy", "{}"),
    "acceptance": ("Acceptance of drafts", "acceptance {}"),
    "num_speculative_tokens": ("Draft tokens a step", "{} draft tokens"),
    "scheduling_policy": ("Queue order", "{}"),
}
"""Names of knobs, and a value of theirs in words."""
_MORE_FIGURES: tuple[tuple[str, str, int, str], ...] = (
    ("output_throughput_per_gpu", "Output tokens/s per GPU", 1, ""),
    ("output_throughput", "Output tokens/s", 1, ""),
    ("total_token_throughput", "Prompt and output tokens/s", 1, ""),
    ("request_throughput", "Requests/s completed", 1, ""),
    ("request_goodput", "Good requests/s", 1, ""),
    ("usd_per_million_output_tokens", "$ per million output tokens", -1, "$"),
    ("usd_per_hour", "$ per hour", -1, "$"),
    ("usd_per_month", "$ per month", -1, "$"),
    ("capacity", "Capacity", 1, ""),
    ("headroom", "Headroom at this load", 1, "%"),
    ("slo_attainment", "SLO attainment", 1, "%"),
    ("joules_per_output_token", "Joules per output token (estimate)", -1, ""),
    ("num_gpus", "GPUs", -1, ""),
    ("failed", "Failed requests", -1, ""),
    ("sim_gpu_busy_share", "GPU busy", 0, "%"),
    ("sim_batch_occupancy_mean", "Batch occupancy, mean", 0, "%"),
    ("sim_kv_occupancy_mean", "KV occupancy, mean", 0, "%"),
    ("sim_kv_occupancy_max", "KV occupancy, highest", 0, "%"),
    ("sim_prefix_hit_rate", "Prompt tokens cached", 1, "%"),
    ("sim_preemptions", "Preemptions", -1, ""),
)
"""Key, label, which way is better (0: neither), unit."""


def explore_html(space: Space, at: Path, prices: Mapping[str, Price], *, make: str = "") -> str:
    """The page as one HTML document that is to lie in the folder `at`; the same bytes for the same results.

    `make` is a command that makes the report of point NUMBER and this page again.
    """
    data = payload(space, at, prices, make=make)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    done = any(not p.error for p in space.points)
    body = [
        f"<h1>{escape(space.title)}</h1>",
        f'<p class="sub">{escape(space.subtitle)}</p>',
        *([asset("explore.html")] if done else []),
        *([list_section("What would flip the choice", _plain(space.flips))] if space.flips else []),
        *([_command(space.serve)] if space.serve else []),
        *([list_section("Notes", _notes(space.notes))] if space.notes else []),
        _pairs("Failed points", ("Error", "Points"), _failures(space)),
        _pairs("Left out", ("Candidate", "Why"), space.left_out),
        f"<footer>Made by TokenTwin of {escape(str(space.root))}</footer>",
        f'<script type="application/json" id="data">{text}</script>',
    ]
    script = "\n".join(asset(name) for name in SCRIPTS) if done else ""
    return page(space.title, body, css=asset("explore.css"), script=script)


def payload(space: Space, at: Path, prices: Mapping[str, Price], *, make: str = "") -> dict[str, Any]:
    """What the scripts read: strict JSON, columns by name with a value per point."""
    points = space.points
    knobs = [_knob(key, [p.params.get(key) for p in points]) for key in space.knobs]
    index = {k["key"]: {canonical(v): i for i, v in enumerate(k["values"])} for k in knobs}
    figures = [
        (k, lab, b, u) for k, lab, b, u in figure_table() if any(p.figures.get(k) is not None for p in points)
    ]
    known = {key for key, *_ in figures}
    every = [
        row
        for row in figure_table()
        if row[0] in known or row[0] in ("usd_per_hour", "usd_per_million_output_tokens")
    ]
    limits, source = limits_of(space)
    reports = [None if p.report is None else _href(p.report, at) for p in points]
    said = [word for word in ("load", "bound", "label") if any(p.words.get(word) for p in points)]
    priced = {gpu: _price(gpu, space, prices) for gpu in sorted({p.gpu for p in points})}
    return {
        "kind": space.kind,
        "knobs": knobs,
        "knob": {key: [index[key][canonical(p.params.get(key))] for p in points] for key in space.knobs},
        "figures": [
            {"key": k, "label": f"{lab} ({space.unit})" if k == "capacity" else lab, "better": b, "unit": u}
            for k, lab, b, u in every
        ],
        "figure": {key: [_number(p.figures.get(key)) for p in points] for key, *_ in figures},
        "interval": {
            key: [_ends(p.intervals.get(key)) for p in points]
            for key, *_ in figures
            if any(key in p.intervals for p in points)
        },
        "words": {word: [p.words.get(word, "") for p in points] for word in said},
        "number": [p.number for p in points],
        "error": [p.error for p in points],
        "runs": [p.runs for p in points],
        "gpu": [p.gpu for p in points],
        "command": [p.command for p in points],
        "report": reports,
        "has": [p.report is not None and p.report.is_file() for p in points],
        "make": make,
        "limits": limits,
        "limits_source": source,
        "statistics": list(STATISTICS),
        "prices": {gpu: price for gpu, price in priced.items() if price is not None},
        "load": next((k["key"] for load in LOADS for k in knobs if k["key"] == load and k["numeric"]), None),
        "objective": "usd_per_hour" if space.kind == "plan" else "usd_per_million_output_tokens",
        "pairs": _knob_pairs(space.knobs),
        "grid": math.prod(len(k["values"]) for k in knobs) <= 4 * len(points),
        "look": theme.layout(),
        "colours": {
            "blue": theme.BLUE,
            "sky": theme.SKY,
            "orange": theme.ORANGE,
            "limit": theme.LIMIT,
            "grey": theme.GREY,
            "faint": theme.translucent(theme.GREY, 0.35),
        },
    }


def figure_table() -> list[tuple[str, str, int, str]]:
    """Every figure that a page can show: key, label, which way is better, unit."""
    latencies = [
        (f"{s}_{m}_ms", f"{'Mean' if s == 'mean' else s.upper()} {m.upper()} (ms)", -1, "ms")
        for m in METRICS
        for s in ("p95", "p50", "p90", "p99", "mean")
    ]
    return [*latencies, *_MORE_FIGURES]


def limits_of(space: Space) -> tuple[dict[str, dict[str, Any]], str]:
    """The limits that the page starts with, by metric, and where they are from; none on what no point has."""
    asked = {k: v for k, v in space.limits_ms.items() if k.split("_")[0] in (*STATISTICS, "median")}
    source = f"the {space.kind}'s own" if asked else "those of the preset chat: none were asked for"
    if not asked:
        asked = {slo.name: slo.limit_s * 1000 for slo in PRESETS["chat"]}
    done = sum(not p.error for p in space.points)
    limits = {}
    for name, limit_ms in asked.items():
        statistic, _, metric = name.replace("median", "p50").partition("_")
        if not done or len(without_figure(space.points, name)) < done:
            limits[metric] = {"statistic": statistic, "ms": limit_ms}
    return limits, source


def front_numbers(space: Space, prices: Mapping[str, Price]) -> list[int]:
    """Numbers of the points that are on the front when the page opens: P95 TTFT and the objective, of those that keep."""
    limits, _ = limits_of(space)
    rows = []
    for p in space.points:
        if p.error or p.figures.get("failed") or "saturated" in p.words.get("load", ""):
            continue
        values = {m: p.figures.get(f"{limit['statistic']}_{m}_ms") for m, limit in limits.items()}
        if any(v is None or v > limits[m]["ms"] for m, v in values.items()):
            continue
        price, rate = _price(p.gpu, space, prices), p.figures.get("output_throughput") or 0.0
        usd = price["usd"] * (p.figures.get("num_gpus") or 0) / rate if price and rate else None
        gain = -usd if usd is not None else p.figures.get("output_throughput_per_gpu")
        ttft = p.figures.get("p95_ttft_ms")
        if ttft is not None and gain is not None:
            rows.append((ttft, -gain, p.number))
    kept, top = [], math.inf
    for _, cost, number in sorted(rows):
        if cost < top:
            kept.append(number)
            top = cost
    return kept


def _knob(key: str, column: Iterable[Any]) -> dict[str, Any]:
    distinct = list({canonical(v): v for v in column}.values())
    numeric = all(_is_number(v) for v in distinct)
    ordered = sorted(distinct, key=lambda v: (v is not None, v if _is_number(v) else 0, str(v)))
    last = key.rsplit(".", 1)[-1]
    label, phrase = KNOB_NAMES.get(key) or KNOB_NAMES.get(last) or (key, last + " {}")
    return {"key": key, "label": label, "phrase": phrase, "numeric": numeric, "values": ordered}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _knob_pairs(knobs: Iterable[str]) -> list[dict[str, Any]]:
    """Pairs of knobs that people look at as a heatmap: [rows, columns]."""
    have = list(knobs)
    load = next((name for name in LOADS if name in have), None)
    accept = next((name for name in have if "accept" in name), None)
    drafts = [name for name in have if ("draft" in name or "speculative_tokens" in name) and name != accept]
    pairs = [
        ("Chunk × load", "max_num_batched_tokens", load),
        ("Batch limit × load", "max_num_seqs", load),
        *(("Acceptance × draft cost", accept, draft) for draft in drafts[:1]),
    ]
    return [{"name": name, "keys": [a, b]} for name, a, b in pairs if a in have and b in have]


def _price(gpu: str, space: Space, prices: Mapping[str, Price]) -> dict[str, Any] | None:
    if gpu in space.prices:
        return {"usd": space.prices[gpu], "example": False}
    price = prices.get(gpu)
    return None if price is None else {"usd": price.usd_per_hour, "example": price.example}


def _href(path: Path, at: Path) -> str:
    return Path(os.path.relpath(path.resolve(), at.resolve())).as_posix()


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _ends(interval: tuple[float, float] | None) -> list[float | None] | None:
    return None if interval is None else [_number(end) for end in interval]


def _plain(lines: Iterable[str]) -> list[tuple[str, str]]:
    return [("plain", line) for line in lines]


def _notes(lines: Iterable[str]) -> list[tuple[str, str]]:
    return [("warn" if line.startswith("Not ") else "plain", line) for line in lines]


def _failures(space: Space) -> list[tuple[str, str]]:
    """Errors with the points that had them, the most frequent first."""
    found: dict[str, list[int]] = {}
    for p in space.points:
        if p.error:
            found.setdefault(p.error, []).append(p.number)
    ordered = sorted(found.items(), key=lambda entry: -len(entry[1]))
    some = {error: ", ".join(f"#{i}" for i in n[:12]) + (" …" if len(n) > 12 else "") for error, n in ordered}
    return [(error, f"{len(n)}: {some[error]}") for error, n in ordered]


def _pairs(heading: str, head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows)
    top = "".join(f'<th scope="col">{h}</th>' for h in head)
    return framed(
        heading, f'<table class="words"><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>'
    )


def _command(serve: str) -> str:
    return (
        f'<section><h2>Serve the first</h2><div class="command"><code id="serve-command">{escape(serve)}</code>'
        '<button type="button" data-copy="serve-command">Copy</button></div></section>'
    )
