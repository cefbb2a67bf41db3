"""The way to the client: connections that a slow reader holds, and lines that events share."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments import theme
from experiments.gallery.entry import Entry, mixed, p, run, times, traffic
from sim.latency import STAGES, stage_times
from sim.record import RunRecord

SLOW_TOKENS_PER_S = 25.0
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("HTTP/2", {"protocol": "http/2"}),
    ("HTTP/1.1, 32 connections", {"protocol": "http/1.1", "connections": 32}),
    ("HTTP/1.1, 24", {"protocol": "http/1.1", "connections": 24}),
    ("HTTP/1.1, 20", {"protocol": "http/1.1", "connections": 20}),
    ("pipelined, 20", {"protocol": "http/1.1-pipelined", "connections": 20}),
    ("pipelined, 16", {"protocol": "http/1.1-pipelined", "connections": 16}),
)


def _quick(record: RunRecord) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Rows of those who read as it comes."""
    names = np.array([tenant.name for tenant in record.tenants])
    found: np.ndarray[Any, np.dtype[np.bool_]] = names[record.requests.tenant] == "screen"
    return found


def head_of_line() -> Entry:
    """What slow readers behind a gateway cost the others, by protocol."""
    tenant = {"dataset": {"name": "random", "input_len": 500, "output_len": 120}, "num_prompts": 300}
    load = mixed(
        [
            {"name": "screen", **tenant, "arrivals": {"request_rate": 4.0}},
            {"name": "voice", **tenant, "arrivals": {"request_rate": 2.5}, "num_prompts": 190},
        ]
    )
    slow = {"voice": {"reader_tokens_per_s": SLOW_TOKENS_PER_S}}
    fig = theme.figure(height=340, barmode="stack", bargap=0.3)
    fig.update_layout(legend_traceorder="normal")
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    tails = {}
    for name, way in WAYS:
        record, summary = run(
            load, network={"clients": 1, "shared": True, "window_kib": 4, **way, "tenants": slow}
        )
        quick = _quick(record)
        for stage, times_s in stage_times(record).items():
            stages[stage].append(1e3 * float(np.mean(times_s[quick])))
        screens = next(tenant for tenant in summary.tenants if tenant.name == "screen")
        tails[name] = 1e3 * screens.ttft.at(95.0)
    names = [name for name, _ in WAYS]
    for stage, means in stages.items():
        if max(means) > 0.1:
            fig.add_bar(y=names, x=means, name=stage, orientation="h", marker_color=theme.STAGES[stage])
    fig.update_yaxes(autorange="reversed")
    fig.update_xaxes(title_text="mean E2EL of screens (ms), by stage")
    few, many = tails["HTTP/1.1, 20"], tails["HTTP/1.1, 32 connections"]
    return Entry(
        "head_of_line",
        "Network: connections and slow readers",
        "--network '{clients: 1, shared: true, protocol: http/1.1, connections: 20, tenants: {...}}' (simulate)",
        f"One gateway carries two classes: screens that take answers as they come, and voices that take "
        f"{SLOW_TOKENS_PER_S:g} tokens a second and so hold a connection for {120 / SLOW_TOKENS_PER_S:.1f} s. Over "
        f"HTTP/2 a slow reader fills its own window and nothing else: P95 TTFT of screens is "
        f"{tails['HTTP/2']:.0f} ms. With 32 connections of HTTP/1.1 it is {many:.0f} ms, with 20 it is {few:.0f} ms, for "
        f"a request waits until one is free. Pipelining over the 20 lets the engine begin and puts the answer behind a "
        f"slow one all the same: {tails['pipelined, 20']:,.0f} ms.",
        fig,
    )


def bandwidth() -> Entry:
    """A client's line that all of its streams share."""
    rates = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 10.0)
    load = traffic(random_input_len=500, random_output_len=200, num_prompts=250, request_rate=8.0)
    fig = theme.figure(height=320)
    found: dict[int, list[float]] = {}
    for interval in (1, 8):
        found[interval] = []
        for rate in rates:
            summary = run(load, network={"clients": 1, "bandwidth_mbit_s": rate}, stream_interval=interval)[1]
            found[interval].append(p(summary, "e2el"))
        name = "a token an event" if interval == 1 else f"{interval} tokens an event"
        fig.add_scatter(x=rates, y=found[interval], name=name, mode="lines+markers")
    fig.update_xaxes(title_text="Mbit/s to the client", type="log", tickvals=rates)
    fig.update_yaxes(title_text="P95 E2EL (ms)", type="log")
    alone = found[1][-1]
    enough = {
        n: next(r for r, v in zip(rates, e2el, strict=True) if v < 1.1 * alone) for n, e2el in found.items()
    }
    return Entry(
        "bandwidth",
        "Network: bandwidth that streams share",
        "--network '{clients: 1, bandwidth_mbit_s: 4}', --stream-interval (simulate)",
        f"All answers go to one client, 8 requests/s of 200 tokens. An event of one token is 250 bytes around 4 of text, "
        f"which makes {8 * 200 * 250 * 8 / 1e6:.1f} Mbit/s: with {enough[1]:g} Mbit/s the line is not felt, and below "
        f"what it carries, events queue without end (at 1 Mbit/s P95 E2EL is {times(found[1][1] / alone)} as long). Sent "
        f"eight at a time the same answers fit into {enough[8]:g} Mbit/s, for pauses eight times as long.",
        fig,
    )
