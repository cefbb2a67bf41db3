"""Timestamps of trace files to exact nanoseconds: ISO dates with or without zone and fraction, or plain
seconds."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import numpy.typing as npt

from sim.record import Ints

_ISO = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,18}))?)?)?"
    r"\s*(Z|z|UTC|[+-]\d\d:?(?:\d\d)?)?"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ZONE = re.compile(r"(?:Z|[+-]\d\d:\d\d)$")


def parse_iso_ns(text: str) -> tuple[int, bool]:
    """Nanoseconds since 1970 (UTC unless the text has a zone) and whether it had one; ValueError otherwise.

    Digits past the ninth are cut.
    """
    match = _ISO.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a date and time: {text!r}")
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    moment = datetime(
        int(year), int(month), int(day), int(hour or 0), int(minute or 0), int(second or 0), tzinfo=UTC
    )
    if zone and zone[0] in "+-":
        digits = zone[1:].replace(":", "").ljust(4, "0")
        offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
        moment = moment.replace(tzinfo=timezone(offset if zone[0] == "+" else -offset))
    delta = moment - _EPOCH
    nanoseconds = int((fraction or "0")[:9].ljust(9, "0"))
    return (delta.days * 86400 + delta.seconds) * 1_000_000_000 + nanoseconds, zone is not None


def parse_iso_column_ns(texts: list[str]) -> tuple[Ints, int]:
    """Nanoseconds since 1970 of a whole column and how many entries had a zone; ValueError if any is not
    plain ISO.

    The vectorised path for what traces contain: one zone suffix for all or none, years 1700 to 2199.
    """
    zone = _ZONE.search(texts[0]) if texts else None
    suffix = zone.group() if zone else ""
    width = len(suffix)
    if suffix:
        if not all(text.endswith(suffix) for text in texts):
            raise ValueError("mixed zones")
        texts = [text[:-width] for text in texts]
    column = np.array(texts, dtype=np.str_)
    length = column.dtype.itemsize // 4
    if not len(texts) or length < 19 or length > 29:
        raise ValueError("not plain ISO")
    chars: npt.NDArray[np.uint32] = column.view(np.uint32).reshape(len(texts), length)
    digit = (chars >= ord("0")) & (chars <= ord("9"))
    pattern_ok = (
        digit[:, [0, 1, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18]].all()
        and (chars[:, [4, 7]] == ord("-")).all()
        and (chars[:, [13, 16]] == ord(":")).all()
        and np.isin(chars[:, 10], [ord(" "), ord("T")]).all()
        and (digit[:, 20:] | (chars[:, 20:] == 0)).all()
        and (length < 20 or np.isin(chars[:, 19], [0, ord(".")]).all())
    )
    year = (chars[:, :4].astype(np.int64) - ord("0")) @ np.array([1000, 100, 10, 1])
    if not pattern_ok or (year < 1700).any() or (year > 2199).any():
        raise ValueError("not plain ISO")
    nanoseconds = column.astype("datetime64[ns]").astype(np.int64)
    if suffix not in ("", "Z"):
        sign = 1 if suffix[0] == "+" else -1
        nanoseconds = nanoseconds - sign * (int(suffix[1:3]) * 3600 + int(suffix[4:6]) * 60) * 1_000_000_000
    return nanoseconds, len(texts) if suffix else 0
