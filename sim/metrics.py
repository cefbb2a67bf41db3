"""What a run amounts to: the summary that every table, file and plot prints.

Pure functions of a `RunRecord`; docs/metrics.md gives each formula. Definitions and key names are those of
`vllm bench serve`, so that numbers of the twin and of a real run can stand in one table. Seconds throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from serving.beams import BeamCounts
from serving.draft_counts import DraftCounts
from sim.frames import frame
from sim.latency import (
    DEFAULT_PERCENTILES,
    Bools,
    Latencies,
    LatencyStats,
    Pooled,
    inter_token_gaps,
    latencies,
    latency_stats,
    percentile_s,
    pooled,
    stage_times,
    token_seconds,
)
from sim.record import Floats, RunRecord, Status, Tenant
from sim.slo import GOODPUT_METRICS, METRICS, TICK_S, Goodput, Slo
from sim.streaming import Perception, perception

if TYPE_CHECKING:
    from pandas import DataFrame


NOT_STREAMED = "No TPOT and no ITL: every answer came whole, at its end."
"""What stands in their place where `Summary.streams` is false."""
NO_PACE = "every answer came whole, so there is no"
"""Why a limit on one of them, named behind it, cannot be judged."""
_PACE = ("tpot", "itl")
_COUNTS = ("drafts", "beams", "perceived")
"""Figures of a `Summary` that are made of several."""


@dataclass(frozen=True, slots=True)
class SloOutcome:
    """One SLO against one run. `value_s` is infinite when too many requests were never served."""

    slo: Slo
    value_s: float
    met: bool | None
    """None where the run has no such figure, such as a TPOT where every answer came whole."""

    @property
    def headroom(self) -> float:
        """Share of the limit left (positive) or overrun (negative)."""
        return 1 - self.value_s / self.slo.limit_s


@dataclass(frozen=True, slots=True)
class TenantSummary:
    """One class of requests; its rejections count against it."""

    name: str
    slo_class: str
    sent: int
    completed: int
    rejected: int
    unfinished: int
    total_input_tokens: int
    total_output_tokens: int
    output_throughput: float
    ttft: LatencyStats
    tpot: LatencyStats
    itl: LatencyStats
    e2el: LatencyStats
    request_goodput: float | None
    slo_attainment: float | None
    goodput_limits: Goodput


@dataclass(frozen=True, slots=True)
class Summary:
    """Every number of a run. Rates are per second of `duration_s`; shares are in 0 to 1."""

    sent: int
    completed: int
    rejected: int
    unfinished: int
    duration_s: float
    """From the first dispatch to the last completion, drain included."""
    sim_duration_s: float
    total_input_tokens: int
    """Prompt tokens of completed requests."""
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    """Good requests per second; None when no limit was set."""
    output_throughput: float
    total_token_throughput: float
    slo_attainment: float | None
    """Good requests / sent requests."""
    slo_attainment_by_metric: dict[str, float]
    goodput_limits: Goodput
    ttft: LatencyStats
    tpot: LatencyStats
    itl: LatencyStats
    e2el: LatencyStats
    stage_mean_s: dict[str, float]
    stage_share: dict[str, float]
    """Share of the mean E2EL."""
    max_concurrent_requests: int
    """Most requests active within one second, as `vllm bench serve` counts them."""
    max_in_system: int
    """Most requests in the system at one instant."""
    max_output_tokens_per_s: float
    prefix_hit_rate: float
    """Prompt tokens found in the prefix cache / prompt tokens, over admitted requests."""
    preemptions: int
    batch_occupancy_mean: float
    """Running sequences / max_num_seqs, weighted by time; idle time counts as 0."""
    batch_occupancy_busy: float
    """The same while steps ran."""
    batch_occupancy_max: float
    kv_occupancy_mean: float
    """KV pages held by running sequences / all pages, weighted by time; idle time counts as 0."""
    kv_occupancy_busy: float
    kv_occupancy_max: float
    gpu_busy_share: float
    num_steps: int
    slos: tuple[SloOutcome, ...]
    tenants: tuple[TenantSummary, ...]
    warnings: tuple[str, ...]
    errors: int = 0
    """Requests that were let in and failed with their replica, all retries used."""
    answered_before: int = 0
    """Requests answered from the response cache, without an engine."""
    drafts: DraftCounts | None = None
    """What became of drafts; None without speculative decoding."""
    beams: BeamCounts | None = None
    """What beam searches took; None without any."""
    perceived: Perception | None = None
    """How the answers read; None unless their streams were followed."""

    @property
    def failed(self) -> int:
        """Requests that did not complete: rejected, failed, or still unfinished when the run ended."""
        return self.rejected + self.errors + self.unfinished

    @property
    def streams(self) -> bool:
        """Whether there is a pace of tokens: not where every completed answer came in one piece, as of beam searches."""
        return not self.completed or self.tpot.count > 0

    @property
    def metrics(self) -> tuple[str, ...]:
        """The latencies that there are: "ttft", "tpot", "itl" and "e2el", those of the pace where answers stream."""
        return tuple(name for name in METRICS if self.streams or name not in _PACE)

    def figures(self) -> dict[str, float]:
        """Every number by name, latencies in ms as `vllm bench serve` calls them; NaN where there is none."""
        out: dict[str, float] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, LatencyStats):
                out |= _figures_ms(each.name, value)
            elif each.name not in _COUNTS and (value is None or isinstance(value, int | float)):
                out[each.name] = math.nan if value is None else value
        if (drafts := self.drafts) is not None:
            out["spec_decode_acceptance_rate"] = drafts.acceptance_rate * 100
            out["spec_decode_acceptance_length"] = drafts.mean_acceptance_length
        if (beams := self.beams) is not None:
            out["beam_requests"] = beams.requests
            out["beam_hit_rate"] = beams.hit_rate
        if self.perceived is not None:
            out |= self.perceived.figures()
        return out

    def __call__(self) -> DataFrame:
        """The figures as a pandas DataFrame with one column, `value`.

        A run's `summary` is numbers and, called, a table, as `plot` of a DataFrame is plots and, called, one.
        """
        figures = self.figures()
        return frame({"value": list(figures.values())}, index=list(figures), name="figure")


def _figures_ms(name: str, stats: LatencyStats) -> dict[str, float]:
    points = {f"p{p:g}": value_s for p, value_s in stats.percentiles_s}
    values_s = {
        "mean": stats.mean_s,
        "median": stats.median_s,
        "std": stats.std_s,
        **points,
        "max": stats.max_s,
    }
    return {f"{statistic}_{name}_ms": value_s * 1000 for statistic, value_s in values_s.items()}


def summarise(
    record: RunRecord,
    *,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    goodput: Goodput | None = None,
    slos: Sequence[Slo] = (),
) -> Summary:
    """All metrics of a run.

    Latency statistics cover completed requests, and TPOT those with more than one token. `goodput` limits
    apply to every request; a tenant's own limits take precedence over them. Where every answer came whole there is no
    TPOT, and a limit on it judges nobody.
    """
    r, lat = record.requests, latencies(record)
    status = {s: int(np.count_nonzero(r.status == s)) for s in Status}
    finished = r.status == Status.FINISHED
    duration_s = _duration_s(record)
    per_second = 1 / duration_s if duration_s > 0 else 0.0
    pools = _pools(record, lat, finished)
    streams = not finished.any() or pools["tpot"].size > 0
    judging = tuple(name for name in GOODPUT_METRICS if streams or name not in _PACE)
    good, good_by_metric, limited = _good(record, lat, goodput or Goodput(), judging)
    stages = {name: _mean(times_s[finished]) for name, times_s in stage_times(record).items()}
    stats = {name: latency_stats(pool, percentiles) for name, pool in pools.items()}
    input_tokens, output_tokens = int(r.prompt_tokens[finished].sum()), int(r.output_tokens[finished].sum())
    admitted = ~np.isnan(r.scheduled_s)
    prompt_tokens = int(r.prompt_tokens[admitted].sum())
    peaks = _peaks(record, finished)
    occupancy = _occupancy(record, duration_s)
    return Summary(
        sent=len(r),
        completed=status[Status.FINISHED],
        rejected=status[Status.REJECTED],
        unfinished=status[Status.UNFINISHED],
        duration_s=duration_s,
        sim_duration_s=record.end_s,
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        request_throughput=status[Status.FINISHED] * per_second,
        request_goodput=float(good.sum() * per_second) if limited else None,
        output_throughput=output_tokens * per_second,
        total_token_throughput=(input_tokens + output_tokens) * per_second,
        slo_attainment=_share(int(good.sum()), len(r)) if limited else None,
        slo_attainment_by_metric=good_by_metric,
        goodput_limits=goodput or Goodput(),
        ttft=stats["ttft"],
        tpot=stats["tpot"],
        itl=stats["itl"],
        e2el=stats["e2el"],
        stage_mean_s=stages,
        stage_share={name: _share(t, stats["e2el"].mean_s) for name, t in stages.items()},
        max_concurrent_requests=peaks[0],
        max_in_system=peaks[1],
        max_output_tokens_per_s=peaks[2],
        prefix_hit_rate=_share(int(r.cached_tokens[admitted].sum()), prompt_tokens),
        answered_before=int(np.count_nonzero((r.status == Status.FINISHED) & (r.replica < 0))),
        preemptions=int(r.preemptions.sum()),
        batch_occupancy_mean=occupancy["batch_mean"],
        batch_occupancy_busy=occupancy["batch_busy"],
        batch_occupancy_max=occupancy["batch_max"],
        kv_occupancy_mean=occupancy["kv_mean"],
        kv_occupancy_busy=occupancy["kv_busy"],
        kv_occupancy_max=occupancy["kv_max"],
        gpu_busy_share=occupancy["gpu_busy"],
        num_steps=len(record.steps),
        slos=slo_outcomes(record, slos),
        tenants=tuple(
            _tenant(record, lat, index, good, judging, percentiles, per_second, goodput or Goodput())
            for index in range(len(record.tenants))
        ),
        warnings=(
            *record.warnings,
            *_thin_percentiles(status[Status.FINISHED], percentiles),
            *(() if streams else _empty_promises(record.tenants, goodput or Goodput())),
        ),
        errors=status[Status.FAILED],
        drafts=record.drafts,
        beams=record.beams,
        perceived=None if record.deliveries is None else perception(record, percentiles),
    )


def slo_outcomes(record: RunRecord, slos: Sequence[Slo]) -> tuple[SloOutcome, ...]:
    """Check SLOs against a run.

    A percentile covers every request that was sent: a rejected one was never served, so its latency is
    infinite, and one still unfinished counts with the time it has waited so far. Means cover completed ones.
    What there is none of, as TPOT and ITL where every answer came whole, is NaN and neither met nor missed.
    """
    if not slos:
        return ()
    r, lat = record.requests, latencies(record)
    rejected, finished = r.status >= Status.REJECTED, r.status == Status.FINISHED
    waited_s = record.end_s - r.sent_s
    pools = _pools(record, lat, finished, with_itl=any(slo.metric == "itl" for slo in slos))
    served = {
        "ttft": np.where(np.isnan(lat.ttft_s), waited_s, lat.ttft_s),
        "tpot": np.where(r.output_tokens > 1, lat.tpot_s, np.nan),
        "e2el": np.where(np.isnan(lat.e2el_s), waited_s, lat.e2el_s),
    }
    streams = not finished.any() or pools["tpot"].size > 0
    outcomes = []
    for slo in slos:
        if not streams and slo.metric in _PACE:
            outcomes.append(SloOutcome(slo, math.nan, None))
            continue
        if slo.percentile is None:
            value_s = latency_stats(pools[slo.metric], ()).mean_s
        elif slo.metric == "itl":
            value_s = percentile_s(pools["itl"], slo.percentile)
        else:
            value_s = percentile_s(pooled(np.where(rejected, np.inf, served[slo.metric])), slo.percentile)
        outcomes.append(SloOutcome(slo, value_s, slo.met(value_s)))
    return tuple(outcomes)


def _pools(record: RunRecord, lat: Latencies, keep: Bools, *, with_itl: bool = True) -> dict[str, Pooled]:
    tpot_s = lat.tpot_s[keep & (record.requests.output_tokens > 1)]
    if not (tpot_s > TICK_S).any():  # every answer came whole
        tpot_s = tpot_s[:0]
    empty = Pooled(np.empty(0), np.empty(0, np.int64))
    return {
        "ttft": pooled(lat.ttft_s[keep]),
        "tpot": pooled(tpot_s),
        "itl": inter_token_gaps(record, keep) if with_itl else empty,
        "e2el": pooled(lat.e2el_s[keep]),
    }


def _duration_s(record: RunRecord) -> float:
    r = record.requests
    if not len(r):
        return 0.0
    done_s = r.last_token_s[r.status == Status.FINISHED]
    return float((done_s.max() if len(done_s) else record.end_s) - r.sent_s.min())


def _good(
    record: RunRecord, lat: Latencies, common: Goodput, judging: Sequence[str]
) -> tuple[Bools, dict[str, float], bool]:
    """Rows that kept every limit they have on the metrics `judging`, the share of rows per metric, and whether there is
    any limit.
    """
    good = record.requests.status == Status.FINISHED
    finished = good.copy()
    by_metric: dict[str, float] = {}
    for name in judging:
        values_s: Floats = getattr(lat, f"{name}_s")
        by_tenant = [limits(t, common).limits_s().get(name, np.nan) for t in record.tenants]
        limit_s = np.array(by_tenant)[record.requests.tenant]
        has_limit = ~np.isnan(limit_s)
        if not has_limit.any():
            continue
        kept = finished & (~has_limit | (values_s <= limit_s + TICK_S))
        by_metric[name] = _share(int((kept & has_limit).sum()), int(has_limit.sum()))
        good &= kept
    return good, by_metric, bool(by_metric)


def limits(tenant: Tenant, common: Goodput) -> Goodput:
    """The limits in force for a tenant: its own where it has them, otherwise the common ones."""
    own = (tenant.goodput_ttft_s, tenant.goodput_tpot_s, tenant.goodput_e2el_s)
    fallback = (common.ttft_s, common.tpot_s, common.e2el_s)
    return Goodput(
        *(mine if mine is not None else theirs for mine, theirs in zip(own, fallback, strict=True))
    )


def _tenant(
    record: RunRecord,
    lat: Latencies,
    index: int,
    good: Bools,
    judging: Sequence[str],
    percentiles: Sequence[float],
    per_second: float,
    common: Goodput,
) -> TenantSummary:
    r, tenant = record.requests, record.tenants[index]
    mine = r.tenant == index
    finished = mine & (r.status == Status.FINISHED)
    stats = {name: latency_stats(pool, percentiles) for name, pool in _pools(record, lat, finished).items()}
    num_good, sent = int((good & mine).sum()), int(mine.sum())
    own = limits(tenant, common)
    has_limits = any(name in judging for name in own.limits_s())
    return TenantSummary(
        name=tenant.name,
        slo_class=tenant.slo_class,
        sent=sent,
        completed=int(finished.sum()),
        rejected=int((mine & (r.status == Status.REJECTED)).sum()),
        unfinished=int((mine & (r.status == Status.UNFINISHED)).sum()),
        total_input_tokens=int(r.prompt_tokens[finished].sum()),
        total_output_tokens=int(r.output_tokens[finished].sum()),
        output_throughput=float(r.output_tokens[finished].sum() * per_second),
        ttft=stats["ttft"],
        tpot=stats["tpot"],
        itl=stats["itl"],
        e2el=stats["e2el"],
        request_goodput=num_good * per_second if has_limits else None,
        slo_attainment=_share(num_good, sent) if has_limits else None,
        goodput_limits=own,
    )


def _peaks(record: RunRecord, finished: Bools) -> tuple[int, int, float]:
    """Most requests in one second, most at one instant, most tokens in one second."""
    r = record.requests
    left_s = np.where(finished, r.last_token_s, record.end_s)
    counted = r.status < Status.REJECTED
    at_once = _most_at_once(r.sent_s[counted], left_s[counted])
    if not finished.any():
        return 0, at_once, 0.0
    sent_s, done_s = r.sent_s[finished], r.last_token_s[finished]
    start_s = float(sent_s.min())
    first, last = (sent_s - start_s).astype(np.int64), (done_s - start_s).astype(np.int64)
    size = int(last.max()) + 2
    active = np.cumsum(np.bincount(first, minlength=size) - np.bincount(last + 1, minlength=size))
    seconds = token_seconds(record, finished)
    seconds -= start_s
    per_second = np.bincount(np.maximum(seconds, 0).astype(np.int64)) if len(seconds) else np.zeros(1)
    return int(active.max()), at_once, float(per_second.max())


def _most_at_once(start_s: Floats, end_s: Floats) -> int:
    if not len(start_s):
        return 0
    inside = np.arange(1, len(start_s) + 1) - np.searchsorted(np.sort(end_s), np.sort(start_s), side="right")
    return int(inside.max())


def _occupancy(record: RunRecord, duration_s: float) -> dict[str, float]:
    s = record.steps
    length_s = s.end_s - s.start_s
    busy_s, wall_s = float(length_s.sum()), record.replica_s(duration_s)
    out = {"gpu_busy": record.gpu_busy_share(duration_s)}
    for name, held, size in (
        ("batch", s.num_running, record.max_num_seqs),
        ("kv", s.used_pages, record.num_pages),
    ):
        if record.fleet is not None:
            shares = held / record.limit_at_steps("max_num_seqs" if name == "batch" else "num_pages")
            area, most = float(np.dot(shares, length_s)), float(shares.max()) if len(held) else 0.0
        else:
            area = float(np.dot(held, length_s)) / max(size, 1)
            most = float(held.max()) / max(size, 1) if len(held) else 0.0
        out[name + "_busy"] = _share(area, busy_s)
        out[name + "_mean"] = _share(area, max(wall_s, busy_s))
        out[name + "_max"] = most
    return out


def _thin_percentiles(count: int, percentiles: Sequence[float]) -> tuple[str, ...]:
    thin = [p for p in percentiles if p < 100 and 0 < count * (1 - p / 100) < 1]
    if not thin:
        return ()
    names = ", ".join(f"P{p:g}" for p in thin)
    return (f"{names} of {count} requests is little more than the maximum; use more requests",)


def _empty_promises(tenants: Sequence[Tenant], goodput: Goodput) -> tuple[str, ...]:
    """Says that limits of requests are on what no request has; SLOs say it themselves in the verdict."""
    if not any("tpot" in limits(tenant, goodput).limits_s() for tenant in tenants):
        return ()
    return (
        "the goodput limit of TPOT judges nobody: every answer came whole, so there is none; limit E2EL instead",
    )


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else math.nan


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
