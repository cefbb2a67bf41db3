"""Kernel timing tables: reading, recognising and cleaning them. Every row that is dropped is counted by
reason.

Two layouts are read, recognised by their header: AIConfigurator-style tables (GEMM, context attention,
generation attention, collectives) and LLMServingSim-style layer profiles (dense, per_sequence, attention,
moe).
"""

from __future__ import annotations

import csv
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from serving.errors import UsageError

Floats = npt.NDArray[np.float64]

_REQUIRED: dict[str, frozenset[str]] = {
    "gemm": frozenset({"dtype", "m", "n", "k", "latency_us"}),
    "prefill": frozenset({"kv_dtype", "heads", "kv_heads", "head_dim", "batch", "isl", "latency_us"}),
    "decode": frozenset({"kv_dtype", "heads", "kv_heads", "head_dim", "batch", "kv_len", "latency_us"}),
    "comm": frozenset({"impl", "op", "mode", "n_gpus", "bytes", "latency_us"}),
    "lss_attention": frozenset({"prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"}),
    "lss_moe": frozenset({"tokens", "activated_experts", "time_us"}),
    "lss_dense": frozenset({"layer", "tokens", "time_us"}),
    "lss_sequence": frozenset({"layer", "sequences", "time_us"}),
}


@dataclass(frozen=True, slots=True)
class Table:
    """A file of timings as text, with what kind it is and a short hash of its bytes."""

    path: Path
    kind: str
    rows: list[dict[str, str]]
    digest: str


@dataclass(slots=True)
class Samples:
    """Timings of one kernel: `shape` (N, S), `grid` (N, G) and `seconds` (N,), plus what cleaning removed."""

    kind: str
    shape: Floats
    grid: Floats
    seconds: Floats
    dropped: Counter[str] = field(default_factory=Counter)
    source: str = ""

    def __len__(self) -> int:
        return len(self.seconds)

    def keep(self, mask: npt.NDArray[np.bool_], reason: str) -> None:
        """Keep the rows of `mask` and count the others under `reason`."""
        lost = int(len(mask) - mask.sum())
        if lost:
            self.dropped[reason] += lost
            self.shape, self.grid, self.seconds = self.shape[mask], self.grid[mask], self.seconds[mask]

    def subset(self, mask: npt.NDArray[np.bool_]) -> Samples:
        return Samples(
            self.kind, self.shape[mask], self.grid[mask], self.seconds[mask], Counter(), self.source
        )


def read_table(path: Path) -> Table:
    """Read a CSV of timings; `UsageError` when it cannot be read or its header is not one of the known
    ones."""
    try:
        data = path.read_bytes()
        reader = csv.DictReader(data.decode("utf-8-sig").splitlines())
        rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read as CSV ({error})") from None
    header = frozenset(reader.fieldnames or ())
    for kind, required in _REQUIRED.items():
        if required <= header:
            return Table(path, kind, rows, hashlib.sha256(data).hexdigest()[:12])
    raise UsageError(f"{path}: line 1: header {sorted(header)} is not a known table of kernel timings")


def samples_from(
    kind: str,
    rows: Sequence[Mapping[str, str]],
    shape: Callable[[Mapping[str, str]], tuple[float, ...]],
    grid: Callable[[Mapping[str, str]], tuple[float, ...]],
    *,
    column: str = "latency_us",
    source: str = "",
) -> Samples:
    """Samples of `rows`; a repeated (shape, grid) keeps the median and counts the others as duplicates."""
    seen: dict[tuple[tuple[float, ...], tuple[float, ...]], list[float]] = {}
    bad = 0
    for row in rows:
        try:
            value = float(row[column]) * 1e-6
            key = (shape(row), grid(row))
        except (ValueError, TypeError):
            bad += 1
            continue
        if not (value > 0 and np.isfinite(value)):
            bad += 1
            continue
        seen.setdefault(key, []).append(value)
    dropped: Counter[str] = Counter()
    if bad:
        dropped["not a positive time"] = bad
    extra = sum(len(v) - 1 for v in seen.values())
    if extra:
        dropped["duplicate"] = extra
    return Samples(
        kind,
        np.array([s for s, _ in seen], np.float64),
        np.array([g for _, g in seen], np.float64),
        np.array([float(np.median(v)) for v in seen.values()]),
        dropped,
        source,
    )


def drop_impossible(samples: Samples, least_s: Floats, *, slack: float = 1.03) -> None:
    """Drop rows more than `slack` times faster than the physical bound `least_s` (peak arithmetic, HBM)."""
    samples.keep(samples.seconds * slack >= least_s, "above the physical peak")


def drop_host_floor(samples: Samples, *, floor_s: float = 2e-5) -> None:
    """Drop rows that time the host's launch, not the kernel.

    A table whose fastest 2 % all sit above `floor_s` was made without CUDA graphs: its floor is the host.
    Rows within 40 % of that floor say nothing about the device.
    """
    floor = float(np.quantile(samples.seconds, 0.02))
    if floor > floor_s:
        samples.keep(samples.seconds > 1.4 * floor, "host-launch floor")


def drop_spikes(samples: Samples, *, factor: float = 1.5) -> None:
    """Drop rows `factor` times slower than a larger problem of the same series (last grid axis):
    interference.

    Smaller steps down stay: they are real switches of tile or algorithm.
    """
    keys = np.concatenate([samples.shape, samples.grid[:, :-1]], axis=1)
    _, series = np.unique(keys, axis=0, return_inverse=True)
    order = np.lexsort((samples.grid[:, -1], series.ravel()))
    mask = np.ones(len(samples), bool)
    later: float = np.inf
    previous = -1
    for row in order[::-1]:
        if series.ravel()[row] != previous:
            later, previous = np.inf, int(series.ravel()[row])
        if samples.seconds[row] > factor * later:
            mask[row] = False
        else:
            later = min(later, float(samples.seconds[row]))
    samples.keep(mask, "spike (non-monotone)")
