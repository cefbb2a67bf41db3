"""Traces in CSV: Azure 2023 and 2024, BurstGPT, and pairs of lengths."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from serving.errors import UsageError
from sim.record import Floats, Ints
from sim.workload.columns import DateColumn, Drops, Reasons, by_time, number_column, token_column
from sim.workload.rows import Rows
from sim.workload.textfile import plural, read_text

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
LENGTHS_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")

_CHUNK_CHARS = 4_000_000


class CsvFile:
    """A CSV file with a header, read in chunks of rows so that a trace of millions stays affordable."""

    def __init__(self, path: Path, columns: tuple[str, ...], dataset: str) -> None:
        self.path = path
        self._text, self.sha256 = read_text(path)
        self._columns = columns
        self._start = self._text.find("\n") + 1 or len(self._text)
        header_lines = 1
        header = self._text[: self._start].strip()
        while not header and self._start < len(self._text):
            end = self._text.find("\n", self._start) + 1 or len(self._text)
            header, self._start = self._text[self._start : end].strip(), end
            header_lines += 1
        self._first_line = header_lines + 1
        names = [name.strip() for name in next(self._reader([header], header_lines))[1]]
        self._width = len(names)
        lower = [name.lower() for name in names]
        self._index = []
        for column in columns:
            if column.lower() not in lower:
                found = ", ".join(name[:40] for name in names[:8]) or "nothing"
                raise UsageError(
                    f"{path}: line {header_lines}: no column {column!r} for dataset {dataset}; found {found}"
                )
            self._index.append(lower.index(column.lower()))

    def chunks(self) -> Iterator[tuple[list[int], list[list[str]]]]:
        """Line numbers and the wanted columns' cells of successive groups of rows; blank lines are left out
        and a row that is too short has empty cells."""
        text, start, line = self._text, self._start, self._first_line
        quoted = '"' in text
        while start < len(text):
            end = len(text) if quoted else text.find("\n", start + _CHUNK_CHARS) + 1 or len(text)
            part = text[start:end].removesuffix("\n").split("\n")
            yield (None if quoted else self._plain(part, line)) or self._parsed(part, line)
            line += len(part)
            start = end

    def _plain(self, part: list[str], line: int) -> tuple[list[int], list[list[str]]] | None:
        """Rows without quotes and of equal width, as in every public trace: no list for each row, five times as
        fast. None when they are not."""
        commas = part[0].count(",")
        if not max(1, *self._index) <= commas < self._width or {row.count(",") for row in part} != {commas}:
            return None
        cells = ",".join(part).split(",")
        return list(range(line, line + len(part))), [cells[i :: commas + 1] for i in self._index]

    def _parsed(self, part: list[str], line: int) -> tuple[list[int], list[list[str]]]:
        rows = [(n, row) for n, row in self._reader(part, line) if len(row) > 1 or (row and row[0].strip())]
        width = max(self._index) + 1
        for number, row in rows:
            if any(cell.strip() for cell in row[self._width :]):
                raise UsageError(
                    f"{self.path}: line {number}: {len(row)} fields under a header of {self._width}; "
                    "quote or correct those with a comma in them"
                )
            row.extend([""] * (width - len(row)))
        return [number for number, _ in rows], [[row[i] for _, row in rows] for i in self._index]

    def _reader(self, lines: list[str], first: int) -> Iterator[tuple[int, list[str]]]:
        reader = csv.reader(lines)
        try:
            for row in reader:
                yield first + reader.line_num - 1, row
        except csv.Error as error:
            raise UsageError(
                f"{self.path}: line {first + reader.line_num - 1}: not CSV ({error}); check the file"
            ) from None


def _finish(
    file: CsvFile,
    prompt: list[Ints],
    output: list[Ints],
    drops: Drops,
    time_s: Floats | None,
    more: list[str],
) -> Rows:
    prompt_tokens = np.concatenate(prompt) if prompt else np.zeros(0, dtype=np.int64)
    output_tokens = np.concatenate(output) if output else np.zeros(0, dtype=np.int64)
    warnings = drops.warnings() + more
    if not len(prompt_tokens):
        why = f" ({'; '.join(warnings)})" if warnings else ""
        raise UsageError(f"{file.path}: no usable rows{why}; give a file with requests")
    meta = {"path": str(file.path), "sha256": file.sha256}
    rows = Rows(prompt_tokens, output_tokens, time_s, meta=meta)
    if time_s is not None:
        order, notes = by_time(time_s)
        warnings += notes
        rows = rows if order is None else rows.take(order)
    return Rows(rows.prompt_tokens, rows.output_tokens, rows.time_s, warnings=tuple(warnings), meta=meta)


def read_azure(path: Path) -> Rows:
    """The Azure LLM inference trace (Azure/AzurePublicDataset): absolute timestamps, whose fractions are
    kept."""
    file = CsvFile(path, AZURE_COLUMNS, "azure")
    dates = DateColumn(path, AZURE_COLUMNS[0])
    drops = Drops()
    parts: tuple[list[Ints], list[Ints], list[Ints]] = ([], [], [])
    for lines, (when, context, generated) in file.chunks():
        ns, when_reasons = (
            dates.parse(when, lines) if when else (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int8))
        )
        prompt, prompt_reasons = token_column(context, lines, path, AZURE_COLUMNS[1])
        output, output_reasons = token_column(generated, lines, path, AZURE_COLUMNS[2])
        kept = drops.keep(
            dict(zip(AZURE_COLUMNS, (when_reasons, prompt_reasons, output_reasons), strict=True))
        )
        for part, column in zip(parts, (ns, prompt, output), strict=True):
            part.append(column[kept])
    ns = np.concatenate(parts[0]) if parts[0] else np.zeros(0, dtype=np.int64)
    time_s = (ns - (ns.min() if len(ns) else 0)) / 1e9
    return _finish(file, parts[1], parts[2], drops, time_s, dates.warnings())


def read_burstgpt(path: Path, model: str | None = None) -> Rows:
    """BurstGPT: seconds from the trace's start; failed requests (0 response tokens) are dropped and
    counted."""
    columns = (*BURSTGPT_COLUMNS, "Model") if model is not None else BURSTGPT_COLUMNS
    file = CsvFile(path, columns, "burstgpt")
    drops = Drops()
    others = 0
    parts: tuple[list[Floats], list[Ints], list[Ints]] = ([], [], [])
    known: set[str] = set()
    for lines, cells in file.chunks():
        if model is not None:
            names = [name.strip() for name in cells[3]]
            known.update(names)
            wanted = [i for i, name in enumerate(names) if name == model]
            others += len(names) - len(wanted)
            lines = [lines[i] for i in wanted]
            cells = [[column[i] for i in wanted] for column in cells[:3]]
        time, time_reasons = number_column(cells[0], lines, path, columns[0])
        prompt, prompt_reasons = token_column(cells[1], lines, path, columns[1])
        output, output_reasons = token_column(cells[2], lines, path, columns[2])
        kept = drops.keep(
            dict(zip(BURSTGPT_COLUMNS, (time_reasons, prompt_reasons, output_reasons), strict=True))
        )
        parts[0].append(time[kept])
        parts[1].append(prompt[kept])
        parts[2].append(output[kept])
    if model is not None and model not in known:
        raise UsageError(
            f"{path}: no row of model {model!r}; known: {', '.join(sorted(known)[:8]) or 'none'}"
        )
    time_s = np.concatenate(parts[0]) if parts[0] else np.zeros(0)
    time_s = time_s - (time_s.min() if len(time_s) else 0.0)
    more = [f"{plural(others, 'row')} of other models left out (model {model})"] if others else []
    return _finish(file, parts[1], parts[2], drops, time_s, more)


def read_lengths(path: Path) -> Rows:
    """Pairs num_prefill_tokens,num_decode_tokens; no times."""
    file = CsvFile(path, LENGTHS_COLUMNS, "lengths")
    drops = Drops()
    parts: tuple[list[Ints], list[Ints]] = ([], [])
    for lines, cells in file.chunks():
        columns: dict[str, Reasons] = {}
        values: list[Ints] = []
        for name, column in zip(LENGTHS_COLUMNS, cells, strict=True):
            tokens, columns[name] = token_column(column, lines, path, name)
            values.append(tokens)
        kept = drops.keep(columns)
        for part, tokens in zip(parts, values, strict=True):
            part.append(tokens[kept])
    return _finish(file, parts[0], parts[1], drops, None, [])
