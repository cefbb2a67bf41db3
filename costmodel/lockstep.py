"""Prices of steps that data-parallel replicas take together because they share their experts.

Attention, dense layers and sampler of a rank have its own tokens; experts and the exchange around them have the tokens
of all ranks. Every layer waits for the rank that reaches it last, so that a step of the group lasts as long as the
slowest rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from costmodel.model import ModelShape
from costmodel.pricer import StepPricer
from costmodel.prices import Step
from costmodel.profile import DeviceProfile
from serving.errors import UsageError

UNVALIDATED = (
    "experts shared among data-parallel replicas are validated by one published run only: "
    "the exchange is that of collectives measured alone, and steps wait for the slowest rank"
)


class LockstepPricer(StepPricer):
    """Prices of the ranks of a group of `data_parallel_size`; options as those of `StepPricer`.

    `step_s` is a step in which every rank does the same.
    """

    def __init__(self, model: ModelShape, profile: DeviceProfile, **options: Any) -> None:
        super().__init__(model, profile, **options)
        ranks = self.tensor_parallel_size * self.data_parallel_size
        if not options.get("enable_expert_parallel") and model.intermediate_size % ranks:
            raise UsageError(
                f"--data-parallel-size {self.data_parallel_size}: experts of width {model.intermediate_size} do not "
                f"divide among {ranks} ranks; choose another size or --enable-expert-parallel"
            )
        self._edge = self._graphs[-1] if self._graphs else 0
        self._shared: list[float] = []

    def lockstep_s(self, steps: Sequence[Step | None]) -> list[float]:
        """Device seconds of each rank's step; None is a rank with nothing to do, which computes a single token."""
        return [self.step_s(*step) + more_s for step, more_s in self.in_lockstep(steps)]

    def in_lockstep(self, steps: Sequence[Step | None]) -> list[tuple[Step, float]]:
        """For each rank the step it takes, and what that takes longer than if all ranks had as many tokens, in seconds.

        While no rank has more tokens than the largest CUDA graph all are padded to the same, otherwise none uses a graph,
        as vLLM does it. What ranks do together is then that of the mean.
        """
        tokens = [1 if step is None else step[0] for step in steps]
        most, mean = max(tokens), -(-sum(tokens) // len(tokens))
        padded = most <= self._edge
        own = [
            (most if padded else t, *(step[1:] if step else _NOTHING))
            for t, step in zip(tokens, steps, strict=True)
        ]
        if padded:
            return [(step, 0.0) for step in own]
        return [(step, self._more_s(step[0], mean)) for step in own]

    def _more_s(self, tokens: int, mean: int) -> float:
        """Of a rank with so many tokens where ranks have `mean`; the host cannot launch faster than it can."""
        if tokens == mean:
            return 0.0
        layers, most = self._linear_layers, max(tokens, mean)
        if tokens >= len(self._linear):
            self._grow_linear(tokens)
        if most >= len(self._shared):
            self._shared = self._by_tokens(most, layers.shared_seconds, layers.shared_seconds)
        alike_s = self._linear[tokens]
        return max(alike_s + (self._shared[mean] - self._shared[tokens]), layers.launches_s) - alike_s

    def extrapolations(
        self, max_context: int | None = None, max_batch: int | None = None, max_tokens: int | None = None
    ) -> list[str]:
        """What lies outside the measured hull, one line each, and what no measurement stands behind."""
        return [*super().extrapolations(max_context, max_batch, max_tokens), UNVALIDATED]


_NOTHING = (0, (), 0, 0, 0)
