"""What a candidate can do at best, from datasheet peaks alone: reasons to leave it out without simulating it.

Every bound is optimistic (peak FLOP/s, peak bandwidth, no queue, no host, a perfect prefix cache), so that what it rules
out is out. Memory is not here: a deployment that does not fit cannot be built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from experiments.capacity_trial import Promises, in_ms
from sim.deployment import Built
from sim.latency import percentile_s, pooled
from sim.metrics import limits
from sim.record import Floats
from sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least seconds of each request of a sample, and least device seconds of its work when it shares every step."""

    ttft_s: Floats
    tpot_s: Floats
    e2el_s: Floats
    work_s: float
    """Mean per request."""

    def least_replicas(self, requests_per_s: float) -> int:
        """Fewer than this cannot do the work, however well they are used."""
        return max(1, math.ceil(requests_per_s * self.work_s * (1 - 1e-9)))


def bounds_of(built: Built, workload: Workload) -> Bounds:
    """Bounds for the requests of a sample on one replica."""
    pricer = built.pricer
    prompt, output = workload.prompt_tokens.astype(np.float64), workload.output_tokens.astype(np.float64)
    new = prompt - _shareable(built, workload)
    one, none = np.ones_like(prompt), np.zeros_like(prompt)
    before = prompt - new
    area = new * before + new * (new + 1) / 2
    flops, num_bytes = pricer.step_work(new, one, area, prompt, none)
    peak, bandwidth = pricer.peak_flops, pricer.peak_bytes_per_s
    prefill_s = np.maximum(flops / peak, num_bytes / bandwidth)
    middle = prompt + output / 2
    decode_flops, decode_bytes = pricer.step_work(one, one, none, none, middle)
    step_s = np.maximum(decode_flops / peak, decode_bytes / bandwidth)
    # Drafts that all stand: so many tokens come of one reading of weights and KV.
    at_once = 1 + built.limits.num_speculative_tokens
    if at_once > 1:
        step_s = np.maximum(decode_flops / peak, decode_bytes / at_once / bandwidth)
    # With company, weights are read for all at once: what is left of a token is its arithmetic and its own KV.
    _, weights = pricer.step_work(one, one, none, none, none)
    own_bytes = np.maximum(decode_bytes - weights, 0.0) * np.maximum(output - 1, 0) / at_once
    work_s = np.maximum((flops + decode_flops * np.maximum(output - 1, 0)) / peak, own_bytes / bandwidth)
    tpot_s = np.where(output > 1, step_s, np.nan)
    e2el_s = prefill_s + step_s * np.maximum(output - 1, 0)
    whole = workload.come_whole()
    ttft_s, tpot_s = np.where(whole, e2el_s, prefill_s), np.where(whole, 0.0, tpot_s)
    return Bounds(ttft_s, tpot_s, e2el_s, float(work_s.mean()))


def broken(bounds: Bounds, workload: Workload, promises: Promises) -> str | None:
    """The promise that even these bounds break, in words; None where there is none."""
    by_metric = {"ttft": bounds.ttft_s, "tpot": bounds.tpot_s, "e2el": bounds.e2el_s, "itl": bounds.tpot_s}
    for slo in promises.slos:
        values = by_metric[slo.metric]
        values = values[~np.isnan(values)]
        if not len(values) or slo.metric == "itl":
            continue
        least = (
            float(values.mean()) if slo.percentile is None else percentile_s(pooled(values), slo.percentile)
        )
        if least > slo.limit_s:
            return f"{slo.label} is at least {in_ms(least)}, over {in_ms(slo.limit_s)}"
    if promises.limited(workload.tenants):
        score = np.zeros(len(workload))
        for metric in ("ttft", "tpot", "e2el"):
            by_tenant = [limits(t, promises.goodput).limits_s().get(metric, np.inf) for t in workload.tenants]
            score = np.maximum(score, np.nan_to_num(by_metric[metric]) / np.array(by_tenant)[workload.tenant])
        good = float((score <= 1).mean())
        if good < promises.attainment:
            return f"at most {good:.1%} of requests can be good, {promises.attainment:.0%} are asked for"
    return None


def _shareable(built: Built, workload: Workload) -> Floats:
    """Prompt tokens that a prefix cache could have: those of the last shared segment, but at least one is computed."""
    shared = np.zeros(len(workload))
    if built.limits.enable_prefix_caching:
        has = np.diff(workload.segment_offsets) > 0
        shared[has] = workload.segment_ends[workload.segment_offsets[1:][has] - 1]
    return np.minimum(shared, workload.prompt_tokens - 1).astype(np.float64)
