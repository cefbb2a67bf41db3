"""Text that comes piece by piece: whole characters only, and nothing that a stop string may yet swallow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from realengine.detokenize import Detokenizer
from realengine.stops import StopStrings
from realengine.tokenizer import Tokenizer
from tests.realengine.engines import smollm2

Pieces = list[str]


def byte_fallback() -> Tokenizer:
    """SentencePiece style: a few words, and a token for each byte of everything else."""
    words = ["<unk>", "▁", "▁the", "▁cat", "a", "b", "é", "\u0301", "🙂"]
    vocabulary = {token: i for i, token in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


def single_bytes() -> Tokenizer:
    """Byte-level BPE without a single merge: each token is one byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def real() -> Tokenizer:
    tokenizer = smollm2()[0].tokenizer
    assert tokenizer is not None
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte fallback": byte_fallback,
    "single bytes": single_bytes,
    "smollm2": real,
}
TEXTS = {
    "two bytes": "Größe, café",
    "three bytes": "你好，世界。これは長い文章です" * 4,
    "emoji": "🙂🙃 flag 🇩🇪, family 👨‍👩‍👧‍👦!",
    "combining marks": "e\u0301a\u0308o\u0302 n\u0303",
    "spaces": "  two  spaces\n\n\tand a tab ",
    "empty": "",
}


def stream(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> Pieces:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.add([token]) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_whole_characters_and_join_to_the_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_continues_its_prompt(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode("Größe 你好 🙂 café the cat")
    for cut in range(len(ids) + 1):
        before, whole = tokenizer.decode(ids[:cut]), tokenizer.decode(ids)
        if whole.startswith(before):  # otherwise the cut is within a character
            assert before + "".join(stream(tokenizer, ids[cut:], ids[:cut])) == whole


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=60))
def test_any_text_survives_byte_by_byte(text: str) -> None:
    tokenizer = single_bytes()
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=24))
def test_bytes_that_are_no_text_hold_nothing_up_for_long(raw: bytes) -> None:
    tokenizer = single_bytes()
    alphabet: dict[int, str] = _byte_letters()
    ids = [tokenizer.backend.token_to_id(alphabet[byte]) for byte in raw]
    detokenizer = tokenizer.detokenizer()
    shown = 0
    for count, token in enumerate(ids, 1):
        shown += len(detokenizer.add([token]))
        # At most one character of up to four bytes, of which three have come, is still open.
        assert len(tokenizer.decode(ids[:count])) - shown <= 3
    assert detokenizer.add([]) == ""


def _byte_letters() -> dict[int, str]:
    """The letter that byte-level BPE writes for each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in table)
    return table | {byte: chr(256 + i) for i, byte in enumerate(others)}


def test_half_a_character_is_held_until_its_other_half() -> None:
    euro = list("€".encode())
    detokenizer = Detokenizer(lambda ids: bytes(ids).decode(errors="replace"))
    assert [detokenizer.add([byte]) for byte in euro] == ["", "", "€"]
    assert detokenizer.add(euro[:2]) == ""
    assert detokenizer.finish() == "\ufffd"


def stopped(strings: Sequence[str], pieces: Sequence[str], **options: Any) -> tuple[Pieces, str | None]:
    stops = StopStrings(strings, **options)
    shown = [stops.add(piece) for piece in pieces]
    return [*shown, stops.finish()], stops.found


def test_a_stop_string_across_pieces_is_found_and_never_shown() -> None:
    assert stopped(["END"], ["one E", "N", "D two"]) == (["one ", "", "", ""], "END")


def test_what_only_looked_like_a_stop_string_is_shown_after_all() -> None:
    assert stopped(["END"], ["one E", "N", "TER"]) == (["one ", "", "ENTER", ""], None)
    assert stopped(["END"], ["one EN"]) == (["one ", "EN"], None)


def test_the_stop_string_that_ends_first_counts() -> None:
    shown, found = stopped(["bc", "abcd"], ["xabcd"])
    assert ("".join(shown), found) == ("xa", "bc")


def test_a_stop_string_may_be_included() -> None:
    assert stopped(["."], ["One.", " Two."], include=True) == (["One.", "", ""], ".")


@settings(max_examples=100, deadline=None)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_cutting_into_pieces_changes_nothing(text: str, strings: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, found = stopped(strings, pieces)
    ends = [(text.find(s) + len(s), text.find(s)) for s in strings if s in text]
    assert "".join(shown) == (text[: min(ends)[1]] if ends else text)
    assert (found is not None) == bool(ends)
