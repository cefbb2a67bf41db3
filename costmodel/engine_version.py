"""Versions of an engine, and whose measurements stand for a version that was not measured."""

from __future__ import annotations

import re
from collections.abc import Iterable

_VERSION = re.compile(r"v?\d+(\.\d+){1,3}([-.+]?[a-z][\w.+-]*)?", re.IGNORECASE)


def is_version(text: str) -> bool:
    """Whether `text` reads like 0.19, v0.10.2 or 0.24.0rc1."""
    return _VERSION.fullmatch(text) is not None


def parse_version(text: str) -> tuple[int, ...]:
    """`0.19.0` as (0, 19, 0); () when there is none."""
    parts = []
    for part in text.strip().lstrip("vV").split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def is_newer(version: str, than: str) -> bool:
    """Whether `version` comes after every version that begins with `than`: 0.19.1 is not newer than 0.19."""
    named = parse_version(than)
    return parse_version(version)[: len(named)] > named


def standing_for(version: str, measured: Iterable[str]) -> str:
    """The newest of the `measured` versions that is not newer than `version`, or the oldest where all are."""
    named = list(measured)
    not_newer = [v for v in named if not is_newer(v, version)]
    return max(not_newer, key=parse_version) if not_newer else min(named, key=parse_version)
