"""Policies for tests: one that never does anything, one that fails."""

from __future__ import annotations

from typing import Any


class Lazy:
    """Schedules nothing."""

    def schedule(self, step: Any) -> None:
        """Leave the step empty."""


class Broken:
    """Fails at its first step."""

    def schedule(self, step: Any) -> None:
        raise ValueError("no such turn")
