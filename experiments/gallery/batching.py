"""What a step contains: policies, chunk sizes, caps by size, fair shares."""

from __future__ import annotations

import math

import numpy as np

from experiments import theme
from experiments.gallery.entry import Entry, knee, mixed, p, run, times, traffic
from sim.latency import latencies

POLICIES = ("static", "continuous", "chunked")


def policies() -> Entry:
    """Static, continuous and chunked batches over load."""
    rates = (2.0, 5.0, 8.0, 11.0, 14.0)
    fig = theme.beside(2, height=340)
    p95: dict[str, list[float]] = {}
    for policy, colour in zip(POLICIES, theme.SERIES, strict=False):
        found = [
            run(
                traffic(random_input_len=1000, random_output_len=150, num_prompts=300, request_rate=rate),
                policy=policy,
            )[1]
            for rate in rates
        ]
        p95[policy] = [p(s, "ttft") for s in found]
        for col, values in ((1, p95[policy]), (2, [p(s, "itl", 99) for s in found])):
            fig.add_scatter(
                x=rates,
                y=values,
                name=policy,
                mode="lines+markers",
                line={"color": colour},
                showlegend=col == 1,
                row=1,
                col=col,
            )
    fig.update_yaxes(type="log", title_text="ms")
    fig.update_yaxes(title_text="", col=2)
    fig.update_xaxes(title_text="requests/s: P95 TTFT", col=1).update_xaxes(
        title_text="requests/s: P99 ITL", col=2
    )
    worse = p95["static"][2] / p95["chunked"][2]
    return Entry(
        "policies",
        "Batching: static, continuous, chunked",
        "--policy static | continuous | chunked",
        f"Static batches make a request wait for the batch before it: at {rates[2]:g} requests/s its P95 TTFT is "
        f"{times(worse)} that of chunked prefill. Continuous batching admits at every step but computes whole prompts, "
        "so that every running answer stops meanwhile (P99 ITL, right). Chunked prefill (vLLM V1) lets prompts and "
        "decodes share a step. Nothing "
        "disturbs a static batch, so that its ITL is the lowest.",
        fig,
    )


def chunk_size() -> Entry:
    """The tokens of a step: TTFT against ITL, and the knee."""
    sizes = (256, 512, 1024, 2048, 4096, 8192)
    load = traffic(random_input_len=4000, random_output_len=200, num_prompts=250, request_rate=4.0)
    found = [run(load, max_num_batched_tokens=size, max_num_seqs=min(size, 256))[1] for size in sizes]
    ttft, itl = [p(s, "ttft") for s in found], [p(s, "itl", 99) for s in found]
    best = sizes[knee([math.log(v) for v in itl], [math.log(v) for v in ttft])]
    at = sizes.index(best)
    fig = theme.figure(height=340)
    fig.add_scatter(
        x=itl, y=ttft, mode="lines+markers+text", text=[str(s) for s in sizes], textposition="top right"
    )
    fig.add_scatter(x=[itl[at]], y=[ttft[at]], mode="markers", marker={"size": 16, "symbol": "circle-open"})
    fig.update_layout(showlegend=False)
    fig.update_xaxes(title_text="P99 ITL (ms)", type="log").update_yaxes(
        title_text="P95 TTFT (ms)", type="log"
    )
    return Entry(
        "chunk_size",
        "Chunked prefill: the size of a chunk",
        "--max-num-batched-tokens",
        f"With prompts of 4,000 tokens, steps of {sizes[-1]:,} tokens give a P99 ITL of {itl[-1]:.0f} ms; steps of "
        f"{sizes[0]} bring it to {itl[0]:.0f} ms, at {times(ttft[0] / ttft[-1])} the P95 TTFT. The knee here is "
        f"{best:,} tokens: P99 ITL {itl[at]:.0f} ms, P95 TTFT {ttft[at]:.0f} ms.",
        fig,
    )


def size_classes() -> Entry:
    """Short requests beside long ones, with and without caps by estimated size."""
    load = mixed(
        [
            {
                "name": "autocomplete",
                "dataset": {"name": "random", "input_len": 100, "output_len": 16},
                "arrivals": {"request_rate": 20},
                "num_prompts": 1200,
            },
            {
                "name": "summaries",
                "dataset": {"name": "random", "input_len": 12000, "output_len": 400},
                "arrivals": {"request_rate": 1.1},
                "num_prompts": 66,
            },
        ]
    )
    caps = (2, 4, 8, 16, 32)
    columns: dict[str, list[float]] = {"autocomplete": [], "summaries": []}
    for cap in caps:
        record, _ = run(
            load, policy="adaptive", size_classes=f"1000:256,inf:{cap}", long_prefill_token_threshold=1024
        )
        ttft = latencies(record).ttft_s * 1e3
        for i, name in enumerate(columns):
            columns[name].append(float(np.nanpercentile(ttft[record.requests.tenant == i], 95)))
    record, _ = run(load)
    ttft = latencies(record).ttft_s * 1e3
    plain = [float(np.nanpercentile(ttft[record.requests.tenant == i], 95)) for i in range(2)]
    fig = theme.figure(height=340)
    for name, colour, base in zip(columns, theme.SERIES, plain, strict=False):
        fig.add_scatter(x=caps, y=columns[name], name=name, mode="lines+markers", line={"color": colour})
        fig.add_scatter(
            x=caps,
            y=[base] * len(caps),
            name=f"{name}, chunked",
            mode="lines",
            line={"color": colour, "dash": "dot"},
        )
    fig.update_xaxes(title_text="long requests that may run at once", type="log", tickvals=caps)
    fig.update_yaxes(title_text="P95 TTFT (ms)", type="log")
    # The tightest cap that does not double what the long requests wait.
    best = next((i for i, value in enumerate(columns["summaries"]) if value < 2 * plain[1]), len(caps) - 1)
    return Entry(
        "size_classes",
        "Adaptive batching: caps by estimated size",
        "--policy adaptive --size-classes 1000:256,inf:16 --long-prefill-token-threshold 1024",
        f"Autocompletion beside summaries of 12,000 tokens. Under plain chunked prefill its P95 TTFT is "
        f"{plain[0]:.0f} ms. "
        f"With at most {caps[best]} long requests at once, each held to 1,024 tokens a step, it is "
        f"{columns['autocomplete'][best]:.0f} ms; summaries pay with {columns['summaries'][best]:,.0f} ms instead of "
        f"{plain[1]:,.0f} ms.",
        fig,
    )


def fairness() -> Entry:
    """A flood beside a trickle, first come first served and fair."""
    load = mixed(
        [
            {
                "name": "flood",
                "dataset": {"name": "random", "input_len": 2000, "output_len": 300},
                "arrivals": {"request_rate": 14},
                "num_prompts": 420,
            },
            {
                "name": "trickle",
                "dataset": {"name": "random", "input_len": 500, "output_len": 100},
                "arrivals": {"request_rate": 1},
                "num_prompts": 30,
            },
        ]
    )
    orders = ("fcfs", "fair")
    fig = theme.figure(height=320, barmode="group")
    found: dict[str, list[float]] = {}
    for order in orders:
        record, _ = run(load, scheduling_policy=order, max_num_seqs=48)
        ttft = latencies(record).ttft_s * 1e3
        found[order] = [float(np.nanpercentile(ttft[record.requests.tenant == i], 95)) for i in range(2)]
        fig.add_bar(x=["flood", "trickle"], y=found[order], name=order)
    fig.update_yaxes(title_text="P95 TTFT (ms)", type="log", dtick="D2")
    return Entry(
        "fairness",
        "Queue: fair shares between tenants",
        "--scheduling-policy fair; a tenant's weight in the workload file",
        "A tenant that sends more than the engine can do, beside one that sends one request a second. First come first "
        f"served, both wait: the trickle's P95 TTFT is {found['fcfs'][1]:,.0f} ms. Served by tokens (VTC), the trickle "
        f"waits {found['fair'][1]:,.0f} ms, and the flood {found['fair'][0]:,.0f} instead of {found['fcfs'][0]:,.0f} ms.",
        fig,
    )
