"""Drafts in a run's files and tables, with the names and meanings of `vllm bench serve`."""

from __future__ import annotations

from typing import Any

from serving.draft_counts import DraftCounts


def draft_json(drafts: DraftCounts | None) -> dict[str, Any]:
    """Keys of the result JSON; none without speculative decoding. The rate is in percent, as vLLM's is."""
    if drafts is None:
        return {}
    return {
        "spec_decode_acceptance_rate": drafts.acceptance_rate * 100,
        "spec_decode_acceptance_length": drafts.mean_acceptance_length,
        "spec_decode_num_drafts": drafts.num_drafts,
        "spec_decode_draft_tokens": drafts.num_draft_tokens,
        "spec_decode_accepted_tokens": drafts.num_accepted_tokens,
        "spec_decode_per_position_acceptance_rates": drafts.acceptance_per_pos,
    }


def draft_rows(drafts: DraftCounts) -> list[tuple[str, str, str]]:
    """Name, value and formula of each row of the console table."""
    each = ", ".join(f"{rate * 100:.1f}" for rate in drafts.acceptance_per_pos)
    return [
        ("Acceptance rate (%):", f"{drafts.acceptance_rate * 100:.2f}", "accepted / draft tokens"),
        ("Acceptance length:", f"{drafts.mean_acceptance_length:.2f}", "1 + accepted / drafts"),
        ("Drafts:", str(drafts.num_drafts), "verifications"),
        ("Draft tokens:", str(drafts.num_draft_tokens), ""),
        ("Accepted tokens:", str(drafts.num_accepted_tokens), ""),
        ("Per-position acceptance (%):", each or "-", ""),
    ]
