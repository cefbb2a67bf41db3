"""Text of a growing list of tokens, emitted as soon as it cannot change any more.

A token may hold half a UTF-8 character, and the way it decodes may depend on its neighbours (leading spaces, byte
fallback). So a short window of tokens is decoded again with each new one, and what the text grew by is emitted, unless
it ends in a replacement character: then the rest of that character is still to come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_CHARACTER_TOKENS = 4
"""Tokens of the longest UTF-8 character, a byte each. A longer undecodable tail is no character to wait for."""
_CONTEXT = 6
_WINDOW = 4 * _CONTEXT


class Detokenizer:
    """`add(ids)` gives the text that became certain; `finish()` gives what was held back.

    `prompt` is read for context only (its last few tokens). Joined, the pieces are the text that decoding everything at
    once gives after the prompt.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids: list[int] = list(prompt[-_CONTEXT:])
        self._shown = decode(self._ids) if self._ids else ""
        """Text of the window that is out already (or belongs to the prompt)."""
        self._waiting = 0
        """Tokens at the end of the window that are not, or only in part, in `_shown`."""

    def add(self, ids: Sequence[int]) -> str:
        """Append tokens; returns the text that can be shown now, which may be empty."""
        return "".join([self._add(token) for token in ids])

    def _add(self, token: int) -> str:
        self._ids.append(token)
        self._waiting += 1
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT):
            if self._waiting < _CHARACTER_TOKENS:
                return ""
            # All but the last character is past saving; that one may still be completed.
            piece = text[len(self._shown) : -1]
            self._shown, self._waiting = text[:-1], _CHARACTER_TOKENS - 1
            return piece
        piece = text[len(self._shown) :]
        self._shown, self._waiting = text, 0
        if len(self._ids) > _WINDOW:
            self._slide()
        return piece

    def _slide(self) -> None:
        """Keep a few tokens as context, from a place where a character begins."""
        for keep in range(_CONTEXT, _CONTEXT + _CHARACTER_TOKENS):
            text = self._decode(self._ids[-keep:])
            if not text.startswith(_REPLACEMENT) and self._shown.endswith(text):
                self._ids, self._shown = self._ids[-keep:], text
                return

    def finish(self) -> str:
        """The text that was still held back, undecodable bytes as U+FFFD."""
        text = self._decode(self._ids)
        piece = text[len(self._shown) :]
        self._shown, self._waiting = text, 0
        return piece
