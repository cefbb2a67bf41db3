"""Speculative verification in Triton; the rule and its sources are in `verification_ref`.

One program per sequence. Whether drafts stand is decided from 2 K numbers; then one distribution (the residual, or the
bonus token's) is passed over twice, for its total and for the draw. Nothing of size V is written.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from realengine.kernels.launch import Launch, jit, power_of_2
from realengine.kernels.philox import uniform
from realengine.kernels.philox_ref import ACCEPT, TARGET
from realengine.kernels.sampling import WARPS, first_above, largest, row_constants


@jit
def block_residual(  # type: ignore[no-untyped-def]
    target, draft, drafted, subtract, start, V: tl.constexpr, BLOCK: tl.constexpr, CERTAIN: tl.constexpr
):
    """(p - q)+ of a block, or p where nothing was rejected (`subtract` 0). CERTAIN: q is 1 at the drafted token."""
    cell = start + tl.arange(0, BLOCK)
    p = tl.load(target + cell, mask=cell < V, other=0.0).to(tl.float64)
    if CERTAIN:
        q = tl.where(cell == drafted, 1.0, 0.0).to(tl.float64)
    else:
        q = tl.load(draft + cell, mask=cell < tl.where(subtract > 0, V, 0), other=0.0).to(tl.float64)
    return tl.where(subtract > 0, tl.maximum(p - q, 0.0), p)


@jit
def total_residual(  # type: ignore[no-untyped-def]
    target, draft, drafted, subtract, V: tl.constexpr, BLOCK: tl.constexpr, CERTAIN: tl.constexpr
):
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, V, BLOCK):
        total += tl.sum(block_residual(target, draft, drafted, subtract, start, V, BLOCK, CERTAIN), 0)
    return total


@jit
def verify_kernel(  # type: ignore[no-untyped-def]
    draft_tokens, draft_probs, target_probs, num_drafts, seeds, positions, greedy, tokens, counts,
    K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, CERTAIN: tl.constexpr,
    ACCEPT: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    drafts = tl.load(num_drafts + seq)
    drafted_at = draft_tokens + seq * K
    target = target_probs + seq * (K + 1) * V
    draft = draft_probs + seq * K * V
    kept = drafts * 0
    by_argmax = kept > 0
    if greedy is not None:
        by_argmax = tl.load(greedy + seq) != 0
    last = kept.to(tl.int64)
    if by_argmax:
        going = drafts >= 0
        while going:
            _, best = largest(target + kept.to(tl.int64) * V, V, BLOCK)
            last = best.to(tl.int64)
            agreed = tl.load(drafted_at + kept, mask=kept < drafts, other=-1) == last
            kept += agreed.to(tl.int32)
            going = agreed
    else:
        seed = tl.load(seeds + seq)
        position = tl.load(positions + seq).to(tl.int64)
        going = kept < drafts
        while going:
            token = tl.load(drafted_at + kept).to(tl.int64)
            p = tl.load(target + kept.to(tl.int64) * V + token).to(tl.float64)
            q = p * 0.0 + 1.0
            if not CERTAIN:
                q = tl.load(draft + kept.to(tl.int64) * V + token).to(tl.float64)
            u = uniform(seed, position + kept, ACCEPT)
            # p/q >= u without the division; p > 0 because u may be exactly 0.
            accepted = (q > 0.0) & (p > 0.0) & (p >= u * q)
            kept += accepted.to(tl.int32)
            going = accepted & (kept < drafts)
        row = kept.to(tl.int64) * V
        drafted = tl.load(drafted_at + kept, mask=kept < drafts, other=-1).to(tl.int64)
        subtract = (kept < drafts).to(tl.int32)
        total = total_residual(target + row, draft + row, drafted, subtract, V, BLOCK, CERTAIN)
        if total <= 0.0:
            # p and q agree up to rounding: the target is then as good.
            subtract = subtract * 0
            total = total_residual(target + row, draft + row, drafted, subtract, V, BLOCK, CERTAIN)
        wanted = uniform(seed, position + kept, TARGET) * total
        running = total * 0.0
        before = total * 0.0
        found = kept * 0
        for start in range(0, V, BLOCK):
            weight = tl.sum(
                block_residual(target + row, draft + row, drafted, subtract, start, V, BLOCK, CERTAIN), 0
            )  # fmt: skip
            reached = (running <= wanted) & (weight > 0.0)
            found = tl.where(reached, start, found)
            before = tl.where(reached, running, before)
            running += weight
        weights = block_residual(target + row, draft + row, drafted, subtract, found, V, BLOCK, CERTAIN)
        last = (found + first_above(weights, wanted - before, BLOCK)).to(tl.int64)
    place = tl.arange(0, K_PAD)
    given = tl.load(drafted_at + place, mask=place < kept, other=-1).to(tl.int64)
    given = tl.where(place == kept, last, given)
    tl.store(tokens + seq * (K + 1) + place, given, mask=place <= K)
    tl.store(counts + seq, kept + 1)


def verify(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    num_drafts: Tensor,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `verification_ref`."""
    launch, tokens, counts = verify_launch(
        draft_tokens, draft_probs, target_probs, num_drafts, seeds, positions, greedy
    )
    launch.run()
    return tokens, counts


def verify_launch(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    num_drafts: Tensor,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor | None,
) -> tuple[Launch, Tensor, Tensor]:
    """The launch, the tokens and their counts."""
    batch, most = draft_tokens.shape
    assert target_probs.is_contiguous()
    assert draft_probs is None or draft_probs.is_contiguous()
    tokens = torch.empty((batch, most + 1), dtype=torch.int64, device=draft_tokens.device)
    counts = torch.empty(batch, dtype=torch.int32, device=draft_tokens.device)
    # A pointer must be given even if nothing is read from it.
    probs = target_probs if draft_probs is None else draft_probs
    constants = {
        **row_constants(target_probs),
        "K": most,
        "K_PAD": power_of_2(most + 1),
        "CERTAIN": draft_probs is None,
        "ACCEPT": ACCEPT,
        "TARGET": TARGET,
    }
    args = (
        draft_tokens.contiguous(),
        probs,
        target_probs,
        num_drafts,
        seeds,
        positions,
        greedy,
        tokens,
        counts,
    )
    return Launch(verify_kernel, (batch,), args, constants, WARPS), tokens, counts
