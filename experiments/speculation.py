"""What speculative decoding is worth: the twin beside the closed form at batch 1, and the load above which it hurts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.prices import Step
from costmodel.speculation import DraftPrices, closed_form_speedup
from experiments import theme
from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.speculative_config import SpeculativeConfig
from sim.deployment import Deployment, build, simulate
from sim.metrics import summarise
from sim.record import Floats, RunRecord
from sim.speculation import Speculation
from sim.workload import Workload, load_workload, spec_from_flags
from sim.world import run_world

ACCEPTANCES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9)
COST_RATIOS = (0.0, 0.05, 0.1, 0.2, 0.4)
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class FlatPricer:
    """Every step takes as long as any other, whatever it verifies: what the closed form assumes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def step_s(self, *step: *Step) -> float:
        """The same for all."""
        return self.seconds

    def decode_run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> Floats:
        """The same for all."""
        return np.full(num_steps, self.seconds)

    def host_s(self, num_seqs: int, num_tokens: int) -> float:
        """Nothing."""
        return 0.0

    def move_s(self, num_pages: int) -> float:
        """Nothing."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Speed-ups at batch 1, [acceptances, cost ratios]: of the twin, and by the closed form."""

    acceptances: tuple[float, ...]
    cost_ratios: tuple[float, ...]
    num_drafts: int
    twin: Floats
    closed_form: Floats

    @property
    def worst(self) -> float:
        """Largest relative difference between the two."""
        return float(np.max(np.abs(self.twin / self.closed_form - 1.0)))

    def lines(self) -> list[str]:
        """A table, twin / closed form in each cell."""
        head = f"{'acceptance':<12}" + "".join(f"{f'c = {c:g}':>16}" for c in self.cost_ratios)
        rows = [
            f"{alpha:<12g}" + "".join(f"{t:>8.2f} /{f:>6.2f}" for t, f in zip(ours, theirs, strict=True))
            for alpha, ours, theirs in zip(self.acceptances, self.twin, self.closed_form, strict=True)
        ]
        return [head, *rows, f"largest difference {self.worst:.1%}"]


def heatmap(
    acceptances: Sequence[float] = ACCEPTANCES,
    cost_ratios: Sequence[float] = COST_RATIOS,
    *,
    num_drafts: int = 4,
    num_tokens: int = 20_000,
    seed: int = 0,
) -> Heatmap:
    """Speed-up of one sequence at a time, over acceptance and the cost of a draft token in decode steps.

    The pricer is that of the closed form: a verification costs what a decode costs. `num_tokens` are simulated per cell.
    """
    answer = 1000
    count = max(1, num_tokens // answer)
    spec = spec_from_flags(
        {
            "dataset_name": "random",
            "random_input_len": 8,
            "random_output_len": answer,
            "num_prompts": count,
            "max_concurrency": 1,
        }
    )
    workload = load_workload(spec, seed=seed)
    plain_s = _decode_s(run_world(workload, _ONE_AT_A_TIME, FlatPricer(0.01)))
    twin = np.empty((len(acceptances), len(cost_ratios)))
    for i, alpha in enumerate(acceptances):
        for j, ratio in enumerate(cost_ratios):
            config = SpeculativeConfig("draft_model", num_drafts, model="draft", acceptance=alpha)
            draft = DraftPrices(FlatPricer(0.01 * ratio), own_cache=True, pass_s=0.0)
            speculation = Speculation(config, 1, draft, verify_s=0.0, seed=seed)
            limits = config.limits(_ONE_AT_A_TIME)
            record = run_world(workload, limits, FlatPricer(0.01), speculation=speculation)
            twin[i, j] = plain_s / _decode_s(record)
    form = [[closed_form_speedup(a, num_drafts, c) for c in cost_ratios] for a in acceptances]
    return Heatmap(tuple(acceptances), tuple(cost_ratios), num_drafts, twin, np.array(form))


_ONE_AT_A_TIME = SchedulerConfig(num_pages=4096, max_num_seqs=1, max_model_len=4096)


def _decode_s(record: RunRecord) -> float:
    """Mean time per output token after the first."""
    return summarise(record).tpot.mean_s


def heatmap_figure(found: Heatmap) -> Any:
    """The twin's heatmap beside the closed form's."""
    fig = theme.beside(2, height=380, spacing=0.1)
    rows = [f"{alpha:g}" for alpha in found.acceptances]
    columns = [f"{ratio:g}" for ratio in found.cost_ratios]
    most = float(max(found.twin.max(), found.closed_form.max()))
    for col, (title, values) in enumerate((("twin", found.twin), ("closed form", found.closed_form)), 1):
        fig.add_heatmap(
            x=columns,
            y=rows,
            z=values,
            zmin=0.5,
            zmax=most,
            zmid=1.0,
            colorscale=[[0, theme.VERMILLION], [0.5 / (most - 0.5), "white"], [1, theme.BLUE]]
            if most > 1.0
            else "Reds",
            text=[[f"{v:.2f}" for v in row] for row in values],
            texttemplate="%{text}",
            hovertemplate="acceptance %{y}, cost %{x}: %{z:.3f}<extra></extra>",
            showscale=col == 2,
            colorbar={"title": "speed-up"},
            row=1,
            col=col,
        )
        fig.update_xaxes(
            title_text=f"{title}: a draft token's cost in decode steps", type="category", row=1, col=col
        )
    fig.update_yaxes(title_text="acceptance", type="category", row=1, col=1)
    return fig


# ---- load --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """So many requests at once, with and without drafts. TPOT in seconds, throughput in output tokens per second."""

    concurrency: int
    plain_tpot_s: float
    drafting_tpot_s: float
    plain_tokens_per_s: float
    drafting_tokens_per_s: float

    @property
    def speedup(self) -> float:
        """Of throughput; below 1 speculation hurts."""
        return self.drafting_tokens_per_s / self.plain_tokens_per_s


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """Points by rising concurrency."""

    points: tuple[LoadPoint, ...]

    @property
    def hurts_above(self) -> float | None:
        """Concurrency at which the speed-up falls to 1, between points in logarithms; None where it never does."""
        for before, after in zip(self.points, self.points[1:], strict=False):
            if before.speedup >= 1.0 > after.speedup:
                share = (before.speedup - 1.0) / (before.speedup - after.speedup)
                return float(before.concurrency * (after.concurrency / before.concurrency) ** share)
        return 0.0 if self.points and self.points[0].speedup < 1.0 else None

    def lines(self) -> list[str]:
        """A table and what it says."""
        out = [
            f"{'at once':>8}{'TPOT ms':>12}{'drafting':>10}{'tokens/s':>12}{'drafting':>10}{'speed-up':>10}"
        ]
        out += [
            f"{p.concurrency:>8}{p.plain_tpot_s * 1e3:>12.2f}{p.drafting_tpot_s * 1e3:>10.2f}"
            f"{p.plain_tokens_per_s:>12.0f}{p.drafting_tokens_per_s:>10.0f}{p.speedup:>10.2f}"
            for p in self.points
        ]
        above = self.hurts_above
        if above is None:
            return [*out, f"speculation helps up to {self.points[-1].concurrency} requests at once"]
        return [*out, f"above {above:.0f} requests at once speculation hurts"]


def load_curve(
    deployment: Deployment,
    *,
    concurrencies: Sequence[int] = CONCURRENCIES,
    input_len: int = 512,
    output_len: int = 256,
    rounds: int = 3,
    seed: int = 0,
) -> LoadCurve:
    """A closed loop of rising concurrency on a deployment with `speculative_config`, and on the same without it.

    Each point sends `rounds` requests per seat. Raises `UsageError` where nothing is drafted.
    """
    if deployment.speculative_config is None:
        raise UsageError("a load curve of speculation needs a deployment with --speculative-config")
    both = [build(deployment.model_copy(update={"speculative_config": None})), build(deployment)]
    points = []
    for concurrency in concurrencies:
        workload = _closed_loop(concurrency, input_len, output_len, concurrency * rounds, seed)
        plain, drafting = (summarise(simulate(workload, each, seed=seed)) for each in both)
        points.append(
            LoadPoint(
                concurrency,
                plain.tpot.mean_s,
                drafting.tpot.mean_s,
                plain.output_throughput,
                drafting.output_throughput,
            )
        )
    return LoadCurve(tuple(points))


def _closed_loop(concurrency: int, input_len: int, output_len: int, count: int, seed: int) -> Workload:
    spec = spec_from_flags(
        {
            "dataset_name": "random",
            "random_input_len": input_len,
            "random_output_len": output_len,
            "random_range_ratio": "0.3",
            "num_prompts": count,
            "max_concurrency": concurrency,
        }
    )
    return load_workload(spec, seed=seed)


def load_figure(curves: dict[str, LoadCurve]) -> Any:
    """Speed-up over load, a line for each name; 1 is where speculation begins to hurt."""
    fig = theme.figure(height=380)
    for (name, curve), colour in zip(curves.items(), theme.SERIES, strict=False):
        fig.add_scatter(
            x=[p.concurrency for p in curve.points],
            y=[p.speedup for p in curve.points],
            name=name,
            mode="lines+markers",
            line={"color": colour},
        )
    fig.add_hline(y=1.0, line={"color": theme.LIMIT, "dash": "dash"})
    seen = sorted({p.concurrency for curve in curves.values() for p in curve.points})
    fig.update_xaxes(
        title_text="requests at once", type="log", tickvals=seen, ticktext=[f"{n}" for n in seen]
    )
    fig.update_yaxes(title_text="throughput, drafts / no drafts")
    return fig
