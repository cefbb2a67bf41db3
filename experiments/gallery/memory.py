"""The KV cache: pages against contiguous memory, who is evicted, the cliff, and how preempted work comes back."""

from __future__ import annotations

import numpy as np

from experiments import theme
from experiments.gallery.entry import GPU, MODEL, Entry, mixed, p, run, times, traffic
from sim.deployment import Deployment, build
from sim.latency import latencies

ORDERS = ("lru", "lfu", "cost", "session")


def paging() -> Entry:
    """Sequences that fit, paged and each in one piece."""
    plan = build(Deployment(model=MODEL, gpu=GPU)).memory
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    paged = [plan.paged_sequences(length) for length in lengths]
    whole = plan.contiguous_sequences()
    fig = theme.figure(height=320)
    fig.add_scatter(x=lengths, y=paged, name="pages of 16 tokens", mode="lines+markers")
    fig.add_scatter(x=lengths, y=[whole] * len(lengths), name="one piece each", mode="lines+markers")
    fig.update_xaxes(
        title_text="tokens that a sequence really has", type="log", tickvals=lengths, tickformat=","
    )
    fig.update_yaxes(title_text="sequences at once", type="log")
    return Entry(
        "paging",
        "KV cache: pages against one piece each",
        "tokentwin memory; --block-size",
        f"Reserving the model's whole context for every sequence, an {GPU.upper()} holds {whole} sequences of {MODEL}. "
        f"In pages, it holds {paged[1]:,} of 1,024 tokens: {1 - whole * 1024 / plan.kv_tokens:.1%} of the contiguous "
        f"cache "
        "would be waste.",
        fig,
    )


def _chat_and_scan() -> object:
    return mixed(
        [
            {
                "name": "chat",
                "dataset": {"name": "random", "input_len": 300, "output_len": 150},
                "arrivals": {"request_rate": 0.5},
                "sessions": {"turns_min": 3, "turns_max": 8, "think_s": 40},
                "shared_prefix": {"group": "system", "tokens": 800},
                "num_prompts": 240,
            },
            {
                "name": "documents",
                "dataset": {"name": "random", "input_len": 6000, "output_len": 60},
                "arrivals": {"request_rate": 1.0},
                "num_prompts": 450,
            },
        ]
    )


def eviction() -> Entry:
    """Hit rates of four orders over cache sizes, for conversations beside documents read once."""
    load = _chat_and_scan()
    pages = (4000, 8000, 12000, 16000, 24000)
    fig = theme.figure(height=340)
    rate: dict[str, list[float]] = {}
    for order in ORDERS:
        rate[order] = []
        for count in pages:
            record, _ = run(load, num_gpu_blocks_override=count, max_model_len=16384, kv_eviction=order)  # type: ignore[arg-type]
            chat = record.requests.tenant == 0
            hit = record.requests.cached_tokens[chat].sum() / record.requests.prompt_tokens[chat].sum()
            rate[order].append(100 * float(hit))
        fig.add_scatter(x=pages, y=rate[order], name=order, mode="lines+markers")
    fig.update_xaxes(title_text="KV pages", type="log", tickvals=pages, tickformat=",")
    fig.update_yaxes(title_text="prompts of conversations found (%)")
    at = max(range(len(pages)), key=lambda i: max(rate[o][i] for o in ORDERS) - rate["lru"][i])
    best = max(ORDERS, key=lambda order: rate[order][at])
    return Entry(
        "eviction",
        "KV cache: which page goes first",
        "--kv-eviction lru | lfu | cost | session",
        "Conversations beside documents that are read once. LRU lets the documents push the conversations out: with "
        f"{pages[at]:,} pages it finds {rate['lru'][at]:.0f} % of their prompts, {best} finds {rate[best][at]:.0f} %. "
        f"With {pages[-1]:,} pages the orders find {min(r[-1] for r in rate.values()):.0f} to "
        f"{max(r[-1] for r in rate.values()):.0f} %.",
        fig,
    )


def cliff() -> Entry:
    """Latency over the cache's size: where it breaks."""
    load = traffic(random_input_len=1500, random_output_len=500, num_prompts=300, request_rate=7.0)
    pages = (2000, 3000, 4000, 5000, 6000, 8000, 12000, 20000)
    found = [run(load, num_gpu_blocks_override=n, max_model_len=8192)[1] for n in pages]
    fig = theme.stacked(2, height=440)
    e2el = [p(s, "e2el") for s in found]
    fig.add_scatter(x=pages, y=e2el, mode="lines+markers", name="P95 E2EL (ms)", row=1, col=1)
    fig.add_scatter(
        x=pages,
        y=[100 * s.kv_occupancy_busy for s in found],
        mode="lines+markers",
        name="pages in use (%)",
        row=2,
        col=1,
    )
    fig.add_scatter(
        x=pages,
        y=[s.preemptions for s in found],
        mode="lines+markers",
        name="preemptions",
        row=2,
        col=1,
    )
    fig.update_xaxes(type="log", tickvals=pages, tickformat=",")
    fig.update_xaxes(title_text="KV pages", row=2, col=1)
    fig.update_yaxes(type="log", row=1, col=1)
    at = next((i for i, value in enumerate(e2el) if value < 1.25 * e2el[-1]), len(pages) - 1)
    return Entry(
        "cliff",
        "KV cache: the cliff",
        "--num-gpu-blocks-override, --gpu-memory-utilization; tokentwin sweep finds it for your traffic",
        f"The same traffic with less and less memory. Down to {pages[at]:,} pages "
        f"({100 * found[at].kv_occupancy_busy:.0f} % "
        f"in use while busy) P95 E2EL stays within a quarter of what ample memory gives; with {pages[0]:,} pages it is "
        f"{times(e2el[0] / e2el[-1])} as long, with {found[0].preemptions:,} preemptions.",
        fig,
    )


def preemption() -> Entry:
    """Recompute, swap, and the cheaper of the two."""
    load = traffic(random_input_len=1500, random_output_len=600, num_prompts=200, request_rate=7.0)
    modes = ("recompute", "swap", "auto")
    fig = theme.figure(height=320)
    worst: dict[str, float] = {}
    for mode in modes:
        record, summary = run(
            load,
            num_gpu_blocks_override=4000,
            max_model_len=8192,
            preemption_mode=mode,
            **({} if mode == "recompute" else {"swap_space": 16.0}),
        )
        e2el = np.sort(latencies(record).e2el_s)
        worst[mode] = p(summary, "e2el")
        fig.add_scatter(
            x=e2el, y=np.arange(1, len(e2el) + 1) / len(e2el), name=mode, mode="lines", line_shape="hv"
        )
    fig.update_xaxes(title_text="E2EL (s)").update_yaxes(title_text="share of requests")
    gain = 1 - worst["swap"] / worst["recompute"]
    return Entry(
        "preemption",
        "KV cache: what becomes of preempted work",
        "--preemption-mode recompute | swap | auto, --swap-space",
        f"With too little memory, swapping to the host changes P95 E2EL by {-gain:+.0%} against computing again "
        f"({worst['recompute'] / 1e3:.1f} s). `auto` asks the cost model for each sequence: "
        f"{worst['auto'] / 1e3:.1f} s. The rate of the host link is the datasheet's times an estimated share, until "
        "`calibrate` measures it.",
        fig,
    )


def host_tier() -> Entry:
    """Prefixes that the device forgets, kept in host memory."""
    sizes = (0.0, 2.0, 4.0, 8.0, 16.0)
    tenants = [
        {
            "name": f"app {i}",
            "dataset": {"name": "random", "input_len": 300, "output_len": 60},
            "arrivals": {"request_rate": 0.25},
            "shared_prefix": {"group": f"app {i}", "tokens": 6000},
            "num_prompts": 25,
        }
        for i in range(16)
    ]
    load = mixed(tenants)
    found = [
        run(
            load,
            num_gpu_blocks_override=2500,
            max_model_len=8192,
            **({"kv_offloading_size": size} if size else {}),
        )[1]
        for size in sizes
    ]
    tails, hits = [p(s, "ttft") for s in found], [100 * s.prefix_hit_rate for s in found]
    fig = theme.stacked(2, height=420)
    names = [f"{size:g} GiB" for size in sizes]
    fig.add_bar(x=names, y=tails, name="P95 TTFT (ms)", row=1, col=1)
    fig.add_bar(x=names, y=hits, name="prompt tokens found (%)", row=2, col=1)
    return Entry(
        "host_tier",
        "KV cache: a second home on the host",
        "--kv-offloading-size",
        "Sixteen applications with prefixes of 6,000 tokens, of which the device holds six. Forgotten pages go to "
        "host memory "
        f"and are copied back when asked for: with {sizes[-1]:g} GiB, {hits[-1]:.0f} % of the prompt tokens are "
        f"found instead "
        f"of {hits[0]:.0f} %, and P95 TTFT falls from {tails[0]:.0f} to {tails[-1]:.0f} ms. Copies take their time "
        f"on the link, "
        "in both directions.",
        fig,
    )
