"""Traces in JSON lines with block hashes: Mooncake and vLLM's timed_trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from serving.errors import UsageError
from sim.record import Ints
from sim.workload.block_hashes import check_cover, segments_of
from sim.workload.columns import Drops, by_time, number_column, show, token_column
from sim.workload.rows import Rows
from sim.workload.spec import MooncakeSpec, TimedTraceSpec
from sim.workload.textfile import read_text


def read_objects(path: Path) -> tuple[list[dict[str, Any]], list[int], str]:
    """The objects of a JSON-lines file, their line numbers and the file's SHA-256; blank lines are skipped.

    Raises UsageError naming the line that is not a JSON object.
    """
    text, digest = read_text(path)
    texts = text.split("\n")
    lines = [i for i, line in enumerate(texts, 1) if line and not line.isspace()]
    if not lines:
        raise UsageError(f"{path}: is empty; give a file with requests")
    objects = list(_parsed(path, texts, lines))
    return objects, lines, digest


def _parsed(path: Path, texts: list[str], lines: list[int]) -> Iterator[dict[str, Any]]:
    decode = json.JSONDecoder().decode
    for line in lines:
        try:
            value = decode(texts[line - 1])
        except (ValueError, RecursionError) as error:
            why = getattr(error, "msg", None) or (
                "too long a number" if isinstance(error, ValueError) else "nested too deeply"
            )
            raise UsageError(
                f"{path}: line {line}: not JSON ({why}); every line must be one JSON object"
            ) from None
        if not isinstance(value, dict):
            raise UsageError(
                f"{path}: line {line}: {show(value)} is not a JSON object; every line must be one"
            )
        yield value


def column_of(objects: list[dict[str, Any]], lines: list[int], path: Path, key: str) -> list[Any]:
    """The values of one key; UsageError naming the first line without it."""
    try:
        return [entry[key] for entry in objects]
    except KeyError:
        i = next(i for i, entry in enumerate(objects) if key not in entry)
        found = ", ".join(map(str, list(objects[i])[:8])) or "nothing"
        raise UsageError(f"{path}: line {lines[i]}: no key {key!r}; found {found[:200]}") from None


def read_mooncake(spec: MooncakeSpec) -> Rows:
    """Mooncake (kvcache-ai/Mooncake): milliseconds, hash ids of 512-token blocks of the prompt."""
    layout = TimedTraceSpec(path=spec.path, chunk_hash_size=spec.block_tokens, sec_multiplier=0.001)
    return _read(layout, hash_ids_required=True)


def read_timed_trace(spec: TimedTraceSpec) -> Rows:
    """vLLM's timed_trace. Unlike vLLM, a prompt longer than its hash ids is an error, and hash ids may be
    missing."""
    return _read(spec, hash_ids_required=False)


def _read(spec: TimedTraceSpec, *, hash_ids_required: bool) -> Rows:
    path = spec.path
    objects, lines, digest = read_objects(path)
    labels = (spec.label_timestamp, spec.label_input_length, spec.label_output_length)
    columns = [column_of(objects, lines, path, label) for label in labels]
    time, time_reasons = number_column(columns[0], lines, path, labels[0])
    prompt, prompt_reasons = token_column(columns[1], lines, path, labels[1])
    output, output_reasons = token_column(columns[2], lines, path, labels[2])
    drops = Drops()
    kept = drops.keep(dict(zip(labels, (time_reasons, prompt_reasons, output_reasons), strict=True)))
    warnings = drops.warnings()
    if not kept.any():
        raise UsageError(
            f"{path}: no usable rows ({'; '.join(warnings) or 'no lines'}); give a file with requests"
        )
    index = np.flatnonzero(kept)
    prompt, output, time = prompt[index], output[index], time[index]
    ids = _hash_ids(spec, objects, lines, index, hash_ids_required)
    counts = np.fromiter(map(len, ids), np.int64, len(ids))
    used = check_cover(
        counts, prompt, spec.chunk_hash_size, np.asarray(lines)[index], path, spec.label_hash_ids
    )
    longer = int(np.count_nonzero(counts > used))
    if longer:
        warnings.append(
            f"{longer:,} of {len(ids):,} rows have more {spec.label_hash_ids} than their prompt fills; "
            "the rest ignored"
        )
    segments = segments_of(ids, used, prompt, spec.chunk_hash_size)
    time_s = (time - time.min()) * spec.sec_multiplier
    meta = {"path": str(path), "sha256": digest, "first_timestamp_s": float(time.min()) * spec.sec_multiplier}
    meta["block_tokens"] = spec.chunk_hash_size
    rows = Rows(prompt, output, time_s, segments, meta=meta)
    order, notes = by_time(time_s)
    rows = rows if order is None else rows.take(order)
    return replace(rows, warnings=tuple(warnings + notes))


def _hash_ids(
    spec: TimedTraceSpec, objects: list[dict[str, Any]], lines: list[int], index: Ints, required: bool
) -> list[list[Any]]:
    label = spec.label_hash_ids
    if required:
        column_of(objects, lines, spec.path, label)
    ids: list[list[Any]] = []
    for i in index.tolist():
        value = objects[i].get(label)
        value = [] if value is None and not required else value
        if not isinstance(value, list) or not set(map(type, value)) <= {int, str}:
            raise UsageError(
                f"{spec.path}: line {lines[i]}, column {label!r}: {show(value)} is not a list of block "
                "ids; correct or remove the line"
            )
        if required and not value:
            raise UsageError(
                f"{spec.path}: line {lines[i]}, column {label!r}: no block ids; for a trace without them "
                "use --dataset-name timed_trace"
            )
        ids.append(value)
    return ids
