"""What text costs a server, measured on this machine: tokenising, detokenising, and writing an event."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from serving.errors import UsageError

LENGTHS = (256, 512, 1024, 2048, 4096)
"""Tokens of the prompts that are timed; a line through them tells a request's cost from a token's."""
ANSWER = 512


class Pieces(Protocol):
    """Turns tokens into text, piece by piece."""

    def add(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True, slots=True)
class TextCosts:
    """Medians of one core, in microseconds and bytes."""

    tokenize_us_per_token: float
    tokenize_us_per_request: float
    detokenize_us_per_token: float
    write_us_per_event: float
    event_bytes: float
    """Of an event with one token."""
    token_bytes: float
    """Bytes of text for each token."""


def measure(
    encode: Callable[[str], Sequence[int]],
    pieces: Callable[[], Pieces],
    write: Callable[[str], bytes],
    text: str,
    *,
    repeats: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> TextCosts:
    """Time a tokenizer and the writing of events on `text`, repeated until it is long enough.

    Raises `UsageError` for a tokenizer that makes nothing of the text.
    """
    once = len(encode(text))
    if once < 2:
        raise UsageError("this tokenizer makes no tokens of the text; give another --dataset-path")
    prompts = [_of_length(text, once, length) for length in LENGTHS]
    counts = np.array([len(encode(prompt)) for prompt in prompts], np.float64)
    times_s = np.array([_median_s(lambda p=prompt: encode(p), repeats, clock) for prompt in prompts])  # type: ignore[misc]
    # Weighed by their inverse, so that the short prompts, which tell a request's own cost, count as much as the long.
    each_s, request_s = np.polyfit(counts, times_s, 1, w=1 / np.maximum(times_s, 1e-12))
    ids = list(encode(_of_length(text, once, ANSWER)))[:ANSWER]

    def read() -> list[str]:
        taken = pieces()
        return [taken.add([token]) for token in ids]

    shown = read()
    events = [write(piece) for piece in shown]
    return TextCosts(
        tokenize_us_per_token=float(each_s) * 1e6,
        tokenize_us_per_request=max(float(request_s), 0.0) * 1e6,
        detokenize_us_per_token=_median_s(read, repeats, clock) / len(ids) * 1e6,
        write_us_per_event=_median_s(lambda: [write(piece) for piece in shown], repeats, clock)
        / len(ids)
        * 1e6,
        event_bytes=float(np.mean([len(event) for event in events])),
        token_bytes=len("".join(shown).encode()) / len(ids),
    )


def _of_length(text: str, tokens: int, wanted: int) -> str:
    """`text` over and over or cut, to about so many tokens."""
    whole = text * (-(-wanted // tokens))
    return whole[: max(1, len(text) * wanted // tokens)]


def _median_s(work: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    times_s = []
    work()  # caches are warm in a server
    for _ in range(repeats):
        begun_s = clock()
        work()
        times_s.append(clock() - begun_s)
    return float(np.median(times_s))
