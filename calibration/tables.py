"""Kernel timing tables: reading, recognising and cleaning them. Every row that is dropped is counted by
reason.

Fits read the kinds gemm, prefill, decode and comm (and the layer profiles of `lss`); `calibration.sources`
turns other projects' layouts into these.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calibration.layouts import read_rows, recognise
from serving.errors import UsageError

Floats = npt.NDArray[np.float64]

_MOST = 1e15
"""Sizes beyond are typing errors."""


@dataclass(frozen=True, slots=True)
class Table:
    """A file of timings as text, with what kind it is and a short hash of its bytes."""

    path: Path
    kind: str
    rows: list[dict[str, str]]
    digest: str
    label: str = ""
    """How it is called in a profile: its path below the folder that was given, or its name."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows left out by an importer, by reason."""

    @property
    def name(self) -> str:
        return self.label or self.path.name

    def holding(self, kind: str, rows: list[dict[str, str]]) -> Table:
        """The same file with `rows` of `kind` instead, nothing counted as dropped yet."""
        return Table(self.path, kind, rows, self.digest, self.label)


@dataclass(slots=True)
class Samples:
    """Timings of one kernel: `shape` (N, S), `grid` (N, G) and `seconds` (N,), plus what cleaning removed."""

    kind: str
    shape: Floats
    grid: Floats
    seconds: Floats
    dropped: Counter[str] = field(default_factory=Counter)
    source: str = ""
    head_dim: int = 128
    noise: float | None = None
    """Log standard deviation of one repeat, where the table states it."""

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
            self.kind,
            self.shape[mask],
            self.grid[mask],
            self.seconds[mask],
            Counter(),
            self.source,
            self.head_dim,
        )


def read_table(path: Path, label: str = "") -> Table:
    """Read a CSV or Parquet file of timings; `UsageError` when it cannot be read or its header is not one of
    the known ones."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    header, rows = read_rows(path, data)
    kind = recognise(header, str(path))
    return Table(path, kind, rows, hashlib.sha256(data).hexdigest()[:12], label)


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
    dropped: Counter[str] = Counter()
    noise: list[float] = []
    for row in rows:
        value = number(row.get(column)) * 1e-6
        if not value > 0:
            dropped["not a positive time"] += 1
            continue
        try:
            key = (shape(row), grid(row))
        except (ValueError, TypeError, ZeroDivisionError):
            key = ((0.0,), ())
        if not is_problem(kind, *key):
            dropped["not a shape"] += 1
            continue
        seen.setdefault(key, []).append(value)
        if (spread := number(row.get("noise"))) > 0:
            noise.append(spread)
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
        noise=float(np.median(noise)) if noise else None,
    )


_MAY_BE_ZERO = {"prefill": 2, "mixed": 1}
"""Grid axis of the cached context, by kind: the only size that may be 0."""


def is_problem(kind: str, shape: tuple[float, ...], grid: tuple[float, ...]) -> bool:
    """Whether these are sizes of a problem: positive and finite, the cached context of a prefill possibly 0."""
    free = _MAY_BE_ZERO.get(kind)
    sizes = (*shape, *(g for axis, g in enumerate(grid) if axis != free))
    return all(0 < s < _MOST for s in sizes) and (
        free is None or free >= len(grid) or 0 <= grid[free] < _MOST
    )


def number(text: str | None) -> float:
    """The finite number that `text` is, else NaN."""
    try:
        value = float(text or "nan")
    except ValueError:
        return float("nan")
    return value if np.isfinite(value) else float("nan")


def thin(samples: Samples, *, most: int = 160) -> None:
    """Keep at most `most` values of each grid axis, spread evenly in the logarithm.

    Sweeps in equal steps say the same again and again at their upper end.
    """
    for axis in range(samples.grid.shape[1] if len(samples) else 0):
        values = np.unique(samples.grid[:, axis])
        if len(values) > most:
            logs = np.log1p(values)
            wanted = np.linspace(logs[0], logs[-1], most)
            kept = values[np.unique(np.abs(logs[:, None] - wanted[None, :]).argmin(axis=0))]
            samples.keep(np.isin(samples.grid[:, axis], kept), "between kept sizes of a dense sweep")


def drop_impossible(samples: Samples, least_s: Floats, *, slack: float = 1.03) -> None:
    """Drop rows more than `slack` times faster than the physical bound `least_s` (peak arithmetic, HBM)."""
    samples.keep(samples.seconds * slack >= least_s, "above the physical peak")


def drop_host_floor(samples: Samples, *, floor_s: float = 2e-5, stand_in: Samples | None = None) -> None:
    """Drop rows that time the host's launch, not the kernel.

    A table whose fastest 2 % all sit above `floor_s` was made without CUDA graphs: its floor is the host.
    Rows within 40 % of that floor say nothing about the device. Where that is most of them, so that little is left of
    what a decode step asks for, `stand_in` times them: the same problems of another kernel that does the same work.
    """
    floor = float(np.quantile(samples.seconds, 0.02))
    if floor <= floor_s:
        return
    seen = samples.seconds > 1.4 * floor
    if stand_in is not None and seen.mean() < 0.5:
        problems = np.column_stack([stand_in.shape, stand_in.grid]).tolist()
        timed = dict(zip(map(tuple, problems), stand_in.seconds.tolist(), strict=True))
        wanted = np.column_stack([samples.shape, samples.grid]).tolist()
        found = np.array([timed.get(tuple(problem), np.nan) for problem in wanted])
        # A kernel takes no longer than the host that hid it.
        samples.seconds = np.where(seen, samples.seconds, np.minimum(found, 1.4 * floor))
        known = ~np.isnan(samples.seconds)
        samples.dropped["host-launch floor, another kernel timed instead"] += int((known & ~seen).sum())
        seen = known
    samples.keep(seen, "host-launch floor")


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
