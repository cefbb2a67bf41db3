"""The plain answer: does the run keep its promises, does it keep up with the load, and what bounds it.

One sentence each, with the number it rests on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sim.metrics import NO_PACE, SloOutcome, Summary, slo_outcomes
from sim.pipeline import bubble_share
from sim.record import RunRecord
from sim.saturation import Load, Saturation, saturation
from sim.slo import Slo

BOUND_WORDS = {
    "kv_pages": "KV cache pages",
    "max_num_seqs": "max_num_seqs",
    "token_budget": "the token budget (prefill compute)",
    "prefill_compute": "prefill compute",
    "decode_bandwidth": "memory bandwidth of decode",
    "host": "the host",
    "bubbles": "the stages' waiting for one another",
    "network": "the network",
    "clients": "the clients' connections and reading",
    "policy": "the batching policy",
    "idle": "nothing: it is under-loaded",
    "nothing_ran": "nothing: no step ran",
}


@dataclass(frozen=True, slots=True)
class Bound:
    """What holds the run back, and the number that says so."""

    kind: str
    """A key of `BOUND_WORDS`."""
    evidence: str
    share: float
    shares: dict[str, float]
    """Every share that was weighed."""

    @property
    def words(self) -> str:
        return BOUND_WORDS[self.kind]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a run. `meets_slos` is None when no SLO was set, or when none is missed and one cannot be judged."""

    meets_slos: bool | None
    slos: tuple[SloOutcome, ...]
    saturation: Saturation
    bound: Bound
    sentences: tuple[str, ...]

    @property
    def saturated(self) -> bool | None:
        """True or False from the drift test; None where it cannot tell."""
        known = {Load.SATURATED: True, Load.STABLE: False, Load.CLOSED_LOOP: False}
        return known.get(self.saturation.load)


def verdict(record: RunRecord, summary: Summary, slos: Sequence[Slo] = ()) -> Verdict:
    """Judge a run. SLOs default to those the summary was made with."""
    outcomes = slo_outcomes(record, slos) if slos else summary.slos
    load, bound = saturation(record), what_bounds(record, summary)
    met = {o.met for o in outcomes}
    meets = False if False in met else True if met == {True} else None
    sentences = (
        *(_slo_sentence(o) for o in outcomes),
        *_loss_sentences(summary),
        _load_sentence(load),
        f"Bound by {bound.words}: {bound.evidence}.",
    )
    return Verdict(meets, outcomes, load, bound, sentences)


def what_bounds(record: RunRecord, summary: Summary) -> Bound:
    """Find the resource that the run waits for.

    Where requests wait at least a tenth of the busy time, it is what refused them admission: a full batch, a
    spent token budget, or no free pages. Otherwise it is what the steps spend their time on, or, with the
    device idle most of the time, nothing.
    """
    s = record.steps
    length_s = s.end_s - s.start_s
    busy_s = float(length_s.sum())
    if not busy_s:
        return Bound("nothing_ran", "the run has no steps", 0.0, {})
    waiting = s.num_waiting > 0
    full = s.num_running >= record.limit_at_steps("max_num_seqs")
    spent = s.num_tokens >= 0.99 * record.limit_at_steps("max_num_batched_tokens")
    pages = (s.used_pages >= 0.8 * record.limit_at_steps("num_pages")) | (s.preemptions > 0)
    waiting_s = float(length_s[waiting].sum())
    causes = {
        "max_num_seqs": waiting & full,
        "token_budget": waiting & ~full & spent,
        "kv_pages": waiting & ~full & ~spent & pages,
        "policy": waiting & ~full & ~spent & ~pages,
    }
    shares = {name: float(length_s[mask].sum()) / busy_s for name, mask in causes.items()}
    gpu_s = float(s.gpu_s.sum())
    mostly_prefill = s.num_prefill_tokens > s.num_decodes
    if record.beams is not None:
        # A hypothesis computes its last page again to have one token: such a step reads the weights as decodes do.
        mostly_prefill &= s.num_prefill_tokens > record.page_tokens * s.num_prefills
    shares["waiting"] = waiting_s / busy_s
    shares["busy"] = busy_s / max(record.replica_s(summary.duration_s), busy_s)
    bubbles = bubble_share(record)
    shares["host" if bubbles is None else "bubbles"] = max(0.0, 1 - gpu_s / busy_s)
    shares["prefill_compute"] = float(s.gpu_s[mostly_prefill].sum()) / busy_s
    shares["decode_bandwidth"] = float(s.gpu_s[~mostly_prefill].sum()) / busy_s
    of_e2el = {name: share if np.isfinite(share) else 0.0 for name, share in summary.stage_share.items()}
    shares["network"] = of_e2el["network"] + of_e2el["gateway"]
    if record.deliveries is not None:
        shares["blocked"] = of_e2el["blocked"]
        shares["clients"] = of_e2el["blocked"] + of_e2el["reader"]
    kind = _bound_kind(shares, causes)
    evidence = _evidence(kind, shares, record, summary)
    if kind in causes:
        prompts, decode = shares["prefill_compute"], shares["decode_bandwidth"]
        evidence += f", while prompts took {prompts:.0%} of it and decode {decode:.0%}"
    return Bound(kind, evidence, shares.get(kind, 1 - shares["busy"]), shares)


def _bound_kind(shares: dict[str, float], causes: Iterable[str]) -> str:
    if shares["waiting"] >= 0.1:
        return max(causes, key=lambda name: shares[name])
    if shares["network"] > 0.5:
        return "network"
    if shares.get("blocked", 0.0) >= 0.1 or shares.get("clients", 0.0) > 0.5:
        return "clients"
    if shares["busy"] < 0.5:
        return "idle"
    kinds = ("host", "bubbles", "prefill_compute", "decode_bandwidth")
    return max(kinds, key=lambda name: shares.get(name, -1.0))


def _evidence(kind: str, shares: dict[str, float], record: RunRecord, summary: Summary) -> str:
    share = f"{shares.get(kind, 0.0):.0%}"
    preempted = f" and {summary.preemptions} preemptions" if summary.preemptions else ""
    return {
        "max_num_seqs": f"requests waited for one of {record.max_num_seqs} seats in {share} of busy time",
        "token_budget": f"requests waited with all {record.max_num_batched_tokens} tokens of a step spent in "
        f"{share} of busy time",
        "kv_pages": f"requests waited for pages in {share} of busy time, with at most "
        f"{summary.kv_occupancy_max:.0%} of {record.num_pages} pages in use{preempted}",
        "policy": f"requests waited with room for them in {share} of busy time",
        "network": f"it takes {share} of the mean end-to-end time",
        "clients": f"they take {share} of the mean end-to-end time: {summary.stage_share['blocked']:.0%} for other "
        f"requests of the same client, {summary.stage_share['reader']:.0%} for reading",
        "idle": f"steps ran in {shares['busy']:.0%} of the time and the batch was "
        f"{summary.batch_occupancy_mean:.0%} full",
        "host": f"the device waited for it in {share} of busy time",
        "bubbles": f"of busy time, {share} are bubbles of the pipeline and host work",
        "prefill_compute": f"steps that mostly compute prompts take {share} of busy time",
        "decode_bandwidth": f"decode steps take {share} of busy time at a mean batch of "
        f"{summary.batch_occupancy_busy * record.max_num_seqs:.0f}",
    }[kind]


def _slo_sentence(outcome: SloOutcome) -> str:
    slo = outcome.slo
    limit = f"{slo.limit_s * 1000:g} ms"
    if outcome.met is None:
        return f"Cannot judge {slo.label} ≤ {limit}: {NO_PACE} {slo.metric.upper()}; limit E2EL instead."
    if not np.isfinite(outcome.value_s):
        if np.isnan(outcome.value_s):
            return f"Misses {slo.label} ≤ {limit}: no request gives a value for it."
        return f"Misses {slo.label} ≤ {limit}: too many requests were rejected to have a value."
    value = f"{outcome.value_s * 1000:.4g} ms" if outcome.value_s < 10 else f"{outcome.value_s:,.1f} s"
    away = f"{abs(outcome.headroom):.0%}" if abs(outcome.headroom) >= 0.01 else "under 1%"
    if outcome.met:
        return f"Meets {slo.label} ≤ {limit}: it is {value}, {away} below the limit."
    times = outcome.value_s / slo.limit_s
    over = f"{times:,.0f} times the limit" if times >= 10 else f"{away} above the limit"
    return f"Misses {slo.label} ≤ {limit}: it is {value}, {over}."


def _loss_sentences(summary: Summary) -> tuple[str, ...]:
    lost = [
        f"{count} of {summary.sent} requests {words}"
        for count, words in (
            (summary.rejected, "rejected"),
            (summary.errors, "failed"),
            (summary.unfinished, "not finished"),
        )
        if count
    ]
    return (f"{'; '.join(lost)}.",) if lost else ()


def _load_sentence(load: Saturation) -> str:
    lead = {
        Load.SATURATED: "Saturated",
        Load.STABLE: "Not saturated",
        Load.CLOSED_LOOP: "Bound by its own concurrency",
        Load.INCONCLUSIVE: "Saturation unknown",
    }[load.load]
    return f"{lead}: {load.reason}."
