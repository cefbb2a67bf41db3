"""Host time that asynchronous scheduling does not hide: fitted on one real run, checked on another.

Three named terms: device idle before every step, more of it before a step with a prompt chunk (it runs outside full
CUDA graphs), and more for every sequence of a step. The fit is the least-squares one of the relative errors of the
runs' figures, no term below 0. Fitted terms are reported; the shipped profiles leave all at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibration.compare import Comparison
from calibration.observed import Case
from calibration.validate import Repricer, compare_case
from costmodel.pricer import StepPricer
from costmodel.prices import Repriced, Step
from sim.record import Floats

_STEPS_S = (2e-4, 1e-3, 5e-6)
"""Finite differences of the three terms, and first steps of the search."""

_SEARCHES = 60
"""Most replays of the first search; each further one has half as many."""

_RESTARTS = (4.0, -4.0, 1.0, -1.0)
"""Sizes of the further searches, in `_STEPS_S`."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds that the device waits for the host: before every step, besides before one with prompt chunks, and
    besides for each sequence."""

    step_s: float = 0.0
    prefill_s: float = 0.0
    per_seq_s: float = 0.0

    def reprice(self, pricer: StepPricer) -> GappedPricer:
        """Prices with these gaps: a `Repricer` of `calibration.validate`."""
        return GappedPricer(pricer, self)


class GappedPricer(Repriced):
    """A step pricer with the device idle for a while before each step."""

    def __init__(self, base: StepPricer, gaps: Gaps) -> None:
        super().__init__(base)
        self._gaps = gaps

    def step_s(self, *step: *Step) -> float:
        """As `StepPricer.step_s`, gaps included."""
        _, _, prefills, num_decodes, *_ = step
        gaps = self._gaps
        gap_s = gaps.step_s + (num_decodes + len(prefills)) * gaps.per_seq_s
        return self.base.step_s(*step) + (gap_s + (gaps.prefill_s if prefills else 0.0))

    def decode_run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> Floats:
        """As `StepPricer.decode_run_s`, gaps included."""
        seconds = self.base.decode_run_s(num_decodes, context_sum, context_max, num_steps)
        return seconds + (self._gaps.step_s + num_decodes * self._gaps.per_seq_s)


def fit_gaps(*cases: Case, per_seq: bool = False, rounds: int = 4) -> Gaps:
    """The gaps, at least 0, with the smallest squared relative errors of the cases' figures.

    `per_seq` fits the time of a sequence too, which a run of even batches cannot tell from that of a step.

    Gauss-Newton, and a simplex search from the best of its steps: a schedule that tips over makes the figures jump, which
    slopes do not see.
    """
    from scipy.optimize import nnls

    terms = 3 if per_seq else 2
    at = best = np.zeros(terms)
    here = _errors(cases, at)
    least = float(here @ here)
    for _ in range(rounds):
        slopes = np.stack(
            [
                (_errors(cases, at + np.eye(terms)[i] * step) - here) / step
                for i, step in enumerate(_STEPS_S[:terms])
            ],
            axis=1,
        )
        at, _rest = nnls(slopes, slopes @ at - here)
        here = _errors(cases, at)
        if float(here @ here) < least:
            best, least = at, float(here @ here)
    return Gaps(*_searched(cases, best).tolist())


def _searched(cases: Sequence[Case], best: Floats) -> Floats:
    """The gaps that simplex searches end at: one from `best` with steps of `_STEPS_S` along each term, then others from
    where it ended with larger and smaller ones across them, for the errors have many small dips."""
    from scipy.optimize import minimize

    def squares(in_steps: Floats) -> float:
        errors = _errors(cases, np.maximum(in_steps, 0.0) * steps)
        return float(errors @ errors)

    steps = np.asarray(_STEPS_S[: len(best)])
    at, least = best / steps, np.inf
    across = np.where(np.arange(len(best)) % 2, -1.0, 1.0)
    for size, most in ((np.ones(len(best)), _SEARCHES), *((s * across, _SEARCHES // 2) for s in _RESTARTS)):
        corners = np.vstack([at, at + np.diag(size)])
        options: Any = {"initial_simplex": corners, "maxfev": most, "xatol": 0.02, "fatol": 1e-9}
        found = minimize(squares, at, method="Nelder-Mead", options=options)
        if found.fun < least:
            at, least = found.x, float(found.fun)
    return np.asarray(np.maximum(at, 0.0) * steps)


def with_gaps(case: Case, gaps: Gaps) -> Comparison:
    """The comparison of a case under given gaps."""
    reprice: Repricer = gaps.reprice
    return compare_case(case, reprice=reprice)


def _errors(cases: Sequence[Case], gaps_s: Floats) -> Floats:
    gaps = Gaps(*gaps_s.tolist())
    return np.array([f.error for case in cases for f in with_gaps(case, gaps).counted()])
