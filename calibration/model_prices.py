"""A deployment's price list for schedules that are not its own, and the prices of a world made of several runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from calibration.recorded import RecordedPrices
from costmodel.pipeline import PipelinePricer
from costmodel.pricer import StepPricer
from costmodel.speculation import seqs_captured
from costmodel.swap import host_link_bytes_per_s
from serving.config import SchedulerConfig
from serving.policies import CHUNKING
from serving.speculative_config import SpeculativeConfig
from sim.deployment import Built
from sim.pipeline_build import make_pricer
from sim.record import Floats
from sim.speculation import Speculation, plan_speculation

KERNEL_FIELDS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "kv_cache_recent_tokens",
    "enforce_eager",
    "collective_overlap",
    "enable_expert_parallel",
    "expert_load_imbalance",
)
"""What a deployment says that the device time of a step depends on, beside its model, device, drafter and limits."""


class ModelPrices:
    """Prices of one pool's kernels under any limits: which CUDA graphs there are belongs to the limits."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self._pricers: dict[tuple[int, int, int], StepPricer] = {}
        self._drafters: dict[tuple[int, int, int], Speculation] = {}

    def facts(self, *, drafting: bool = True) -> tuple[object, ...]:
        """Equal for price lists that are alike, in draft passes too or in all but them."""
        d, own = self.built.deployment, self.built.speculation
        passes = None
        if drafting and own is not None and own.draft is not None:
            passes = (own.config.method, own.config.model, own.config.num_layers)
        return (self.built.model, self.built.profile, passes, *(getattr(d, name) for name in KERNEL_FIELDS))

    def host_facts(self, *, drafting: bool = True) -> tuple[object, ...]:
        """The same of the host's work."""
        return (self.built.profile.host, drafting and self.looks_up)

    def link_facts(self) -> tuple[object, ...]:
        """The same of hand-overs between stages."""
        p, d = self.built.profile, self.built.deployment
        return (
            d.pipeline_parallel_size > 1,
            p.facts.link_bytes_per_s,
            p.all_reduce,
            d.tensor_parallel_size,
            self.built.model.hidden_size,
        )

    @property
    def looks_up(self) -> bool:
        """Whether the host makes drafts."""
        own = self.built.speculation
        return own is not None and own.draft is None

    def pricer(self, limits: SchedulerConfig, policy: str) -> StepPricer:
        """The price list under these limits."""
        tokens, seqs, drafts = _sizes(limits)
        if policy not in CHUNKING:
            tokens = max(tokens, limits.max_model_len)
        key = (tokens, seqs, drafts)
        if (known := self._pricers.get(key)) is None:
            b = self.built
            known = make_pricer(
                b.deployment,
                b.model,
                b.profile,
                max_num_batched_tokens=tokens,
                max_num_seqs=seqs_captured(seqs, drafts) if drafts else seqs,
            )
            self._pricers[key] = known
        if limits.swap_pages or limits.host_cache_pages:
            page_bytes = limits.page_tokens * self.built.memory.kv_bytes_per_token
            known.page_move_s = page_bytes / host_link_bytes_per_s(self.built.profile.facts)
        return known

    def speculation(self, limits: SchedulerConfig) -> Speculation:
        """Verifications and draft passes under these limits; passes are free where this deployment makes none."""
        key = tokens, seqs, drafts = _sizes(limits)
        if (known := self._drafters.get(key)) is None:
            b, own = self.built, self.built.speculation
            if own is None:
                queries = b.model.num_heads // b.model.num_kv_heads
                known = Speculation(SpeculativeConfig("ngram", drafts), queries, None)
            else:
                config = replace(
                    own.config,
                    num_speculative_tokens=drafts,
                    num_speculative_tokens_per_batch_size=(),
                    acceptance=0.0,
                )
                known, _ = plan_speculation(
                    config,
                    b.model,
                    b.profile,
                    b.memory,
                    tensor_parallel_size=b.deployment.tensor_parallel_size,
                    dtype=b.deployment.dtype,
                    quantization=b.deployment.quantization,
                    kv_cache_dtype=b.deployment.kv_cache_dtype,
                    max_num_batched_tokens=tokens,
                    max_num_seqs=seqs,
                    cuda_graphs=not b.deployment.enforce_eager,
                )
            self._drafters[key] = known
        return known


def _sizes(limits: SchedulerConfig) -> tuple[int, int, int]:
    return limits.max_num_batched_tokens, limits.max_num_seqs, limits.num_speculative_tokens


class WorldPrices:
    """Device times of one run, host times of another, hand-overs of a third, in a pipeline of `depth` stages.

    Kernels and hand-overs of as many stages keep their times; others' are added up and divided evenly among the stages,
    and follow one another where there is but one.
    """

    step_s: Callable[..., float]
    decode_run_s: Callable[..., Floats]

    def __init__(
        self,
        kernel: StepPricer | RecordedPrices,
        host: StepPricer | RecordedPrices,
        link: StepPricer | None,
        depth: int,
    ) -> None:
        self.host_s, self.move_s = host.host_s, kernel.move_s
        self._kernel, self._depth = kernel, depth
        self._stages = kernel.num_stages if isinstance(kernel, PipelinePricer | RecordedPrices) else 1
        self._link = link if isinstance(link, PipelinePricer) else None
        if self._stages == 1 and (depth > 1 or self._link is None):
            self.step_s, self.decode_run_s = kernel.step_s, kernel.decode_run_s
        else:
            self.step_s, self.decode_run_s = self._whole_s, self._run_s

    def stage_s(self, *step: Any) -> list[float]:
        """As `PipelinePricer.stage_s`."""
        kernel = self._kernel
        if self._stages == self._depth:
            assert isinstance(kernel, PipelinePricer | RecordedPrices)
            return kernel.stage_s(*step)
        return [self._kernels_s(*step) / self._depth] * self._depth

    def transfer_s(self, num_tokens: int) -> float:
        """As `PipelinePricer.transfer_s`; nothing where the run of the hand-overs had none."""
        if (link := self._link) is None:
            return 0.0
        hops, own = link.num_stages - 1, max(self._depth - 1, 1)
        each_s = link.transfer_s(num_tokens)
        return each_s if hops == own else each_s * hops / own

    def _kernels_s(self, *step: Any) -> float:
        kernel = self._kernel
        if self._stages == 1:
            return kernel.step_s(*step)
        assert isinstance(kernel, PipelinePricer | RecordedPrices)
        return sum(kernel.stage_s(*step))

    def _whole_s(self, *step: Any) -> float:
        """A step that passes all there is by itself."""
        return self._kernels_s(*step) + self.transfer_s(step[0])

    def _run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> Floats:
        n = num_decodes
        steps: Sequence[tuple[Any, ...]] = [
            (n, n, (), n, context_sum + j * n, context_max + j) for j in range(num_steps)
        ]
        return np.array([self._whole_s(*step) for step in steps])
