"""A fleet in the table, the result file and the report: pools, replicas, their number over time, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from experiments import theme
from experiments.prices import Price, load_prices
from sim.fleet.record import ReplicaState
from sim.fleet.summary import FleetSummary, Share, fleet_summary
from sim.record import RunRecord

MOST_REPLICAS = 16
"""Rows of the table by replica."""
_STATES = (
    (ReplicaState.READY, "ready", theme.BLUE),
    (ReplicaState.STARTING, "starting", theme.ORANGE),
    (ReplicaState.DRAINING, "draining", theme.PURPLE),
    (ReplicaState.DOWN, "down", theme.VERMILLION),
)


def cost_usd(fleet: FleetSummary, prices: Mapping[str, Price]) -> float | None:
    """Dollars for the GPU-hours of a run; None where a GPU has no price."""
    if any(pool.facts.gpu not in prices for pool in fleet.pools):
        return None
    return sum(pool.gpu_hours * prices[pool.facts.gpu].usd_per_hour for pool in fleet.pools)


def fleet_json(record: RunRecord) -> dict[str, Any]:
    """`sim_fleet` of the result file: pools, replicas, and how many there were over time; empty without a fleet."""
    summary = fleet_summary(record)
    if summary is None:
        return {}
    most = sum(pool.ready_most * pool.facts.gpus_per_replica for pool in summary.pools)
    out = summary.json() | {
        "num_gpus": most,
        "cost_usd_at_example_prices": cost_usd(summary, load_prices()),
    }
    if record.fleet is not None:
        out["replicas_over_time"] = [
            {"time_s": float(t), **{name: int(n) for name, n in counts.items()}}
            for t, counts in _over_time(record)
        ]
    return {"sim_fleet": out}


def _over_time(record: RunRecord) -> Iterator[tuple[float, dict[str, int]]]:
    """The number of replicas in each state after every instant at which one changed."""
    assert record.fleet is not None
    times_s = record.fleet.event_s
    counts = {name: record.fleet.counts(state)[1] for state, name, _ in _STATES}
    last = np.append(np.diff(times_s) > 0, True) if len(times_s) else np.empty(0, bool)
    for i in np.flatnonzero(last).tolist():
        yield float(times_s[i]), {name: int(values[i]) for name, values in counts.items()}


def fleet_lines(record: RunRecord) -> list[str]:
    """The fleet for the terminal, at most 80 columns wide; empty for one plain replica."""
    summary = fleet_summary(record)
    if summary is None:
        return []
    head = (
        f"{'':<18}{'replicas':>9}{'requests':>10}{'output tok':>12}{'busy %':>8}{'KV %':>7}{'P95 TTFT':>11}"
    )
    lines = [head]
    for pool in summary.pools:
        role = "" if pool.facts.role == "both" else f" {pool.facts.role}"
        count = f"{pool.ready_mean:.3g}/{pool.ready_most}"
        lines.append(_line(f"{pool.facts.name}{role}", count, pool.share))
    shown = summary.replicas[:MOST_REPLICAS] if len(summary.replicas) > 1 else ()
    for index, (_, share) in enumerate(shown):
        lines.append(_line(f"  replica {index}", _up(share, record.end_s), share))
    if len(summary.replicas) > MOST_REPLICAS:
        lines.append(f"  … and {len(summary.replicas) - MOST_REPLICAS} more replicas")
    usd = cost_usd(summary, load_prices())
    price = "" if usd is None else f", ${usd:,.2f} at example prices"
    lines.append(f"Replica-hours {summary.replica_hours:.3f}, GPU-hours {summary.gpu_hours:.3f}{price}")
    if summary.retries or summary.lost_tokens:
        lines.append(f"Retries {summary.retries}; {summary.lost_tokens} tokens lost with failed replicas")
    if summary.kv_transfers:
        lines.append(
            f"KV transfers {summary.kv_transfers}, {summary.kv_transfer_mean_s * 1000:.2f} ms each on average"
        )
    return lines


def _line(name: str, count: str, share: Share) -> str:
    ttft = "-" if math.isnan(share.p95_ttft_s) else f"{share.p95_ttft_s * 1000:.1f}"
    busy, kv = f"{share.busy_share * 100:.1f}", f"{share.kv_share * 100:.1f}"
    return f"{name[:18]:<18}{count:>9}{share.requests:>10}{share.output_tokens:>12}{busy:>8}{kv:>7}{ttft:>11}"


def _up(share: Share, end_s: float) -> str:
    return "-" if end_s <= 0 else f"{share.serving_s / end_s:.0%}"


def fleet_rows(record: RunRecord) -> tuple[list[str], list[list[str]]] | None:
    """Head and rows of the report's table; None for one plain replica."""
    summary = fleet_summary(record)
    if summary is None:
        return None
    head = [
        "",
        "GPUs",
        "Ready",
        "Requests",
        "Prefill tok",
        "Output tok",
        "Busy",
        "KV",
        "P95 TTFT",
        "Outages",
    ]
    rows = []
    for pool in summary.pools:
        facts = pool.facts
        role = "" if facts.role == "both" else f", {facts.role}"
        gpus = f"{facts.gpus_per_replica} × {facts.gpu}"
        rows.append(
            [
                f"{facts.name}{role}",
                gpus,
                f"{pool.ready_mean:.3g} of {pool.ready_most}",
                *_cells(pool.share),
            ]
        )
    for index, (name, share) in enumerate(summary.replicas):
        rows.append([f"{index}: {name}", "", _up(share, record.end_s), *_cells(share)])
    return head, rows


def _cells(share: Share) -> list[str]:
    ttft = "–" if math.isnan(share.p95_ttft_s) else f"{share.p95_ttft_s * 1000:,.1f} ms"
    return [
        f"{share.requests:,}",
        f"{share.prompt_tokens:,}",
        f"{share.output_tokens:,}",
        f"{share.busy_share:.1%}",
        f"{share.kv_share:.1%}",
        ttft,
        f"{share.outages}",
    ]


def limit_words(record: RunRecord, name: str) -> str:
    """A limit of each replica such as `max_num_seqs`: `1,024`, or `256 to 1,024` where pools differ in it."""
    if record.fleet is None:
        return f"{getattr(record, name):,}"
    limits = [getattr(pool, name) for pool in record.fleet.pools]
    return " to ".join(f"{limit:,}" for limit in dict.fromkeys((min(limits), max(limits))))


def replicas_over_time(record: RunRecord, at: Any) -> Any:
    """Replicas by state over time, stacked, so that the top is what is paid for. `at` is the report's clock."""
    assert record.fleet is not None
    fig = theme.figure(height=300)
    changes = list(_over_time(record))
    times = [max(t, at.from_s) for t, _ in changes] + [at.to_s]
    for _, name, colour in _STATES:
        values = [counts[name] for _, counts in changes]
        if not any(values):
            continue
        fig.add_scatter(
            x=at(np.array(times)),
            y=[*values, values[-1]],
            name=name,
            mode="lines",
            line={"shape": "hv", "width": 0.6, "color": colour},
            fillcolor=theme.translucent(colour, 0.55),
            stackgroup="replicas",
        )
    fig.update_yaxes(title_text="Replicas", rangemode="tozero")
    return fig.update_xaxes(title_text=at.title)
