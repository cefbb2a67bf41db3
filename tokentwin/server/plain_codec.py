"""Tokens without a tokenizer file, for a twin of a model whose tokenizer is not at hand.

A token is one byte, or up to three lower-case letters with or without a space before them: about three characters of
English, and every text comes back as it was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from realengine.detokenize import Detokenizer

_LETTERS = 26
_TWO, _THREE = _LETTERS**2, _LETTERS**3
_BYTES = 256
# Ids: bytes; "ab"; "abc"; " a"; " ab"; " abc". A single letter without a space is its byte.
_SPANS = ((False, 2, _TWO), (False, 3, _THREE), (True, 1, _LETTERS), (True, 2, _TWO), (True, 3, _THREE))
_PIECE = re.compile(r" [a-z]{1,3}|[a-z]{2,3}|.", re.DOTALL)


def _starts() -> dict[tuple[bool, int], int]:
    first, out = _BYTES, {}
    for spaced, length, count in _SPANS:
        out[spaced, length] = first
        first += count
    return out


_START = _starts()
VOCAB_SIZE = _BYTES + sum(count for _, _, count in _SPANS)
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
"""What `PlainCodec.render` does, for a twin of a model whose tokenizer comes without a chat template."""


class PlainCodec:
    """Text to tokens and back by arithmetic. A model with fewer tokens gets bytes alone."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; there are no special tokens to add."""
        if self.vocab_size < VOCAB_SIZE:
            return [byte % self.vocab_size for byte in text.encode("utf-8", "replace")]
        ids: list[int] = []
        for piece in _PIECE.findall(text):
            spaced = len(piece) > 1 and piece[0] == " "
            letters = piece[1:] if spaced else piece
            start = _START.get((spaced, len(letters)))
            if start is None:
                ids += piece.encode("utf-8", "replace")
                continue
            number = 0
            for letter in letters:
                number = number * _LETTERS + ord(letter) - 97
            ids.append(start + number)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(_bytes, ids)).decode("utf-8", "replace")

    def detokenizer(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """Turns the tokens that follow `prompt` into text, piece by piece."""
        return Detokenizer(self.decode, prompt)

    def render(self, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
        """A conversation as text: each message under its role, then the assistant's turn."""
        turns = [f"<{message.get('role', 'user')}>\n{message.get('content') or ''}\n" for message in messages]
        return "".join(turns) + ("<assistant>\n" if variables.get("add_generation_prompt", True) else "")


def _bytes(token: int) -> bytes:
    token %= VOCAB_SIZE
    if token < _BYTES:
        return bytes((token,))
    for spaced, length, count in _SPANS:
        number = token - _START[spaced, length]
        if number < count:
            break
    letters = []
    for _ in range(length):
        number, letter = divmod(number, _LETTERS)
        letters.append(letter + 97)
    return b" " * spaced + bytes(reversed(letters))
