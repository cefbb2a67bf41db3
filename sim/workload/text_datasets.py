"""Datasets of text: ShareGPT conversations and custom JSON lines. Token counts are exact with a tokenizer
file and an estimate from words without one; `meta` says which."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.beams import MAX_BEAM_WIDTH
from serving.errors import UsageError
from sim.record import Floats, Ints
from sim.workload.columns import Drops, Reasons, by_time, number_column, show, token_column
from sim.workload.jsonl_traces import read_objects
from sim.workload.rows import Rows, Segments
from sim.workload.spec import CustomSpec, ShareGptSpec
from sim.workload.textfile import read_text

Mask = npt.NDArray[np.bool_]
TokenCounter = Callable[[list[str]], list[int]]

_IDEOGRAPHS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]")
ESTIMATE = "estimate: 4 tokens for 3 words, 1 for a CJK character"
"""The rule of thumb for English text and byte-pair encodings; real tokenizers differ by some 20 %."""


def estimate_tokens(text: str) -> int:
    """Tokens of a text by its words, see ESTIMATE; 0 only for a blank text."""
    ideographs = len(_IDEOGRAPHS.findall(text))
    words = len((_IDEOGRAPHS.sub(" ", text) if ideographs else text).split())
    return ideographs + -(-words * 4 // 3)


def token_counter(tokenizer: Path | None) -> tuple[TokenCounter, str]:
    """A function from texts to token counts and how it counts. Raises UsageError for an unreadable
    tokenizer."""
    if tokenizer is None:
        return lambda texts: [estimate_tokens(text) for text in texts], ESTIMATE
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not path.is_file():
        raise UsageError(f"{path}: no such tokenizer file; give a tokenizer.json or its folder")
    try:
        Tokenizer = importlib.import_module("tokenizers").Tokenizer
    except ImportError:
        raise UsageError(
            "counting with a tokenizer needs the package tokenizers; pip install tokenizers"
        ) from None
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise UsageError(f"{path}: not a tokenizer file ({str(error).splitlines()[0][:80]})") from None

    def count(texts: list[str]) -> list[int]:
        return [len(encoding.ids) for encoding in loaded.encode_batch(texts, add_special_tokens=True)]

    return count, f"tokenizer: {path}"


def _estimated(how: str) -> list[str]:
    """Says so when lengths are no tokenizer's."""
    return [f"token counts are an {how}; a tokenizer file counts exactly"] if how == ESTIMATE else []


def read_sharegpt(spec: ShareGptSpec) -> Rows:
    """Questions and answers of conversations; see `ShareGptSpec` for what is dropped."""
    path = spec.path
    text, digest = read_text(path)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{path}: {where}not JSON; ShareGPT is one JSON list of conversations") from None
    if not isinstance(entries, list):
        raise UsageError(
            f"{path}: is not a JSON list of conversations; is it another format? (--dataset-name)"
        )
    drops = Drops(total=len(entries))
    questions: list[str] = []
    answers: list[str] = []
    conversation: list[int] = []
    for number, entry in enumerate(entries, 1):
        pairs = _pairs(entry, path, number)
        if not pairs:
            drops.drop("fewer than 2 turns")
        for question, answer in pairs if spec.multi_turn else pairs[:1]:
            questions.append(question)
            answers.append(answer)
            conversation.append(number)
    count, how = token_counter(spec.tokenizer)
    prompt = np.array(count(questions), dtype=np.int64)
    output = np.array(count(answers), dtype=np.int64)
    empty = (prompt < 1) | (
        (output < 1) if spec.output_len is None else np.zeros(len(output), dtype=np.bool_)
    )
    if spec.output_len is not None:
        output = np.full(len(prompt), spec.output_len, dtype=np.int64)
    kept = _kept(spec, prompt, output, np.array(conversation), empty, drops)
    warnings = drops.warnings("conversations") + _estimated(how)
    if not kept.any():
        raise UsageError(f"{path}: no usable conversations ({'; '.join(warnings) or 'empty list'})")
    numbers = (
        np.unique(np.array(conversation)[kept], return_inverse=True)[1].astype(np.int64)
        if spec.multi_turn
        else None
    )
    meta = {"path": str(path), "sha256": digest, "token_count": how}
    return Rows(prompt[kept], output[kept], conversation=numbers, warnings=tuple(warnings), meta=meta)


def _kept(
    spec: ShareGptSpec, prompt: Ints, output: Ints, conversation: Ints, empty: Mask, drops: Drops
) -> Mask:
    """Rows that are used. A conversation with an empty turn is dropped whole: the later turns would miss
    history."""
    if spec.multi_turn:
        broken = np.unique(conversation[empty])
        drops.counts.update({"an empty turn": len(broken)} if len(broken) else {})
        kept: Mask = ~np.isin(conversation, broken)
        return kept
    short = prompt < spec.min_tokens
    if spec.output_len is None:
        short = short | (output < spec.min_tokens)
    rules = (
        ("an empty turn", empty),
        (f"a turn under {spec.min_tokens} tokens", short),
        (f"a prompt over {spec.max_prompt_tokens:,} tokens", prompt > spec.max_prompt_tokens),
        (f"over {spec.max_total_tokens:,} tokens in all", prompt + output > spec.max_total_tokens),
    )
    kept = np.ones(len(prompt), dtype=np.bool_)
    for why, rule in rules:
        bad = int(np.count_nonzero(kept & rule))
        drops.counts.update({why: bad} if bad else {})
        kept &= ~rule
    return kept


def _pairs(entry: Any, path: Path, number: int) -> list[tuple[str, str]]:
    """(question, answer) texts of a conversation. A leading system message is part of the first question; an
    answer before any question is left out; a last question without an answer too."""
    turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise UsageError(
            f"{path}: entry {number}: no list 'conversations'; is it another format? (--dataset-name)"
        )
    pairs: list[tuple[str, str]] = []
    question: list[str] = []
    asked = False
    for turn in turns:
        text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
        if not isinstance(text, str):
            raise UsageError(
                f"{path}: entry {number}: a turn without text 'value': {show(turn)}; correct or remove it"
            )
        speaker = str(turn.get("from", turn.get("role", ""))).lower()
        if speaker in ("gpt", "assistant", "chatgpt", "bard", "bing", "model") or (speaker == "" and asked):
            if asked:
                pairs.append(("\n".join(question), text))
            question, asked = [], False
        else:
            question.append(text)
            asked = asked or speaker != "system"
    return pairs


def read_custom(spec: CustomSpec) -> Rows:
    """JSON lines of our own keys, see `CustomSpec`; lines sorted by `arrival_s` where given."""
    path = spec.path
    objects, lines, digest = read_objects(path)
    drops = Drops()
    meta: dict[str, Any] = {"path": str(path), "sha256": digest}
    reasons: dict[str, Reasons] = {}
    prompt = _prompt_tokens(spec, objects, lines, meta, reasons)
    if spec.output_len is None:
        values = [_required(entry, "output_tokens", lines[i], path) for i, entry in enumerate(objects)]
        output, reasons["output_tokens"] = token_column(values, lines, path, "output_tokens")
    else:
        output = np.full(len(objects), spec.output_len, dtype=np.int64)
    time = _arrivals(objects, lines, path, reasons)
    ends, streams = _prefixes(objects, lines, path, prompt)
    beams = _beam_widths(objects, lines, path)
    kept = np.flatnonzero(drops.keep(reasons))
    warnings = drops.warnings() + _estimated(meta.get("token_count", ""))
    if not len(kept):
        raise UsageError(
            f"{path}: no usable rows ({'; '.join(warnings) or 'no lines'}); give a file with requests"
        )
    segments = Segments.one_each(ends[kept], streams[kept])
    rows = Rows(prompt[kept], output[kept], segments=segments if len(segments.ends) else None, meta=meta)
    if beams is not None:
        rows = replace(rows, beam_width=beams[kept])
    if time is not None:
        time_s = time[kept] - time[kept].min()
        rows = replace(rows, time_s=time_s)
        order, notes = by_time(time_s)
        warnings += notes
        rows = rows if order is None else rows.take(order)
    return replace(rows, warnings=tuple(warnings))


def _required(entry: dict[str, Any], key: str, line: int, path: Path) -> Any:
    if key not in entry:
        raise UsageError(f"{path}: line {line}: no key {key!r}; add it or set --custom-output-len")
    return entry[key]


def _prompt_tokens(
    spec: CustomSpec,
    objects: list[dict[str, Any]],
    lines: list[int],
    meta: dict[str, Any],
    reasons: dict[str, Reasons],
) -> Ints:
    path = spec.path
    key = "prompt_tokens" if "prompt_tokens" in objects[0] else "prompt"
    for line, entry in zip(lines, objects, strict=True):
        if key not in entry:
            raise UsageError(
                f"{path}: line {line}: no key {key!r}; every line needs the same one of prompt and "
                "prompt_tokens"
            )
        if key == "prompt" and not isinstance(entry[key], str):
            raise UsageError(
                f"{path}: line {line}, column 'prompt': {show(entry[key])} is not text; use prompt_tokens "
                "for a count"
            )
    values: list[Any] = [entry[key] for entry in objects]
    if key == "prompt":
        count, meta["token_count"] = token_counter(spec.tokenizer)
        values = count(values)
    elif spec.tokenizer is not None:
        raise UsageError(f"{path}: has prompt_tokens, so a tokenizer has no effect; remove it")
    tokens, reasons[key] = token_column(values, lines, path, key)
    return tokens


def _arrivals(
    objects: list[dict[str, Any]], lines: list[int], path: Path, reasons: dict[str, Reasons]
) -> Floats | None:
    have = sum("arrival_s" in entry for entry in objects)
    if not have:
        return None
    if have != len(objects):
        i = next(i for i, entry in enumerate(objects) if "arrival_s" not in entry)
        raise UsageError(
            f"{path}: line {lines[i]}: no key 'arrival_s', which other lines have; give it on all lines "
            "or none"
        )
    time, reasons["arrival_s"] = number_column(
        [entry["arrival_s"] for entry in objects], lines, path, "arrival_s"
    )
    return time


def _beam_widths(objects: list[dict[str, Any]], lines: list[int], path: Path) -> Ints | None:
    """Hypotheses of each line's beam search; None where no line has one."""
    widths = np.zeros(len(objects), dtype=np.int64)
    for i, entry in enumerate(objects):
        width = entry.get("beam_width", 0)
        if type(width) is not int or not 0 <= width <= MAX_BEAM_WIDTH:
            raise UsageError(
                f"{path}: line {lines[i]}, column 'beam_width': {show(width)}; give a whole number of hypotheses from 1 "
                f"to {MAX_BEAM_WIDTH}, or 0 for no beam search"
            )
        widths[i] = width
    return widths if widths.any() else None


def _prefixes(objects: list[dict[str, Any]], lines: list[int], path: Path, prompt: Ints) -> tuple[Ints, Ints]:
    numbers: dict[str, int] = {}
    ends = np.zeros(len(objects), dtype=np.int64)
    streams = np.zeros(len(objects), dtype=np.int64)
    for i, entry in enumerate(objects):
        if entry.get("prefix_group") is None and entry.get("prefix_tokens") is None:
            continue
        length = entry.get("prefix_tokens")
        if (
            entry.get("prefix_group") is None
            or not isinstance(length, int)
            or isinstance(length, bool)
            or length < 0
        ):
            raise UsageError(
                f"{path}: line {lines[i]}, column 'prefix_tokens': {show(length)}; give a prefix_group "
                "and a whole number of tokens"
            )
        if 0 < prompt[i] < length:
            raise UsageError(
                f"{path}: line {lines[i]}, column 'prefix_tokens': {length} exceeds the prompt's "
                f"{int(prompt[i])} tokens"
            )
        ends[i] = length
        streams[i] = numbers.setdefault(str(entry["prefix_group"]), len(numbers))
    return ends, streams
