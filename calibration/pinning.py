"""Keep this process on one core while it measures, where the system lets a process choose."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pinned() -> Iterator[int | None]:
    """Run on one core: the last of those allowed, which the system's own work seldom uses. Gives its number, or None.

    Threads that exist already keep their cores; threads and processes made within inherit this one.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    try:
        os.sched_setaffinity(0, {core})
    except OSError:
        yield None
        return
    try:
        yield core
    finally:
        os.sched_setaffinity(0, allowed)
