"""One tenant's requests: rows read or made, how many of them, in which order, and when each is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.errors import UsageError
from sim.record import Floats, Ints
from sim.workload import arrivals, csv_traces, jsonl_traces, sessions, synthetic, text_datasets
from sim.workload.rows import Rows, Segments
from sim.workload.sessions import Turns
from sim.workload.spec import (
    AzureSpec,
    BurstGptSpec,
    CustomSpec,
    LengthsSpec,
    MooncakeSpec,
    PrefixRepetitionSpec,
    RandomSpec,
    SessionSpec,
    ShareGptSpec,
    TenantSpec,
    TimedTraceSpec,
)
from sim.workload.streams import Streams
from sim.workload.textfile import plural

DEFAULT_NUM_PROMPTS = 1000
"""Requests of a generated dataset when nothing says how many, as in `vllm bench serve`."""

FileSpec = AzureSpec | BurstGptSpec | CustomSpec | LengthsSpec | MooncakeSpec | ShareGptSpec | TimedTraceSpec


@dataclass(frozen=True, slots=True)
class TenantRequests:
    """Requests of one tenant, session by session, with streams numbered from 0."""

    turns: Turns
    warnings: tuple[str, ...]
    meta: dict[str, Any]


def read_rows(spec: FileSpec) -> Rows:
    """All usable rows of a dataset file. Raises UsageError."""
    match spec:
        case AzureSpec():
            return csv_traces.read_azure(spec.path)
        case BurstGptSpec():
            return csv_traces.read_burstgpt(spec.path, spec.model)
        case LengthsSpec():
            return csv_traces.read_lengths(spec.path)
        case MooncakeSpec():
            return jsonl_traces.read_mooncake(spec)
        case TimedTraceSpec():
            return jsonl_traces.read_timed_trace(spec)
        case ShareGptSpec():
            return text_datasets.read_sharegpt(spec)
        case CustomSpec():
            return text_datasets.read_custom(spec)


def load_tenant(tenant: TenantSpec, streams: Streams) -> TenantRequests:
    """The requests of `tenant` before its shared-prefix group is put in front of them.

    Raises UsageError; fields of the tenant are in backquotes, for `load_workload` to name as the user does.
    """
    dataset = tenant.dataset
    if isinstance(dataset, (RandomSpec, PrefixRepetitionSpec)):
        _refuse_trace_options(tenant)
        return _place(tenant, dataset, streams)
    rows = read_rows(dataset)
    if rows.beam_width is not None and tenant.beam_width is not None:
        raise UsageError(
            f"{dataset.path}: its lines say how wide beams are, and so does `beam_width`; leave one of them out"
        )
    if rows.time_s is not None and tenant.arrivals.from_trace:
        return _replay(tenant, rows)
    _refuse_trace_options(tenant)
    return _place(tenant, rows, streams)


def _refuse_trace_options(tenant: TenantSpec) -> None:
    if not tenant.arrivals.from_trace:
        return
    name = tenant.dataset.name
    if tenant.arrivals.rate_scale != 1:
        raise UsageError(
            f"`arrivals.rate_scale` scales a trace's own times and {name} has none; set `arrivals.request_rate`"
        )
    if tenant.arrivals.duration_s is not None:
        raise UsageError(
            f"`arrivals.duration_s` needs times and {name} has none; set `arrivals.request_rate`"
        )


def _replay(tenant: TenantSpec, rows: Rows) -> TenantRequests:
    """The trace at its own times, faster or slower by `rate_scale`."""
    if tenant.sessions is not None:
        raise UsageError(
            "sessions need arrivals of their own; set `arrivals.request_rate` (a trace places single requests)"
        )
    if getattr(tenant.dataset, "order", "file") != "file":
        raise UsageError(
            "`dataset.order` has no effect when requests are sent at the trace's own times; set "
            "`arrivals.request_rate` or remove `dataset.order`"
        )
    assert rows.time_s is not None
    time_s = rows.time_s / tenant.arrivals.rate_scale
    count = len(rows)
    warnings = rows.warnings
    if tenant.arrivals.duration_s is not None:
        count = int(np.searchsorted(time_s, tenant.arrivals.duration_s, side="left"))
    if tenant.num_prompts is not None:
        if tenant.num_prompts > count:
            warnings += (
                f"{tenant.num_prompts:,} requests asked for, but the trace has {count:,}; all of them are "
                "sent",
            )
        count = min(count, tenant.num_prompts)
    picked = rows.take(np.arange(count))
    return TenantRequests(_single(picked, time_s[:count]), warnings, rows.meta)


def _place(
    tenant: TenantSpec, source: Rows | RandomSpec | PrefixRepetitionSpec, streams: Streams
) -> TenantRequests:
    """Requests at times of the spec's own: first how many sessions of how many turns, then their rows, then
    times."""
    order = _conversation_order(tenant, source, streams) if isinstance(source, Rows) else None
    turns, start_s = _turns_and_times(tenant, source, order, streams)
    count = int(turns.sum())
    warnings: tuple[str, ...] = ()
    if isinstance(source, RandomSpec):
        picked = synthetic.make_random(source, count, streams.rows)
    elif isinstance(source, PrefixRepetitionSpec):
        picked = synthetic.make_prefix_repetition(source, count, streams.rows)
    else:
        index, warnings = _row_order(tenant, source, order, turns, streams)
        picked = source.take(index)
    if tenant.turns is None:
        placed = _single(picked, start_s)
    else:
        placed = sessions.compose(picked, turns, start_s, tenant.turns, streams.think)
    return TenantRequests(placed, (*picked.warnings, *warnings), picked.meta)


def _single(rows: Rows, sent_s: Floats) -> Turns:
    count = len(rows)
    segments = rows.segments if rows.segments is not None else Segments.none(count)
    return Turns(
        rows.prompt_tokens,
        rows.output_tokens,
        sent_s,
        segments,
        np.full(count, -1, dtype=np.int64),
        np.zeros(count),
        rows.beam_width,
    )


def _turns_and_times(
    tenant: TenantSpec, source: Rows | RandomSpec | PrefixRepetitionSpec, order: Ints | None, streams: Streams
) -> tuple[Ints, Floats]:
    """Turns of each session and its start; a request without sessions is a session of one turn.

    The number of prompts, a duration at a steady rate, or a rate curve limits them, else the file's length.
    """
    spec = tenant.arrivals
    is_curve = spec.rate_points is not None or spec.daily_curve is not None
    limit, num_sessions = tenant.num_prompts, arrivals.count_for(spec)
    start_s: Floats | None = None
    if is_curve and (limit is None or spec.duration_s is not None):
        start_s = arrivals.draw(spec, None, streams.arrivals)
        num_sessions = len(start_s)
    elif limit is None and num_sessions is None:
        limit = len(source) if isinstance(source, Rows) else DEFAULT_NUM_PROMPTS
    if isinstance(source, Rows) and order is not None:
        turns = _file_turns(source, order, num_sessions, limit)
    else:
        turns = sessions.draw_turns(tenant.turns or SessionSpec(), num_sessions, limit, streams.turns)
    if isinstance(source, PrefixRepetitionSpec):
        turns = sessions.cut(turns, synthetic.prefix_repetition_count(source, int(turns.sum())))
    if start_s is None:
        start_s = (
            np.zeros(len(turns)) if spec.from_trace else arrivals.draw(spec, len(turns), streams.arrivals)
        )
    if not len(turns):
        raise UsageError(
            f"tenant {tenant.name!r} sends no request; raise the rate, the duration or `num_prompts`"
        )
    return turns, start_s[: len(turns)]


def _conversation_order(tenant: TenantSpec, rows: Rows, streams: Streams) -> Ints | None:
    """Order in which the file's conversations are used, or None when rows are single requests."""
    if rows.conversation is None:
        return None
    count = int(rows.conversation[-1]) + 1
    if getattr(tenant.dataset, "order", "file") == "file":
        return np.arange(count)
    return streams.order.permutation(count)


def _file_turns(rows: Rows, order: Ints, num_sessions: int | None, limit: int | None) -> Ints:
    assert rows.conversation is not None
    sizes = np.bincount(rows.conversation)[order]
    if num_sessions is None:
        assert limit is not None
        num_sessions = -(-limit // int(sizes.sum())) * len(sizes)
    turns = np.resize(sizes, num_sessions)
    return turns if limit is None else sessions.cut(turns, limit)


def _row_order(
    tenant: TenantSpec, rows: Rows, conversations: Ints | None, turns: Ints, streams: Streams
) -> tuple[Ints, tuple[str, ...]]:
    """Which rows are sent, in order, and a warning when the file was too short and was used again."""
    available, count = len(rows), int(turns.sum())
    order = getattr(tenant.dataset, "order", "file")
    if conversations is not None:
        assert rows.conversation is not None
        starts = np.searchsorted(rows.conversation, np.arange(len(conversations)))
        first = starts[np.resize(conversations, len(turns))]
        index = np.repeat(first - (np.cumsum(turns) - turns), turns) + np.arange(count)
        again = len(turns) > len(conversations)
    elif order == "sample":
        return streams.order.integers(0, available, size=count), ()
    else:
        base = np.arange(available) if order == "file" else streams.order.permutation(available)
        index = base[np.arange(count) % available]
        again = count > available
    if not again:
        return index, ()
    shared = ", shared prefixes included" if rows.segments is not None else ""
    return index, (f"{plural(available, 'row')} used again from the top to make {count:,} requests{shared}",)
