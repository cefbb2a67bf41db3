"""Costs of text against a tokenizer whose costs are known, on a clock that only it moves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from calibration.text_costs import measure
from serving.errors import UsageError

REQUEST_US, TOKEN_US, PIECE_US, EVENT_US = 150.0, 1.25, 3.5, 2.0
TEXT = "word " * 100


class Timed:
    """Every five letters are a token; work moves the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def encode(self, text: str) -> list[int]:
        ids = list(range(len(text) // 5))
        self.now_s += (REQUEST_US + TOKEN_US * len(ids)) * 1e-6
        return ids

    def add(self, ids: Sequence[int]) -> str:
        self.now_s += PIECE_US * len(ids) * 1e-6
        return "word "

    def write(self, piece: str) -> bytes:
        self.now_s += EVENT_US * 1e-6
        return b"x" * 95 + piece.encode()


def test_known_costs_are_found() -> None:
    timed = Timed()
    found = measure(timed.encode, lambda: timed, timed.write, TEXT, clock=lambda: timed.now_s)
    assert found.tokenize_us_per_token == pytest.approx(TOKEN_US)
    assert found.tokenize_us_per_request == pytest.approx(REQUEST_US)
    assert found.detokenize_us_per_token == pytest.approx(PIECE_US)
    assert found.write_us_per_event == pytest.approx(EVENT_US)
    assert (found.event_bytes, found.token_bytes) == (100.0, 5.0)


def test_a_tokenizer_that_makes_nothing_is_an_error() -> None:
    with pytest.raises(UsageError, match="no tokens"):
        measure(lambda text: [], Timed, lambda piece: b"", TEXT)
