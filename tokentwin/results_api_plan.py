"""What `tt.plan` returns: fleets, cheapest first, why the others are not among them, and the runs behind them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.capacity import unit
from experiments.plan import Fleet, label
from experiments.plan_report import flips, vllm_command
from serving.errors import UsageError
from sim.frames import frame
from tokentwin.commands.plan import PlanAnswer, fleet_run
from tokentwin.frames import card, number
from tokentwin.plots_planning import PlanPlots, p95_ms

if TYPE_CHECKING:
    from pandas import DataFrame

    from tokentwin.run import Run


@dataclass(frozen=True)
class PlanResult:
    """The cheapest fleets for a traffic and its promises, and why the others are not among them."""

    answer: PlanAnswer

    @property
    def fleets(self) -> tuple[Fleet, ...]:
        """Cheapest first."""
        return self.answer.plan.fleets

    @property
    def winner(self) -> Fleet | None:
        """The cheapest; None where no candidate keeps the promises."""
        return self.answer.plan.winner

    @property
    def plot(self) -> PlanPlots:
        """Pictures of the fleets: `planned.plot.pareto()`."""
        return PlanPlots(self)

    @property
    def requests(self) -> DataFrame:
        """One row per request of the winner's run. Raises UsageError where no fleet won, or without pandas."""
        return self.run().requests

    @property
    def command(self) -> str:
        """`vllm serve …` of one replica of the winner; empty where vLLM cannot serve it, or nobody won."""
        return vllm_command(self.winner)[0] if self.winner is not None else ""

    @property
    def flips(self) -> list[str]:
        """What would flip the choice, in sentences."""
        return flips(self.answer.plan) if self.fleets else []

    def run(self, rank: int = 0) -> Run:
        """The run that a fleet was judged by, with all that a run has. Raises UsageError where there is no such fleet."""
        if not 0 <= rank < len(self.fleets):
            raise UsageError(f"there is no fleet {rank}; the plan has {len(self.fleets)}, from 0")
        return fleet_run(self.fleets[rank], self.answer)

    def summary(self) -> DataFrame:
        """One row per fleet, cheapest first; index is the rank. Raises UsageError without pandas."""
        plan = self.answer.plan
        rows = []
        for fleet in self.fleets:
            d = fleet.candidate.deployment
            room = fleet.headroom(plan.load)
            rows.append(
                {
                    "fleet": f"{fleet.replicas} x {label(d)}",
                    "gpu": d.gpu,
                    "replicas": fleet.replicas,
                    "gpus": fleet.gpus,
                    "usd_per_hour": fleet.usd_per_hour,
                    "usd_per_month": fleet.usd_per_month,
                    "usd_per_million_tokens": fleet.usd_per_million_tokens,
                    **{f"p95_{name}_ms": p95_ms(fleet, name) for name in ("ttft", "tpot", "e2el")},
                    "output_throughput": fleet.summary.output_throughput,
                    "joules_per_token": fleet.joules_per_token,
                    "headroom": math.nan if room is None else room,
                    "on_front": fleet.on_front,
                }
            )
        return frame({name: [row[name] for row in rows] for name in (rows[0] if rows else ())}, name="rank")

    def pruned(self) -> DataFrame:
        """One row per candidate that was left out, with the reason. Raises UsageError without pandas."""
        left = self.answer.plan.pruned
        return frame(
            {
                "candidate": [label(p.candidate.deployment) for p in left],
                "why": [p.why for p in left],
                "reason": [p.reason for p in left],
                "simulated": [p.simulated for p in left],
            }
        )

    def lines(self) -> list[str]:
        """The answer in sentences."""
        plan, winner = self.answer.plan, self.winner
        what = f"{plan.load:.4g} {unit(plan.variable)}"
        if winner is None:
            return [f"No candidate sustains {what} with these promises.", *plan.notes]
        name = f"{winner.replicas} x {label(winner.candidate.deployment)}"
        gpus = f"{winner.gpus} GPU{'s' if winner.gpus > 1 else ''}"
        first = f"For {what}: {name}, {gpus}, ${winner.usd_per_hour:,.2f} an hour, ${winner.usd_per_month:,.0f} a month."
        doubtful = winner.doubtful(plan.promises)
        sure = (
            [f"Not certain: the interval of {' and '.join(doubtful)} reaches beyond the limit."]
            if doubtful
            else []
        )
        return [first, *sure, *self.flips, *plan.notes]

    def __repr__(self) -> str:
        return f"<Plan of {len(self.fleets)} fleets: {self.lines()[0]}>"

    def _repr_html_(self) -> str:
        rows = []
        for fleet in self.fleets:
            room = fleet.headroom(self.answer.plan.load)
            rows.append(
                [
                    f"{fleet.replicas} x {label(fleet.candidate.deployment)}{' *' if fleet.on_front else ''}",
                    str(fleet.gpus),
                    f"{fleet.usd_per_month:,.0f}",
                    number(fleet.usd_per_million_tokens, 3),
                    number(p95_ms(fleet, "ttft")),
                    number(p95_ms(fleet, "tpot")),
                    "–" if room is None else f"{room:+.0%}",
                ]
            )
        head = (
            "fleet (* on the Pareto front)",
            "GPUs",
            "$/month",
            "$/Mtok output",
            "P95 TTFT (ms)",
            "P95 TPOT (ms)",
            "room",
        )
        return card("Plan", self.lines(), head, rows, more="summary()")
