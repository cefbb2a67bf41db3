"""Turning columns of a trace file into numbers. Each dirty value has one outcome: its row is dropped and
counted (empty, NaN, zero or negative tokens), or an error names file, line and column (anything else that is
not a count)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.errors import UsageError
from sim.record import Floats, Ints
from sim.workload.textfile import plural
from sim.workload.timestamps import parse_iso_column_ns, parse_iso_ns

MAX_TOKENS = 10_000_000
"""A prompt or answer longer than this is a broken file, not a request."""

_MAX_NUMERIC_TIME = 1e16
_LONG_GAP_S = 30 * 86400.0
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_EMPTY = {"", "nan", "null", "none", "na", "n/a", "nat"}
_REASONS = ("", "empty or NaN", "0", "negative")

Reasons = npt.NDArray[np.int8]
Lines = Sequence[int]


@dataclass(slots=True)
class Drops:
    """Rows left out, counted by reason."""

    total: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def keep(self, reasons: dict[str, Reasons]) -> npt.NDArray[np.bool_]:
        """Rows with no reason in any column; a dropped row counts for the first column that has one."""
        arrays = list(reasons.items())
        kept = np.ones(len(arrays[0][1]), dtype=np.bool_)
        self.total += len(kept)
        for column, codes in arrays:
            for code in (1, 2, 3):
                bad = int(np.count_nonzero(kept & (codes == code)))
                if bad:
                    self.counts[f"{column} is {_REASONS[code]}"] += bad
            kept &= codes == 0
        return kept

    def drop(self, why: str) -> None:
        """Counts one row that is left out for a reason of its own."""
        self.counts[why] += 1

    def warnings(self, noun: str = "rows") -> list[str]:
        """One line for each reason, such as "12 of 19,366 rows dropped: GeneratedTokens is 0"."""
        return [f"{count:,} of {self.total:,} {noun} dropped: {why}" for why, count in self.counts.items()]


def _number(value: object) -> float | int | None:
    """The number a cell holds, None when it is empty or NaN; ValueError when it is neither."""
    if isinstance(value, bool):
        raise ValueError
    if value is None:
        return None
    if isinstance(value, (int, float)):
        return None if value != value else value
    if not isinstance(value, str):
        raise ValueError
    text = value.strip()
    if text.lower() in _EMPTY:
        return None
    if not _NUMBER.fullmatch(text):
        raise ValueError
    return int(text) if text.lstrip("+-").isdigit() and len(text) < 32 else float(text)


def show(value: object) -> str:
    """A cell as quoted in an error, cut to a readable length and one line."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def fault(path: Path, line: int, column: str, message: str) -> UsageError:
    """The error for one cell: file, line, column, what is wrong and the fix."""
    return UsageError(f"{path}: line {line}, column {column!r}: {message}")


def token_column(values: Sequence[object], lines: Lines, path: Path, column: str) -> tuple[Ints, Reasons]:
    """Token counts and a reason code for each row (0 keeps it). Raises UsageError for anything that is not a
    count."""
    count = len(values)
    tokens = _plain_ints(values)
    if tokens is None:
        tokens = np.zeros(count, dtype=np.int64)
        empty = np.zeros(count, dtype=np.bool_)
        for i, value in enumerate(values):
            try:
                number = _number(value)
            except ValueError:
                raise fault(
                    path,
                    lines[i],
                    column,
                    f"{show(value)} is not a number of tokens; correct or remove the line",
                ) from None
            if number is None:
                empty[i] = True
            elif abs(number) > MAX_TOKENS:
                raise _too_large(path, lines[i], column, value)
            elif number != math.floor(number):
                raise fault(
                    path,
                    lines[i],
                    column,
                    f"{show(value)} is not a whole number of tokens; correct or remove the line",
                )
            else:
                tokens[i] = int(number)
    else:
        empty = np.zeros(count, dtype=np.bool_)
        if count and int(np.abs(tokens).max()) > MAX_TOKENS:
            i = int(np.argmax(np.abs(tokens) > MAX_TOKENS))
            raise _too_large(path, lines[i], column, values[i])
    reasons = np.zeros(count, dtype=np.int8)
    reasons[tokens == 0] = 2
    reasons[tokens < 0] = 3
    reasons[empty] = 1
    return tokens, reasons


def _too_large(path: Path, line: int, column: str, value: object) -> UsageError:
    return fault(
        path, line, column, f"{show(value)} tokens is more than {MAX_TOKENS:,}; correct or remove the line"
    )


def _plain_ints(values: Sequence[object]) -> Ints | None:
    """The column at full speed when it holds nothing but whole numbers, else None."""
    kinds = set(map(type, values))
    cells: Any = values
    if kinds == {str}:
        if "_" in "".join(cells):
            return None
    elif kinds != {int}:
        return None
    try:
        ints = np.fromiter(map(int, cells), np.int64, len(cells))
    except (ValueError, OverflowError):
        return None
    return None if len(ints) and int(ints.min()) == -(1 << 63) else ints


def number_column(values: Sequence[object], lines: Lines, path: Path, column: str) -> tuple[Floats, Reasons]:
    """Times in the file's unit and a reason code for each row. Raises UsageError for anything that is not a
    number."""
    times = np.zeros(len(values))
    reasons = np.zeros(len(values), dtype=np.int8)
    for i, value in enumerate(values):
        try:
            number = _number(value)
        except ValueError:
            raise fault(
                path, lines[i], column, f"{show(value)} is not a time; correct or remove the line"
            ) from None
        if number is None:
            reasons[i] = 1
        elif abs(number) > _MAX_NUMERIC_TIME:
            raise fault(
                path, lines[i], column, f"{show(value)} is too large for a time; correct or remove the line"
            )
        else:
            times[i] = number
    return times, reasons


@dataclass(slots=True)
class DateColumn:
    """ISO timestamps collected chunk by chunk as exact nanoseconds."""

    path: Path
    column: str
    with_zone: int = 0
    without_zone: int = 0

    def parse(self, texts: list[str], lines: Lines) -> tuple[Ints, Reasons]:
        """Nanoseconds since 1970 and a reason code for each row."""
        reasons = np.zeros(len(texts), dtype=np.int8)
        try:
            ns, with_zone = parse_iso_column_ns(texts)
        except (ValueError, OverflowError):
            ns, with_zone = self._one_by_one(texts, lines, reasons)
        self.with_zone += with_zone
        self.without_zone += len(texts) - with_zone - int(np.count_nonzero(reasons))
        return ns, reasons

    def _one_by_one(self, texts: list[str], lines: Lines, reasons: Reasons) -> tuple[Ints, int]:
        ns = np.zeros(len(texts), dtype=np.int64)
        with_zone = 0
        for i, text in enumerate(texts):
            if text.strip().lower() in _EMPTY:
                reasons[i] = 1
                continue
            try:
                ns[i], has_zone = parse_iso_ns(text)
            except (ValueError, OverflowError):
                message = f"{show(text)} is not a time like 2023-11-16 18:15:46.6805900; correct the line"
                raise fault(self.path, lines[i], self.column, message) from None
            with_zone += has_zone
        return ns, with_zone

    def warnings(self) -> list[str]:
        """Says so when zones were mixed."""
        if self.with_zone and self.without_zone:
            total = self.with_zone + self.without_zone
            return [f"{self.without_zone:,} of {total:,} timestamps have no time zone and were read as UTC"]
        return []


def by_time(time_s: Floats) -> tuple[Ints | None, list[str]]:
    """The stable order that sorts `time_s` (None when it is sorted) and what to tell the user about it."""
    warnings = []
    order = None
    if len(time_s) > 1 and bool((np.diff(time_s) < 0).any()):
        late = int(np.count_nonzero(time_s < np.maximum.accumulate(time_s)))
        warnings.append(f"{late:,} of {plural(len(time_s), 'row')} out of time order; sorted")
        order = np.argsort(time_s, kind="stable").astype(np.int64)
        time_s = time_s[order]
    if len(time_s) > 1 and float(np.diff(time_s).max()) > _LONG_GAP_S:
        days = float(np.diff(time_s).max()) / 86400
        warnings.append(f"a gap of {days:,.0f} days between two requests; check the timestamps")
    return order, warnings
