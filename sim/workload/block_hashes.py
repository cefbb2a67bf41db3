"""From per-block hash ids to shared-prefix segments: two prompts share a block only if they share all before
it."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from serving.errors import UsageError
from sim.record import Ints
from sim.workload.rows import Segments


def check_cover(
    counts: Ints, prompt_tokens: Ints, block_tokens: int, lines: Ints, path: Path, column: str
) -> Ints:
    """How many ids of each request are used: ceil(prompt / block), or none where there are no ids.

    Raises UsageError naming the line when there are too few to cover the prompt.
    """
    needed = -(-prompt_tokens // block_tokens)
    short = (counts < needed) & (counts > 0)
    if short.any():
        i = int(np.argmax(short))
        raise UsageError(
            f"{path}: line {int(lines[i])}, column {column!r}: {int(counts[i])} ids of {block_tokens} "
            "tokens do not cover "
            f"{int(prompt_tokens[i])} input tokens ({int(needed[i])} needed); is the block size right?"
        )
    return np.minimum(counts, needed)


def segments_of(ids: list[list[Any]], used: Ints, prompt_tokens: Ints, block_tokens: int) -> Segments:
    """One segment per block; the last one may be partial. Ids are ints or strings."""
    offsets = np.concatenate(([0], np.cumsum(used))).astype(np.int64)
    if not offsets[-1]:
        return Segments.none(len(ids))
    trimmed = (row if len(row) == n else row[:n] for row, n in zip(ids, used.tolist(), strict=True))
    codes = _codes(list(chain.from_iterable(trimmed)))
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], used)
    ends = np.minimum((position + 1) * block_tokens, np.repeat(prompt_tokens, used))
    parents = np.empty_like(codes)
    parents[1:] = codes[:-1]
    parents[offsets[:-1][used > 0]] = -1
    sizes = ends - position * block_tokens
    first = np.unique(codes, return_index=True)[1]
    consistent = bool((parents == parents[first][codes]).all() and (sizes == sizes[first][codes]).all())
    return Segments(offsets, ends, codes if consistent else _chained(offsets, codes, sizes))


def _codes(flat: list[Any]) -> Ints:
    """Ids renumbered 0, 1, … in order of value (of appearance for ids that are not small ints)."""
    if set(map(type, flat)) == {int}:
        try:
            array = np.fromiter(flat, np.int64, len(flat))
        except OverflowError:
            pass
        else:
            codes: Ints = np.unique(array, return_inverse=True)[1].astype(np.int64).reshape(-1)
            return codes
    seen: dict[Any, int] = {}
    return np.fromiter((seen.setdefault((type(i), i), len(seen)) for i in flat), np.int64, len(flat))


def _chained(offsets: Ints, codes: Ints, sizes: Ints) -> Ints:
    """Streams by whole history, for files where one id follows different parents (ids of content, not of
    prefixes)."""
    seen: dict[tuple[int, int, int], int] = {}
    streams = np.empty_like(codes)
    starts = set(offsets[:-1].tolist())
    parent = -1
    for i, (code, size) in enumerate(zip(codes.tolist(), sizes.tolist(), strict=True)):
        if i in starts:
            parent = -1
        parent = seen.setdefault((parent, code, size), len(seen))
        streams[i] = parent
    return streams
