"""What the steps of one replica take: prices, moves of pages, drafts to verify and to make, noise."""

from __future__ import annotations

from costmodel.prices import Prices
from serving.plan import StepPlan
from sim.noise import NoiseStream
from sim.record import Floats
from sim.speculation import Speculator


def priced_step(plan: StepPlan) -> tuple[int, int, list[tuple[int, int]], int, int, int]:
    """A plan as `Prices.step_s` is asked for it; padding is as long as the longest decode, or one token."""
    padding = plan.num_padding
    longest = plan.decode_context_max or (1 if padding else 0)
    return (
        plan.num_tokens + padding,
        plan.num_sampled + padding,
        [(chunk.num_tokens, chunk.context) for chunk in plan.chunks],
        plan.num_decodes + padding,
        plan.decode_context_sum + padding * longest,
        longest,
    )


class StepCosts:
    """Device and host seconds of the steps that a scheduler plans."""

    def __init__(self, pricer: Prices, noise: NoiseStream | None, speculator: Speculator | None) -> None:
        self.pricer, self.noise, self.speculator = pricer, noise, speculator

    def step_s(self, plan: StepPlan, step: int) -> tuple[float, float]:
        """Device and host time of a plan that will be logged as step number `step`."""
        if self.speculator is not None:
            self.speculator.note(step, plan)
            gpu_s = self.speculator.step_s(self.pricer, plan)
            host_s = self.pricer.host_s(len(plan), plan.num_tokens) + self.speculator.host_s(plan)
        else:
            gpu_s = self.pricer.step_s(*priced_step(plan))
            host_s = self.host_s(plan)
        if plan.swap_out or plan.swap_in:
            gpu_s += self.moves_s(plan)
        return (gpu_s if self.noise is None else self.noisy(gpu_s, step)), host_s

    def host_s(self, plan: StepPlan) -> float:
        """Host time of a plan without drafts."""
        return self.pricer.host_s(len(plan.slots) + plan.num_padding, plan.num_tokens)

    def moves_s(self, plan: StepPlan) -> float:
        """Time of a plan's copies between device and host."""
        return self.pricer.move_s(sum(len(move.sources) for move in (*plan.swap_out, *plan.swap_in)))

    def noisy(self, gpu_s: float, step: int) -> float:
        """Device time with the luck of step number `step`."""
        if self.noise is None:
            return gpu_s
        gpu_s = gpu_s * self.noise.at(step)
        return gpu_s + self.noise.stall_at(step) if self.noise.stalls_any else gpu_s

    def leap_s(self, plan: StepPlan, context_sum: int, context_max: int, first: int, steps: int) -> Floats:
        """Device time of each of `steps` decodes of a plan's sequences, from step number `first` on."""
        padding = plan.num_padding
        gpu_s = self.pricer.decode_run_s(
            len(plan) + padding, context_sum + padding * context_max, context_max, steps
        )
        if self.noise is None:
            return gpu_s
        gpu_s = gpu_s * self.noise.run(first, steps)
        return gpu_s + self.noise.stall_run(first, steps) if self.noise.stalls_any else gpu_s
