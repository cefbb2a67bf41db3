"""How many requests the runs of a search for capacity have: fewer where each is many requests to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from sim.workload import Workload

SHORT, FULL = 512, 4096
"""Requests of the first and of the longest run at one load."""
LONGEST = 65_536
LONE = 128
"""Requests that are sent one by one to see what an idle server does."""
FEWEST_LONE = 32
"""Of fewer, no share is clear of its limit (`experiments.capacity_trial`)."""
DRAWN = 1024
"""Requests of a run for the interval."""
MOST_SHORTER = 8
"""Runs are never shorter than by this factor: a P95 of 512 answers still rests on two dozen of them."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Requests of each kind of run, for one replica."""

    short: int = SHORT
    full: int = FULL
    longest: int = LONGEST
    lone: int = LONE
    drawn: int = DRAWN

    @classmethod
    def of(cls, sample: Workload, full: int | None = None) -> Lengths:
        """For traffic like `sample`; `full` is what was asked for, None where nothing was.

        A beam search or a best-of of k requests to the engine takes the time of k, and runs are shorter by that factor.
        """
        by = min(float(sample.engine_requests().mean()), MOST_SHORTER)
        short = round(SHORT / by)
        return cls(
            short,
            max(full if full is not None else round(FULL / by), short),
            round(LONGEST / by),
            max(round(LONE / by), FEWEST_LONE),
            round(DRAWN / by),
        )
