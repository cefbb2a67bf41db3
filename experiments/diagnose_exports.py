"""Exports of production requests: OpenTelemetry spans in OTLP JSON with vLLM's attributes, and plain CSV.

docs/diagnose.md lists both formats.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.diagnose_run import Measured, from_columns
from serving.errors import UsageError, nearest
from sim.deployment import Deployment

SPAN = "llm_request"
"""Name of the span that vLLM's API server ends with each request."""
ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "output_tokens": "gen_ai.usage.completion_tokens",
    "ttft_s": "gen_ai.latency.time_to_first_token",
    "e2el_s": "gen_ai.latency.e2e",
    "queue_s": "gen_ai.latency.time_in_queue",
    "prefill_s": "gen_ai.latency.time_in_model_prefill",
}
"""vLLM's attributes (vllm/tracing/utils.py), latencies in seconds."""
NEEDED = ("sent_s", "prompt_tokens", "output_tokens", "ttft_s", "e2el_s")
OPTIONAL = ("queue_s", "prefill_s", "cached_tokens", "preemptions")
WHOLE = ("prompt_tokens", "output_tokens", "cached_tokens", "preemptions")


def read_export(path: Path, deployment: Deployment | None = None) -> Measured:
    """Requests of an export. Raises `UsageError` naming the file and what is wrong in it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    if text.lstrip().startswith(("{", "[")):
        return _from_spans(path, text, deployment)
    return _from_csv(path, text, deployment)


def _from_spans(path: Path, text: str, deployment: Deployment | None) -> Measured:
    rows: list[dict[str, float]] = []
    failed = 0
    for number, span in enumerate(_spans(path, text), 1):
        known = {a.get("key"): _value(a.get("value") or {}) for a in span.get("attributes") or []}
        if span.get("name") != SPAN and ATTRIBUTES["ttft_s"] not in known:
            continue
        missing = [
            name for name in ("prompt_tokens", "output_tokens", "e2el_s") if ATTRIBUTES[name] not in known
        ]
        if missing:
            raise UsageError(
                f"{path}: span {number} ({span.get('name')!r}) has no attribute {ATTRIBUTES[missing[0]]}"
            )
        row = {name: _number(known[key], path, key) for name, key in ATTRIBUTES.items() if key in known}
        try:
            row["sent_s"] = int(span["startTimeUnixNano"]) / 1e9
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"{path}: span {number} has no startTimeUnixNano") from None
        if row["output_tokens"] < 1 or "ttft_s" not in row:
            failed += 1
        else:
            rows.append(row)
    if not rows:
        raise UsageError(
            f"{path}: no finished {SPAN!r} span; start vLLM with --otlp-traces-endpoint and export its spans"
        )
    return _measured(path, "the OpenTelemetry export", rows, deployment, failed)


def _spans(path: Path, text: str) -> Iterator[Mapping[str, Any]]:
    """Spans of OTLP JSON: one export, a list of them, or one a line as the collector's file exporter writes."""
    try:
        found = json.loads(text)
        exports = found if isinstance(found, list) else [found]
    except ValueError:
        exports = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    exports.append(json.loads(line))
                except ValueError as error:
                    raise UsageError(f"{path}: line {number}: not JSON ({error})") from None
    for export in exports:
        if not isinstance(export, dict) or not isinstance(export.get("resourceSpans"), list):
            raise UsageError(
                f"{path}: neither a result of vllm bench serve nor OTLP JSON, whose top level has resourceSpans"
            )
        for resource in export["resourceSpans"]:
            for scope in resource.get("scopeSpans") or []:
                yield from scope.get("spans") or []


def _value(value: Mapping[str, Any]) -> Any:
    for kind in ("intValue", "doubleValue", "stringValue"):
        if kind in value:
            return value[kind]
    return None


def _number(value: Any, path: Path, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise UsageError(f"{path}: {where}: {value!r} is not a number of 0 or more")
    return number


def _from_csv(path: Path, text: str, deployment: Deployment | None) -> Measured:
    reader = csv.DictReader(text.splitlines())
    header = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = header
    for name in NEEDED:
        if name not in header:
            raise UsageError(f"{path}: line 1: no column {name!r}; needed: {', '.join(NEEDED)}")
    for name in header:
        if name not in (*NEEDED, *OPTIONAL):
            raise UsageError(
                f"{path}: line 1: unknown column {name!r}; {nearest(name, (*NEEDED, *OPTIONAL))}"
            )
    rows = []
    for number, row in enumerate(reader, 2):
        if None in row or None in row.values():
            raise UsageError(f"{path}: line {number}: {len(header)} fields are needed, as in line 1")
        rows.append({name: _number(row[name], path, f"line {number}: {name}") for name in header})
    kept = [row for row in rows if row["output_tokens"] >= 1]
    if not kept:
        raise UsageError(f"{path}: no request with an answer; there is nothing to diagnose")
    return _measured(path, "the CSV", kept, deployment, len(rows) - len(kept))


def _measured(
    path: Path, source: str, rows: list[dict[str, float]], deployment: Deployment | None, failed: int
) -> Measured:
    def column(name: str) -> Any:
        if not all(name in row for row in rows):
            return None
        values = np.array([row[name] for row in rows])
        return values.astype(np.int64) if name in WHOLE else values

    if (short := next((i for i, row in enumerate(rows) if row["e2el_s"] < row["ttft_s"]), None)) is not None:
        raise UsageError(f"{path}: request {short + 1}: e2el_s is less than ttft_s")
    columns = {name: column(name) for name in (*NEEDED, *OPTIONAL)}
    some = [name for name in OPTIONAL if columns[name] is None and any(name in row for row in rows)]
    notes = [f"{name} is missing in some requests and left out" for name in some]
    return from_columns(path.stem, source, **columns, lost=failed, deployment=deployment, notes=notes)
