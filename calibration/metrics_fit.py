"""Recalibration from requests that a real server served: host terms and a scale per phase, kernel shapes kept.

Recorded latencies say little about single kernels but much about sums: how long steps with prompts take, how long steps
without, and what the host adds. So three factors are fitted, by replaying the requests in the twin, and folded into the
profile: one on the kernels at the sizes of prompts, one at those of decodes, one on the host's terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibration.compare import Figure, figures_of
from calibration.observed import Case
from calibration.runs_saved import is_bench_json, is_saved_run, read_bench, read_saved_run
from calibration.validate import memory_of, replay, twin_samples
from costmodel.memory import default_limits
from costmodel.pipeline import PipelinePricer
from costmodel.pricer import StepPricer
from costmodel.profile import DeviceProfile, KernelFit
from serving.errors import UsageError
from sim.deployment import Deployment
from sim.lockstep_build import sharing_replicas
from sim.pipeline_build import make_pricer, of_engine
from sim.record import Floats

PHASES = ("prefill", "decode", "host")
_STATISTICS = ("mean", "median", "p90")
_PRIOR = 0.05
"""Pull of each factor to 1, in relative errors a natural logarithm: what the figures do not tell stays where it was."""
_STEP = 0.03
_BOUND = 2.0
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Refit:
    """The profile after, and how far it moved."""

    profile: DeviceProfile
    factors: Mapping[str, float]
    """By `PHASES`."""
    before: tuple[Figure, ...]
    after: tuple[Figure, ...]
    leverage: Mapping[str, float]
    """How much all figures move, root mean square, for 1 % on a factor; little means that it could not be told."""
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What moved and why, in words."""
        out = [f"{'figure':<14}{'real ms':>10}{'before':>9}{'after':>9}"]
        for a, b in zip(self.before, self.after, strict=True):
            name = f"{a.metric} {a.statistic}"
            out.append(f"{name:<14}{a.real_ms:>10,.1f}{a.error:>+9.1%}{b.error:>+9.1%}")
        for phase in PHASES:
            why = _why(phase, self.before) if self.leverage[phase] > 1e-4 else "no figure depends on it here"
            out.append(f"{phase}: times {self.factors[phase]:.3f} ({why})")
        return [*out, *(f"note: {note}" for note in self.notes)]


def _why(phase: str, figures: tuple[Figure, ...]) -> str:
    metric = {"prefill": "ttft", "decode": "tpot", "host": "tpot"}[phase]
    errors = [f.error for f in figures if f.metric == metric]
    return f"{metric.upper()} was {float(np.mean(errors)):+.1%} off" if errors else "no figure of its own"


def read_case(path: Path, profile: str, deployment: Deployment | None) -> Case:
    """A run folder of ours, or a JSON of `vllm bench serve --save-detailed` with how it was served."""
    if is_saved_run(path):
        return read_saved_run(path, profile)
    if is_bench_json(path):
        return read_bench(
            path, None if deployment is None else deployment.model_copy(update={"gpu": profile})
        )
    raise UsageError(
        f"{path}: neither a run folder (run.json and requests.parquet) nor a JSON of vllm bench serve --save-detailed"
    )


def scaled(profile: DeviceProfile, factors: Mapping[str, float], decode_tokens: int) -> DeviceProfile:
    """`profile` with every kernel at up to `decode_tokens` tokens times the decode factor, at more times the other.

    Kernels that were never measured stay, and so do collectives and experts. Raises `UsageError` for a profile without
    measured GEMMs and attention, which has nothing to move.
    """
    if not any(
        fit.residual for fits in (profile.gemm, profile.decode, profile.prefill) for fit in fits.values()
    ):
        raise UsageError(f"{profile.name}: no kernel of it was measured; calibrate the device first")
    logs = {phase: math.log(factors[phase]) for phase in PHASES}

    def moved(fit: KernelFit, axis: int | None, phase: str = "") -> KernelFit:
        if fit.residual is None:
            return fit  # priced by datasheet: no measured shape to move
        grid = np.meshgrid(*(np.asarray(a) for a in fit.residual.grid), indexing="ij")
        if axis is None:
            by = np.full(grid[0].size, logs[phase])
        else:
            by = np.where(grid[axis].ravel() <= decode_tokens, logs["decode"], logs["prefill"])
        shift = np.rint(by * 1e4).astype(int) + np.asarray(fit.residual.everywhere_e4 or [0])
        return fit.model_copy(
            update={"residual": fit.residual.model_copy(update={"everywhere_e4": shift.tolist()})}
        )

    def all_moved(fits: Mapping[str, KernelFit], axis: int | None, phase: str = "") -> dict[str, KernelFit]:
        return {name: moved(fit, axis, phase) for name, fit in fits.items()}

    host = profile.host
    times = factors["host"]
    return profile.model_copy(
        update={
            "gemm": all_moved(profile.gemm, 0),
            "other_gemms": {version: all_moved(fits, 0) for version, fits in profile.other_gemms.items()},
            "prefill": all_moved(profile.prefill, None, "prefill"),
            "decode": all_moved(profile.decode, None, "decode"),
            "decode_mixed": all_moved(profile.decode_mixed, None, "prefill"),
            "elementwise": moved(profile.elementwise, 0) if profile.elementwise else None,
            "sampler": moved(profile.sampler, 0) if profile.sampler else None,
            "host": host.model_copy(
                update={
                    "step_s": host.step_s * times,
                    "per_seq_s": host.per_seq_s * times,
                    "per_token_s": host.per_token_s * times,
                }
            ),
        }
    )


def refit(case: Case, profile: DeviceProfile) -> Refit:
    """Factors with the least relative errors of the mean, median and P90 of TTFT, TPOT and E2EL.

    Gauss-Newton with finite differences, steps halved where they do not help. Raises `UsageError` for a run without
    latencies per request.
    """
    if not case.observed.samples:
        raise UsageError(f"{case.name}: no latencies per request were kept; save the run in detail")
    seqs = case.deployment.max_num_seqs or default_limits(profile)[1]
    pages = case.observed.num_pages or memory_of(case).num_blocks

    def figures(theta: Floats) -> tuple[Figure, ...]:
        factors = dict(zip(PHASES, np.exp(theta).tolist(), strict=True))
        return _figures(case, scaled(profile, factors, seqs), pages)

    def misfit(theta: Floats) -> Floats:
        found = np.array([f.error for f in figures(theta)])
        return np.concatenate([found, _PRIOR * theta])

    at = np.zeros(3)
    before = figures(at)
    here = misfit(at)
    jacobian = np.zeros((len(here), 3))
    first: Floats | None = None
    for _ in range(_ROUNDS):
        for i, step in enumerate(np.eye(3) * _STEP):
            jacobian[:, i] = (misfit(at + step) - here) / _STEP
        first = jacobian.copy() if first is None else first
        change = np.linalg.lstsq(jacobian, -here, rcond=None)[0]
        for shorter in (1.0, 0.5, 0.25):
            there = np.clip(at + shorter * change, -_BOUND, _BOUND)
            found = misfit(there)
            if better := float(found @ found) < float(here @ here) * 0.999:
                at, here = there, found
                break
        if not better:
            break
    factors = dict(zip(PHASES, np.exp(at).tolist(), strict=True))
    assert first is not None
    size = np.sqrt(np.mean(first[: len(before)] ** 2, axis=0)) * 0.01
    provenance = profile.provenance
    words = ", ".join(f"{phase} x {value:.4f}" for phase, value in factors.items())
    noted = provenance.model_copy(
        update={
            "notes": [
                *provenance.notes,
                f"refitted to {len(case.workload)} recorded requests of {case.name}: {words}",
            ]
        }
    )
    done = scaled(profile, factors, seqs).model_copy(update={"provenance": noted})
    return Refit(
        done,
        factors,
        before,
        figures(at),
        dict(zip(PHASES, size.tolist(), strict=True)),
        case.notes,
    )


def _figures(case: Case, profile: DeviceProfile, pages: int) -> tuple[Figure, ...]:
    d = case.deployment
    tokens, seqs = default_limits(profile)
    tokens, seqs = d.max_num_batched_tokens or tokens, d.max_num_seqs or seqs

    def reprice(old: StepPricer) -> StepPricer | PipelinePricer:
        chosen, _ = of_engine(d, profile, sharing_replicas(d, old.model))
        return make_pricer(d, old.model, chosen, max_num_batched_tokens=tokens, max_num_seqs=seqs)

    record, _ = replay(case, pages, reprice)
    twin = twin_samples(record, at_engine=case.at_engine)
    samples = {metric: (real, twin[metric]) for metric, real in case.observed.samples.items()}
    return tuple(f for f in figures_of(samples) if f.statistic in _STATISTICS)
