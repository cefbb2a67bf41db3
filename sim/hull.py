"""What of a prediction lies outside the measured hull: device, formats and shapes before a run; batches, contexts and
chunks that really occurred after it.

A measured hull is the box of smallest and largest measured values per axis, kept with each fit of a profile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from costmodel.formats import gemm_format, kv_format
from costmodel.predict import outside
from costmodel.profile import KernelFit
from serving.errors import UsageError
from sim.deployment import Built
from sim.record import Floats, RunRecord


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """One thing that was priced without having been measured."""

    what: str
    """In words, such as "decode: batch 1 to 400 outside the measured 1 to 256"."""
    steps: float | None = None
    """Share of the run's steps that it touches; None where it touches all or is known before the run."""

    @property
    def words(self) -> str:
        """The line that is printed."""
        return self.what if self.steps is None else f"{self.what} (in {_percent(self.steps)} of steps)"


def before_run(built: Built) -> tuple[Extrapolation, ...]:
    """What is known from the deployment alone: device, number formats, head size, weight shapes."""
    if built.pools:
        return tuple(dict.fromkeys(each for pool in built.pools for each in before_run(pool)))
    lines = built.pricer.extrapolations(max_context=_least(built, "context"), max_batch=1, max_tokens=16)
    return tuple(Extrapolation(line) for line in dict.fromkeys(lines))


def after_run(built: Built, record: RunRecord) -> tuple[Extrapolation, ...]:
    """All of `before_run`, and the batches, contexts and chunks of the run that were never measured."""
    if built.pools and record.fleet is not None:
        pool_of = record.fleet.pool_of[record.steps.replica]
        parts = [replace(record, steps=record.steps.where(pool_of == i)) for i in range(len(built.pools))]
        share_of: dict[str, float | None] = {}
        for pool, part in zip(built.pools, parts, strict=True):
            weight = len(part.steps) / max(len(record.steps), 1)
            for each in after_run(pool, part):
                so_far = share_of.get(each.what, 0.0)
                if each.steps is None or so_far is None:
                    share_of[each.what] = None
                else:
                    share_of[each.what] = so_far + weight * each.steps
        return tuple(Extrapolation(what, share) for what, share in share_of.items())
    found = list(before_run(built))
    steps = record.steps
    if not len(steps):
        return tuple(found)
    decodes = steps.num_decodes > 0
    prefills = steps.num_prefills > 0
    batch, context, tokens, chunks, before = (
        column.astype(np.float64)
        for column in (
            steps.num_decodes,
            steps.decode_context_sum,
            steps.num_prefill_tokens,
            steps.num_prefills,
            steps.prefill_context_sum - steps.num_prefill_tokens,
        )
    )
    alone, mixed = decodes & ~prefills, decodes & prefills
    kv = kv_format(built.deployment.kv_cache_dtype).name
    gemm = gemm_format(built.deployment.dtype, built.deployment.quantization).name
    profile = built.profile
    seen: list[tuple[str, KernelFit | None, str, Floats]] = [
        ("decode", profile.decode.get(kv), "batch", batch[alone]),
        ("decode", profile.decode.get(kv), "context", context[alone] / batch[alone]),
        ("decode_mixed", profile.decode_mixed.get(kv), "batch", batch[mixed]),
        ("decode_mixed", profile.decode_mixed.get(kv), "context", context[mixed] / batch[mixed]),
        ("prefill", profile.prefill.get(kv), "tokens", tokens[prefills] / chunks[prefills]),
        ("prefill", profile.prefill.get(kv), "context", before[prefills] / chunks[prefills]),
        ("gemm", profile.gemm.get(gemm), "m", steps.num_tokens.astype(np.float64)),
    ]
    for name, fit, axis, values in seen:
        found += _outside(name, axis, fit, values, len(steps))
    longest = int((record.requests.prompt_tokens + record.requests.output_tokens).max())
    least, most = _range(profile.decode.get(kv), "context")
    if longest > most:
        found.append(
            Extrapolation(
                f"decode: longest sequence {longest} tokens, contexts measured {least:g} to {most:g}"
            )
        )
    return tuple(found)


def check_strict(found: tuple[Extrapolation, ...]) -> None:
    """`--strict`: raise UsageError when anything is extrapolated.

    Ask with `before_run` before simulating and with `after_run` afterwards (results may be kept; the exit code is 2).
    """
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UsageError(
            f"--strict: not measured: {found[0].words}{more}; calibrate for it, or leave --strict out to extrapolate"
        )


def _outside(name: str, axis: str, fit: KernelFit | None, seen: Floats, count: int) -> list[Extrapolation]:
    if fit is None or axis not in fit.hull or not len(seen):
        return []
    least, most = fit.hull[axis]
    out = (seen < least) | (seen > most)
    if not out.any():
        return []
    what = outside(name, axis, (float(seen.min()), float(seen.max())), (least, most))
    return [Extrapolation(what, float(out.sum()) / count)]


def _range(fit: KernelFit | None, axis: str) -> tuple[float, float]:
    return fit.hull.get(axis, (0.0, float("inf"))) if fit is not None else (0.0, float("inf"))


def _least(built: Built, axis: str) -> int:
    kv = kv_format(built.deployment.kv_cache_dtype).name
    return max(16, int(_range(built.profile.decode.get(kv), axis)[0]))


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "under 1%"
