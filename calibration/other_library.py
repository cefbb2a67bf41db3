"""Products of another version of the vendor's library, timed by others on another card of the same kind.

Which kernel cuBLAS takes for a product changes between its versions: on RTX PRO 6000 the same product of bfloat16 takes
from a quarter less to nearly twice as long under CUDA 12 as under CUDA 13, by the number of tokens. The tables lie in
`calibration/data` (its README says whose they are). Two cards of one kind differ in pace; the times are brought to
the pace of the card that the profile is of, by products that both run with the same kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calibration.assemble import clean_gemm
from calibration.fit import DEFAULT_OPTIONS, Options, fit_kernel
from calibration.lss import layer_samples
from calibration.tables import Samples, Table, read_table, samples_from
from costmodel.formats import hardware
from costmodel.layers import STREAMING
from costmodel.profile import DeviceFacts, KernelFit
from serving.errors import UsageError

Floats = npt.NDArray[np.float64]

DATA = Path(__file__).parent / "data"
_DTYPE = "bfloat16"
_HEAD_ROWS = 256.0
"""Shapes timed at no more rows than this are LM heads, which multiply one row of a sequence."""


@dataclass(frozen=True, slots=True)
class SameKernel:
    """A product for which both libraries take the same kernels between `least` and `most` tokens.

    The other table has it beyond `most` only; at any number of tokens it has a product as wide and `deeper` in k, whose
    grid of thread blocks is the same, so that the two differ by one factor, told where the table has both.
    """

    shape: tuple[float, float]
    deeper: tuple[float, float]
    least: float
    most: float


LLAMA_UP = SameKernel((28672.0, 4096.0), (28672.0, 8192.0), 576.0, 2048.0)
"""Gate and up projection of Llama 3.1 8B, and of a half of 70B. Their stairs lie at the same tokens in both libraries."""


def _series(samples: Samples, shape: tuple[float, float]) -> dict[float, float]:
    """Seconds of a shape (n, k) by number of tokens."""
    here = np.all(samples.shape == shape, axis=1)
    return dict(zip(samples.grid[here, 0].tolist(), samples.seconds[here].tolist(), strict=True))


def _ratio(a: dict[float, float], b: dict[float, float], least: float, most: float) -> float:
    """Median of a / b over the numbers of tokens from `least` to `most` that both have."""
    common = [m for m in a if m in b and least <= m <= most]
    if not common:
        raise UsageError(
            f"no number of tokens from {least:g} to {most:g} in both tables to tell the card's pace by"
        )
    return float(np.median([a[m] / b[m] for m in common]))


def pace(theirs: Samples, ours: Samples, by: SameKernel = LLAMA_UP) -> float:
    """How many times as long the other card takes for what both run with the same kernel, memory not the limit.

    Raises `UsageError` where the tables have no such product in common.
    """
    deep, shallow = _series(theirs, by.deeper), _series(theirs, by.shape)
    depth = _ratio(shallow, deep, by.most + 1.0, np.inf)
    return depth * _ratio(deep, _series(ours, by.shape), by.least, by.most)


def at_pace(samples: Samples, slower: float, facts: DeviceFacts) -> Samples:
    """The samples of a card whose multiprocessors are `slower` times as slow, with its memory as fast."""
    hw = hardware(facts)
    read_s = samples.shape.prod(axis=1) * hw.weight_bytes / (hw.hbm_bytes_per_s * STREAMING)
    seconds = np.maximum(samples.seconds / slower, np.minimum(samples.seconds, read_s))
    return _with(samples, samples.shape, samples.grid, seconds)


def _with(samples: Samples, shape: Floats, grid: Floats, seconds: Floats) -> Samples:
    return Samples(samples.kind, shape, grid, seconds, Counter(samples.dropped), samples.source)


def other_samples(stem: str, ours: Samples, facts: DeviceFacts) -> tuple[Samples, float]:
    """(timings of `calibration/data/STEM.csv` at this card's pace, how much slower the other card is).

    As far as the profile's own go in tokens, and with its LM heads, which no library reads faster than memory does.
    """
    table = read_table(DATA / f"{stem}.csv")
    theirs = _gemm(table)
    slower = pace(theirs, ours)
    theirs.keep(theirs.grid[:, 0] <= ours.grid[:, 0].max(), "more tokens than the profile's own")
    found = at_pace(theirs, slower, facts)
    clean_gemm(found, _DTYPE, facts)
    heads = np.isin(ours.shape[:, 0], _heads(ours))
    return (
        _with(
            found,
            np.concatenate([found.shape, ours.shape[heads]]),
            np.concatenate([found.grid, ours.grid[heads]]),
            np.concatenate([found.seconds, ours.seconds[heads]]),
        ),
        slower,
    )


def _gemm(table: Table) -> Samples:
    return samples_from(
        "gemm",
        [r for r in table.rows if r["dtype"] == _DTYPE],
        lambda r: (float(r["n"]), float(r["k"])),
        lambda r: (float(r["m"]),),
        source=table.name,
    )


def _heads(samples: Samples) -> list[float]:
    widths = np.unique(samples.shape[:, 0])
    return [n for n in widths.tolist() if samples.grid[samples.shape[:, 0] == n, 0].max() <= _HEAD_ROWS]


def fit_other(
    stem: str, tables: Sequence[Table], facts: DeviceFacts, options: Options = DEFAULT_OPTIONS
) -> dict[str, KernelFit]:
    """Fits by number format of `calibration/data/STEM.csv`, for the device that has layer profiles in `tables`."""
    ours = layer_samples(tables, facts)["gemm"]
    samples, slower = other_samples(stem, ours, facts)
    samples.source = (
        f"{samples.source}: times of another card, {slower:.3f} times as slow; LM heads of this one"
    )
    return {_DTYPE: fit_kernel("gemm", samples, hardware(facts), options=options)}
