"""SOURCE_DATE_EPOCH: the time that files are to bear instead of now (reproducible-builds.org)."""

from __future__ import annotations

import os

from serving.errors import UsageError

_LAST = 253_402_300_799
"""The end of the year 9999."""


def source_date_s() -> int | None:
    """Seconds since 1970 in UTC; None where it is not set or empty. Raises UsageError for what is no such number."""
    text = os.environ.get("SOURCE_DATE_EPOCH", "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text[:20]) <= _LAST):
        raise UsageError(
            f"SOURCE_DATE_EPOCH={text[:40]} is not a number of seconds since 1970; set it to one, such as 1700000000, or "
            "unset it"
        )
    return int(text)
