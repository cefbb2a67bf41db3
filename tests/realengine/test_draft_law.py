"""Speculation changes no distribution: chi-square tests of what verification gives, and of a mistake that it would catch.

The target is a Markov chain, so that the law of every token given the one before is known; drafts follow another chain.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from realengine.complete import complete
from realengine.draft import verify
from realengine.generation import Sampling
from realengine.kernels import operators
from realengine.kernels.philox_ref import DRAFT
from realengine.seats import Draws
from tests.realengine.engines import CPU, running, tiny_model
from tests.realengine.test_generation import PROMPT, next_logits

KERNELS = operators(CPU)
V, K, ROWS = 9, 3, 200_000
START = 4


def chains(case: str) -> tuple[Tensor, Tensor]:
    """Logits of the next token given the last, [V, V], of the target and of the draft."""
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(V, V, generator=generator) * 1.5
    draft = target + torch.randn(V, V, generator=generator)
    if case == "q zero where p is not":
        draft[:, ::2] = -torch.inf
    if case == "p zero where q is not":
        target[:, 1::3] = -torch.inf
    return target, draft


def how(temperature: float, top_p: float, rows: int) -> Draws:
    seeds = np.arange(rows, dtype=np.int64) * 7919
    return Draws(
        np.full(rows, temperature, np.float32),
        np.zeros(rows, np.int32),
        np.full(rows, top_p, np.float32),
        np.zeros(rows, np.float32),
        seeds,
        temperature == 0,
        -1,
    )


def parameters(draws: Draws) -> list[Tensor]:
    return [torch.from_numpy(a) for a in (draws.temperature, draws.top_k, draws.top_p, draws.min_p)]


def speculate(
    case: str, temperature: float, top_p: float, rule: Any = KERNELS.verify
) -> tuple[Tensor, Tensor]:
    """Tokens [ROWS, K + 1] and counts of one verification in each of many sequences that begin alike."""
    target, draft = chains(case)
    draws = how(temperature, top_p, ROWS)
    chosen, seeds = parameters(draws), torch.from_numpy(draws.seed)
    last, drafts, probs = torch.full((ROWS,), START), [], []
    for nth in range(K):
        logits = draft[last]
        probs.append(KERNELS.sampling_probs(logits, *chosen))
        last = KERNELS.sample(logits, *chosen, seeds, torch.full((ROWS,), nth), stream=DRAFT)
        drafts.append(last)
    tokens = torch.stack(drafts, 1)
    before = torch.cat((torch.full((ROWS, 1), START), tokens), 1)
    rows = np.arange(ROWS)
    check = SimpleNamespace(
        drafts=tokens.numpy(),
        num_drafts=np.full(ROWS, K),
        first_row=rows * (K + 1),
        first_position=np.zeros(ROWS, np.int64),
    )
    positions = np.tile(np.arange(K + 1), ROWS)
    wide = how(temperature, top_p, ROWS * (K + 1))
    wide.seed = np.repeat(draws.seed, K + 1)
    inputs: Any = SimpleNamespace(draft=check, sample_positions=positions)
    kernels: Any = SimpleNamespace(sampling_probs=KERNELS.sampling_probs, sample=KERNELS.sample, verify=rule)
    return verify(target[before.flatten()], inputs, wide, torch.stack(probs, 1), kernels, torch.from_numpy)


def p_value(seen: Tensor, probs: Tensor) -> float:
    """Of counts [V] against probabilities [V]; 0 when something came that cannot."""
    total = float(seen.sum())
    possible = probs > 0
    if bool(seen[~possible].any()):
        return 0.0
    expected = probs[possible].double() * total
    statistic = float(((seen[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    return float(chi2.sf(statistic, freedom)) if freedom else 1.0


def worst(tokens: Tensor, counts: Tensor, law: Tensor) -> float:
    """The least p-value of all tokens given the token before, [V, V] being the target's law."""
    found = []
    before = torch.full((len(tokens),), START)
    for nth in range(K + 1):
        given = counts > nth
        for last in range(V):
            here = tokens[given & (before == last), nth]
            if len(here) > 50 * V:
                found.append(p_value(torch.bincount(here, minlength=V), law[last]))
        before = tokens[:, nth]
    return min(found)


CASES = ["p and q differ", "q zero where p is not", "p zero where q is not"]


@pytest.mark.parametrize(
    ("case", "temperature", "top_p"),
    [
        *((case, 1.0, 1.0) for case in CASES),
        (CASES[0], 0.0, 1.0),
        (CASES[0], 0.5, 1.0),
        (CASES[1], 2.0, 1.0),
        (CASES[0], 1.0, 0.7),
        (CASES[2], 2.0, 0.9),
    ],
)
def test_what_comes_out_is_distributed_as_the_targets_own_tokens(
    case: str, temperature: float, top_p: float
) -> None:
    tokens, counts = speculate(case, temperature, top_p)
    law = KERNELS.sampling_probs(chains(case)[0], *parameters(how(temperature, top_p, V)))
    # Some 30 tests of each, and 8 of these: one in a thousand would be met by luck, one in a million would not.
    assert worst(tokens, counts, law) > 1e-6
    assert set(counts.unique().tolist()) <= set(range(1, K + 2))
    assert counts.double().mean() > 1.3 or temperature == 0  # one and the same answer, maybe without a draft


def resampled_from_the_draft(
    drafts: Tensor, probs: Tensor, target: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """The well-known mistake: a rejected token is replaced by another draw from q instead of from the residual."""
    tokens, counts = KERNELS.verify(drafts, probs, target, *rest)
    kept = counts.long() - 1
    rejected = kept < K
    rows = torch.arange(len(drafts))
    again = torch.multinomial(probs[rows, kept.clamp(max=K - 1)], 1).squeeze(1)
    tokens[rows, kept] = torch.where(rejected, again, tokens[rows, kept])
    return tokens, counts


@pytest.mark.parametrize("case", CASES)
def test_the_test_catches_a_rejected_token_drawn_again_from_the_draft(case: str) -> None:
    torch.manual_seed(0)
    tokens, counts = speculate(case, 1.0, 1.0, resampled_from_the_draft)
    law = chains(case)[0].softmax(dim=1)
    assert worst(tokens, counts, law) < 1e-12


@pytest.mark.parametrize("drafter", ["draft_model", "self", "ngram"])
def test_an_engine_that_drafts_draws_from_the_models_distribution(drafter: str) -> None:
    model = tiny_model()
    first = next_logits(model, PROMPT).softmax(dim=-1)
    second = torch.zeros_like(first)
    for token in range(len(first)):
        second += first[token] * next_logits(model, [*PROMPT, token]).softmax(dim=-1)
    given: dict[str, Any] = {
        "draft_model": {"model": "x"},
        "self": {"num_layers": 2},
        "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 2},
    }[drafter]
    speculative = {"method": drafter, "num_speculative_tokens": 2, **given}
    draws = 1500
    with running(
        model, speculative=speculative, draft=tiny_model(1) if drafter == "draft_model" else None,
        max_num_seqs=500, num_pages=2000,
    ) as engine:  # fmt: skip
        (answers,) = complete(engine, [PROMPT], Sampling(max_tokens=3, n=draws, seed=1, ignore_eos=True))
    assert engine.recorder.drafts.num_draft_tokens > 0
    for nth, law in ((0, first), (1, second)):
        counts = torch.bincount(torch.tensor([a.token_ids[nth] for a in answers]), minlength=len(law))
        likely = law * draws >= 5
        seen = torch.cat((counts[likely], counts[~likely].sum().unsqueeze(0)))
        probs = torch.cat((law[likely], law[~likely].sum().unsqueeze(0)))
        assert p_value(seen, probs) > 1e-4
