"""The errors a user sees. Each message is one line that says what is wrong, where, and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TokenTwinError(Exception):
    """Base of every error raised on purpose. The command line prints its message and exits with `exit_code`."""

    exit_code = 1


class UsageError(TokenTwinError):
    """The input (a flag, a config field, a file) is wrong; the message names it and the fix."""

    exit_code = 2


class InfeasibleError(UsageError):
    """The configuration is well formed but cannot run, such as a model larger than the memory of its GPUs."""


MOST_NAMES = 24
"""A longer list of names helps nobody in one line."""


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> str:
    """`"; did you mean 'h200'?"`-style hint for an unknown `name`, or the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=count, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return "known: " + ", ".join(names[:MOST_NAMES]) + more
