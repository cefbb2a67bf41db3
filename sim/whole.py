"""A request whose answer is shown all at once, and what several requests to the engine leave of it meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.request import Request

if TYPE_CHECKING:
    from sim.replica import Replica


@dataclass(slots=True, eq=False)
class Whole:
    """A request whose answer comes whole, while those of the engine that it takes are under way."""

    row: int
    request: Request
    """As it was sent: its prompt and what the scheduler knows of its sender."""
    replica: Replica
    guests: list[int] = field(default_factory=list)
    """Rows of the log for what is made of it, beside its own."""
    missing: int = 0
    """Requests to the engine that have not ended."""
    generated: int = 0
    """Tokens that they gave, those that are not shown included."""
    last_step: tuple[int, ...] = ()
    """Replica and step that gave the last of them."""
