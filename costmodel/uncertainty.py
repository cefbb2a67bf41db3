"""How sure the prices are: the spread of each group of kernels, and prices as they might truly be.

A profile stores no covariance of its coefficients, so the uncertainty is one factor per group of kernels and number
format, common to all its shapes: lognormal with median 1, as wide as the fit's error. Which error depends on the shape:

- measured shapes: the error at measured rows and the spread of repeated measurements;
- other shapes: the held-out error (whole shapes left out), or the bare formula's where it is unknown;
- kernels without a fit: `UNFITTED_LOG_STD`.

A mean absolute error e of a normal variable means a standard deviation of e·sqrt(π/2).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from costmodel.formats import GEMM_FORMATS, attention_fit, gemm_format, hardware, kv_format
from costmodel.layers import elementwise_bytes
from costmodel.lockstep import LockstepPricer
from costmodel.model import ModelShape
from costmodel.pipeline import PipelinePricer
from costmodel.predict import Kernel
from costmodel.prices import Prices, Repriced, Step
from costmodel.profile import DeviceProfile, KernelFit

Floats = npt.NDArray[np.float64]
Group = Literal["engine", "linear", "prefill", "decode", "mixed", "host"]

UNFITTED_LOG_STD = 0.2
"""Of a kernel priced by datasheet and default efficiencies: such prices lie within about a third of fitted ones."""
ENGINE_LOG_STD = 0.032
"""Between kernels timed alone and the same kernels in an engine: clocks under load, library versions, gaps between
launches. That is how far apart several engines' timings of the same products on one kind of GPU are, and what mean TPOT
of real runs on three machines confirms (`calibration.engine_spread`)."""
HOST_LOG_STD = 0.25
"""Of the host's times, which no kernel table measures: CPUs, Python and engine versions differ by this much."""
_TOKENS = 64.0
"""Batch at which the shares of a layer's kernels are taken."""
_MAE_TO_STD = math.sqrt(math.pi / 2)


@dataclass(frozen=True, slots=True)
class Factors:
    """What the prices of each group are multiplied by."""

    engine: float = 1.0
    """All device time, besides the group's own factor."""
    linear: float = 1.0
    """Everything that depends on the number of tokens alone: GEMMs, norms, collectives, LM head, sampler."""
    prefill: float = 1.0
    decode: float = 1.0
    mixed: float = 1.0
    """Decodes that share a step with a prefill."""
    host: float = 1.0


@dataclass(frozen=True, slots=True)
class GroupSpread:
    """One uncertain factor: median 1, standard deviation `log_std` of its logarithm."""

    group: Group
    key: str
    """Names the fit behind it: deployments that are priced by the same fit share its error."""
    log_std: float
    reason: str


@dataclass(frozen=True, slots=True)
class Spread:
    """All that is uncertain about a deployment's prices."""

    groups: tuple[GroupSpread, ...]
    step_log_std: float
    """Spread of one step's device time from run to run, in log units."""

    def scale(self) -> dict[str, float]:
        """`log_std` by key."""
        return {group.key: group.log_std for group in self.groups}

    def factors(self, normals: Mapping[str, float]) -> Factors:
        """Factors for standard normal numbers by key; a missing key leaves its groups alone."""
        by_group = {g.group: math.exp(g.log_std * normals.get(g.key, 0.0)) for g in self.groups}
        return Factors(**by_group)

    def draw(self, seed: int, index: int) -> dict[str, float]:
        """Standard normal numbers by key; the same for every deployment that has the key."""
        return {key: _normal(seed, index, key) for key in self.scale()}


def _normal(seed: int, index: int, key: str) -> float:
    digest = hashlib.sha256(key.encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8)]
    return float(np.random.default_rng(np.random.SeedSequence((seed, index, *words))).standard_normal())


class PerturbedPricer(Repriced):
    """Prices whose groups are scaled by `factors`; a step alone and within a run still costs the same float.

    Page moves and a pipeline's hand-overs are figures of the datasheet and no group's.
    """

    def __init__(self, base: Prices, factors: Factors) -> None:
        super().__init__(base)
        self.factors = factors

    def step_s(self, *step: *Step) -> float:
        """As `StepPricer.step_s`. A group's part is what the price loses without it."""
        num_tokens, num_sampled, prefills, num_decodes, *_ = step
        base, by = self.base.step_s, self.factors
        total = base(*step)
        linear = base(num_tokens, num_sampled, (), 0, 0, 0)
        if not prefills:
            return by.engine * (by.linear * linear + by.decode * (total - linear))
        without = base(num_tokens, num_sampled, prefills, 0, 0, 0) if num_decodes else total
        attention = by.prefill * (without - linear) + by.mixed * (total - without)
        return by.engine * (by.linear * linear + attention)

    def decode_run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> Floats:
        """As `StepPricer.decode_run_s`."""
        total = self.base.decode_run_s(num_decodes, context_sum, context_max, num_steps)
        linear = self.base.step_s(num_decodes, num_decodes, (), 0, 0, 0)
        by = self.factors
        return np.asarray(by.engine * (by.linear * linear + by.decode * (total - linear)))

    def stage_s(self, *step: *Step) -> list[float]:
        """As `PipelinePricer.stage_s`."""
        assert isinstance(self.base, PipelinePricer)
        kinds = [PerturbedPricer(kind, self.factors).step_s(*step) for kind in self.base.kinds]
        return [kinds[kind] for kind in self.base.kind_of]

    def transfer_s(self, num_tokens: int) -> float:
        """As `PipelinePricer.transfer_s`."""
        assert isinstance(self.base, PipelinePricer)
        return self.base.transfer_s(num_tokens)

    def lockstep_s(self, steps: Sequence[Step | None]) -> list[float]:
        """As `LockstepPricer.lockstep_s`."""
        assert isinstance(self.base, LockstepPricer)
        scale = self.factors.engine * self.factors.linear
        return [self.step_s(*step) + scale * more_s for step, more_s in self.base.in_lockstep(steps)]

    def host_s(self, num_seqs: int, num_tokens: int) -> float:
        """As `StepPricer.host_s`."""
        return self.factors.host * self.base.host_s(num_seqs, num_tokens)


def spread_of(
    model: ModelShape,
    profile: DeviceProfile,
    *,
    tensor_parallel_size: int = 1,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> Spread:
    """The uncertainty of a deployment's prices. Raises `UsageError` for unknown formats."""
    fmt, kv_name = gemm_format(dtype, quantization).name, kv_format(kv_cache_dtype).name
    linear, noise, reason = _linear(model, profile, tensor_parallel_size, fmt)
    version = profile.products if profile.versioned_gemm(fmt) else ""
    groups = [
        GroupSpread("engine", f"{profile.name}/engine", ENGINE_LOG_STD, "kernels in an engine, not alone"),
        GroupSpread("linear", "/".join(filter(None, (profile.name, "linear", fmt, version))), linear, reason),
    ]
    shape = (
        float(model.heads_per_rank(tensor_parallel_size)),
        float(model.kv_heads_per_rank(tensor_parallel_size)),
    )
    hw = hardware(profile.facts, head_dim=model.head_dim)
    decode = _attention(profile.decode, kv_name)
    for group, fit in (
        ("prefill", _attention(profile.prefill, kv_name)),
        ("decode", decode),
        ("mixed", _attention(profile.decode_mixed, kv_name) or decode),
    ):
        kind: Group = "decode" if fit is decode else group  # type: ignore[assignment]
        measured = fit is not None and Kernel(fit.kind, fit, hw).measured(shape) and _same_head(fit, model)
        log_std, why = _error(fit, measured)
        groups.append(
            GroupSpread(group, f"{profile.name}/{kind}/{kv_name}", log_std, f"{kind}/{kv_name}: {why}")  # type: ignore[arg-type]
        )
    groups.append(GroupSpread("host", "host", HOST_LOG_STD, "host times are not measured by kernel tables"))
    attention_noise = decode.noise_log_std if decode is not None else noise
    return Spread(tuple(groups), (noise + attention_noise) / 2)


def _same_head(fit: KernelFit, model: ModelShape) -> bool:
    """Whether the fit is of this head size: 128 unless it says otherwise."""
    return fit.hull.get("head_dim", (128.0, 128.0))[0] == model.head_dim


def _attention(fits: Mapping[str, KernelFit], kv_name: str) -> KernelFit | None:
    """The fit of this cache format, or another format's."""
    return attention_fit(fits, kv_name)[0]


def _error(fit: KernelFit | None, measured: bool) -> tuple[float, str]:
    """Standard deviation of the log of a price over the truth, and what it is taken from."""
    if fit is None or not fit.fitted:
        return UNFITTED_LOG_STD, "not measured on this device"
    errors = fit.errors
    if measured and errors.measured is not None:
        return math.hypot(errors.measured * _MAE_TO_STD, fit.noise_log_std), "measured shape"
    if errors.held_out is not None:
        return errors.held_out * _MAE_TO_STD, f"shape not measured, held-out error {errors.held_out:.1%}"
    if errors.train is not None:
        return errors.train * _MAE_TO_STD, f"shape not measured, formula's error {errors.train:.1%}"
    return UNFITTED_LOG_STD, "fit without errors"


def _linear(model: ModelShape, profile: DeviceProfile, tp: int, fmt: str) -> tuple[float, float, str]:
    """Spread of the sum of all token-wise kernels, spread of repeats, and a sentence.

    Kernels of different kinds err independently. Within GEMMs, errors of unmeasured shapes are common to them (one
    formula), repeats of measured ones are not.
    """
    tokens, layers = np.asarray(_TOKENS), float(model.num_layers)
    hw, hw16 = hardware(profile.facts, GEMM_FORMATS[fmt]), hardware(profile.facts)
    fit = profile.gemm.get(fmt)
    if fit is None and "bfloat16" in profile.gemm:
        fit = profile.gemm["bfloat16"].model_copy(update={"residual": None})
    gemm, gemm16 = Kernel("gemm", fit, hw), Kernel("gemm", profile.gemm.get("bfloat16"), hw16)
    per_layer = [*model.attention_gemms(tp), *(() if model.num_experts else model.mlp_gemms(tp))]
    products = [(gemm, g, layers) for g in per_layer] + [(gemm16, model.lm_head_gemm(tp), 1.0)]
    total, common, noise, unmeasured = 0.0, 0.0, 0.0, 0
    variance = 0.0
    for kernel, product, times in products:
        seconds = float(kernel.seconds((product.n, product.k), tokens)) * times
        measured = kernel.measured((product.n, product.k))
        log_std, _ = _error(kernel.fit, measured)
        total += seconds
        noise += seconds * (kernel.fit.noise_log_std if kernel.fit else 0.03)
        if measured:
            variance += (seconds * log_std) ** 2
        else:
            common += seconds * log_std
            unmeasured += 1
    others: list[tuple[Kernel, float]] = []
    elementwise = Kernel("elementwise", profile.elementwise, hw16)
    width = sum(elementwise_bytes(model, tp).values())
    others.append((elementwise, layers * float(elementwise.seconds((width,), tokens))))
    sampler = Kernel("sampler", profile.sampler, hw16)
    others.append((sampler, float(sampler.seconds((model.vocab_size,), tokens))))
    if tp > 1:
        reduce = Kernel("all_reduce", profile.all_reduce, hw16)
        num_bytes = tokens * model.hidden_size * 2.0
        others.append((reduce, 2.0 * layers * float(reduce.seconds((tp,), num_bytes))))
    if model.num_experts:
        moe = Kernel("moe", profile.moe.get("bfloat16"), hw)
        chosen, experts = float(model.experts_per_token), float(model.num_experts)
        touched = experts * (1.0 - (1.0 - chosen / experts) ** tokens)
        expert = moe.seconds((model.hidden_size, model.intermediate_size / tp), tokens * chosen, touched)
        others.append((moe, layers * float(expert)))
    for kernel, seconds in others:
        total += seconds
        variance += (seconds * _error(kernel.fit, False)[0]) ** 2
        noise += seconds * (kernel.fit.noise_log_std if kernel.fit else 0.03)
    words = (
        "all shapes measured" if not unmeasured else f"{unmeasured} of {len(products)} shapes not measured"
    )
    return math.sqrt(common**2 + variance) / total, noise / total, f"gemm/{fmt}: {words}"
