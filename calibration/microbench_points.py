"""Which steps to measure, the most telling first: corners of the grid before its middle, then where a curve jumps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from calibration.microbench_steps import Composition

_TILE = 64
"""Token counts on both sides of its multiples are measured: formulas step there, and so do most kernels."""
_JUMP = 0.06
"""How far, in logarithms, a time may lie off the line between its neighbours before the interval is cut."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the engine may be asked to do."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_context: int
    kv_tokens: int
    """Tokens that the cache holds."""
    odd: bool = False
    """Measure sizes off the multiples of 16: CPU libraries favour round ones, which service seldom has."""

    def allows(self, what: Composition) -> bool:
        """Whether such a step can happen."""
        longest = max([*what.decodes, *(tokens + before for tokens, before in what.chunks)])
        return (
            longest <= self.max_context
            and what.kv_tokens <= self.kv_tokens
            and what.num_tokens <= max(self.max_num_batched_tokens, self.max_num_seqs)
        )


def reference(bounds: Bounds) -> Composition:
    """The step that is measured again and again, to see the machine drift: one of the grid."""
    context = min(_contexts(bounds), key=lambda c: abs(c - 64))
    return Composition((context,) * min(_batches(bounds), key=lambda b: abs(b - 4)))


def _batches(bounds: Bounds) -> list[int]:
    return octaves(1, bounds.max_num_seqs, 1.5 if bounds.odd else 2.0)


def _contexts(bounds: Bounds) -> list[int]:
    longest = max(bounds.max_context - bounds.odd, 1)
    return octaves(min(16 + _off(bounds), longest), longest, 4.0)


def _off(bounds: Bounds) -> int:
    """What is added to round sizes to make them odd."""
    return 3 if bounds.odd else 0


def corners_first(values: Sequence[int]) -> list[int]:
    """Both ends, the middle, then the middles of what is between: any beginning covers the range."""
    rows = sorted(set(values))
    if len(rows) <= 2:
        return rows[::-1]
    order, spans = [len(rows) - 1, 0], [(0, len(rows) - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            spans += [(low, middle), (middle, high)]
    return [rows[i] for i in order]


def octaves(low: int, high: int, step: float = 2.0) -> list[int]:
    """`low`, then by factors of `step`, and `high` itself."""
    count = max(0, math.ceil(math.log(high / low) / math.log(step))) if high > low else 0
    return sorted({*(round(low * step**i) for i in range(count)), high})


def plan_points(bounds: Bounds) -> list[Composition]:
    """Every step of the base grid that the bounds allow, in the order in which to measure."""
    off, batches, contexts = _off(bounds), _batches(bounds), _contexts(bounds)
    most = min(bounds.max_num_batched_tokens, bounds.max_context)
    tiles = [_TILE * 2**i for i in range(4)]
    edges = [m for t in tiles for m in (t - (1 if bounds.odd else 0), t + 1) if m < most]
    chunks = sorted({*octaves(min(8 + off, most), most, 1.5 if bounds.odd else 2.0), *edges})
    far = octaves(16 + off, max(bounds.max_context - 8, 16 + off), 4.0)
    if (room := bounds.max_context - most) > 16 + off:
        far = sorted({*far, room})  # as far as chunks of every size can reach
    deep = [tokens for tokens in chunks if tokens - 1 not in edges and tokens - 2 not in edges]

    ranked: list[tuple[int, Composition]] = []
    for b, batch in enumerate(corners_first(batches)):
        for c, context in enumerate(corners_first(contexts)):
            ranked.append((b + c, Composition((context,) * batch)))
    for t, tokens in enumerate(corners_first(chunks)):
        ranked.append((t, Composition(chunks=((tokens, 0),))))
    for t, tokens in enumerate(corners_first(deep)):
        ranked += [
            (t + 1 + i, Composition(chunks=((tokens, before),)))
            for i, before in enumerate(corners_first([f for f in far if f + tokens <= bounds.max_context]))
        ]
    # Tokens without anything to attend to: rotation and the writing of K and V by themselves.
    for t, tokens in enumerate(corners_first(sorted({*octaves(1, most, 4.0)}))):
        ranked.append((min(t, 2), Composition((1,) * tokens, sampled=1)))
    for rank, batch in enumerate(corners_first([b for b in batches if b > 1])[:3]):
        ranked += [(rank + 1, uneven) for uneven in uneven_batches(batch, contexts)]
    # Kernels beside each other, of sizes that are measured alone too: what do they share?
    near = [before for before in (0, *far) if before <= bounds.max_context // 2][:3]
    for rank, batch in enumerate(corners_first([b for b in batches if b < most])[:3]):
        fitting = [tokens for tokens in deep if tokens <= most - batch]
        ranked += [(rank + 1, mixed) for mixed in _mixtures(batch, contexts, fitting, near[-1])]
    ranked += [(3, Composition(chunks=pair)) for pair in _pairs(deep, near, most)]
    allowed = [(rank, what) for rank, what in ranked if bounds.allows(what)]
    return list(dict.fromkeys(what for _, what in sorted(allowed, key=lambda item: item[0])))


def _mixtures(batch: int, contexts: Sequence[int], sizes: Sequence[int], before: int) -> list[Composition]:
    """Decodes beside a chunk of the largest and of the smallest size that fits, and beside the beginning of a prompt."""
    if not sizes:
        return []
    long, *shorter = corners_first(contexts[:-1] or contexts)
    short = shorter[0] if shorter else long
    return [
        Composition((long,) * batch, ((sizes[-1], before),)),
        Composition((long,) * batch, ((sizes[0], before),)),
        Composition((short,) * batch, ((sizes[-1], 0),)),
    ]


def _pairs(sizes: Sequence[int], befores: Sequence[int], most: int) -> list[tuple[tuple[int, int], ...]]:
    """Chunks side by side in `most` tokens: the largest equal ones, and the largest with the smallest."""
    found: list[tuple[tuple[int, int], ...]] = []
    if halves := [tokens for tokens in sizes if 2 * tokens <= most]:
        found += [((halves[-1], before),) * 2 for before in befores[:2]]
    if (large := [tokens for tokens in sizes if tokens + sizes[0] <= most]) and large[-1] > sizes[0]:
        found += [((large[-1], befores[0]), (sizes[0], before)) for before in befores[-1:]]
    return found


def uneven_batches(batch: int, contexts: Sequence[int]) -> list[Composition]:
    """Contexts spread from a third to the whole of a size: does the mean set the time, or the longest?"""
    spread = [
        tuple(round(long * (1 + 2 * i / (batch - 1)) / 3) for i in range(batch)) for long in contexts[1:-1]
    ]
    return [Composition(decodes) for decodes in spread]


def next_cut(times: Mapping[int, float], *, least_gap: int = 8) -> int | None:
    """The token count at which another measurement tells most: in the widest interval beside a bend.

    A point bends where it lies off the line between its neighbours in double logarithms. None when all is smooth.
    """
    sizes = sorted(times)
    best, where = _JUMP, None
    for before, here, after in zip(sizes, sizes[1:], sizes[2:], strict=False):
        x = [math.log(s) for s in (before, here, after)]
        y = [math.log(times[s]) for s in (before, here, after)]
        line = y[0] + (y[2] - y[0]) * (x[1] - x[0]) / (x[2] - x[0])
        bend = abs(y[1] - line)
        for low, high in ((before, here), (here, after)):
            # A jump over a narrow gap is found already.
            if high - low > least_gap and bend > best:
                best, where = bend, (low + high) // 2
    return where
