"""In front of the engine and around it: admission, routing, cold starts, jitter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments import theme
from experiments.gallery.entry import Entry, mixed, p, run, times, traffic
from sim.latency import latencies
from sim.record import Status
from sim.workload import Workload


def admission() -> Entry:
    """Offered load beyond capacity, with and without shedding."""
    rates = (10.0, 15.0, 20.0, 25.0, 30.0)
    fig = theme.figure(height=340)
    good: dict[str, list[float]] = {}
    for name, fields in (
        ("everybody let in", {}),
        ("shedding at P95 TTFT 500 ms", {"admission": {"shed": {"ttft_ms": 500}}}),
    ):
        good[name] = []
        for rate in rates:
            load = traffic(
                random_input_len=1000, random_output_len=200, num_prompts=int(40 * rate), request_rate=rate
            )
            record, summary = run(load, max_num_seqs=128, **fields)
            ttft = latencies(record).ttft_s
            within = np.count_nonzero((record.requests.status == Status.FINISHED) & (ttft < 0.5))
            good[name].append(within / summary.duration_s)
        fig.add_scatter(x=rates, y=good[name], name=name, mode="lines+markers")
    fig.update_xaxes(title_text="requests/s offered")
    fig.update_yaxes(title_text="requests/s within 500 ms", rangemode="tozero")
    plain, shed = (values[-1] for values in good.values())
    return Entry(
        "admission",
        "Admission: shedding load",
        "--admission '{shed: {ttft_ms: 500}}' (also max_waiting, deadline_ms, token_bucket)",
        f"Offered {rates[-1]:g} requests/s, more than the engine can do, it answers {plain:.1f} a second within 500 ms "
        f"when everybody is let in, for all wait alike. Shedding refuses some at once, and {shed:.1f} a second keep the "
        "promise. The refused pay: they get status 429.",
        fig,
    )


def routing() -> Entry:
    """Routers in front of four replicas, for prompts that share prefixes."""
    tenants = [
        {
            "name": f"app {i}",
            "dataset": {"name": "random", "input_len": 300, "output_len": 100},
            "arrivals": {"request_rate": 2.0},
            "shared_prefix": {"group": f"app {i}", "tokens": 6000},
            "num_prompts": 60,
        }
        for i in range(16)
    ]
    load = mixed(tenants)
    routers = ("round_robin", "least_outstanding", "power_of_two", "least_kv", "prefix_hash")
    hits, tails = [], []
    for router in routers:
        _, summary = run(
            load, data_parallel_size=4, router=router, num_gpu_blocks_override=4000, max_model_len=8192
        )
        hits.append(100 * summary.prefix_hit_rate)
        tails.append(p(summary, "ttft"))
    fig = theme.stacked(2, height=420)
    fig.add_bar(x=routers, y=tails, name="P95 TTFT (ms)", row=1, col=1)
    fig.add_bar(x=routers, y=hits, name="prompt tokens found (%)", row=2, col=1)
    return Entry(
        "routing",
        "Replicas: which one gets the request",
        "--data-parallel-size 4 --router round_robin | least_outstanding | power_of_two | least_kv | prefix_hash | "
        "session",
        f"Sixteen applications, each with a prefix of 6,000 tokens, before four replicas whose caches hold a part of "
        f"them. "
        f"Round robin finds {hits[0]:.0f} % of the prompt tokens; a hash ring over prefixes {hits[-1]:.0f} %, which "
        f"brings P95 "
        f"TTFT from {tails[0]:,.0f} to {tails[-1]:,.0f} ms. The ring bounds each replica's load, so that a popular "
        f"prefix "
        "spills over instead of queueing.",
        fig,
    )


def cold_start() -> Entry:
    """A step in load, and replicas that take a while to start."""
    load = mixed(
        [
            {
                "name": "base",
                "dataset": {"name": "random", "input_len": 800, "output_len": 200},
                "arrivals": {"request_rate": 8},
                "num_prompts": 3600,
            },
        ]
    )
    fig = theme.figure(height=340)
    worst = {}
    for name, fields in (
        ("cold start 60 s", {"cold_start": {"seconds": 60}}),
        ("cold start 10 s", {"cold_start": {"seconds": 10}}),
    ):
        record, _ = run(
            load,
            gpu="l40s",
            autoscaler={"outstanding": 24, "min_replicas": 1, "max_replicas": 4},
            **fields,
        )
        minutes = np.floor(record.requests.sent_s / 15).astype(int)
        ttft = latencies(record).ttft_s
        x = np.unique(minutes)
        y = [1e3 * float(np.nanpercentile(ttft[minutes == m], 95)) for m in x]
        worst[name] = max(y)
        fig.add_scatter(x=15 * x, y=y, name=name, mode="lines")
    fig.update_xaxes(title_text="seconds").update_yaxes(title_text="P95 TTFT (ms)", type="log", dtick="D2")
    slow, fast = worst.values()
    return Entry(
        "cold_start",
        "Cold and warm: replicas that have to start",
        "--autoscaler '{outstanding: 24, max_replicas: 4}' --cold-start '{seconds: 60}'",
        "Traffic for more than one L40S meets one, and the autoscaler starts others. Until they serve, requests "
        "queue: the "
        f"worst quarter of a minute has a P95 TTFT of {slow / 1e3:.1f} s when a start takes 60 s, and "
        f"{fast / 1e3:.1f} s when "
        "it takes 10. The default start is worked out from the bytes of the weights and the number of CUDA graphs.",
        fig,
    )


def jitter() -> Entry:
    """Each source of late tokens switched on by itself."""
    load = traffic(random_input_len=1000, random_output_len=300, num_prompts=250, request_rate=5.0)
    sources: tuple[tuple[str, dict[str, object]], ...] = (
        ("load alone", {}),
        ("+ step noise", {"step_jitter": "profile"}),
        ("+ stalls", {"step_jitter": "profile", "stall_rate": 0.005, "stall_ms": 60.0}),
        ("+ scarce memory", {"step_jitter": "profile", "stall_rate": 0.005, "stall_ms": 60.0,
                             "num_gpu_blocks_override": 1300, "max_model_len": 8192}),
    )  # fmt: skip
    fig = theme.figure(height=330, barmode="group")
    found = [run(load, **fields)[1] for _, fields in sources]
    names = [name for name, _ in sources]
    for percentile in (50, 99):
        fig.add_bar(x=names, y=[p(s, "tpot", percentile) for s in found], name=f"P{percentile} TPOT")
    fig.update_yaxes(title_text="ms", rangemode="tozero")
    ratio = [p(s, "tpot", 99) / p(s, "tpot", 50) for s in found]
    return Entry(
        "jitter",
        "Jitter: why P99 TPOT is not P50",
        "--step-jitter profile, --stall-rate, --stall-ms",
        f"P99 over P50 of TPOT is {ratio[0]:.2f} from load alone (prompts between decodes), {ratio[1]:.2f} with the "
        f"step noise "
        f"that the profile was measured with, {ratio[2]:.2f} with a stall of 60 ms in one step of 200, and "
        f"{times(ratio[3])} "
        "where memory is scarce besides. Each source has its own random stream: switching one off leaves the others "
        "as they "
        "were. Stalls are an assumption of yours; no profile has measured any.",
        fig,
    )


def response_cache() -> Entry:
    """Repeated requests, answered before they reach an engine."""
    rates = (5.0, 10.0, 15.0, 20.0, 25.0)
    fig = theme.figure(height=330)
    tails: dict[str, list[float]] = {}
    share = 0.0
    for name, fields in (
        ("every request to the engine", {}),
        ("answers given again", {"response_cache": "memory"}),
    ):
        tails[name] = []
        for rate in rates:
            record, summary = run(popular(rate), **fields)
            tails[name].append(p(summary, "ttft"))
            share = max(share, summary.answered_before / len(record.requests))
        fig.add_scatter(x=rates, y=tails[name], name=name, mode="lines+markers")
    fig.update_xaxes(title_text="requests/s").update_yaxes(title_text="P95 TTFT (ms)", type="log")
    plain, cached = (values[-1] for values in tails.values())
    return Entry(
        "response_cache",
        "Response cache: answers given before",
        "--response-cache memory (serve: also redis://HOST:PORT/0)",
        f"Questions of a help desk, of which some are popular (Zipf): up to {share:.0%} of the requests repeat one "
        f"that has been "
        f"answered. Answered again at once, they leave the engine to the others: at {rates[-1]:g} requests/s P95 TTFT is "
        f"{cached:,.0f} instead of {plain:,.0f} ms. An answer is that of the very same prompt, sampling and weights, "
        f"or none.",
        fig,
    )


def popular(rate: float, questions: int = 2000) -> Workload:
    """Requests for questions drawn by Zipf's law; the same question is the same prompt and answer."""
    rng = np.random.default_rng(0)
    count = int(40 * rate)
    load = traffic(random_input_len=8, random_output_len=8, num_prompts=count, request_rate=rate)
    weights = 1.0 / np.arange(1, questions + 1)
    asked = rng.choice(questions, count, p=weights / weights.sum())
    prompt, answer = rng.integers(400, 2400, questions), rng.integers(100, 400, questions)
    return replace(
        load,
        prompt_tokens=prompt[asked],
        output_tokens=answer[asked],
        segment_offsets=np.arange(count + 1),
        segment_ends=prompt[asked],
        segment_streams=asked.astype(np.int64),
    )
