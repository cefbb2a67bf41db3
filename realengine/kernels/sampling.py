"""Sampling without sorting: a filter is a threshold on the logits, found by bisection of their bit patterns.

Floats order as their bits do (with the bits of negative ones turned), so a threshold is exact after at most 32 passes
over a row, and usually after half as many, once one token lies between the bounds. A row of 128k logits stays in L2. No
row reads another's, and sums run in a fixed order: batch composition cannot change a token. One program per row, since
decode batches have rows enough; rows without top-k or top-p make no pass for it, and greedy rows make one in all.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from realengine.kernels.launch import Launch, device_of, jit, power_of_2
from realengine.kernels.philox import uniform
from realengine.kernels.philox_ref import TARGET

BLOCK = 4096
"""Logits per step of a pass."""
WARPS = 8
STAGES = tl.constexpr(4)
"""Three steps of 16 KB are on their way while one is computed: a row's program has its multiprocessor to itself."""


@jit
def order_key(x):  # type: ignore[no-untyped-def]
    """An integer that orders as the float32 x does."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def from_order_key(key):  # type: ignore[no-untyped-def]
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def largest(row, V: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest number of a row, and the first index that has it."""
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.full((BLOCK,), 0, tl.int32) + tl.arange(0, BLOCK)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        cell = start + tl.arange(0, BLOCK)
        x = tl.load(row + cell, mask=cell < V, other=float("-inf")).to(tl.float32)
        better = x > top
        top = tl.where(better, x, top)
        at = tl.where(better, cell, at)
    best = tl.max(top, 0)
    return best, tl.min(tl.where(top == best, at, V - 1), 0)


@jit
def count_and_weigh(row, threshold, top, warmth, V: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many logits reach the threshold, and their total weight (float64)."""
    count = tl.zeros((BLOCK,), tl.int32)
    weight = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        cell = start + tl.arange(0, BLOCK)
        x = tl.load(row + cell, mask=cell < V, other=float("-inf")).to(tl.float32)
        kept = (x >= threshold) & (cell < V)
        count += kept.to(tl.int32)
        weight += tl.where(kept, tl.exp((x - top) / warmth), 0.0)
    return tl.sum(count, 0), tl.sum(weight.to(tl.float64), 0)


@jit
def find_threshold(  # type: ignore[no-untyped-def]
    row, low, top, warmth, least_count, least_weight, V: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest threshold that leaves at least `least_count` logits and `least_weight`; `low` is known to.

    Bounds: enough reach from_order_key(under), too few reach from_order_key(over).
    """
    under = order_key(low)
    over = order_key(top) + 1
    count_under, _ = count_and_weigh(row, low, top, warmth, V, BLOCK)
    count_over = count_under * 0
    while (over - under > 1) & (count_under - count_over > 1) & (count_under != least_count):
        middle = under + (over - under) // 2
        count, weight = count_and_weigh(row, from_order_key(middle), top, warmth, V, BLOCK)
        enough = (count >= least_count) & (weight >= least_weight)
        under = tl.where(enough, middle, under)
        over = tl.where(enough, over, middle)
        count_under = tl.where(enough, count, count_under)
        count_over = tl.where(enough, count_over, count)
    return from_order_key(under)


@jit
def filter_threshold(row, top, warmth, top_k, top_p, min_p, V: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least logit that passes top-k, min-p and top-p, in that order."""
    threshold = top * 0.0 + float("-inf")
    if (top_k > 0) & (top_k < V):
        threshold = find_threshold(row, threshold, top, warmth, top_k, 0.0, V, BLOCK)
    if min_p > 0.0:
        threshold = tl.maximum(threshold, top + warmth * tl.log(min_p))
    if top_p < 1.0:
        _, weight = count_and_weigh(row, threshold, top, warmth, V, BLOCK)
        least = top_p.to(tl.float64) * weight
        threshold = find_threshold(row, threshold, top, warmth, 1, least, V, BLOCK)
    return threshold


@jit
def sample_kernel(  # type: ignore[no-untyped-def]
    logits, temperature, top_k, top_p, min_p, seeds, positions, out, logits_row,
    V: tl.constexpr, BLOCK: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    row = logits + seq.to(tl.int64) * logits_row
    top, best = largest(row, V, BLOCK)
    warmth = tl.load(temperature + seq)
    if warmth <= 0.0:
        tl.store(out + seq, best.to(tl.int64))
        return
    threshold = filter_threshold(
        row, top, warmth, tl.load(top_k + seq), tl.load(top_p + seq), tl.load(min_p + seq), V, BLOCK
    )  # fmt: skip
    # Two passes in the same order: the total, then the block in which the running sum passes u times it.
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, V, BLOCK):
        total += tl.sum(block_weights(row, start, threshold, top, warmth, V, BLOCK), 0)
    wanted = uniform(tl.load(seeds + seq), tl.load(positions + seq), STREAM) * total
    before = tl.full((), 0.0, tl.float64)
    found = tl.full((), 0, tl.int32)
    running = tl.full((), 0.0, tl.float64)
    for start in range(0, V, BLOCK):
        weight = tl.sum(block_weights(row, start, threshold, top, warmth, V, BLOCK), 0)
        # Blocks without weight are passed over, so that rounding cannot end in one.
        reached = (running <= wanted) & (weight > 0.0)
        found = tl.where(reached, start, found)
        before = tl.where(reached, running, before)
        running += weight
    weights = block_weights(row, found, threshold, top, warmth, V, BLOCK)
    tl.store(out + seq, (found + first_above(weights, wanted - before, BLOCK)).to(tl.int64))


@jit
def block_weights(row, start, threshold, top, warmth, V: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    cell = start + tl.arange(0, BLOCK)
    x = tl.load(row + cell, mask=cell < V, other=float("-inf")).to(tl.float32)
    kept = (x >= threshold) & (cell < V)
    return tl.where(kept, tl.exp((x - top) / warmth), 0.0).to(tl.float64)


@jit
def first_above(weights, wanted, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first index at which the running sum exceeds `wanted`; the last one with weight if rounding passes all."""
    index = tl.arange(0, BLOCK)
    running = tl.cumsum(weights, 0)
    first = tl.min(tl.where(running > wanted, index, BLOCK), 0)
    last = tl.max(tl.where(weights > 0.0, index, 0), 0)
    return tl.minimum(first, last)


@jit
def sampling_probs_kernel(  # type: ignore[no-untyped-def]
    logits, temperature, top_k, top_p, min_p, out, logits_row, V: tl.constexpr, BLOCK: tl.constexpr
):
    seq = tl.program_id(0)
    row = logits + seq.to(tl.int64) * logits_row
    to = out + seq.to(tl.int64) * V
    top, best = largest(row, V, BLOCK)
    warmth = tl.load(temperature + seq)
    if warmth <= 0.0:
        for start in range(0, V, BLOCK):
            cell = start + tl.arange(0, BLOCK)
            tl.store(to + cell, tl.where(cell == best, 1.0, 0.0), mask=cell < V)
        return
    threshold = filter_threshold(
        row, top, warmth, tl.load(top_k + seq), tl.load(top_p + seq), tl.load(min_p + seq), V, BLOCK
    )  # fmt: skip
    _, total = count_and_weigh(row, threshold, top, warmth, V, BLOCK)
    for start in range(0, V, BLOCK):
        cell = start + tl.arange(0, BLOCK)
        weights = block_weights(row, start, threshold, top, warmth, V, BLOCK)
        tl.store(to + cell, (weights / total).to(tl.float32), mask=cell < V)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    stream: int = TARGET,
) -> Tensor:
    """See `sampling_ref`."""
    launch, out = sample_launch(logits, temperature, top_k, top_p, min_p, seeds, positions, stream)
    launch.run()
    return out


def sampling_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """See `sampling_ref`."""
    launch, out = sampling_probs_launch(logits, temperature, top_k, top_p, min_p)
    launch.run()
    return out


def sample_launch(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    stream: int = TARGET,
) -> tuple[Launch, Tensor]:
    """The launch, and the tokens."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    args = (logits, temperature, top_k, top_p, min_p, seeds, positions, out, logits.stride(0))
    constants = {**row_constants(logits), "STREAM": stream}
    return Launch(sample_kernel, (len(logits),), args, constants, WARPS), out


def sampling_probs_launch(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Launch, Tensor]:
    """The launch, and the distributions."""
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    args = (logits, temperature, top_k, top_p, min_p, out, logits.stride(0))
    return Launch(sampling_probs_kernel, (len(logits),), args, row_constants(logits), WARPS), out


def row_constants(rows: Tensor) -> dict[str, int]:
    """How a program goes over a row of the vocabulary; interpreted, in smaller steps, so that tests make several."""
    vocabulary = rows.shape[-1]
    block = BLOCK if device_of(rows).arch else 1024
    return {"V": vocabulary, "BLOCK": min(block, power_of_2(vocabulary))}
