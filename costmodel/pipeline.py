"""A model cut into the stages of a pipeline: who has which layers, what a step costs on each, and what a hand-over takes.

Not validated: no measurement of a pipeline was at hand. A stage is priced as a model of its layers; a hand-over is
priced from the datasheet's link.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from costmodel.formats import hardware
from costmodel.model import ModelShape
from costmodel.predict import Kernel
from costmodel.pricer import StepPricer
from costmodel.prices import Step, steps_of_run
from costmodel.profile import DeviceProfile
from serving.errors import UsageError

Floats = npt.NDArray[np.float64]

UNVALIDATED = (
    "pipeline parallelism is not validated against measurements: stages are priced as models of fewer layers, "
    "hand-overs from the datasheet's link"
)


def layers_per_stage(num_layers: int, num_stages: int) -> list[int]:
    """Layers of each stage as vLLM divides them: a remainder goes to the stages before the last, one each.

    Raises `UsageError` unless each stage has a layer.
    """
    if not 1 <= num_stages <= num_layers:
        raise UsageError(f"--pipeline-parallel-size must be in 1..{num_layers}, not {num_stages}")
    each, left = divmod(num_layers, num_stages)
    return [each + (num_stages - 1 - left <= stage < num_stages - 1) for stage in range(num_stages)]


class PipelinePricer(StepPricer):
    """Prices of steps that pass stages, each with `tensor_parallel_size` devices.

    `step_s` is a step's time on all stages together and their hand-overs, without waiting: what a lone request feels.
    """

    def __init__(
        self,
        model: ModelShape,
        profile: DeviceProfile,
        pipeline_parallel_size: int,
        make: Callable[[ModelShape, bool, bool], StepPricer],
        *,
        tensor_parallel_size: int = 1,
    ) -> None:
        """`make(model of a stage, it is the first, it is the last)` prices one stage."""
        layers = layers_per_stage(model.num_layers, pipeline_parallel_size)
        kinds = [(n, i == 0, i == len(layers) - 1) for i, n in enumerate(layers)]
        unique = list(dict.fromkeys(kinds))
        self.model, self.profile, self.tensor_parallel_size = model, profile, tensor_parallel_size
        self.kinds = [make(model.model_copy(update={"num_layers": n}), *ends) for n, *ends in unique]
        """Prices of stages that differ."""
        self.kind_of = [unique.index(kind) for kind in kinds]
        self.page_move_s = 0.0
        self._transfers_s: dict[int, float] = {}
        self._link = Kernel("all_reduce", profile.all_reduce, hardware(profile.facts))
        self._latency_s = self._link.coefficients["latency_s"] + self._link.coefficients["per_hop_s"]

    @property
    def num_stages(self) -> int:
        return len(self.kind_of)

    def stage_s(self, *step: *Step) -> list[float]:
        """Device seconds of one step on each stage; arguments as those of `StepPricer.step_s`."""
        seconds = [kind.step_s(*step) for kind in self.kinds]
        return [seconds[kind] for kind in self.kind_of]

    def transfer_s(self, num_tokens: int) -> float:
        """Seconds to hand a step over: hidden states and residual, 16 bit, over the link between two devices.

        Of tensor-parallel ranks each sends its share, which the receivers gather (half of what an all-reduce of the same
        bytes takes). A message takes at least what the shortest collective of two devices does.
        """
        if (known := self._transfers_s.get(num_tokens)) is not None:
            return known
        num_bytes = num_tokens * self.model.hidden_size * 2 * 2.0
        tp = self.tensor_parallel_size
        sent_s = self._latency_s + num_bytes / tp / self.profile.facts.link_bytes_per_s
        gathered_s = 0.5 * float(self._link.seconds((tp,), num_bytes)) if tp > 1 else 0.0
        self._transfers_s[num_tokens] = sent_s + gathered_s
        return sent_s + gathered_s

    def step_s(self, *step: *Step) -> float:
        """Device seconds from the first stage to the last, hand-overs included."""
        return sum(self.stage_s(*step)) + (self.num_stages - 1) * self.transfer_s(step[0])

    def decode_run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> Floats:
        """As `StepPricer.decode_run_s`, of steps one after the other."""
        steps = steps_of_run(num_decodes, context_sum, context_max, num_steps)
        return np.array([self.step_s(*step) for step in steps])

    def host_s(self, num_seqs: int, num_tokens: int) -> float:
        """As `StepPricer.host_s`."""
        return self.kinds[0].host_s(num_seqs, num_tokens)

    @property
    def peak_flops(self) -> float:
        """Dense FLOP/s of one device in the arithmetic of the linear layers."""
        return self.kinds[0].peak_flops

    def step_work(
        self,
        num_tokens: npt.ArrayLike,
        num_sampled: npt.ArrayLike,
        prefill_attention_area: npt.ArrayLike,
        prefill_context_sum: npt.ArrayLike,
        decode_context_sum: npt.ArrayLike,
    ) -> tuple[Floats, Floats]:
        """(FLOPs, HBM bytes) of steps on one device, in the mean over the stages."""
        columns = (num_tokens, num_sampled, prefill_attention_area, prefill_context_sum, decode_context_sum)
        done = []
        for stage, kind in enumerate(self.kind_of):
            sampled = num_sampled if stage == self.num_stages - 1 else np.zeros_like(num_sampled)
            done.append(self.kinds[kind].step_work(columns[0], sampled, *columns[2:]))
        flops, moved = (np.sum(parts, axis=0) / self.num_stages for parts in zip(*done, strict=True))
        return flops, moved

    def extrapolations(
        self, max_context: int | None = None, max_batch: int | None = None, max_tokens: int | None = None
    ) -> list[str]:
        """What lies outside the measured hull, one line each, and what no measurement stands behind."""
        found = [
            line for kind in self.kinds for line in kind.extrapolations(max_context, max_batch, max_tokens)
        ]
        return [*dict.fromkeys(found), UNVALIDATED]
