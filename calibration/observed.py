"""What a real run left, in one form whatever file it came from: the case to replay, and what was observed."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from costmodel.engine_version import is_version
from costmodel.profile import load_profile
from serving.errors import UsageError
from sim.deployment import Deployment
from sim.pipeline_build import product_formats, reducing
from sim.record import Floats
from sim.workload.types import ClosedLoop, Workload


@dataclass(frozen=True, slots=True)
class Observed:
    """Latencies of a real run: per request where they were kept, else only means."""

    samples: Mapping[str, Floats] = field(default_factory=dict)
    """Seconds per request, by metric."""
    means_ms: Mapping[str, float] = field(default_factory=dict)
    time_s: Floats = field(default_factory=lambda: np.empty(0))
    series: Mapping[str, Floats] = field(default_factory=dict)
    """At `time_s`: running and waiting requests, and the share of KV pages in use (0 to 1), where known."""
    num_pages: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A real run to replay: what it served, on what, and what came out."""

    name: str
    deployment: Deployment
    workload: Workload
    observed: Observed
    at_engine: bool
    """Latencies start when the engine queues the request, not when a client sends it."""
    engine_version: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def semantics_of(version: tuple[int, ...]) -> str:
    """Which scheduler semantics an engine version has.

    vLLM 0.12 (December 2025) and later take part in what 0.33's recorded schedules show; earlier ones admit
    a prompt without room for all of it and queue every freed page last.
    """
    return "vllm-2025" if version and version < (0, 12) else "vllm-0.33"


def graphs_in_budget(version: tuple[int, ...]) -> bool:
    """vLLM counts the CUDA-graph pool inside `gpu_memory_utilization` since 0.21."""
    return not version or version >= (0, 21)


def with_engine(deployment: Deployment, version: str) -> Deployment:
    """The deployment with its engine's version, where anything is priced by that."""
    profile = load_profile(deployment.gpu)
    if is_version(version) and (
        reducing(deployment) > 1 or any(map(profile.versioned_gemm, product_formats(deployment)))
    ):
        return deployment.model_copy(update={"engine_version": version})
    return deployment


def read_rows(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a CSV file. Raises `UsageError` when it cannot be read or lacks a column."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            header = list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read as CSV ({error})") from None
    missing = [name for name in needed if name not in header]
    if missing:
        raise UsageError(f"{path}: line 1: no column {missing[0]!r}; found {', '.join(header)}")
    return rows


def number(row: Mapping[str, str], column: str, path: Path) -> float:
    """A number of a CSV row. Raises `UsageError` naming file, column and value."""
    text = row.get(column, "")
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(
            f"{path}: column {column!r}: {text!r} is not a number; correct the row or leave it out"
        )
    return value


def plain_workload(
    name: str,
    sent_s: Floats | Sequence[float],
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    *,
    hash_ids: Sequence[Sequence[int]] = (),
    block_tokens: int = 16,
    max_concurrency: int | None = None,
) -> Workload:
    """A workload of one tenant, sorted by `sent_s`; `hash_ids` name the blocks of each prompt, in order."""
    sent_s = np.asarray(sent_s, np.float64)
    order = np.argsort(sent_s, kind="stable")
    prompt = np.asarray(prompt_tokens, np.int64)[order]
    offsets, ends, streams = [0], np.empty(0, np.int64), np.empty(0, np.int64)
    if len(hash_ids):
        rows = [np.asarray(hash_ids[i], np.int64) for i in order.tolist()]
        ends = np.concatenate(
            [np.minimum((np.arange(len(r)) + 1) * block_tokens, n) for r, n in zip(rows, prompt, strict=True)]
        )
        streams = np.concatenate(rows)
        offsets += np.cumsum([len(r) for r in rows]).tolist()
    else:
        offsets += [0] * len(order)
    count = len(order)
    return Workload(
        name=name,
        sent_s=sent_s[order],
        prompt_tokens=prompt,
        output_tokens=np.asarray(output_tokens, np.int64)[order],
        tenant=np.zeros(count, np.int64),
        priority=np.zeros(count, np.int64),
        segment_offsets=np.asarray(offsets, np.int64),
        segment_ends=ends,
        segment_streams=streams,
        after=np.full(count, -1, np.int64),
        think_s=np.zeros(count),
        closed_loop=None if max_concurrency is None else ClosedLoop(max_concurrency),
    )
