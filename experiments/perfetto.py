"""A run as a Chrome trace (JSON, gzip): open it at ui.perfetto.dev and see steps, requests and counters on one
time line.

Each replica is a process: a track of steps, counters of running and waiting requests and of KV pages, and one
nested slice per request with its queue, prefill and decode. Where streams were followed over a network there are what it
was blocked for before it went off, its way to the queue (send), and the rest of its last event's way (deliver).
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from experiments.results import writable
from sim.meta import meta_value
from sim.record import RunRecord, Status

MAX_EVENTS = 1_000_000
SLICE = 8192
"""Events encoded at a time."""
NETWORK_STAGES = ("blocked", "network", "gateway", "detokenize", "reader")
CLIENT_PID = 0
"""Process of requests that never reached a replica."""
Event = dict[str, Any]


def write_trace(record: RunRecord, path: str | Path, *, max_events: int = MAX_EVENTS) -> Path:
    """Write the trace and return its path; the same run gives the same bytes.

    A run with more than `max_events` events is cut in time, and `otherData.cut_at_s` says where. Raises UsageError
    when the file cannot be written.
    """
    target = Path(path)
    head, events = _trace(record, max_events)
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    with writable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            target.open("wb") as file,
            gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as out,
        ):
            # In slices: a whole trace as objects takes half a gigabyte.
            out.write((encode(head)[:-1] + ',"traceEvents":[').encode())
            comma = ""
            while some := list(islice(events, SLICE)):
                out.write((comma + encode(some)[1:-1]).encode())
                comma = ","
            out.write(b"]}")
    return target


def trace(record: RunRecord, *, max_events: int = MAX_EVENTS) -> dict[str, Any]:
    """The trace as an object in Chrome's trace event format; times in microseconds."""
    head, events = _trace(record, max_events)
    return {**head, "traceEvents": list(events)}


def _trace(record: RunRecord, max_events: int) -> tuple[dict[str, Any], Iterator[Event]]:
    until_s = _cut_s(record, max_events)
    events = chain(
        _names(record), _steps(record, until_s), _counters(record, until_s), _requests(record, until_s)
    )
    facts = {key: meta_value(record, key) for key in ("model_id", "gpu", "seed", "version")}
    other: dict[str, Any] = {key: value for key, value in facts.items() if value is not None}
    if math.isfinite(until_s):
        other["cut_at_s"] = until_s
    return {"displayTimeUnit": "ms", "otherData": other}, events


def _cut_s(record: RunRecord, max_events: int) -> float:
    """The time at which the trace would hold more than `max_events` events; infinite when it never does.

    A step makes at most three events, counters included, and a request fourteen.
    """
    at_s = np.concatenate([record.steps.start_s, record.requests.sent_s])
    weight = np.concatenate([np.full(len(record.steps), 3), np.full(len(record.requests), 14)])
    order = np.argsort(at_s, kind="stable")
    over = np.flatnonzero(np.cumsum(weight[order]) > max_events)
    return float(at_s[order[over[0]]]) if len(over) else math.inf


def _names(record: RunRecord) -> Iterator[Event]:
    fleet = record.fleet
    pools = [""] * record.num_replicas
    if fleet is not None and len(fleet.pools) > 1:
        pools = [f" ({fleet.pools[pool].name})" for pool in fleet.pool_of]
    names = {CLIENT_PID: "clients"} | {i + 1: f"replica {i}{pool}" for i, pool in enumerate(pools)}
    for pid, name in names.items():
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
        if pid != CLIENT_PID:
            yield {"ph": "M", "pid": pid, "tid": 1, "name": "thread_name", "args": {"name": "steps"}}


def _steps(record: RunRecord, until_s: float) -> Iterator[Event]:
    columns = {name: column.tolist() for name, column in record.steps.columns().items()}
    shown = ("num_tokens", "num_prefill_tokens", "num_prefills", "num_decodes", "decode_context_sum")
    state = ("num_running", "num_waiting", "used_pages", "preemptions")
    for i, start_s in enumerate(columns["start_s"]):
        if start_s >= until_s:
            continue
        args = {name: columns[name][i] for name in shown + state}
        args["gpu_ms"] = round(columns["gpu_s"][i] * 1e3, 6)
        args["host_ms"] = round(columns["host_s"][i] * 1e3, 6)
        yield {
            "ph": "X",
            "pid": columns["replica"][i] + 1,
            "tid": 1,
            "name": _step_name(args["num_prefill_tokens"], args["num_decodes"]),
            "ts": _us(start_s),
            "dur": _us(columns["end_s"][i] - start_s),
            "args": args,
        }


def _step_name(prefill_tokens: int, decodes: int) -> str:
    parts = [f"prefill {prefill_tokens}"] * (prefill_tokens > 0) + [f"decode {decodes}"] * (decodes > 0)
    return " + ".join(parts) or "step"


def _counters(record: RunRecord, until_s: float) -> Iterator[Event]:
    """Counters at the start of each step, where they changed; the last step of a replica returns them to 0."""
    s = record.steps
    for replica in np.unique(s.replica).tolist():
        mine = np.flatnonzero((s.replica == replica) & (s.start_s < until_s))
        if not len(mine):
            continue
        at_s = [*s.start_s[mine].tolist(), float(s.end_s[mine[-1]])]
        for name, columns in (
            ("requests", {"running": s.num_running, "waiting": s.num_waiting}),
            ("KV pages", {"used": s.used_pages}),
        ):
            rows = list(zip(*(c[mine].tolist() for c in columns.values()), strict=True))
            before: tuple[int, ...] | None = None
            for time_s, row in zip(at_s, [*rows, (0,) * len(columns)], strict=True):
                if row != before:
                    args = dict(zip(columns, row, strict=True))
                    yield {
                        "ph": "C",
                        "pid": replica + 1,
                        "tid": 0,
                        "name": name,
                        "ts": _us(time_s),
                        "args": args,
                    }
                before = row


def _requests(record: RunRecord, until_s: float) -> Iterator[Event]:
    columns = {name: column.tolist() for name, column in record.requests.columns().items()}
    shown = ("prompt_tokens", "output_tokens", "max_output_tokens", "cached_tokens", "preemptions", "reason")
    for i, sent_s in enumerate(columns["sent_s"]):
        if sent_s >= until_s:
            continue
        number = columns["request_id"][i]
        args = {name: columns[name][i] for name in shown}
        args["tenant"] = record.tenants[columns["tenant"][i]].name
        args["status"] = Status(columns["status"][i]).name.lower()
        if record.deliveries is not None:
            args |= {f"{name}_ms": round(columns[f"{name}_s"][i] * 1e3, 6) for name in NETWORK_STAGES}
        common = {"cat": "request", "id": number, "pid": max(columns["replica"][i] + 1, CLIENT_PID), "tid": 0}
        if columns["status"][i] == Status.REJECTED:
            yield {
                "ph": "i",
                "s": "p",
                "name": f"rejected {number}",
                "ts": _us(sent_s),
                "args": args,
            } | common
            continue
        moments = [sent_s] + [
            columns[k][i] for k in ("queued_s", "scheduled_s", "prefill_done_s", "engine_done_s")
        ]
        known = [t for t in moments if not math.isnan(t)]
        last_s = columns["last_token_s"][i]
        end_s = max(record.end_s if math.isnan(last_s) else last_s, known[-1])
        yield {"ph": "b", "name": f"request {number}", "ts": _us(sent_s), "args": args} | common
        stages = list(zip(("queue", "prefill", "decode"), known[1:4], [*known[2:5], end_s], strict=False))
        if record.deliveries is not None:
            stages = _with_network(stages, known, sent_s + columns["held_s"][i], end_s)
        for name, start_s, stop_s in stages:
            yield {"ph": "b", "name": name, "ts": _us(start_s)} | common
            yield {"ph": "e", "name": name, "ts": _us(stop_s)} | common
        yield {"ph": "e", "name": f"request {number}", "ts": _us(end_s)} | common


def _with_network(
    stages: list[tuple[str, float, float]], known: list[float], off_s: float, end_s: float
) -> list[tuple[str, float, float]]:
    """What is before and after the engine, where there is any; `known` are the moments from sending on."""
    before = [("blocked", known[0], off_s), ("send", off_s, known[1] if len(known) > 1 else end_s)]
    after = [("deliver", known[4], end_s)] if len(known) == 5 else []
    return [each for each in (*before, *stages, *after) if each in stages or each[2] > each[1]]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
