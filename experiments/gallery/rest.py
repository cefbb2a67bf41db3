"""Number formats, devices side by side, and what readers see."""

from __future__ import annotations

import numpy as np

from experiments import theme
from experiments.gallery.entry import Entry, p, run, times, traffic
from sim.streaming import reading

FORMATS: tuple[tuple[str, dict[str, str]], ...] = (
    ("bf16", {}),
    ("fp8", {"quantization": "fp8"}),
    ("fp8, KV fp8", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
)


def quantisation() -> Entry:
    """TPOT over load for number formats."""
    rates = (2.0, 8.0, 16.0, 24.0, 32.0)
    fig = theme.figure(height=340)
    tpot: dict[str, list[float]] = {}
    for name, fields in FORMATS:
        tpot[name] = [
            p(
                run(
                    traffic(random_input_len=500, random_output_len=200, num_prompts=300, request_rate=rate),
                    **fields,
                )[1],
                "tpot",
            )
            for rate in rates
        ]
        fig.add_scatter(x=rates, y=tpot[name], name=name, mode="lines+markers")
    fig.update_xaxes(title_text="requests/s").update_yaxes(title_text="P95 TPOT (ms)", rangemode="tozero")
    return Entry(
        "quantisation",
        "Quantisation: weights and KV cache",
        "--quantization, --kv-cache-dtype; tokentwin quality says what it does to answers",
        f"On an H100, fp8 weights bring P95 TPOT at {rates[0]:g} requests/s from {tpot['bf16'][0]:.1f} to "
        f"{tpot['fp8'][0]:.1f} ms, for there the weights are what a step reads; at {rates[-1]:g} requests/s from "
        f"{tpot['bf16'][-1]:.1f} to {tpot['fp8'][-1]:.1f} ms. An fp8 cache gives {tpot['fp8, KV fp8'][-1]:.1f} ms "
        f"there and "
        "holds twice the tokens.",
        fig,
    )


def tensor_parallel() -> Entry:
    """Latency and throughput per device over tensor parallelism."""
    sizes = (1, 2, 4, 8)
    load = traffic(random_input_len=1000, random_output_len=200, num_prompts=200, request_rate=4.0)
    found = [run(load, tensor_parallel_size=n)[1] for n in sizes]
    tpot = [p(s, "tpot") for s in found]
    ideal = [tpot[0] / n for n in sizes]
    fig = theme.figure(height=320)
    fig.add_scatter(x=sizes, y=tpot, name="P95 TPOT", mode="lines+markers")
    fig.add_scatter(x=sizes, y=ideal, name="if it divided", mode="lines", line={"dash": "dot"})
    fig.update_xaxes(title_text="devices", type="log", tickvals=sizes)
    fig.update_yaxes(title_text="ms", type="log", dtick="D2")
    return Entry(
        "tensor_parallel",
        "Parallelism: tensor parallel",
        "--tensor-parallel-size; --data-parallel-size puts replicas behind a router instead",
        f"An 8B model on one H100 has a P95 TPOT of {tpot[0]:.1f} ms. Two bring {tpot[1]:.1f}, eight {tpot[3]:.1f} ms: "
        f"{times(tpot[0] / tpot[3])} as fast for 8 times the devices, as two all-reduces a layer (measured tables) "
        f"and small "
        "products do not divide.",
        fig,
    )


def streaming() -> Entry:
    """Tokens per event: the longest pause that a reader meets."""
    load = traffic(random_input_len=1000, random_output_len=300, num_prompts=150, request_rate=6.0)
    record, _ = run(load)
    groups = (1, 2, 4, 8, 16, 32)
    pauses, words = [], []
    for n in groups:
        found = reading(record, interval=n)
        pauses.append(1e3 * float(np.nanpercentile(found.longest_pause_s, 95)))
        words.append(1e3 * float(np.nanpercentile(found.first_word_s, 95)))
    fig = theme.figure(height=320)
    fig.add_scatter(x=groups, y=pauses, name="longest pause, P95", mode="lines+markers")
    fig.add_scatter(x=groups, y=words, name="first whole word, P95", mode="lines+markers")
    fig.update_xaxes(title_text="tokens an event", type="log", tickvals=groups)
    fig.update_yaxes(title_text="ms", rangemode="tozero")
    return Entry(
        "streaming",
        "Streaming: tokens an event",
        "--stream-interval, --stream-slice-ms (simulate and serve); tokentwin reading RUN --stream-interval 1,8,32",
        f"Sending 32 tokens together instead of one makes 1/32 of the events, and the longest pause grows from "
        f"{pauses[0]:.0f} to {pauses[-1]:.0f} ms (P95); the first whole word comes after {words[-1]:.0f} instead of "
        f"{words[0]:.0f} ms. Up to {max(n for n, w in zip(groups, pauses, strict=True) if w < 2 * pauses[0]):g} "
        f"tokens an event, pauses "
        "stay under twice what the engine makes by itself.",
        fig,
    )
