"""Beam searches and best-of in a run's files and tables: what they took, beside what was shown of them."""

from __future__ import annotations

from typing import Any

from serving.beams import BeamCounts, CandidateCounts


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
        ("Searches:", str(beams.searches), "shown whole, at their end"),
        ("One-token requests:", str(beams.requests), "1 + width (tokens - 1) each"),
        ("Tokens shown:", str(beams.shown_tokens), "the best hypothesis of each"),
        ("Tokens computed:", str(beams.computed_tokens), each),
        (
            "Prefix cache hit rate (%):",
            f"{beams.hit_rate * 100:.2f}",
            "of hypotheses, prompt too",
        ),
    ]


def candidate_json(candidates: CandidateCounts | None) -> dict[str, Any]:
    """Keys of the result JSON; none without best-of."""
    if candidates is None:
        return {}
    return {
        "best_of_requests": candidates.requests,
        "best_of_answers": candidates.answers,
        "best_of_generated_tokens": candidates.generated_tokens,
        "best_of_shown_tokens": candidates.shown_tokens,
    }


def candidate_rows(candidates: CandidateCounts) -> list[tuple[str, str, str]]:
    """Name, value and formula of each row of the console table."""
    return [
        ("Requests:", str(candidates.requests), "shown whole, at their end"),
        ("Answers sampled:", str(candidates.answers), "one of each is shown"),
        ("Tokens generated:", str(candidates.generated_tokens), "of all those answers"),
        ("Tokens shown:", str(candidates.shown_tokens), ""),
    ]
