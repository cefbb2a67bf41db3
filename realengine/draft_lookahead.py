"""Drafts by lookahead: guesses for all coming positions at once, corrected by every step, and the n-grams met on the way.

Jacobi iteration after Fu, Bailis, Stoica, Zhang: "Break the sequential dependency of LLM inference using lookahead
decoding", 2024. A step's draws at the drafted positions are the next iterate of the guess. Token i of the window in one
iterate followed by token i + 1 of the next, and so on over n of them, is an n-gram that the model tends to write; the
pool keeps the newest by their first token. The paper computes a window of iterates beside the drafts under a mask of its
own; here the drafts are the window, so that a step costs no rows beyond those that it verifies.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from realengine.draft import Ints, Text

POOL_TOKENS = 4096
"""First tokens whose n-grams a sequence remembers; the least recently seen are forgotten."""


class LookaheadDrafter:
    """A pool and the latest guesses of each seat. `size` tokens make an n-gram."""

    def __init__(self, size: int, num_slots: int) -> None:
        self._size = size
        self._pools: list[OrderedDict[int, list[int]]] = [OrderedDict() for _ in range(num_slots)]
        self._fed: list[list[dict[int, int]]] = [[] for _ in range(num_slots)]
        """By seat, what the last `size` - 1 steps computed past the text: token by position."""
        self._read: list[int] = [0] * num_slots

    def take(self, slot: int) -> None:
        """See `TextDrafter`."""
        self._pools[slot] = OrderedDict()
        self._fed[slot] = []
        self._read[slot] = 0

    def propose(self, slot: int, text: Text, drawn: Ints, num_given: int, most: int) -> Ints:
        """See `TextDrafter`. The guess always has `most` tokens: an iteration needs somewhere to begin."""
        size = len(text)
        self._learn(slot, text)
        # What was drawn after a draft that did not stand is the next iterate for the positions after the text.
        iterate = {size + i: int(token) for i, token in enumerate(drawn[num_given:].tolist())}
        self._collect(slot, iterate)
        drafts: list[int] = []
        last = int(text[-1])
        while len(drafts) < most:
            tail = self._pools[slot].get(last)
            drafts += [iterate.get(size + len(drafts), last)] if tail is None else tail
            last = drafts[-1]
        del drafts[most:]
        fed = self._fed[slot]
        fed.append({size - 1: int(text[-1]), **dict(zip(range(size, size + most), drafts, strict=True))})
        del fed[: 1 - self._size]
        return np.array(drafts, np.int64)

    def _learn(self, slot: int, text: Text) -> None:
        """N-grams of the text itself, those since the last time."""
        tokens = text[max(0, self._read[slot] - self._size + 1) :].tolist()
        for i in range(len(tokens) - self._size + 1):
            self._keep(slot, tokens[i : i + self._size])
        self._read[slot] = len(text)

    def _collect(self, slot: int, iterate: dict[int, int]) -> None:
        """N-grams along the diagonal: a token fed some steps ago, its successor in the step after, the newest last."""
        fed = self._fed[slot]
        if len(fed) < self._size - 1:
            return
        for position, newest in iterate.items():
            first = position - self._size + 1
            before = [guess.get(first + i) for i, guess in enumerate(fed)]
            tokens = [token for token in before if token is not None]
            if len(tokens) == len(before):
                self._keep(slot, [*tokens, newest])

    def _keep(self, slot: int, tokens: list[int]) -> None:
        pool = self._pools[slot]
        pool[tokens[0]] = tokens[1:]
        pool.move_to_end(tokens[0])
        if len(pool) > POOL_TOKENS:
            pool.popitem(last=False)
