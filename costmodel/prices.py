"""The questions that whoever prices steps answers, once for all: `Prices`, and `Repriced` to change some of the answers.

`costmodel.pricer.StepPricer` answers them from a device's kernels; others scale, delay or replay those answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

Step = tuple[int, int, Sequence[tuple[int, int]], int, int, int]
"""The arguments of `Prices.step_s`, in order."""


class Prices(Protocol):
    """What a step costs, in seconds."""

    def step_s(
        self,
        num_tokens: int,
        num_sampled: int,
        prefills: Sequence[tuple[int, int]],
        num_decodes: int,
        decode_context_sum: int,
        decode_context_max: int,
        /,
    ) -> float:
        """Device time of one step of `num_tokens` tokens, `num_sampled` rows of which go through the LM head.

        `prefills` are (chunk tokens, context tokens before the chunk); contexts of the `num_decodes` decoding sequences
        include the current token.
        """

    def decode_run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int, /) -> Floats:
        """Device times of `num_steps` decode steps in which every context grows by one token a step."""

    def host_s(self, num_seqs: int, num_tokens: int, /) -> float:
        """Host work that a step needs."""

    def move_s(self, num_pages: int, /) -> float:
        """Time to copy KV pages between device and host; asked only of deployments that swap."""


class StagedPrices(Prices, Protocol):
    """Prices of a model whose layers lie on the stages of a pipeline."""

    def stage_s(self, *step: *Step) -> list[float]:
        """Device time of one step on each stage."""

    def transfer_s(self, num_tokens: int, /) -> float:
        """Time to hand a step's activations to the next stage."""


class LockstepPrices(Prices, Protocol):
    """Prices of data-parallel ranks that share their experts."""

    def lockstep_s(self, steps: Sequence[Step | None], /) -> list[float]:
        """Device time of each rank's step where they take these together; None is a rank with nothing to do."""


class Repriced:
    """Prices that differ from those of `base` in what a subclass overrides; everything else is asked of `base`."""

    def __init__(self, base: Prices) -> None:
        self.base = base

    def step_s(self, *step: *Step) -> float:
        """See `Prices`."""
        return self.base.step_s(*step)

    def decode_run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> Floats:
        """See `Prices`."""
        return self.base.decode_run_s(num_decodes, context_sum, context_max, num_steps)

    def host_s(self, num_seqs: int, num_tokens: int) -> float:
        """See `Prices`."""
        return self.base.host_s(num_seqs, num_tokens)

    def move_s(self, num_pages: int) -> float:
        """See `Prices`."""
        return self.base.move_s(num_pages)


def steps_of_run(num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> list[Step]:
    """The single steps of a run of decodes."""
    return [
        (num_decodes, num_decodes, (), num_decodes, context_sum + j * num_decodes, context_max + j)
        for j in range(num_steps)
    ]
