"""Host time that asynchronous scheduling does not hide: fitted on one real run, checked on another.

Two named terms: `gap_step_s`, device idle before every step, and `gap_prefill_s`, more of it before a step with a
prompt chunk (it runs outside full CUDA graphs). The fit is the least-squares one of the relative errors of a run's
figures, neither term below 0. Fitted terms are reported; the shipped profiles leave both at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calibration.compare import Comparison
from calibration.observed import Case
from calibration.validate import Repricer, compare_case
from costmodel.pricer import StepPricer
from sim.record import Floats

_STEPS_S = (2e-4, 1e-3)
"""Finite differences of the two terms."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds that the device waits for the host: before every step, and besides before one with prompt chunks."""

    step_s: float = 0.0
    prefill_s: float = 0.0

    def reprice(self, pricer: StepPricer) -> GappedPricer:
        """Prices with these gaps: a `Repricer` of `calibration.validate`."""
        return GappedPricer(pricer, self)


class GappedPricer:
    """A step pricer with the device idle for a while before each step."""

    def __init__(self, pricer: StepPricer, gaps: Gaps) -> None:
        self._pricer, self._gaps = pricer, gaps

    def step_s(
        self,
        num_tokens: int,
        num_sampled: int,
        prefills: Sequence[tuple[int, int]],
        num_decodes: int,
        decode_context_sum: int,
        decode_context_max: int,
    ) -> float:
        """As `StepPricer.step_s`, gaps included."""
        seconds = self._pricer.step_s(
            num_tokens, num_sampled, prefills, num_decodes, decode_context_sum, decode_context_max
        )
        return seconds + self._gaps.step_s + (self._gaps.prefill_s if prefills else 0.0)

    def decode_run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> Floats:
        """As `StepPricer.decode_run_s`, gaps included."""
        return self._pricer.decode_run_s(num_decodes, context_sum, context_max, num_steps) + self._gaps.step_s

    def host_s(self, num_seqs: int, num_tokens: int) -> float:
        """As `StepPricer.host_s`."""
        return self._pricer.host_s(num_seqs, num_tokens)


def fit_gaps(case: Case, *, rounds: int = 4) -> Gaps:
    """The gaps, at least 0, with the smallest squared relative errors of the case's figures.

    Gauss-Newton; a schedule that tips over makes the figures jump, so the best of its steps is returned.
    """
    from scipy.optimize import nnls

    at = best = np.zeros(2)
    here = _errors(case, at)
    least = float(here @ here)
    for _ in range(rounds):
        slopes = np.stack(
            [(_errors(case, at + np.eye(2)[i] * step) - here) / step for i, step in enumerate(_STEPS_S)],
            axis=1,
        )
        at, _rest = nnls(slopes, slopes @ at - here)
        here = _errors(case, at)
        if float(here @ here) < least:
            best, least = at, float(here @ here)
    return Gaps(float(best[0]), float(best[1]))


def with_gaps(case: Case, gaps: Gaps) -> Comparison:
    """The comparison of a case under given gaps."""
    reprice: Repricer = gaps.reprice
    return compare_case(case, reprice=reprice)


def _errors(case: Case, gaps_s: Floats) -> Floats:
    found = with_gaps(case, Gaps(float(gaps_s[0]), float(gaps_s[1])))
    return np.array([f.error for f in found.counted()])
