"""The parts of the server by themselves."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realengine.generation import Sampling
from tokentwin.server.backend import Delta, Failed, GenerationRequest, Refused, Timing
from tokentwin.server.chunks import timing_ms
from tokentwin.server.generation import TextGeneration
from tokentwin.server.mailbox import Mailbox
from tokentwin.server.plain_codec import TEMPLATE, VOCAB_SIZE, PlainCodec
from tokentwin.server.schemas import clean


@given(st.text())
def test_the_plain_codec_loses_nothing(text: str) -> None:
    codec = PlainCodec()
    ids = codec.encode(text)
    assert all(0 <= token < VOCAB_SIZE for token in ids)
    assert codec.decode(ids) == text


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30))
def test_any_ids_have_a_text(ids: list[int]) -> None:
    codec = PlainCodec()
    pieces = codec.detokenizer()
    assert pieces.add(ids) + pieces.finish() == codec.decode(ids)


def test_english_has_about_three_characters_a_token() -> None:
    text = "the quick brown fox jumps over the lazy dog while nobody looks"
    assert 2 < len(text) / len(PlainCodec().encode(text)) < 4


def test_a_model_with_few_tokens_gets_bytes() -> None:
    assert max(PlainCodec(300).encode("a quick brown fox")) < 256


def test_the_template_of_twins_without_one_renders_as_the_plain_codec_does() -> None:
    from realengine.tokenizer import Tokenizer

    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b\n"}]
    codec = Tokenizer(None, template=TEMPLATE)
    for wanted in (True, False):
        shown = codec.render(messages, add_generation_prompt=wanted)
        assert shown == PlainCodec().render(messages, add_generation_prompt=wanted)


@given(st.text(alphabet=st.characters(codec=None)), st.integers(0, 5))
def test_clean_text_is_utf8_and_clean_text_is_left_alone(text: str, at: int) -> None:
    broken = text[:at] + "\ud800" + text[at:]
    clean(broken).encode()
    whole = text.encode("utf-8", "replace").decode()
    assert clean(whole) == whole


# ---- mailbox -----------------------------------------------------------------------------------------------


def test_a_mailbox_groups_tokens_after_the_first() -> None:
    async def main() -> list[int]:
        box, sizes = Mailbox(interval=4), []
        for token in range(10):
            box.put(Delta(0, [token], finish_reason="length" if token == 9 else None))
            try:
                (delta,) = await asyncio.wait_for(box.get(), 0.001)
            except TimeoutError:
                continue
            sizes.append(len(delta.token_ids))
        return sizes

    assert asyncio.run(main()) == [1, 4, 4, 1]


def test_a_mailbox_joins_what_waits_and_keeps_answers_apart() -> None:
    async def main() -> list[Delta]:
        box = Mailbox()
        for index, token, text in ((0, 1, "a"), (1, 2, "b"), (0, 3, "c")):
            box.put(Delta(index, [token], text))
        return await box.get()

    first, second = asyncio.run(main())
    assert (first.index, first.token_ids, first.text) == (0, [1, 3], "ac")
    assert (second.index, second.token_ids, second.text) == (1, [2], "b")


def test_a_mailbox_closes_when_it_overflows() -> None:
    async def main() -> None:
        box = Mailbox(limit=3)
        assert box.put(Delta(0, [1, 2, 3]))
        assert not box.put(Delta(0, [4]))
        assert not box.put(Delta(0, [5]))
        with pytest.raises(Failed, match="3 tokens"):
            await box.get()

    asyncio.run(main())


# ---- text --------------------------------------------------------------------------------------------------


def spoken(text: str, sizes: list[int], **sampling: object) -> tuple[list[Delta], list[tuple[int, str]]]:
    """`text` given byte by byte in groups of `sizes`, with what was aborted."""
    ids = list(text.encode())
    request = GenerationRequest("a", [], Sampling(max_tokens=len(ids) or 1, **sampling))  # type: ignore[arg-type]
    aborted: list[tuple[int, str]] = []

    async def main() -> list[Delta]:
        box = Mailbox()
        generation = TextGeneration(PlainCodec(), request, box, lambda *what: aborted.append(what))
        deltas, at = [], 0
        for size in [*sizes, len(ids)]:
            last = at + size >= len(ids)
            box.put(Delta(0, ids[at : at + size], finish_reason="length" if last else None))
            deltas.append(await anext(generation))
            at += size
            if deltas[-1].finish_reason is not None:
                break
        with pytest.raises(StopAsyncIteration):
            await anext(generation)
        return deltas

    return asyncio.run(main()), aborted


@given(st.text(min_size=1, max_size=12), st.lists(st.integers(1, 4), max_size=12))
def test_no_half_of_a_character_is_shown(text: str, sizes: list[int]) -> None:
    deltas, _ = spoken(text, sizes)
    assert "".join(delta.text for delta in deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta.text for delta in deltas)


@given(
    st.text("ab", max_size=20),
    st.lists(st.integers(1, 3), max_size=20),
    st.text("ab", min_size=1, max_size=3),
)
def test_the_text_ends_before_the_first_stop_string(text: str, sizes: list[int], stop: str) -> None:
    text += "."
    deltas, aborted = spoken(text, sizes, stop=(stop,))
    head, met, _ = text.partition(stop)
    assert "".join(delta.text for delta in deltas) == head
    assert deltas[-1].finish_reason == ("stop" if met else "length")
    assert deltas[-1].stop_reason == (stop if met else None)
    assert sum(len(delta.token_ids) for delta in deltas) == len(head + met)
    assert aborted == ([(0, "stop")] if met else [])


# ---- numbers -----------------------------------------------------------------------------------------------


def test_timing_in_milliseconds() -> None:
    """Queued 1 s, first token after 3 s, 5 tokens with 0.5 s between."""
    shown = timing_ms(Timing(10.0, 11.0, 13.0, 15.0, 7, 5))
    assert shown == {
        "queue_time_ms": 1000.0,
        "time_to_first_token_ms": 3000.0,
        "generation_time_ms": 2000.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 2.0,
    }
    assert timing_ms(Timing(0.0, 0.0, 1.0, 1.0, 7, 1))["tokens_per_second"] == 0.0


def test_lengths_are_fitted_to_the_context() -> None:
    def fitted(prompt: int, open_tokens: int | None = None, **sampling: int) -> int:
        request = GenerationRequest(
            "a", [1] * prompt, Sampling(**sampling), open_ended="max_tokens" not in sampling
        )
        return request.fitted(100, open_tokens).max_tokens

    assert fitted(90, max_tokens=10) == 10
    with pytest.raises(Refused):
        fitted(90, max_tokens=11)
    assert fitted(90) == 10
    assert fitted(20, 30) == 30
    assert fitted(20, 30, min_tokens=15) == 30
    assert fitted(90, 30) == 10
