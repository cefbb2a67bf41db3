"""Drafts by prompt lookup: what followed the last time that the text ended as it does now.

As in vLLM: the longest suffix of between `least` and `most` tokens that occurs earlier in the text, its first occurrence,
and the tokens after that.
"""

from __future__ import annotations

import numpy as np

from realengine.draft import Ints, Text


class NgramDrafter:
    """Keeps nothing between steps."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def take(self, slot: int) -> None: ...

    def propose(self, slot: int, text: Text, drawn: Ints, num_given: int, most: int) -> Text:
        """See `TextDrafter`."""
        return find(text, self._least, self._most)[:most]


def find(text: Text, least: int, most: int) -> Text:
    """The tokens that followed the first occurrence of the longest suffix of `text` that occurs before; may be none.

    Every earlier end of a suffix of `least` tokens is a candidate; each is then compared token by token backwards, all
    candidates at once, until none is left or `most` tokens agree.
    """
    size = len(text)
    ends = np.flatnonzero(text[: size - 1] == text[-1])  # of the last token of each earlier occurrence
    for back in range(1, most):
        inside = ends[ends >= back]
        longer = inside[text[inside - back] == text[size - 1 - back]]
        if not len(longer):
            if back < least:
                return text[:0]
            break
        ends = longer
    return text[int(ends[0]) + 1 :] if len(ends) else text[:0]
