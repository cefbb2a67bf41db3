"""Drafts of recorded runs in another world: one run's verifications and draft passes, another's luck.

Which drafts stand is a property of request and position, so that a run's luck can be met by another schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from calibration.recorded import Key, RecordedPrices
from costmodel.prices import Prices
from costmodel.speculation import lookup_s
from serving.plan import StepPlan
from sim.acceptance import Acceptance, Rates, make_acceptance, uniforms
from sim.record import Ints, RunRecord
from sim.speculation import Speculation, Speculator

_REJECTED, _STOOD, _UNKNOWN = 0, 1, 2
_GUESS, _FOUND = 11, 12
"""Streams of random numbers."""


@dataclass(frozen=True, slots=True)
class Drafting(Speculation):
    """In place of a deployment's own: verifications and draft passes as priced by its fields, the rest from elsewhere."""

    acceptance: Callable[[], Acceptance] = field(kw_only=True)
    lookups: bool = field(default=False, kw_only=True)
    """Whether the host looks drafts up."""
    recorded: RecordedPrices | None = field(default=None, kw_only=True)
    """Where steps took what was recorded of them."""

    def perturbed(self, pricer: object) -> Speculation:
        """Itself."""
        return self

    def speculator(self) -> Speculator:
        """For one replica."""
        return _Drafter(self, self.acceptance())


@dataclass(slots=True)
class _Drafter(Speculator):
    def step_s(self, pricer: Prices, plan: StepPlan) -> float:
        drafting = self.speculation
        assert isinstance(drafting, Drafting)
        if (recorded := drafting.recorded) is None:
            return Speculator.step_s(self, pricer, plan)
        key = _key(plan)
        if (found := recorded.found(key)) is not None:
            return found
        return (
            recorded.fitted(key) if recorded.model is None else Speculator.step_s(self, recorded.model, plan)
        )

    def host_s(self, plan: StepPlan) -> float:
        drafting = self.speculation
        assert isinstance(drafting, Drafting)
        if not drafting.lookups or plan.num_to_draft is None:
            return 0.0
        looking = plan.num_to_draft > 0
        context = (plan.context + plan.num_new)[looking]
        return lookup_s(len(context), int(context.sum()))


def _key(plan: StepPlan) -> Key:
    """What a step with drafts computes, as it is recorded."""
    chunks = [(chunk.num_tokens, chunk.context) for chunk in plan.chunks]
    area = sum(count * before + count * (count + 1) // 2 for count, before in chunks)
    tokens = sum(count for count, _ in chunks)
    return (plan.num_tokens, tokens, len(chunks), plan.num_decodes, plan.decode_context_sum, float(area))


def stated_acceptance(given: object, num_tokens: int, most: int, seed: int) -> Acceptance:
    """What a deployment says of drafts of `num_tokens`, for drafts of up to `most`: its last position goes on."""
    found = make_acceptance(given, num_tokens, seed)
    return found.longer(most) if isinstance(found, Rates) else found


class RecordedAcceptance:
    """What stood in a run that says no more of it than the tokens that each step gave.

    All tokens of a step but its last were drafts that stood. What came after a whole draft had stood, or at a place
    where the run drafted nothing, is drawn with the run's rates: `num_tokens` is the most that it drafted.
    """

    def __init__(self, record: RunRecord, num_tokens: int) -> None:
        drafts = record.drafts
        tried = drafts.num_drafts if drafts is not None else 0
        self._rate = drafts.num_accepted_tokens / drafts.num_draft_tokens if drafts and tried else 0.0
        self._answers: dict[int, Ints] = {}
        decodes = stood = 0
        for row, request in enumerate(record.requests.request_id.tolist()):
            given = _tokens_by_step(record, row)
            bits = np.full(int(given.sum()), _STOOD, np.int64)
            last = np.cumsum(given) - 1
            bits[last] = np.where(given > num_tokens, _UNKNOWN, _REJECTED)
            self._answers[request] = bits
            decodes += max(len(given) - 1, 0)
            stood += int((given > 1).sum())
        left = decodes - stood
        self._found = min(max((tried - stood) / left, 0.0), 1.0) if left > 0 else 1.0
        """Share of steps with a draft among those in which none stood."""

    def accepted(self, requests: Ints, positions: Ints, drafts: Ints) -> Ints:
        """See `sim.acceptance.Acceptance`."""
        out = np.zeros_like(drafts)
        most = int(drafts.max(initial=0))
        guesses = uniforms(0, _GUESS, requests[:, None], positions[:, None] + np.arange(most)) < self._rate
        for i, (request, position, count) in enumerate(
            zip(requests.tolist(), positions.tolist(), drafts.tolist(), strict=True)
        ):
            stands = guesses[i, :count].copy()
            known = self._answers.get(request, out[:0])[position : position + count]
            stands[: len(known)] = np.where(known == _UNKNOWN, stands[: len(known)], known == _STOOD)
            out[i] = int(np.logical_and.accumulate(stands).sum())
        return out

    def drafted(self, requests: Ints, positions: Ints, most: Ints) -> Ints:
        """See `sim.acceptance.Acceptance`."""
        if self._found >= 1.0:
            return most
        found = uniforms(0, _FOUND, requests, positions) < self._found
        for i, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
            known = self._answers.get(request)
            if known is not None and position < len(known) and known[position] == _STOOD:
                found[i] = True
        return np.where(found, most, 0)


def _tokens_by_step(record: RunRecord, row: int) -> Ints:
    """Tokens that each step gave a request, in order."""
    ranges = slice(int(record.tokens.offsets[row]), int(record.tokens.offsets[row + 1]))
    count, several = record.tokens.count[ranges], record.tokens.per_step
    each = np.ones(len(count), np.int64) if several is None else several[ranges]
    return np.repeat(each, count)
