"""Page keys of real tokens: the chain of digests by hand, however the tokens come."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.request import TokenKeys

TOKENS = st.lists(st.integers(0, 2**40), max_size=60)


def by_hand(size: int, tokens: list[int], salt: str) -> list[bytes]:
    keys, parent = [], salt.encode()
    for begin in range(0, len(tokens) - size + 1, size):
        page = b"".join(token.to_bytes(8, "little") for token in tokens[begin : begin + size])
        parent = sha256(parent + page).digest()
        keys.append(parent)
    return keys


@given(st.integers(1, 9), TOKENS, st.lists(st.integers(0, 20), max_size=6), st.sampled_from(["", "mine"]))
def test_a_chain_of_digests_however_the_tokens_come(
    size: int, tokens: list[int], cuts: list[int], salt: str
) -> None:
    keys, at = TokenKeys(size, (), salt), 0
    for cut in [*cuts, len(tokens)]:
        keys.extend(tokens[at : at + cut])
        at = min(at + cut, len(tokens))
    assert [keys[page] for page in range(len(keys))] == by_hand(size, tokens, salt)


@given(st.integers(1, 9), TOKENS, TOKENS, TOKENS)
def test_copies_grow_apart(size: int, tokens: list[int], one: list[int], other: list[int]) -> None:
    first = TokenKeys(size, np.array(tokens, np.int64).tolist(), "salt")
    second = first.copy()
    first.extend(one)
    second.extend(other)
    assert [*map(first.__getitem__, range(len(first)))] == by_hand(size, tokens + one, "salt")
    assert [*map(second.__getitem__, range(len(second)))] == by_hand(size, tokens + other, "salt")
