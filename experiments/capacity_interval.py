"""How sure a capacity is: the search again, near its answer, in other states of the world.

Calibration errors, the noise of steps and the requests are drawn as for any figure (`sim.intervals`). The runs are
shorter than those of the search; because all of them meet the same requests, the shift that a calibration error makes
is seen all the same, and what noise and sampling do is scaled to the search's own length (variance ∝ 1/requests).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from costmodel.uncertainty import Spread
from experiments.capacity_traffic import Traffic, head
from experiments.capacity_trial import Promises, judge
from sim.deployment import Built, simulate
from sim.intervals import Draw, Interval, Parts, gather, plan_draws
from sim.noise import StepNoise
from sim.replications import deployment_spread, is_drawn, perturbed, run_draws

_STEP = 0.04
"""First distance, in log load, at which a crossing is looked for."""
_MOST_STEPS = 12


def capacity_interval(
    built: Built,
    traffic: Traffic,
    promises: Promises,
    load: float,
    *,
    requests: int,
    drawn: int,
    seed: int,
    replications: int,
    jobs: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Interval | None:
    """The 95 % interval of a capacity found with runs of `requests`, from runs of `drawn`; None if it cannot be told."""
    spread = deployment_spread(built)
    count = min(drawn, requests)
    draws = plan_draws(spread, seed=seed, replications=replications, resample=is_drawn(traffic.spec))
    first = len(draws) - replications
    start = math.log(load)

    def evaluate(draw: Draw, at: float) -> dict[str, float]:
        return {"capacity": math.exp(_crossing(built, traffic, promises, spread, draw, at, count))}

    def told(before: int) -> Callable[[int, int], None]:
        def tell(done: int, _: int) -> None:
            if progress is not None:
                progress(f"interval: {before + done} of {len(draws)} states of the world")

        return tell

    results = run_draws(lambda draw: evaluate(draw, start), draws[:first], jobs=jobs, progress=told(0))
    partial = gather(spread, draws[:first], results)
    nominal = partial.nominal["capacity"]
    shifts = {
        key: math.log(effect["capacity"] / nominal) / next(iter(draws[1 + i].normals.values()))
        for i, (key, effect) in enumerate(partial.effects.items())
    }

    def near(draw: Draw) -> dict[str, float]:
        shift = sum(shifts.get(key, 0.0) * normal for key, normal in draw.normals.items())
        return evaluate(draw, math.log(nominal) + shift)

    results = [*results, *run_draws(near, draws[first:], jobs=jobs, progress=told(first))]
    parts = gather(spread, draws, results).parts("capacity", "log")
    if parts is None:
        return None
    shrink = math.sqrt(count / requests)
    parts = Parts(parts.effects, parts.noise * shrink, parts.rest * shrink)
    low, high = parts.range()
    return Interval(load, load * math.exp(min(low, 0.0)), load * math.exp(max(high, 0.0)), *parts.sources())


def _crossing(
    built: Built,
    traffic: Traffic,
    promises: Promises,
    spread: Spread,
    draw: Draw,
    start: float,
    count: int,
) -> float:
    """Log load at which the margin crosses 0 in one state of the world, interpolated between two runs."""
    if draw.sample_seed is not None:
        traffic = traffic.with_seed(draw.sample_seed)
    pricer = perturbed(built, spread, draw.normals)
    noise = None if draw.noise_seed is None else StepNoise(spread.step_log_std, draw.noise_seed)
    whole_numbers = traffic.ladder.whole_numbers

    def margin(log_load: float) -> tuple[float, float]:
        load = math.exp(log_load)
        if whole_numbers:
            load = max(round(load), 1)
        workload = traffic.workload(load, count)
        if len(workload) > 2 * count:
            workload = head(workload, 2 * count)
        record = simulate(workload, built, pricer=pricer, noise=noise)
        if record.interrupted:
            raise KeyboardInterrupt
        return math.log(load), judge(record, load, promises, whole=traffic.whole).margin

    x, m = margin(start)
    step = _STEP
    for _ in range(_MOST_STEPS):
        direction = -1 if m > 0 else 1
        further = x + direction * step
        if whole_numbers:
            further = math.log(max(round(math.exp(further)), round(math.exp(x)) + direction, 1))
            if further == x:
                return x
        x1, m1 = margin(further)
        if (m > 0) != (m1 > 0):
            return x + (x1 - x) * m / (m - m1)
        x, m = x1, m1
        step *= 1.5
    return x
