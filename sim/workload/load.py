"""From a `WorkloadSpec` to the columns of a `Workload`: load each tenant, put shared prefixes in front,
merge."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from serving.errors import UsageError
from sim.record import Ints, Tenant
from sim.workload.flags import reworded
from sim.workload.rows import Segments
from sim.workload.sessions import Turns
from sim.workload.spec import MAX_SPAN_S, TenantSpec, WorkloadSpec
from sim.workload.streams import Streams
from sim.workload.tenant import TenantRequests, load_tenant
from sim.workload.types import ClosedLoop, Workload


def load_workload(spec: WorkloadSpec, *, seed: int) -> Workload:
    """The workload of `spec`: the same columns for the same spec, seed and files, on every machine.

    Raises UsageError for unreadable or wrong files and for options that cannot be met.
    """
    if seed < 0:
        raise UsageError(f"--seed must not be negative, got {seed}")
    loaded = []
    for number, tenant in enumerate(spec.tenants):
        try:
            loaded.append(load_tenant(tenant, Streams.of(seed, tenant.name)))
            _check_span(loaded[-1].turns)
        except UsageError as error:
            raise UsageError(reworded(str(error), spec, number)) from None
    groups: dict[str, int] = {}
    for tenant in spec.tenants:
        if tenant.shared_prefix is not None:
            groups.setdefault(tenant.shared_prefix.group, len(groups))
    next_stream = len(groups)
    parts: list[Turns] = []
    for tenant, requests in zip(spec.tenants, loaded, strict=True):
        turns = requests.turns
        parts.append(_with_prefix(tenant, turns, groups, next_stream))
        next_stream += turns.segments.num_streams
    return _merge(spec, seed, parts, loaded)


def _check_span(turns: Turns) -> None:
    first_s = turns.sent_s[turns.after < 0]
    if len(first_s) and not first_s.max() <= MAX_SPAN_S:
        raise UsageError(
            f"the last request would be sent after {first_s.max():g} s, and a workload lasts at most a year "
            f"({MAX_SPAN_S:.0f} s); raise `arrivals.request_rate`, or correct the times of the trace"
        )


def _with_prefix(tenant: TenantSpec, turns: Turns, groups: dict[str, int], first_stream: int) -> Turns:
    """`turns` with stream numbers of the whole workload and the tenant's shared prefix in front of each
    prompt."""
    own = turns.segments
    segments = Segments(own.offsets, own.ends, own.streams + first_stream)
    prompt = turns.prompt_tokens
    if tenant.shared_prefix is not None:
        length = tenant.shared_prefix.tokens
        ends = np.full(len(prompt), length, dtype=np.int64)
        segments = segments.prepend(
            ends, np.full(len(prompt), groups[tenant.shared_prefix.group], dtype=np.int64)
        )
        prompt = prompt + length
    return replace(turns, prompt_tokens=prompt, segments=segments)


def _merge(spec: WorkloadSpec, seed: int, parts: list[Turns], loaded: list[TenantRequests]) -> Workload:
    counts = [len(part.prompt_tokens) for part in parts]
    first_row = np.concatenate(([0], np.cumsum(counts)))
    sent_s = np.concatenate([part.sent_s for part in parts])
    order = np.argsort(sent_s, kind="stable").astype(np.int64)
    row_of = np.empty_like(order)
    row_of[order] = np.arange(len(order))
    after = np.concatenate(
        [
            np.where(part.after >= 0, part.after + start, -1)
            for part, start in zip(parts, first_row, strict=False)
        ]
    )
    after = np.where(after >= 0, row_of[after], -1)[order]
    offsets = np.concatenate(
        ([0], np.cumsum(np.concatenate([np.diff(part.segments.offsets) for part in parts])))
    )
    ends = np.concatenate([part.segments.ends for part in parts])
    streams = np.concatenate([part.segments.streams for part in parts])
    segments = Segments(offsets.astype(np.int64), ends, streams).take(order)
    tenant = np.repeat(np.arange(len(parts)), counts)[order]
    priorities = np.array([t.priority for t in spec.tenants], dtype=np.int64)
    several = len(spec.tenants) > 1
    warnings = [
        f"{t.name}: {line}" if several else line
        for t, requests in zip(spec.tenants, loaded, strict=True)
        for line in requests.warnings
    ]
    return Workload(
        name=spec.name,
        sent_s=sent_s[order],
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts])[order],
        output_tokens=np.concatenate([part.output_tokens for part in parts])[order],
        tenant=tenant,
        priority=priorities[tenant],
        segment_offsets=segments.offsets,
        segment_ends=segments.ends,
        segment_streams=segments.streams,
        after=after,
        think_s=np.concatenate([part.think_s for part in parts])[order],
        tenants=tuple(_tenant(t) for t in spec.tenants),
        closed_loop=None if spec.max_concurrency is None else ClosedLoop(spec.max_concurrency),
        warnings=tuple(warnings),
        meta=_meta(spec, seed, loaded),
        beam_width=_beam_width(spec, parts, order),
        best_of=_best_of(spec, tenant),
    )


def _best_of(spec: WorkloadSpec, tenant: Ints) -> Ints | None:
    """Answers sampled to each request; None where one is enough for all."""
    several = np.array([each.best_of for each in spec.tenants], dtype=np.int64)[tenant]
    return several if (several > 1).any() else None


def _beam_width(spec: WorkloadSpec, parts: list[Turns], order: Ints) -> Ints | None:
    """Of each request in order, 0 for those without a beam search; None where no request asks for one."""
    widths = [
        np.full(len(part.prompt_tokens), tenant.beam_width or 0)
        if part.beam_width is None
        else part.beam_width
        for tenant, part in zip(spec.tenants, parts, strict=True)
    ]
    width = np.concatenate(widths).astype(np.int64)[order]
    return width if width.any() else None


def _tenant(spec: TenantSpec) -> Tenant:
    limits = (spec.goodput.ttft, spec.goodput.tpot, spec.goodput.e2el)
    ttft_s, tpot_s, e2el_s = (None if ms is None else ms / 1000 for ms in limits)
    return Tenant(spec.name, spec.slo_class, ttft_s, tpot_s, e2el_s, spec.rtt_ms / 1000, spec.weight)


def _meta(spec: WorkloadSpec, seed: int, loaded: list[TenantRequests]) -> dict[str, Any]:
    """JSON values; `request_rate` and `burstiness` as in `vllm bench serve` results where there is one
    tenant."""
    meta: dict[str, Any] = {"seed": seed, "max_concurrency": spec.max_concurrency}
    if len(spec.tenants) == 1:
        only = spec.tenants[0]
        rate = only.arrivals.request_rate
        meta |= {"dataset": only.dataset.name, **loaded[0].meta}
        meta |= {
            "request_rate": "inf" if rate == math.inf else rate,
            "burstiness": _json(only.arrivals.burstiness),
        }
        meta["rate_scale"] = only.arrivals.rate_scale
    tenants = zip(spec.tenants, loaded, strict=True)
    meta["tenants"] = [
        {"name": t.name, "dataset": t.dataset.name, **requests.meta} for t, requests in tenants
    ]
    meta["spec"] = spec_json(spec)
    return meta


def spec_json(spec: WorkloadSpec) -> dict[str, Any]:
    """A workload's description as its `meta` has it under "spec": with a seed it makes the workload again."""
    content: dict[str, Any] = _json(spec.model_dump(mode="json"))
    return content


def _json(value: Any) -> Any:
    """`value` with infinities as the text "inf", which JSON lacks."""
    if isinstance(value, dict):
        return {key: _json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_json(entry) for entry in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
