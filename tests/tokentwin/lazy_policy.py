"""A policy that never does anything, for the test of lost requests."""

from __future__ import annotations

from typing import Any


class Lazy:
    """Schedules nothing."""

    def schedule(self, step: Any) -> None:
        """Leave the step empty."""
