"""One replica on several devices: tensor and pipeline parallelism side by side."""

from __future__ import annotations

from typing import Any

from experiments import theme
from experiments.gallery.entry import GPU, Entry, p, traffic
from sim.deployment import Deployment, build, simulate
from sim.metrics import summarise
from sim.pipeline import bubble_share

WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("TP 4", {"tensor_parallel_size": 4}),
    ("TP 2 x PP 2", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ("PP 4", {"pipeline_parallel_size": 4}),
    ("PP 4, 1,024 tokens a step", {"pipeline_parallel_size": 4, "max_num_batched_tokens": 1024}),
)


def pipeline_parallel() -> Entry:
    """TPOT over load of four devices, cut across, along, or both ways."""
    rates = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    fig = theme.figure(height=340)
    tpot: dict[str, list[float]] = {}
    bubbles: dict[str, float | None] = {}
    for name, fields in WAYS:
        tpot[name] = []
        built = build(Deployment(model="llama-3.1-70b", gpu=GPU, **fields))
        for rate in rates:
            load = traffic(random_input_len=1000, random_output_len=200, num_prompts=200, request_rate=rate)
            record = simulate(load, built)
            tpot[name].append(p(summarise(record), "tpot"))
        bubbles[name] = bubble_share(record)
        fig.add_scatter(x=rates, y=tpot[name], name=name, mode="lines+markers")
    fig.update_xaxes(title_text="requests/s")
    fig.update_yaxes(title_text="P95 TPOT (ms)", type="log", tickvals=(20, 50, 100, 200))
    across, both, along, even = (tpot[name] for name, _ in WAYS)
    idle, idle_even = (bubbles[name] or 0.0 for name, _ in WAYS[2:])
    return Entry(
        "pipeline_parallel",
        "Parallelism: pipeline parallel",
        "--pipeline-parallel-size, with --tensor-parallel-size; simulate, capacity, sweep and plan",
        f"A 70B model on four H100. At {rates[0]:g} requests/s a token passes all stages, none of which helps another: "
        f"P95 TPOT is {along[0]:.0f} ms with four stages, {both[0]:.0f} ms with two of two devices, {across[0]:.0f} ms "
        f"with four tensor-parallel ranks. At {rates[-1]:g} requests/s they have {along[-1]:.0f}, {both[-1]:.0f} and "
        f"{across[-1]:.0f} ms, as steps in flight differ in size: stages idle {idle:.0%} of the time. Steps of at most "
        f"1,024 tokens are more alike: {idle_even:.0%} bubbles and {even[-1]:.0f} ms. "
        "Pipeline parallelism is not validated against measurements.",
        fig,
    )
