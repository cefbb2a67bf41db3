"""How the answers of a run read, for the tables of the console and of the report."""

from __future__ import annotations

from sim.streaming import READING_TOKENS_PER_S, Perception


def perceived_rows(perceived: Perception) -> list[tuple[str, str, str]]:
    """Names, values and what they mean; times in ms."""
    rows = []
    for name, stats, formula in (
        ("first word", perceived.first_word, "send to first whole word"),
        ("longest pause", perceived.longest_pause, "between two events"),
    ):
        rows.append((f"Median {name} (ms):", f"{stats.median_s * 1000:.2f}", formula))
        rows += [
            (f"P{p:g} {name} (ms):", f"{value_s * 1000:.2f}", "")
            for p, value_s in stats.percentiles_s
            if p == 95
        ]
    share = f"{perceived.waiting_share:.1%}"
    return [*rows, ("Waiting for text:", share, f"of reading at {READING_TOKENS_PER_S:g} tokens/s")]
