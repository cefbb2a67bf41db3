"""The twin's heatmap is the closed form's at batch 1, and the load above which drafts hurt is found."""

from __future__ import annotations

import pytest

from experiments.speculation import LoadCurve, LoadPoint, heatmap, heatmap_figure, load_curve, load_figure
from serving.errors import UsageError
from sim.deployment import Deployment


def test_the_heatmap_agrees_with_the_closed_form_within_two_percent() -> None:
    found = heatmap((0.5, 0.8), (0.0, 0.25), num_drafts=4, num_tokens=10_000)
    assert found.worst < 0.02
    assert found.twin[1, 0] > 3 > 1 > found.twin[0, 1]
    figure = heatmap_figure(found)
    assert len(figure.data) == 2
    assert len(found.lines()) == 4


def point(concurrency: int, speedup: float) -> LoadPoint:
    return LoadPoint(concurrency, 0.01, 0.01, 100.0, 100.0 * speedup)


def test_where_drafts_begin_to_hurt() -> None:
    assert LoadCurve((point(1, 1.4), point(4, 1.2), point(16, 0.8))).hurts_above == pytest.approx(8.0)
    assert LoadCurve((point(1, 1.4), point(4, 1.1))).hurts_above is None
    assert LoadCurve((point(1, 0.9),)).hurts_above == 0.0


def test_a_busy_server_gains_less_than_an_idle_one() -> None:
    config = (
        '{"method": "draft_model", "model": "llama-3.2-1b", "num_speculative_tokens": 4, "acceptance": 0.6}'
    )
    deployment = Deployment(model="llama-3.1-8b", gpu="h100", speculative_config=config)
    curve = load_curve(deployment, concurrencies=(1, 128), output_len=64, rounds=2)
    assert curve.points[0].speedup > 1.1 * curve.points[1].speedup
    assert len(load_figure({"draft": curve}).data) == 1
    with pytest.raises(UsageError, match="speculative-config"):
        load_curve(Deployment(model="llama-3.1-8b"))
