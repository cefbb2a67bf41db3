"""Statistics behind the rules of a diagnosis. Pure functions of the columns of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from experiments.diagnose_run import Measured
from sim.deployment import build
from sim.intervals import t975
from sim.latency import Bools
from sim.record import Floats, RunRecord, StepTable
from sim.saturation import count_at
from sim.workload import Workload, WorkloadSpec, load_workload

FEW_STEPS = 20
"""Decode-only steps needed to say what a step without prompts takes."""
MOST_PROMPTS = 5000
"""Prompts looked at for shared beginnings."""


@dataclass(frozen=True, slots=True)
class Exponent:
    """A power law fitted by least squares in logarithms: its exponent with a 95 % interval."""

    value: float
    low: float
    high: float
    above: int
    """Points more than three times above the line."""


def tail_rows(values: Floats, percentile: float | None) -> Bools:
    """Rows around a percentile: as many ranks below it as there are above; all rows for a mean or the median."""
    known = ~np.isnan(values)
    if percentile is None or percentile <= 50 or not known.any():
        return known
    least = float(np.percentile(values[known], max(2 * percentile - 100, 0.0)))
    return known & (values >= least)


def growth_exponent(tokens: Floats | np.ndarray, seconds: Floats) -> Exponent | str:
    """How `seconds` grow with `tokens`, or why that cannot be told."""
    kept = (tokens > 0) & (seconds > 0)
    if kept.sum() < 30:
        return f"{int(kept.sum())} prompts are too few"
    x, y = np.log(tokens[kept].astype(np.float64)), np.log(seconds[kept])
    spread = float(np.exp(np.quantile(x, 0.9) - np.quantile(x, 0.1)))
    if spread < 2:
        return f"prompt lengths hardly vary (P90 is {spread:.2g} times P10)"
    n = len(x)
    slope, start = np.polyfit(x, y, 1)
    rest = y - slope * x - start
    error = float(rest.std(ddof=2) / (x.std() * math.sqrt(n)))
    half = t975(n - 2) * error
    return Exponent(float(slope), float(slope - half), float(slope + half), int((rest > math.log(3)).sum()))


def concurrency(run: Measured) -> Floats:
    """Requests in service halfway through each request's decode."""
    ended_s = run.sent_s + run.e2el_s
    middle_s = run.sent_s + run.ttft_s + run.decode_s / 2
    order = np.argsort(middle_s, kind="stable")
    out = np.empty(len(run))
    out[order] = count_at(middle_s[order], run.sent_s + run.ttft_s, ended_s)
    return out


def decode_steps(run: Measured) -> tuple[Floats, Floats] | None:
    """Batch and device time of every step that only decodes; None where there are too few, or no steps at all."""
    if run.record is None:
        return None
    s = run.record.steps
    rows = (s.num_prefills == 0) & (s.num_decodes > 0)
    if rows.sum() < FEW_STEPS:
        return None
    return s.num_decodes[rows].astype(np.float64), s.gpu_s[rows]


def decode_split(run: Measured) -> dict[str, float]:
    """Shares of the time between tokens: decode kernels, prompts beside them, the host, and waits after preemptions.

    Without steps, gaps beyond the median gap stand for prompts and preemptions together. Empty without either.
    """
    if run.record is None or not len(run.record.steps):
        if run.gaps_s is None or not run.gaps_s.mean() > 0:
            return {}
        usual = min(float(np.median(run.gaps_s) / run.gaps_s.mean()), 1.0)
        return {"kernels": usual, "prompts": 1 - usual}
    s = run.record.steps
    waiting = np.maximum(s.num_running - s.num_prefills, 0)
    plain_s = np.minimum(_plain_s(run), s.gpu_s)
    seconds = {
        "kernels": float((plain_s * waiting).sum()),
        "prompts": float(((s.gpu_s - plain_s) * waiting).sum()),
        "host": float((np.maximum(s.end_s - s.start_s - s.gpu_s, 0) * waiting).sum()),
        "preempted": _preempted_s(run.record, waiting),
    }
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total > 0 else {}


def _plain_s(run: Measured) -> Floats:
    """What each step would take without its prompts: as its decode-only neighbours in batch, or as priced."""
    assert run.record is not None
    s = run.record.steps
    steps = decode_steps(run)
    if steps is not None:
        batch, where = np.unique(steps[0], return_inverse=True)
        mean = np.bincount(where, steps[1]) / np.bincount(where)
        plain_s: Floats = np.interp(s.num_decodes, batch, mean)
    elif run.deployment is not None:
        plain_s = _priced(s, run)
    else:
        plain_s = s.gpu_s
    return np.where(s.num_decodes > 0, plain_s, 0.0)


def _priced(s: StepTable, run: Measured) -> Floats:
    assert run.deployment is not None
    pricer = build(run.deployment).pricer
    known: dict[tuple[int, int], float] = {}
    out = np.zeros(len(s))
    for i, (n, context) in enumerate(zip(s.num_decodes.tolist(), s.decode_context_sum.tolist(), strict=True)):
        if n:
            key = (n, context // 256)
            if key not in known:
                known[key] = pricer.step_s(n, n, (), n, context, -(-context // n))
            out[i] = known[key]
    return out


def _preempted_s(record: RunRecord, waiting: np.ndarray) -> float:
    """Seconds between first and last tokens in which a sequence held no seat, summed over requests."""
    r, s = record.requests, record.steps
    if not r.preemptions.sum():
        return 0.0
    decode_s = float(np.nansum(r.engine_done_s - r.prefill_done_s))
    return max(decode_s - float(((s.end_s - s.start_s) * waiting).sum()), 0.0)


def shared_share(traffic: WorkloadSpec | Workload, seed: int, page_tokens: int) -> float | None:
    """Share of prompt tokens in full pages that an earlier prompt also begins with: what an endless cache would find.

    None where the record does not say which prompts begin alike.
    """
    if isinstance(traffic, WorkloadSpec):
        traffic = load_workload(traffic, seed=seed)
    elif not len(traffic.segment_ends):
        return None
    seen: set[int] = set()
    found = total = 0
    for row in range(min(len(traffic), MOST_PROMPTS)):
        prompt = int(traffic.prompt_tokens[row])
        total += prompt
        keys = traffic.page_keys(row, page_tokens)
        hit = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
        found += min(hit * page_tokens, prompt)
        seen.update(keys)
    return found / total if total else 0.0
