"""Beam searches in a run's files and tables: what they took, beside what was shown of them."""

from __future__ import annotations

from typing import Any

from serving.beams import BeamCounts


def beam_json(beams: BeamCounts | None) -> dict[str, Any]:
    """Keys of the result JSON; none without beam search."""
    if beams is None:
        return {}
    return {
        "beam_searches": beams.searches,
        "beam_requests": beams.requests,
        "beam_computed_tokens": beams.computed_tokens,
        "beam_cached_tokens": beams.cached_tokens,
        "beam_shown_tokens": beams.shown_tokens,
    }


def beam_rows(beams: BeamCounts) -> list[tuple[str, str, str]]:
    """Name, value and formula of each row of the console table."""
    each = f"{beams.computed_tokens / beams.shown_tokens:.1f} a shown token" if beams.shown_tokens else ""
    return [
        ("Searches:", str(beams.searches), "shown at their end: TPOT 0"),
        ("One-token requests:", str(beams.requests), "1 + width (tokens - 1) each"),
        ("Tokens shown:", str(beams.shown_tokens), "the best hypothesis of each"),
        ("Tokens computed:", str(beams.computed_tokens), each),
        (
            "Prefix cache hit rate (%):",
            f"{beams.hit_rate * 100:.2f}",
            "of hypotheses, prompt too",
        ),
    ]
