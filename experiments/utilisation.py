"""How much of its peaks a device uses: model FLOPs and memory traffic of steps over the time they took.

MFU (model FLOPs utilisation, Chowdhery et al. 2022) is FLOPs / (time · peak FLOP/s), MBU (model bandwidth utilisation)
is bytes / (time · peak bytes/s), both counted from the model's shape (`costmodel.work`), so that padding and idle time
show as what they are: peak that was not used. Of the twin the time is predicted,
of the engine it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from costmodel.model import ModelShape
from costmodel.work import step_work
from experiments.observed import span_s
from sim.deployment import Built
from sim.record import Floats, RunRecord


class Work(Protocol):
    """Work of every step on one device, in rows of the step table, and the device's peaks (NaN where not known).

    `experiments.report_figures.Roofline` is one too.
    """

    @property
    def flops(self) -> Floats: ...
    @property
    def bytes(self) -> Floats: ...
    @property
    def peak_flops_per_s(self) -> float: ...
    @property
    def peak_bytes_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class StepWork:
    """The plain one."""

    flops: Floats
    bytes: Floats
    peak_flops_per_s: float = math.nan
    peak_bytes_per_s: float = math.nan
    device: str = ""


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Of a whole run, per device. Shares are None where the device's peaks are not known."""

    flops_per_s: float
    """Model FLOPs per second while steps ran."""
    bytes_per_s: float
    mfu: float | None
    """While steps ran, host gaps within them included."""
    mbu: float | None
    mfu_wall: float | None
    """Over the whole run, idle time included."""
    mbu_wall: float | None

    def json(self) -> dict[str, Any]:
        """JSON values by name; what is not known is left out."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


Columns = Mapping[str, npt.NDArray[Any]]
"""Of a step table, and those of `serving.draft_steps.DraftSteps` where drafts are verified."""


def twin_work(record: RunRecord, built: Built) -> StepWork:
    """Work of the steps of a simulated run (`work_of_steps`), beside the device's peaks."""
    flops, num_bytes = work_of_steps(_columns(record), built)
    pricer = built.pricer
    return StepWork(flops, num_bytes, pricer.peak_flops, pricer.peak_bytes_per_s, built.profile.facts.product)


def work_of_steps(steps: Columns, built: Built) -> tuple[Floats, Floats]:
    """(FLOPs, bytes) of steps on one device: the target's, its verifications, and the passes of a draft model.

    Every prompt chunk counts as sampled once, which overstates the LM head's work of unfinished chunks.
    """
    flops, num_bytes = built.pricer.step_work(*_target(steps))
    draft = None if built.speculation is None else built.speculation.draft
    if draft is not None and "draft_passes" in steps:
        pricer: Any = draft.pricer
        more = _draft_work(steps, pricer.step_work, own_cache=draft.own_cache)
        flops, num_bytes = flops + more[0], num_bytes + more[1]
    return flops, num_bytes


def _columns(record: RunRecord) -> Columns:
    drafting = {} if record.draft_steps is None else record.draft_steps.columns()
    return {**record.steps.columns(), **drafting}


def _target(steps: Columns) -> tuple[npt.NDArray[Any], ...]:
    """Arguments of `costmodel.work.step_work` for the target; a sequence's KV is read once for all that it verifies."""
    tokens, pairs = steps["num_tokens"], steps["prefill_attention_area"]
    if "verified_pairs" in steps:
        pairs = pairs + steps["verified_pairs"]
    sampled = tokens - steps["num_prefill_tokens"] + steps["num_prefills"]
    return tokens, sampled, pairs, steps["prefill_context_sum"], steps["decode_context_sum"]


def _draft_work(
    steps: Columns, step_work: Callable[..., tuple[Floats, Floats]], *, own_cache: bool
) -> tuple[Floats, Floats]:
    """(FLOPs, bytes) of the drafter's passes in every step; `step_work` counts those of its shape.

    Each pass reads the weights, as many experts of them as a pass of mean size touches. A drafter with a cache of its
    own reads prompt chunks as the target does.
    """
    passes = np.maximum(steps["draft_passes"], 1)
    prompts = (steps["draft_passes"] > 0) & own_cache
    flops, num_bytes = step_work(
        steps["draft_tokens"] / passes,
        steps["draft_sampled"] / passes,
        (steps["prefill_attention_area"] * prompts + steps["draft_pairs"]) / passes,
        steps["prefill_context_sum"] * prompts / passes,
        steps["draft_context_sum"] / passes,
    )
    return flops * passes, num_bytes * passes


def engine_work(record: RunRecord) -> StepWork | None:
    """Work of the steps of a run of the engine, from the shape and peaks that its `meta` holds; None of other runs.

    Peaks are NaN where they are not known, as of a CPU.
    """
    facts: Mapping[str, Any] = (record.meta.get("engine") or {}).get("work") or {}
    if not facts:
        return None
    number, steps = facts["bytes_per_number"], _columns(record)
    sizes = {"weight_bytes": number, "kv_bytes": number, "activation_bytes": number}
    flops, num_bytes = step_work(ModelShape.model_validate(facts["shape"]), *_target(steps), **sizes)
    if "draft_passes" in steps and (draft := facts.get("draft")) is not None:
        of_shape = partial(step_work, ModelShape.model_validate(draft["shape"]), **sizes)
        more = _draft_work(steps, of_shape, own_cache=draft["own_cache"])
        flops, num_bytes = flops + more[0], num_bytes + more[1]
    peaks = [facts.get(name) for name in ("peak_flops_per_s", "peak_bytes_per_s")]
    flops_per_s, bytes_per_s = (math.nan if peak is None else float(peak) for peak in peaks)
    return StepWork(flops, num_bytes, flops_per_s, bytes_per_s, facts["device"])


def utilisation(record: RunRecord, work: Work) -> Utilisation:
    """Means over a run; `work` may have NaN peaks."""
    s = record.steps
    busy_s = float((s.end_s - s.start_s).sum())
    from_s, to_s = span_s(record)
    wall_s = record.replica_s(to_s - from_s)
    flops, num_bytes = float(np.sum(work.flops)), float(np.sum(work.bytes))

    def share(amount: float, time_s: float, peak: float) -> float | None:
        return amount / (time_s * peak) if time_s > 0 and math.isfinite(peak) else None

    return Utilisation(
        flops / busy_s if busy_s > 0 else 0.0,
        num_bytes / busy_s if busy_s > 0 else 0.0,
        share(flops, busy_s, work.peak_flops_per_s),
        share(num_bytes, busy_s, work.peak_bytes_per_s),
        share(flops, wall_s, work.peak_flops_per_s),
        share(num_bytes, wall_s, work.peak_bytes_per_s),
    )


def step_shares(record: RunRecord, work: Work) -> tuple[Floats, Floats]:
    """(MFU, MBU) of every step, shape (steps,) each; NaN for a step without length or a device without known peaks."""
    length_s = record.steps.end_s - record.steps.start_s
    with np.errstate(divide="ignore", invalid="ignore"):
        per_s = np.where(length_s > 0, 1.0 / length_s, np.nan)
    return work.flops * per_s / work.peak_flops_per_s, work.bytes * per_s / work.peak_bytes_per_s


def step_share_columns(record: RunRecord, work: Work | None) -> dict[str, npt.NDArray[np.float32]]:
    """`mfu` and `mbu` of every step for a file; nothing where peaks are not known, or devices may differ."""
    if work is None or not math.isfinite(work.peak_flops_per_s) or record.fleet is not None:
        return {}
    mfu, mbu = step_shares(record, work)
    return {"mfu": mfu.astype(np.float32), "mbu": mbu.astype(np.float32)}


def rates_by_window(record: RunRecord, work: Work, edges_s: Floats) -> tuple[Floats, Floats]:
    """(FLOP/s, bytes/s) of one device between each pair of edges, shape (edges − 1,) each; idle time counts.

    A step's work is spread evenly over its time, so that the windows add up to the run.
    """
    length_s = np.diff(edges_s) * max(record.num_replicas, 1)
    flops, num_bytes = (_spread(record, amount, edges_s) for amount in (work.flops, work.bytes))
    return flops / length_s, num_bytes / length_s


def _spread(record: RunRecord, amount: Floats, edges_s: Floats) -> Floats:
    """How much of `amount`, one a step, falls between each pair of edges, over all replicas."""
    s = record.steps
    out = np.zeros(len(edges_s) - 1)
    for replica in np.unique(s.replica):
        mine = s.replica == replica
        total = np.cumsum(amount[mine])
        times = np.column_stack([s.start_s[mine], s.end_s[mine]]).ravel()
        done = np.column_stack([total - amount[mine], total]).ravel()
        out += np.diff(np.interp(edges_s, times, done))
    return out
