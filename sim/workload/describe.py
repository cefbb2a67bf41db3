"""A workload in numbers: how many requests, how long, how fast, and how much of the prompts is shared."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.record import Floats, Ints
from sim.workload.types import Workload

PERCENTILES = (50, 90, 95, 99)


def describe(workload: Workload, *, page_tokens: int = 16) -> dict[str, Any]:
    """JSON values, most telling first. Rates and gaps are of first turns, since later ones follow answers."""
    first = workload.after < 0
    summary: dict[str, Any] = {
        "name": workload.name,
        "num_requests": len(workload),
        "num_sessions": int(first.sum()),
    }
    summary |= _rate(workload.sent_s[first])
    summary |= _lengths("prompt_tokens", workload.prompt_tokens) | _lengths(
        "output_tokens", workload.output_tokens
    )
    hits = shared_prefix_tokens(workload, page_tokens=page_tokens)
    total = int(workload.prompt_tokens.sum())
    summary |= _beams(workload.beam_width)
    summary["page_tokens"] = page_tokens
    summary["shared_prefix_share"] = float(hits.sum()) / total if total else 0.0
    summary["max_concurrency"] = (
        None if workload.closed_loop is None else workload.closed_loop.max_concurrency
    )
    summary["tenants"] = []
    for index, tenant in enumerate(workload.tenants):
        mine = workload.tenant == index
        part: dict[str, Any] = {
            "name": tenant.name,
            "slo_class": tenant.slo_class,
            "num_requests": int(mine.sum()),
        }
        part |= _rate(workload.sent_s[mine & first])
        part |= _lengths("prompt_tokens", workload.prompt_tokens[mine])
        part |= _lengths("output_tokens", workload.output_tokens[mine])
        part |= _beams(None if workload.beam_width is None else workload.beam_width[mine])
        own = int(workload.prompt_tokens[mine].sum())
        part["shared_prefix_share"] = float(hits[mine].sum()) / own if own else 0.0
        summary["tenants"].append(part)
    summary["warnings"] = list(workload.warnings)
    return summary


def shared_prefix_tokens(workload: Workload, *, page_tokens: int) -> Ints:
    """Prompt tokens of each request that an infinite cache would find: full pages sent by an earlier request.

    An upper bound of what a real cache finds: pages count as cached as soon as they are sent, and the last
    prompt token is always computed. Shape (n,).
    """
    hits = np.zeros(len(workload), dtype=np.int64)
    if not len(workload.segment_ends):
        return hits
    longest: dict[int, int] = {}
    ends, streams = workload.segment_ends.tolist(), workload.segment_streams.tolist()
    offsets = workload.segment_offsets.tolist()
    for row in range(len(workload)):
        found, on_path = 0, True
        for i in range(offsets[row], offsets[row + 1]):
            end, stream = ends[i], streams[i]
            seen = longest.get(stream, 0)
            if on_path:
                if seen > found:
                    found = min(end, seen)
                on_path = found == end
            if end > seen:
                longest[stream] = end
        hits[row] = found
    hits = np.minimum(hits, workload.prompt_tokens - 1)
    return hits // page_tokens * page_tokens


def _rate(sent_s: Floats) -> dict[str, Any]:
    """Span, mean rate and coefficient of variation of the gaps; None where too few requests were sent."""
    span_s = float(sent_s[-1] - sent_s[0]) if len(sent_s) else 0.0
    gaps_s = np.diff(sent_s)
    return {
        "duration_s": float(sent_s[-1]) if len(sent_s) else 0.0,
        "request_rate": (len(sent_s) - 1) / span_s if span_s > 0 else None,
        "gap_cv": float(gaps_s.std() / gaps_s.mean()) if span_s > 0 else None,
    }


def _beams(width: Ints | None) -> dict[str, Any]:
    """Beam searches and how wide they are; nothing where there are none."""
    if width is None or not width.any():
        return {}
    searches = width[width > 0]
    return {
        "num_beam_searches": len(searches),
        "mean_beam_width": float(searches.mean()),
        "max_beam_width": int(searches.max()),
    }


def _lengths(name: str, tokens: Ints) -> dict[str, Any]:
    result: dict[str, Any] = {f"total_{name}": int(tokens.sum())}
    if len(tokens):
        result[f"mean_{name}"] = float(tokens.mean())
        for percent, value in zip(PERCENTILES, np.percentile(tokens, PERCENTILES), strict=True):
            result[f"p{percent}_{name}"] = float(value)
        result[f"max_{name}"] = int(tokens.max())
    return result
