"""One test of a search for capacity: does a deployment keep its promises at this load, in the long run?

A promise is a limit on a statistic of something that every request has (a latency, or, for goodput, the worst of its
latencies over their limits). It is judged over the middle of the run: requests of the warm-up met an emptier server,
and the last ones an emptying one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.errors import UsageError
from sim.latency import Bools, inter_token_gaps, latencies, latency_stats, percentile_s, pooled
from sim.metrics import limits
from sim.record import Floats, RunRecord, Status, Tenant
from sim.saturation import Load, Saturation, saturation
from sim.slo import Goodput, Slo
from sim.workload import Workload

BATCHES = 16
MOST = 1.0 + 1e-9
"""Of a limit, with what clocks round."""
CERTAIN_Z = 2.5
"""Standard errors between a share and its limit from which on more requests are not asked for; above 1.96, because a
growing run is looked at several times."""


@dataclass(frozen=True, slots=True)
class Promises:
    """What must hold: SLOs, and, where requests have limits of their own, the share of them that keeps those."""

    slos: tuple[Slo, ...] = ()
    goodput: Goodput = field(default_factory=Goodput)
    attainment: float = 0.95

    def check(self, workload: Workload) -> None:
        """Raises UsageError when nothing is promised, or what such requests do not have, or the share cannot be."""
        if not 0 < self.attainment <= 1:
            raise UsageError(
                f"--slo-attainment must lie above 0 and up to 1, got {self.attainment:g}; 0.95 is 95 %"
            )
        if not self.slos and not self.limited(workload.tenants):
            raise UsageError(
                "no promise to keep: add --slo, such as --slo chat or --slo p95_ttft:500 p95_tpot:50, "
                "or --goodput ttft:500 tpot:50"
            )
        self._check_pace(workload)

    def _check_pace(self, workload: Workload) -> None:
        """An answer that comes whole has no gaps between tokens, and one of a single token has none either."""
        one = workload.output_tokens == 1
        whole = workload.come_whole() & ~one
        if not (whole | one).all():
            return
        limited = [limits(tenant, self.goodput).limits_s() for tenant in workload.tenants]
        asked = [
            f"--slo {s.name}" for s in self.slos if s.metric == "itl" or (s.metric == "tpot" and whole.any())
        ]
        if whole.any() and any("tpot" in by_metric for by_metric in limited):
            asked.append("a goodput limit of tpot")
        if asked:
            why = "comes whole (a beam search or best-of)" if whole.any() else "has one token"
            raise UsageError(
                f"{asked[0]}: every answer {why} and has no ITL or TPOT; set a limit on E2EL instead, such as "
                "p95_e2el:5000"
            )

    def limited(self, tenants: Sequence[Tenant]) -> bool:
        """Whether a request has limits of its own."""
        return any(limits(tenant, self.goodput).limits_s() for tenant in tenants)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One promise at one load."""

    name: str
    """As typed, such as "p95_ttft", or "slo_attainment"."""
    label: str
    value: float
    """Seconds, or the share of good requests; infinite where too many requests were refused, NaN where no request has
    it, as TPOT where answers have one token: then it is neither kept nor broken."""
    limit: float
    ratio: float
    """How much of the limit is used: kept up to 1. Of goodput, the quantile of each request's worst share of a limit."""
    settled: bool
    """Whether the value is clear of its limit by `CERTAIN_Z` standard errors."""
    missing: float
    """Share of requests (or of gaps) over the limit; NaN for a mean."""

    @property
    def kept(self) -> bool:
        return self.ratio <= MOST


@dataclass(frozen=True, slots=True)
class Trial:
    """A load that was tested."""

    load: float
    num_requests: int
    outcomes: tuple[Outcome, ...]
    saturation: Saturation
    rejected: int = 0
    final: bool = True
    """Whether the run was of full length, or failed beyond doubt before."""

    @property
    def sustained(self) -> bool:
        """All promises kept and no queue that grows. A run too short to tell is not a yes."""
        steady = self.saturation.load in (Load.STABLE, Load.CLOSED_LOOP)
        return steady and all(outcome.kept for outcome in self.outcomes)

    @property
    def worst(self) -> Outcome:
        """The promise closest to its limit, or furthest beyond it."""
        return max(self.outcomes, key=lambda outcome: outcome.ratio)

    @property
    def margin(self) -> float:
        """Logarithm of the worst ratio, positive where not sustained; for interpolation between loads."""
        ratio = self.worst.ratio
        log = math.log(ratio) if 0 < ratio < math.inf else math.copysign(5.0, ratio - 1)
        log = min(max(log, -0.7), 0.7)
        return max(log, 0.05) if self.saturation.load is Load.SATURATED else log

    @property
    def hopeless(self) -> bool:
        """Whether even a short run leaves no doubt: at least half of the requests miss a limit."""
        return any(outcome.missing > 0.5 or outcome.ratio == math.inf for outcome in self.outcomes)

    @property
    def settled_miss(self) -> bool:
        """Whether some promise is missed by more than sampling explains."""
        return any(outcome.settled and not outcome.kept for outcome in self.outcomes)

    @property
    def reason(self) -> str:
        """What gives at this load, in words; of a sustained one, what is nearest to its limit."""
        worst = self.worst
        if self.saturation.load is Load.SATURATED and worst.kept:
            return f"saturated: {self.saturation.reason}"
        if self.saturation.load is Load.INCONCLUSIVE and worst.kept:
            return f"saturation unknown: {self.saturation.reason}"
        return words(worst)


def words(outcome: Outcome) -> str:
    """Such as "P95 TTFT is 520 ms, over the limit of 500 ms"."""
    if outcome.name == "slo_attainment":
        verb = "at least" if outcome.kept else "below"
        return f"{outcome.value:.1%} of requests are good, {verb} the {outcome.limit:.1%} asked for"
    side = "within" if outcome.kept else "over"
    return f"{outcome.label} is {in_ms(outcome.value)}, {side} the limit of {in_ms(outcome.limit)}"


def in_ms(value_s: float) -> str:
    """Such as "4.989 ms" or "24,140 ms"; "none" of NaN."""
    if not math.isfinite(value_s):
        return "none" if math.isnan(value_s) else "infinite"
    value = value_s * 1000
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.4g} ms"


def judge(
    record: RunRecord, load: float, promises: Promises, *, whole: bool = False, final: bool = True
) -> Trial:
    """Judge a run at one load. `whole` takes every request: a trace has no steady middle."""
    window = np.ones(len(record.requests), np.bool_) if whole else middle(record)
    return Trial(
        load,
        len(record.requests),
        outcomes(record, promises, window),
        saturation(record),
        int(np.count_nonzero(record.requests.status >= Status.REJECTED)),
        final,
    )


def middle(record: RunRecord) -> Bools:
    """Requests sent after the warm-up and before the last stretch of the same length.

    The warm-up is as `sim.saturation` takes it, the P95 of the time from being scheduled to the last token, and at most
    a quarter of the time in which requests are sent.
    """
    r = record.requests
    first_s, last_s = float(r.sent_s.min()), float(r.sent_s.max())
    cut_s = min(served_s(record), (last_s - first_s) / 4)
    kept: Bools = (r.sent_s >= first_s + cut_s) & (r.sent_s <= last_s - cut_s)
    return kept if kept.any() else np.ones(len(r), np.bool_)


def served_s(record: RunRecord) -> float:
    """P95 of the time from first being scheduled to the last token; 0 where nothing finished."""
    r = record.requests
    times_s = (latencies(record).e2el_s - (r.scheduled_s - r.queued_s))[r.status == Status.FINISHED]
    return float(np.percentile(times_s, 95)) if len(times_s) else 0.0


def outcomes(record: RunRecord, promises: Promises, window: Bools) -> tuple[Outcome, ...]:
    """Every promise over the requests of `window`."""
    r, lat = record.requests, latencies(record)
    refused = r.status >= Status.REJECTED
    served = {
        "ttft": lat.ttft_s,
        "tpot": np.where(r.output_tokens > 1, lat.tpot_s, np.nan),
        "e2el": lat.e2el_s,
    }
    out = []
    for slo in promises.slos:
        if slo.metric == "itl":
            out.append(_gaps(record, slo, window))
        else:
            values = np.where(refused, np.inf, served[slo.metric])[window]
            out.append(_latency(slo, values[~np.isnan(values)]))
    if promises.limited(record.tenants):
        score = np.zeros(len(r))
        for metric in ("ttft", "tpot", "e2el"):
            by_tenant = [limits(t, promises.goodput).limits_s().get(metric, np.inf) for t in record.tenants]
            values = np.nan_to_num(served[metric], nan=0.0) / np.array(by_tenant)[r.tenant]
            score = np.maximum(score, values)
        score = np.where(r.status == Status.FINISHED, score, np.inf)[window]
        out.append(_attainment(score, promises.attainment))
    return tuple(out)


def _latency(slo: Slo, values: Floats) -> Outcome:
    if not len(values):
        return Outcome(slo.name, slo.label, math.nan, slo.limit_s, 0.0, False, 0.0)
    if slo.percentile is None:
        served = values[np.isfinite(values)]
        mean = float(served.mean()) if len(served) else math.inf
        error = _batch_error(served) if len(served) >= BATCHES else math.inf
        settled = abs(mean - slo.limit_s) > CERTAIN_Z * error
        return Outcome(slo.name, slo.label, mean, slo.limit_s, mean / slo.limit_s, settled, math.nan)
    value = percentile_s(pooled(values), slo.percentile)
    missing, settled = _share_over(values > slo.limit_s, 1 - slo.percentile / 100)
    return Outcome(slo.name, slo.label, value, slo.limit_s, value / slo.limit_s, settled, missing)


def _attainment(score: Floats, asked: float) -> Outcome:
    over = score > MOST
    missing, settled = _share_over(over, 1 - asked)
    # The quantile moves smoothly with the load where the share of good requests jumps from 1 to less.
    ratio = float(np.quantile(score, asked, method="inverted_cdf"))
    return Outcome("slo_attainment", "SLO attainment", 1 - missing, asked, ratio, settled, missing)


def _gaps(record: RunRecord, slo: Slo, window: Bools) -> Outcome:
    """Gaps between tokens, pooled; batches are of requests, because gaps of one request depend on each other."""
    done = window & (record.requests.status == Status.FINISHED)
    pool = inter_token_gaps(record, done)
    if slo.percentile is None:
        value = latency_stats(pool, ()).mean_s
        return Outcome(slo.name, slo.label, value, slo.limit_s, value / slo.limit_s, False, math.nan)
    value = percentile_s(pool, slo.percentile)
    shares = []
    for rows in np.array_split(np.flatnonzero(done), BATCHES):
        mine = np.zeros(len(done), np.bool_)
        mine[rows] = True
        part = inter_token_gaps(record, mine)
        size = part.size
        shares.append(float(part.counts[part.values_s > slo.limit_s].sum()) / size if size else 0.0)
    allowed = 1 - slo.percentile / 100
    missing, error = float(np.mean(shares)), float(np.std(shares, ddof=1)) / math.sqrt(BATCHES)
    settled = abs(missing - allowed) > CERTAIN_Z * max(error, allowed / 10)
    return Outcome(slo.name, slo.label, value, slo.limit_s, value / slo.limit_s, settled, missing)


def _share_over(over: Bools, allowed: float) -> tuple[float, bool]:
    """Share of True, and whether it is clear of `allowed`.

    The standard error is the larger of two: over batches of consecutive requests, which share their luck, and of a
    binomial share with two successes and two failures added (Agresti and Coull), so that a share of 0 has one too.
    """
    n, share = len(over), float(over.mean())
    if n < 2 * BATCHES:
        return share, False
    padded = (float(over.sum()) + 2) / (n + 4)
    error = max(_batch_error(over.astype(np.float64)), math.sqrt(padded * (1 - padded) / n))
    return share, abs(share - allowed) > CERTAIN_Z * error


def _batch_error(values: Floats) -> float:
    """Standard error of the mean, from means of `BATCHES` runs of consecutive values."""
    means = [float(part.mean()) for part in np.array_split(values, BATCHES)]
    return float(np.std(means, ddof=1)) / math.sqrt(BATCHES)
