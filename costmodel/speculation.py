"""What drafts cost: the passes that make them, the step that verifies them, and the memory that they take.

A verification is one step over 1 + d tokens of each sequence. Its linear layers and its LM head see that many rows; they
are replayed from a CUDA graph up to the largest captured batch, which vLLM sizes by tokens and so reaches with fewer
sequences. Its attention is a decode whose queries share the KV that is read: query tokens times heads per KV head fill
tiles of 64 rows, and only what needs a second tile costs another pass over the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from costmodel.formats import gemm_format
from costmodel.memory import MemoryPlan, weight_bytes
from costmodel.model import ModelShape
from costmodel.pricer import MAX_GRAPH_TOKENS
from costmodel.prices import Prices

QUERY_TILE = 64
"""Rows of a tile of queries in FlashAttention's packed-GQA decode kernels (FlashAttention 2 and 3, FlashInfer)."""

DRAFT_PASS_S = 0.4e-3
VERIFY_S = 0.5e-3
"""Time beyond kernels of a draft pass (launches, metadata) and of a verification (rejection sampler, input preparation).

Between EAGLE (0.1 and 0.6 ms) and EAGLE-3 (0.6 and 1.1 ms) on Llama-3.1-8B and an H100 at batch 1, k = 2 to 7, in vLLM of
mid-2025 (its issue 20780): what one layer and an LM head per draft token and one step per verification leave unexplained.
"""

LOOKUP_PER_SEQ_S = 5e-6
LOOKUP_PER_TOKEN_S = 1e-9
"""N-gram lookup on the host: a compiled scan over each sequence's text; an estimate."""


def verification_s(
    pricer: Prices,
    queries_per_kv_head: int,
    *,
    num_tokens: int,
    num_sampled: int,
    prefills: Sequence[tuple[int, int]],
    num_decodes: int,
    decode_context_sum: int,
    decode_context_max: int,
    longest_draft: int,
    verify_s: float = VERIFY_S,
) -> float:
    """Device seconds of a step that verifies drafts of up to `longest_draft` tokens; 0 where nobody has any.

    `num_tokens` and `num_sampled` (rows through the LM head) count the draft tokens; `num_decodes` counts sequences.
    """
    tiles = -(-(1 + longest_draft) * queries_per_kv_head // QUERY_TILE)
    return (verify_s if longest_draft else 0.0) + pricer.step_s(
        num_tokens,
        num_sampled,
        prefills,
        num_decodes * tiles,
        decode_context_sum * tiles,
        decode_context_max,
    )


@dataclass(frozen=True, slots=True)
class DraftPrices:
    """The passes of a drafter that is a model: `pricer` prices its shape.

    `own_cache`: its first pass computes the whole step once more, the token just drawn included; otherwise (the target's
    own first layers) that token alone.
    """

    pricer: Prices
    own_cache: bool
    pass_s: float = DRAFT_PASS_S

    def first_pass_s(
        self,
        *,
        num_tokens: int,
        prefills: Sequence[tuple[int, int]],
        num_decodes: int,
        decode_context_sum: int,
        decode_context_max: int,
        num_drafting: int,
        drafting_context_sum: int,
    ) -> float:
        """The pass that gives every drafting sequence its first draft token."""
        if not self.own_cache:
            return self.pass_s + self._decode_s(num_drafting, drafting_context_sum, decode_context_max + 1)
        return self.pass_s + self.pricer.step_s(
            num_tokens + num_drafting,
            num_drafting,
            prefills,
            num_decodes,
            decode_context_sum + num_decodes,
            decode_context_max + 1,
        )

    def later_pass_s(self, num_drafting: int, context_sum: int, context_max: int) -> float:
        """A pass that adds one draft token to `num_drafting` sequences."""
        return self.pass_s + self._decode_s(num_drafting, context_sum, context_max)

    def _decode_s(self, rows: int, context_sum: int, context_max: int) -> float:
        return self.pricer.step_s(rows, rows, (), rows, context_sum, context_max)


def seqs_captured(max_num_seqs: int, num_drafts: int) -> int:
    """Sequences by which a pricer sizes its CUDA graphs where each has 1 + `num_drafts` tokens.

    vLLM captures up to twice the tokens of a full decode batch, at most 512, and counts drafts as tokens.
    """
    return max(max_num_seqs, min(max_num_seqs * (1 + num_drafts), MAX_GRAPH_TOKENS // 2))


def lookup_s(num_seqs: int, context_sum: int) -> float:
    """Host seconds to look drafts up in the text of `num_seqs` sequences."""
    return num_seqs * LOOKUP_PER_SEQ_S + context_sum * LOOKUP_PER_TOKEN_S


def memory_with_draft(
    plan: MemoryPlan,
    draft: ModelShape,
    *,
    tensor_parallel_size: int,
    dtype: str,
    kv_bytes: float = 2.0,
) -> MemoryPlan:
    """`plan` with a draft model beside the target: its weights come off the cache, and every page holds its KV too.

    As in vLLM, which spreads the draft's layers over the same ranks and pages. The draft is not quantised.
    """
    weights = weight_bytes(draft, gemm_format(dtype, None), tensor_parallel_size=tensor_parallel_size)
    per_token = draft.kv_bytes_per_token(tensor_parallel_size, kv_bytes)
    left = plan.kv_cache_bytes - weights
    both = plan.kv_bytes_per_token + per_token
    return replace(
        plan,
        weight_bytes=plan.weight_bytes + weights,
        kv_bytes_per_token=both,
        kv_formula=f"{plan.kv_bytes_per_token:,.0f} B + {per_token:,.0f} B of the draft = {both:,.0f} B",
        num_blocks=max(0, int(left // (both * plan.block_size))),
    )


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens per verification: (1 - α^(k+1)) / (1 - α), for drafts that stand with probability α each.

    Leviathan, Kalman, Matias: "Fast inference from transformers via speculative decoding", 2023, equation 1.
    """
    if acceptance >= 1.0:
        return num_drafts + 1.0
    return (1.0 - acceptance ** (num_drafts + 1)) / (1.0 - acceptance)


def closed_form_speedup(acceptance: float, num_drafts: int, cost_ratio: float) -> float:
    """Speed-up over plain decoding: (1 - α^(k+1)) / ((1 - α)(ck + 1)) for drafts that cost c of a decode step each.

    Same source, theorem 3.8; it takes a verification to cost what a decode costs, which a busy device does not grant.
    """
    return expected_tokens(acceptance, num_drafts) / (cost_ratio * num_drafts + 1.0)
