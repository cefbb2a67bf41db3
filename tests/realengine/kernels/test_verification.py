"""Speculative verification: the output is the target's, whatever the draft, and known mistakes are caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from realengine.kernels import sampling_ref, verification, verification_ref
from tests.realengine.kernels.paged import DEVICE
from tests.realengine.kernels.test_sampling import settings

DRAWS, VOCABULARY, DRAFTS = 200_000, 8, 2
Verify = Callable[..., tuple[Tensor, Tensor]]


def distributions(*, temperature: float = 1.0, holes: bool = False) -> tuple[Tensor, Tensor]:
    """Draft [K, V] and target [K+1, V]; with holes, the draft never proposes some tokens that the target wants."""
    p = sampling_ref.sampling_probs(
        torch.randn(DRAFTS + 1, VOCABULARY), **cpu(DRAFTS + 1, temperature=temperature)
    )
    q_logits = torch.randn(DRAFTS, VOCABULARY)
    if holes:
        q_logits[:, ::3] = -torch.inf
        p[:, 1] = 0  # and the target never wants a token that the draft proposes
        p /= p.sum(dim=1, keepdim=True)
    return sampling_ref.sampling_probs(q_logits, **cpu(DRAFTS, temperature=temperature)), p


def cpu(rows: int, **given: float) -> dict[str, Tensor]:
    return {name: x.cpu() for name, x in settings(rows, **given).items()}


def tokens_of(verify: Verify, q: Tensor, p: Tensor, *, certain: bool = False) -> tuple[Tensor, Tensor]:
    """Drafts drawn from q (or always the likeliest, as an n-gram would) and verified, many times."""
    generator = torch.Generator().manual_seed(1)
    if certain:
        drafts = q.argmax(dim=1).expand(DRAWS, -1)
    else:
        drafts = torch.stack([row.multinomial(DRAWS, True, generator=generator) for row in q], dim=1)
    seeds = torch.randint(0, 2**62, (DRAWS,), generator=generator)
    counts = torch.full((DRAWS,), DRAFTS, dtype=torch.int32)
    given = None if certain else q.expand(DRAWS, -1, -1)
    return verify(drafts, given, p.expand(DRAWS, -1, -1), counts, seeds, torch.zeros_like(seeds))


def p_value(tokens: Tensor, counts: Tensor, p: Tensor) -> float:
    """The least likely of the positions: tokens at each, among rows that reach it, against the target there."""
    values = []
    for place in range(int(counts.max())):
        seen = torch.bincount(tokens[counts > place, place], minlength=VOCABULARY)
        possible = p[place] > 0
        if seen[~possible].any():
            return 0.0
        expected = p[place][possible].double()
        values.append(stats.chisquare(seen[possible], expected / expected.sum() * seen.sum()).pvalue)
    return float(min(values))


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize(("temperature", "holes"), [(1.0, False), (1.0, True), (0.5, False)])
def test_the_output_is_distributed_as_the_target(temperature: float, holes: bool, certain: bool) -> None:
    q, p = distributions(temperature=temperature, holes=holes)
    tokens, counts = tokens_of(verification_ref.verify, q, p, certain=certain)
    assert p_value(tokens, counts, p) > 1e-3
    # A draft is accepted with probability sum(min(p, q)).
    if certain:
        q = torch.nn.functional.one_hot(q.argmax(dim=1), VOCABULARY).float()
    first, second = torch.minimum(p[:DRAFTS], q).sum(dim=1).tolist()
    assert counts.double().mean().item() == pytest.approx(1 + first + first * second, abs=0.01)


def residual_from_q(drafts: Tensor, q: Tensor, p: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    """The mistake of replacing a rejected draft by another draw from the draft's distribution."""
    tokens, counts = verification_ref.verify(drafts, q, p, *rest)
    rows = torch.arange(len(tokens))
    rejected = counts <= DRAFTS
    again = q[rows, (counts.long() - 1).clamp(max=DRAFTS - 1)].multinomial(1).squeeze(1)
    tokens[rows[rejected], counts.long()[rejected] - 1] = again[rejected]
    return tokens, counts


def residual_from_p(drafts: Tensor, q: Tensor, p: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    """The mistake of replacing a rejected draft by a draw from the target, not from what q leaves of it."""
    tokens, counts = verification_ref.verify(drafts, q, p, *rest)
    rows = torch.arange(len(tokens))
    rejected = counts <= DRAFTS
    again = p[rows, counts.long() - 1].multinomial(1).squeeze(1)
    tokens[rows[rejected], counts.long()[rejected] - 1] = again[rejected]
    return tokens, counts


def all_accepted(drafts: Tensor, q: Tensor, p: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    """The mistake of u = 0."""
    tokens, counts = verification_ref.verify(drafts, q, p, *rest)
    tokens[:, :DRAFTS] = drafts
    tokens[:, DRAFTS] = tokens[:, DRAFTS].clamp(min=0)
    return tokens, torch.full_like(counts, DRAFTS)


def unprocessed_target(drafts: Tensor, q: Tensor, p: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    """The mistake of verifying against the target at temperature 1 when 0.5 was asked for."""
    raw = p.sqrt()
    return verification_ref.verify(drafts, q, raw / raw.sum(dim=-1, keepdim=True), *rest)


@pytest.mark.parametrize("mistake", [residual_from_q, residual_from_p, all_accepted, unprocessed_target])
def test_known_mistakes_are_caught(mistake: Verify) -> None:
    q, p = distributions(temperature=0.5)
    assert p_value(*tokens_of(mistake, q, p), p) < 1e-9


def test_greedy_rows_emit_the_target_argmax_and_stop_at_the_first_difference() -> None:
    p = torch.rand(4, DRAFTS + 1, VOCABULARY)
    best = p.argmax(dim=-1)
    wrong = (best + 1) % VOCABULARY
    drafts = torch.stack(
        (
            best[0, :2],
            torch.stack((best[1, 0], wrong[1, 1])),
            torch.stack((wrong[2, 0], best[2, 1])),
            best[3, :2],
        )
    )
    counts = torch.tensor([2, 2, 2, 1], dtype=torch.int32)
    seeds, greedy = torch.arange(4), torch.ones(4, dtype=torch.bool)
    tokens, kept = verification_ref.verify(drafts, None, p, counts, seeds, seeds, greedy)
    assert kept.tolist() == [3, 2, 1, 2]
    for row, count in enumerate(kept.tolist()):
        assert tokens[row].tolist() == [*best[row, :count].tolist(), *[-1] * (DRAFTS + 1 - count)]
    # One-hot targets, as temperature 0 gives, come to the same without the flag.
    one_hot = torch.nn.functional.one_hot(best, VOCABULARY).float()
    again, _ = verification_ref.verify(drafts, None, one_hot, counts, seeds, seeds)
    assert torch.equal(again, tokens)


def test_without_drafts_verification_is_sampling() -> None:
    logits = torch.randn(64, VOCABULARY)
    parameters = cpu(64, temperature=0.8)
    seeds, positions = torch.arange(64), torch.arange(64) + 5
    probs = sampling_ref.sampling_probs(logits, **parameters).unsqueeze(1)
    none = torch.empty(64, 0, dtype=torch.int64)
    tokens, _ = verification_ref.verify(
        none, None, probs, torch.zeros(64, dtype=torch.int32), seeds, positions
    )
    expected = sampling_ref.sample(logits, **parameters, seeds=seeds, positions=positions)
    assert torch.equal(tokens[:, 0], expected)


def test_what_is_impossible_is_never_accepted_even_when_u_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verification_ref, "uniform", lambda seeds, positions, stream: (seeds + positions) * 0.0
    )
    p, q = torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    one, draft = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int64)
    for probs in (q, None, torch.tensor([[[0.0, 1.0]]])):  # the last: a draft that q itself excludes
        tokens, counts = verification_ref.verify(draft, probs, p, one, one, one)
        assert (tokens.tolist(), counts.tolist()) == ([[1, -1]], [1])


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("vocabulary", [50, 1500])
def test_the_kernel_gives_the_reference_tokens(vocabulary: int, certain: bool) -> None:
    rows, most = 10, 3
    target = torch.softmax(torch.randn(rows, most + 1, vocabulary) * 2, dim=-1)
    draft = torch.softmax(torch.randn(rows, most, vocabulary) * 2, dim=-1)
    drafts = torch.randint(0, vocabulary, (rows, most))
    for row in range(6):  # drafts that have a chance
        target[row, torch.arange(most), drafts[row]] = 0.6
    draft[4] = target[4, :most]  # p = q: always accepted
    target[5, 2] = 0
    target[5, 2, 7] = 1.0
    greedy = torch.arange(rows) % 5 == 3
    drafts[3, :2] = target[3, :2].argmax(dim=-1)
    counts = torch.tensor([3, 3, 2, 3, 3, 3, 0, 1, 3, 3], dtype=torch.int32)
    seeds = torch.randint(-(2**62), 2**62, (rows,))
    args = (drafts, None if certain else draft, target, counts, seeds, torch.arange(rows) + 11, greedy)
    expected = verification_ref.verify(*args)
    assert len(expected[1].unique()) > 2
    got = verification.verify(*(x if x is None else x.to(DEVICE) for x in args))  # type: ignore[arg-type]
    assert torch.equal(got[0].cpu(), expected[0])
    assert torch.equal(got[1].cpu(), expected[1])
