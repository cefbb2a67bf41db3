"""Which drafts the target accepts, in a twin that has no text: a chance per draft token, or what a real run recorded.

Every token of every request has one random number, whoever runs beside it: draft token j of a verification is accepted
when all before it were and the number of its position lies below the acceptance. The same seed gives the same answers
under every schedule, and two deployments under one seed meet the same luck.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from serving.errors import UsageError
from sim.acceptance_presets import PRESETS, preset
from sim.record import Floats, Ints

_FLAG = '--speculative-config: "acceptance"'
_FOUND, _ACCEPTED, _RATE = 1, 2, 3
"""Streams of random numbers."""


class Acceptance(Protocol):
    """Asked once per step for all sequences that verify or draft; `requests` [n] are their numbers."""

    def accepted(self, requests: Ints, positions: Ints, drafts: Ints) -> Ints:
        """How many of `drafts` [n] stand; `positions` [n] counts the answer's tokens before them."""

    def drafted(self, requests: Ints, positions: Ints, most: Ints) -> Ints:
        """How many of at most `most` [n] tokens the drafter finds for the next step."""


def uniforms(seed: int, stream: int, requests: Ints, positions: Ints) -> Floats:
    """A number in [0, 1) for each request and position: SplitMix64 of the four."""
    x = requests.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
    x = _mixed(x + np.uint64((seed * 0xD1342543DE82EF95 + stream * 0xAF251AF3B0F025B5) & (2**64 - 1)))
    return np.asarray((_mixed(x) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Rates:
    """Acceptance `rates[j]` of draft token j given that all before it stood; `draft_rate` of lookups find a draft."""

    def __init__(self, rates: Sequence[float], seed: int, draft_rate: float = 1.0) -> None:
        self._rates = np.array(rates, np.float64)
        self._seed = seed
        self._draft_rate = draft_rate

    def longer(self, count: int) -> Rates:
        """For drafts of at least `count` tokens: the last position's rate holds for those beyond it."""
        rates = self._rates.tolist()
        return Rates([*rates, *rates[-1:] * (count - len(rates))], self._seed, self._draft_rate)

    def accepted(self, requests: Ints, positions: Ints, drafts: Ints) -> Ints:
        """See `Acceptance`."""
        return _accepted(self._seed, self._rates[None, :], requests, positions, drafts)

    def drafted(self, requests: Ints, positions: Ints, most: Ints) -> Ints:
        """See `Acceptance`."""
        if self._draft_rate >= 1.0:
            return most
        found = uniforms(self._seed, _FOUND, requests, positions) < self._draft_rate
        return np.where(found, most, 0)


class BetaRates:
    """Each request has an acceptance of its own, drawn from Beta(a, b): predictable and creative ones side by side."""

    def __init__(self, a: float, b: float, seed: int) -> None:
        self._a, self._b, self._seed = a, b, seed
        self._known: Floats = np.full(1024, np.nan)

    def rate(self, requests: Ints) -> Floats:
        """The acceptance of requests, [n]."""
        most = int(requests.max(initial=0))
        if most >= len(self._known):
            self._known = np.concatenate((self._known, np.full(most + 1, np.nan)))
        rates = self._known[requests]
        if np.isnan(rates).any():
            from scipy.special import betaincinv

            rates = betaincinv(
                self._a, self._b, uniforms(self._seed, _RATE, requests, np.zeros_like(requests))
            )
            self._known[requests] = rates
        return rates

    def accepted(self, requests: Ints, positions: Ints, drafts: Ints) -> Ints:
        """See `Acceptance`."""
        return _accepted(self._seed, self.rate(requests)[:, None], requests, positions, drafts)

    def drafted(self, requests: Ints, positions: Ints, most: Ints) -> Ints:
        """See `Acceptance`."""
        return most


class Replayed:
    """Verifications as they were recorded: `outcomes[i]` are (drafted, accepted) of answer i, in order.

    Request n repeats answer n, beginning again where there are more requests or more steps than recorded.
    """

    def __init__(self, outcomes: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._outcomes = [list(answer) for answer in outcomes]
        self._next: dict[int, int] = {}

    def accepted(self, requests: Ints, positions: Ints, drafts: Ints) -> Ints:
        """See `Acceptance`."""
        out = np.zeros_like(drafts)
        for i, (request, most) in enumerate(zip(requests.tolist(), drafts.tolist(), strict=True)):
            if most:
                _, accepted = self._peek(request)
                self._next[request] = self._next.get(request, 0) + 1
                out[i] = min(accepted, most)
        return out

    def drafted(self, requests: Ints, positions: Ints, most: Ints) -> Ints:
        """See `Acceptance`. A recorded step without a draft is passed over when it has had its turn."""
        out = np.zeros_like(most)
        for i, request in enumerate(requests.tolist()):
            drafted, _ = self._peek(request)
            if not drafted:
                self._next[request] = self._next.get(request, 0) + 1
            out[i] = drafted
        return np.minimum(out, most)

    def _peek(self, request: int) -> tuple[int, int]:
        answer = self._outcomes[request % len(self._outcomes)]
        return answer[self._next.get(request, 0) % len(answer)]


def _accepted(seed: int, rates: Floats, requests: Ints, positions: Ints, drafts: Ints) -> Ints:
    most = int(drafts.max(initial=0))
    nth = np.arange(most)
    u = uniforms(seed, _ACCEPTED, requests[:, None], positions[:, None] + nth)
    stands = (u < rates[:, :most]) & (nth < drafts[:, None])
    return np.asarray(np.logical_and.accumulate(stands, axis=1).sum(axis=1), np.int64)


def make_acceptance(given: Any, num_tokens: int, seed: int = 0) -> Acceptance:
    """What `"acceptance"` says: a rate, a list of them, the name of a preset, or an object.

    Objects are {"beta": [a, b]}, {"replay": FILE} and {"rates": [...], "draft_rate": r}. Raises `UsageError`.
    """
    if given is None:
        raise UsageError(
            f'{_FLAG} is missing: a twin has no text to draft; say 0.7, [0.8, 0.6], {{"beta": [4, 2]}}, '
            f'{{"replay": FILE}} or a preset ({", ".join(PRESETS)})'
        )
    if isinstance(given, str):
        found = preset(given)
        return Rates(_enough(found.rates, num_tokens, given), seed, found.draft_rate)
    if isinstance(given, Mapping):
        return _from_object(given, num_tokens, seed)
    if isinstance(given, list | tuple):
        return Rates(_enough([_rate(each) for each in given], num_tokens, "the list"), seed)
    return Rates([_rate(given)] * num_tokens, seed)


def _from_object(given: Mapping[str, Any], num_tokens: int, seed: int) -> Acceptance:
    keys = set(given)
    if keys == {"replay"}:
        return Replayed(read_outcomes(Path(str(given["replay"]))))
    if keys == {"beta"}:
        pair = given["beta"]
        if (
            not isinstance(pair, list | tuple)
            or len(pair) != 2
            or not all(_is_number(x) and x > 0 for x in pair)
        ):
            raise UsageError(f'{_FLAG}: "beta" takes two positive numbers such as [4, 2], got {pair!r}')
        return BetaRates(float(pair[0]), float(pair[1]), seed)
    if "rates" in keys and keys <= {"rates", "draft_rate"}:
        rates = given["rates"]
        each = [_rate(r) for r in (rates if isinstance(rates, list | tuple) else [rates] * num_tokens)]
        return Rates(_enough(each, num_tokens, "rates"), seed, _rate(given.get("draft_rate", 1.0)))
    raise UsageError(
        f'{_FLAG}: an object has either "beta", "replay", or "rates" with "draft_rate", got {sorted(keys)}'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rate(value: Any) -> float:
    if not _is_number(value) or not 0.0 <= value <= 1.0:
        raise UsageError(f"{_FLAG}: a rate is a number from 0 to 1, got {value!r}")
    return float(value)


def _enough(rates: Sequence[float], num_tokens: int, what: str) -> Sequence[float]:
    if len(rates) < num_tokens:
        raise UsageError(
            f"{_FLAG}: {what} has {len(rates)} positions and num_speculative_tokens is {num_tokens}; "
            f"lower it to {len(rates)} or say more rates"
        )
    return rates[:num_tokens]


def read_outcomes(path: Path) -> list[list[tuple[int, int]]]:
    """The outcomes in a file of `tokentwin measure-acceptance`. Raises `UsageError` when it cannot be read."""
    try:
        answers = json.loads(path.read_text(encoding="utf-8"))["outcomes"]
        outcomes = [[(int(drafted), int(accepted)) for drafted, accepted in answer] for answer in answers]
    except OSError as error:
        raise UsageError(f"{_FLAG}: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{_FLAG}: {path} is not a file of tokentwin measure-acceptance: it has no outcomes"
        ) from None
    outcomes = [answer for answer in outcomes if answer]
    if not outcomes or any(not 0 <= a <= d for answer in outcomes for d, a in answer):
        raise UsageError(f"{_FLAG}: {path} has no outcomes, or accepts more than was drafted")
    return outcomes
