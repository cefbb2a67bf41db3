"""Speculative decoding: against the closed form, and over load."""

from __future__ import annotations

from experiments.gallery.entry import GPU, MODEL, Entry
from experiments.speculation import heatmap, heatmap_figure, load_curve, load_figure
from sim.deployment import Deployment


def speculation() -> Entry:
    """Speed-up over acceptance and the cost of a draft."""
    found = heatmap()
    best, worst = float(found.twin.max()), float(found.twin.min())
    return Entry(
        "speculation",
        "Speculative decoding: acceptance and the cost of a draft",
        '--speculative-config \'{"method": "draft_model", "model": …, "num_speculative_tokens": 4, "acceptance": 0.7}\'',
        f"One request at a time, four draft tokens a step: from {worst:.2f} to {best:.2f} times as fast, depending "
        f"on how many "
        "drafts stand and what one costs. The twin (left) simulates every step; the closed form "
        "(1 − αᵏ⁺¹) / ((1 − α)(ck + 1)) is on the right, and no cell differs by more than "
        f"{found.worst:.1%}. Greedy and sampled answers stay exactly those of the model alone.",
        heatmap_figure(found),
    )


def speculation_load() -> Entry:
    """Speed-up over concurrency, which the closed form does not know."""
    curves = {}
    for name, acceptance in (("70 % accepted", 0.7), ("50 % accepted", 0.5)):
        config = {"method": "ngram", "num_speculative_tokens": 4, "acceptance": acceptance}
        curves[name] = load_curve(Deployment(model=MODEL, gpu=GPU, speculative_config=config))
    limits = [
        f"{name}: above {curve.hurts_above:.0f} requests at once"
        if curve.hurts_above is not None
        else f"{name}: nowhere up to {curve.points[-1].concurrency} at once"
        for name, curve in curves.items()
    ]
    first = next(iter(curves.values())).points[0].speedup
    return Entry(
        "speculation_load",
        "Speculative decoding: the load above which it hurts",
        "--speculative-config, with disable_by_batch_size to stop drafting there",
        f"Alone, a request is {first:.1f} times as fast, for the device reads its weights once for five positions. "
        f"In a full "
        f"batch the positions cost arithmetic, and drafts that fall are work for nothing. Speculation hurts "
        f"({'; '.join(limits)}).",
        load_figure(curves),
    )
