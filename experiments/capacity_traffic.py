"""Traffic whose load can be turned up: the same requests under one seed, at another rate, speed or concurrency."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from serving.errors import UsageError
from sim.workload import Workload, WorkloadSpec, load_workload
from sim.workload.arrival_spec import ArrivalSpec
from sim.workload.flags import scale_rates
from sim.workload.load import spec_json
from sim.workload.spec import TRACES, TenantSpec
from sim.workload.types import ClosedLoop

LoadVar = Literal["request_rate", "rate_scale", "max_concurrency"]

_RUNGS_PER_DOUBLING = 64
_EVERY_NUMBER_UP_TO = 92
"""From here on whole numbers are closer together than 1.1 %."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """The loads that can be an answer: 64 to a doubling (1.1 % apart), with four digits, or whole numbers.

    They do not depend on where a search starts, so neither does its answer.
    """

    whole_numbers: bool = False

    def load(self, rung: int) -> float:
        """The load of a rung."""
        if not self.whole_numbers:
            return float(f"{2 ** (rung / _RUNGS_PER_DOUBLING):.4g}")
        first = _EVERY_NUMBER_UP_TO
        if rung <= first:
            return float(max(rung, 1))
        return float(round(first * 2 ** ((rung - first) / _RUNGS_PER_DOUBLING)))

    def rung(self, load: float) -> int:
        """The rung nearest to a load."""
        if not self.whole_numbers:
            return round(_RUNGS_PER_DOUBLING * math.log2(load))
        first = _EVERY_NUMBER_UP_TO
        if load <= first:
            return max(round(load), 1)
        return first + round(_RUNGS_PER_DOUBLING * math.log2(load / first))

    @property
    def lowest(self) -> int | None:
        """The lowest rung, where there is one."""
        return 1 if self.whole_numbers else None


class Traffic(Protocol):
    """Requests at a load."""

    variable: LoadVar
    whole: bool
    """Whether all requests are always sent, and all are judged: a trace."""
    ladder: Ladder

    @property
    def spec(self) -> WorkloadSpec:
        """What is sent."""

    def workload(self, load: float, num_requests: int) -> Workload:
        """The workload at a load; about `num_requests` of it unless `whole`."""

    def with_seed(self, seed: int) -> Traffic:
        """The same traffic, drawn anew."""

    def requests_per_s(self, load: float) -> float:
        """Mean rate at a load; NaN where the server decides."""


@dataclass
class Steady:
    """Tenants that send at steady rates. The load is the sum of the rates."""

    spec: WorkloadSpec
    seed: int = 0
    variable: LoadVar = "request_rate"
    whole: bool = False
    ladder: Ladder = Ladder()
    _bases: dict[int, Workload] = field(default_factory=dict)

    @property
    def total_rate(self) -> float:
        """Sum of the tenants' rates as they were given."""
        return sum(_rate(tenant) for tenant in self.spec.tenants)

    @property
    def sessions(self) -> bool:
        """Whether the rate is of sessions, whose later turns come when they come."""
        return any(tenant.turns is not None for tenant in self.spec.tenants)

    def workload(self, load: float, num_requests: int) -> Workload:
        if self.sessions:
            return load_workload(self.spec_at(load, num_requests), seed=self.seed)
        if num_requests not in self._bases:
            self._bases[num_requests] = load_workload(self.spec_at(1.0, num_requests), seed=self.seed)
        base = self._bases[num_requests]
        meta = {**base.meta, "spec": spec_json(self.spec_at(load, num_requests))}
        if "request_rate" in meta:
            meta["request_rate"] = load
        return replace(base, sent_s=base.sent_s / load, meta=meta)

    def with_seed(self, seed: int) -> Steady:
        return Steady(self.spec, seed)

    def requests_per_s(self, load: float) -> float:
        return load

    def spec_at(self, load: float, num_requests: int) -> WorkloadSpec:
        """The workload's description at a load."""
        total = self.total_rate
        tenants = [
            tenant.model_copy(
                update={"num_prompts": max(round(num_requests * _rate(tenant) / total), _least(tenant))}
            )
            for tenant in self.spec.tenants
        ]
        return scale_rates(self.spec.model_copy(update={"tenants": tuple(tenants)}), load / total)


@dataclass
class Replay:
    """A trace at its own times, sped up: the load is the factor. All of it is sent, or its first requests."""

    spec: WorkloadSpec
    seed: int = 0
    variable: LoadVar = "rate_scale"
    whole: bool = True
    ladder: Ladder = Ladder()
    _base: Workload | None = None

    @property
    def base(self) -> Workload:
        """The trace at its own speed."""
        if self._base is None:
            self._base = load_workload(self.spec, seed=self.seed)
        return self._base

    def workload(self, load: float, num_requests: int) -> Workload:
        if self.base.tenants and (self.base.after >= 0).any():
            return load_workload(scale_rates(self.spec, load), seed=self.seed)
        meta = {**self.base.meta, "spec": spec_json(scale_rates(self.spec, load))}
        if any(tenant.arrivals.duration_s is not None for tenant in self.spec.tenants):
            meta.pop("spec")  # at another speed it lets others in
        return replace(self.base, sent_s=self.base.sent_s / load, meta=meta)

    def with_seed(self, seed: int) -> Replay:
        return self if seed == self.seed else Replay(self.spec, seed)

    def requests_per_s(self, load: float) -> float:
        sent_s = self.base.sent_s
        return load * (len(sent_s) - 1) / float(sent_s[-1] - sent_s[0])


@dataclass
class Closed:
    """As many users as the load says, each of whom sends the next request when the last one is answered."""

    inner: Traffic
    variable: LoadVar = "max_concurrency"
    whole: bool = False
    ladder: Ladder = Ladder(whole_numbers=True)

    def workload(self, load: float, num_requests: int) -> Workload:
        workload = self.inner.workload(1.0, num_requests)
        meta = {**workload.meta, "max_concurrency": int(load)}
        if "request_rate" in meta:
            meta["request_rate"] = "inf"
        meta.pop("spec", None)  # says a rate
        at_once = np.where(workload.after >= 0, workload.sent_s, 0.0)
        return replace(workload, sent_s=at_once, closed_loop=ClosedLoop(int(load)), meta=meta)

    @property
    def spec(self) -> WorkloadSpec:
        """What the inner traffic sends."""
        return self.inner.spec

    def with_seed(self, seed: int) -> Closed:
        return Closed(self.inner.with_seed(seed))

    def requests_per_s(self, load: float) -> float:
        return math.nan


def make_traffic(spec: WorkloadSpec, *, seed: int = 0, variable: LoadVar | None = None) -> Traffic:
    """The traffic of a workload. `variable` max_concurrency asks for a closed loop; otherwise the workload decides.

    A generated dataset without a rate gets one; a trace keeps its own times unless it is given a rate. Raises
    UsageError for traffic without a steady load (ramps, curves), and where the load would be given twice.
    """
    if spec.max_concurrency is not None:
        hint = (
            "remove it: that is what is searched"
            if variable == "max_concurrency"
            else "remove it, or search over it with --workload-var max_concurrency"
        )
        raise UsageError(f"--max-concurrency has no effect on a search for capacity; {hint}")
    for tenant in spec.tenants:
        arrivals = tenant.arrivals
        if arrivals.ramp_up_strategy or arrivals.rate_points or arrivals.daily_curve:
            what = "a ramp" if arrivals.ramp_up_strategy else "a rate curve"
            raise UsageError(
                f"capacity is about a steady load, and {what} is none; leave it out, and compare the answer with its peak"
            )
        if arrivals.duration_s is not None and not arrivals.from_trace:
            raise UsageError("--duration has no effect on a search for capacity; set --num-prompts instead")
    if variable == "max_concurrency":
        if any(_finite_rate(tenant) for tenant in spec.tenants):
            raise UsageError(
                "--request-rate has no effect with --workload-var max_concurrency; remove one of them"
            )
        return Closed(Steady(_with_rates(spec), seed))
    if any(tenant.arrivals.from_trace for tenant in spec.tenants) and _has_times(spec):
        replay = Replay(spec, seed)
        if float(np.ptp(replay.base.sent_s)) > 0:
            return replay
    if variable == "rate_scale":
        raise UsageError("--workload-var rate_scale needs a trace with times of its own; use request_rate")
    return Steady(_with_rates(spec), seed)


def _has_times(spec: WorkloadSpec) -> bool:
    return any(t.arrivals.from_trace and t.dataset.name in (*TRACES, "custom") for t in spec.tenants)


def _finite_rate(tenant: TenantSpec) -> bool:
    rate = tenant.arrivals.request_rate
    return rate is not None and math.isfinite(rate)


def _with_rates(spec: WorkloadSpec) -> WorkloadSpec:
    """The only tenant without a rate gets 1 a second; several must say how they share."""
    missing = [tenant for tenant in spec.tenants if not _finite_rate(tenant)]
    if missing and len(spec.tenants) > 1:
        raise UsageError(
            f"tenant {missing[0].name!r} has no finite request_rate, and rates say how tenants share the load; "
            "set one"
        )
    tenants = [
        tenant.model_copy(
            update={
                "arrivals": ArrivalSpec(
                    request_rate=tenant.arrivals.request_rate if _finite_rate(tenant) else 1.0,
                    burstiness=tenant.arrivals.burstiness,
                )
            }
        )
        for tenant in spec.tenants
    ]
    return spec.model_copy(update={"tenants": tuple(tenants)})


def _rate(tenant: TenantSpec) -> float:
    rate = tenant.arrivals.request_rate
    assert rate is not None
    return rate


def _least(tenant: TenantSpec) -> int:
    return int(getattr(tenant.dataset, "num_prefixes", 1))


def head(workload: Workload, count: int) -> Workload:
    """The first `count` requests of a workload."""
    last = int(workload.segment_offsets[count])
    return replace(
        workload,
        sent_s=workload.sent_s[:count],
        prompt_tokens=workload.prompt_tokens[:count],
        output_tokens=workload.output_tokens[:count],
        tenant=workload.tenant[:count],
        priority=workload.priority[:count],
        segment_offsets=workload.segment_offsets[: count + 1],
        segment_ends=workload.segment_ends[:last],
        segment_streams=workload.segment_streams[:last],
        after=workload.after[:count],
        think_s=workload.think_s[:count],
        beam_width=None if workload.beam_width is None else workload.beam_width[:count],
        best_of=None if workload.best_of is None else workload.best_of[:count],
    )
