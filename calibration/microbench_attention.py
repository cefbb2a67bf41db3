"""A step's attention taken apart: rotation, what chunks and decodes take alone, and what of it is left beside others.

Rotation (with the writing of K and V) happens once to all tokens of a step, whatever attends afterwards, so a step of
several kernels takes less than these alone by the rotations that are not done again. That difference says how much of
attention is rotation: rows that attend to themselves only bound it, since they go through a kernel of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from calibration.microbench_run import Measured
from calibration.microbench_steps import Composition, repeated

LEAST_SHARE = 0.02
"""Attention that is left after rotation is at least this share of the whole: differences of noisy times."""

_CROWD = 64.0
"""Chunks side by side at which a chunk's share of a busy device is taken, as in `costmodel.attention`."""
_UNKNOWN = 0.5
"""Share of the rows' time taken for rotation where no step of several kernels was measured."""
_LEAST_ROTATION = 0.05


class Prices(Protocol):
    """A kernel that can be asked (`costmodel.predict.Kernel`)."""

    @property
    def launch_s(self) -> float: ...

    def seconds(self, shape: Sequence[float], *grid: npt.ArrayLike) -> npt.NDArray[np.float64]: ...


def attention_means(runs: Iterable[Measured], layers: float) -> dict[Composition, float]:
    """Mean seconds of one layer's attention, rotation included, by what the step was."""
    found: dict[Composition, list[float]] = {}
    for run in runs:
        found.setdefault(run.what, []).append(run.parts["attention"] / layers)
    return {what: repeated(values)[0] for what, values in found.items()}


def _alone(what: Composition) -> list[Composition]:
    """The steps of one kernel of which `what` is made: its decodes, and each chunk."""
    decodes = [Composition(what.decodes)] if what.decodes else []
    return decodes + [Composition(chunks=(chunk,)) for chunk in what.chunks]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Seconds of rotation and KV writing of one layer: a share of what rows take that attend to themselves."""

    sizes: tuple[int, ...]
    rows_s: tuple[float, ...]
    share: float

    def __call__(self, tokens: float) -> float:
        """For a number of tokens, between the measured ones in logarithms."""
        return self.share * self.rows(tokens)

    def rows(self, tokens: float) -> float:
        """Of rows that attend to themselves."""
        if not self.sizes:
            return 0.0
        return float(np.exp(np.interp(np.log(tokens), np.log(self.sizes), np.log(self.rows_s))))


def rotation(means: Mapping[Composition, float]) -> Rotation:
    """The share with which decodes and a chunk, each measured alone, add up to what they take together.

    It leaves something of every step for its kernel.
    """
    rows = {what.num_tokens: s for what, s in means.items() if what.sampled is not None}
    sizes = tuple(sorted(rows))
    whole = Rotation(sizes, tuple(rows[size] for size in sizes), 1.0)
    if not sizes:
        return whole
    single = [w for w in means if w.sampled is None and len(_alone(w)) == 1]
    most = min(
        ((1.0 - LEAST_SHARE) * means[w] / whole.rows(w.num_tokens) for w in single),
        default=1.0,
    )
    again, saved = [], []
    for what, together in means.items():
        parts = _alone(what)
        if (
            what.sampled is not None
            or not what.decodes
            or len(parts) != 2
            or any(p not in means for p in parts)
        ):
            continue
        again.append((sum(whole.rows(p.num_tokens) for p in parts) - whole.rows(what.num_tokens)) / together)
        saved.append(sum(means[p] for p in parts) / together - 1.0)  # noise grows with the time
    square = float(np.dot(again, again))
    share = float(np.dot(again, saved)) / square if square > 0.0 else _UNKNOWN * most
    return Rotation(whole.sizes, whole.rows_s, float(np.clip(share, _LEAST_ROTATION * most, min(most, 1.0))))


class Beside:
    """Chunks' price beside other work: a share of one kernel for all of them, or (`apart` 1) of a kernel for each."""

    def __init__(self, prefill: Prices, heads: tuple[float, float], apart: float) -> None:
        self._prefill, self._heads, self._apart = prefill, heads, apart

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Of one layer, for (tokens, before) of each, as `costmodel.pricer` adds them up."""
        together, alone = self.bounds(chunks)
        return together + self._apart * (alone - together)

    def bounds(self, chunks: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """In one kernel, and in kernels of their own."""
        launch, sum_s, total_s = self._prefill.launch_s, 0.0, self._prefill.launch_s
        for tokens, before in chunks:
            alone = float(self._prefill.seconds(self._heads, 1.0, float(tokens), float(before)))
            crowd = float(self._prefill.seconds(self._heads, _CROWD, float(tokens), float(before)))
            total_s += min(max(crowd - launch, 0.0) / _CROWD, alone)
            sum_s += alone
        return total_s, sum_s


def chunks_apart(
    means: Mapping[Composition, float], rotate: Rotation, prefill: Prices, heads: tuple[float, float]
) -> float:
    """0 where several chunks take what the formula says of one kernel with all their work, 1 where as long as one after
    another, less than 0 where even less than the formula says."""
    beside = Beside(prefill, heads, 0.0)
    above, whole = [], []
    for what, seconds in means.items():
        if what.decodes or len(what.chunks) < 2:
            continue
        together, apart = beside.bounds(what.chunks)
        above.append((seconds - rotate(what.num_tokens) - together) / seconds)
        whole.append((apart - together) / seconds)
    square = float(np.dot(whole, whole))
    return round(float(np.clip(np.dot(above, whole) / square, -1.0, 1.0)), 3) if square > 0.0 else 0.0


def saved_beside_chunks(
    means: Mapping[Composition, float],
    rotate: Rotation,
    beside: Beside,
    decode: Prices,
    heads: tuple[float, float],
) -> dict[int, tuple[float, list[float]]]:
    """Seconds that decodes take less beside chunks than alone, by their number: the mean, and how far each measured
    mixture lies from it as a share of its time."""
    found: dict[int, list[tuple[float, float]]] = {}
    for what, seconds in means.items():
        batch = len(what.decodes)
        if what.sampled is not None or not what.chunks or len(set(what.decodes)) != 1:
            continue
        alone = float(decode.seconds(heads, float(batch), float(what.decodes[0])))
        added = seconds - rotate(what.num_tokens) - beside.seconds(what.chunks)
        found.setdefault(batch, []).append((alone - added, seconds))
    saved = {}
    for batch, pairs in sorted(found.items()):
        less, whole = np.array(pairs).T
        mean = float(np.average(less, weights=whole**-2.0))
        saved[batch] = (mean, ((less - mean) / whole).tolist())
    return saved


def longest_share(
    means: Mapping[Composition, float], rotate: Rotation, decode: Prices, heads: tuple[float, float]
) -> float:
    """0 where a batch takes as long as its mean context says, 1 where as long as its longest; from uneven batches.

    More than 1 where rows are padded to the longest and masked besides.
    """
    found = []
    for what, seconds in means.items():
        contexts = what.decodes
        if what.chunks or len(set(contexts)) < 2:
            continue
        mean, longest = sum(contexts) / len(contexts), max(contexts)
        low, high = (float(decode.seconds(heads, len(contexts), c)) for c in (mean, longest))
        if high > 1.05 * low:
            found.append((seconds - rotate(len(contexts)) - low) / (high - low))
    return round(float(np.clip(np.median(found), 0.0, 2.0)), 3) if found else 0.0
