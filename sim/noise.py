"""Run-to-run noise of steps: one random factor per step, found by the step's number.

Step k of a replica gets the same factor whenever and however often it is priced, alone or within a leap, so that
fast-forward changes nothing and two deployments under one seed meet the same luck.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sim.record import Floats

_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class StepNoise:
    """Lognormal factors of mean 1 on the device time of steps.

    `log_std` is the spread of a step in log units. `correlation` in [0, 1) is that of neighbouring steps: slow drifts
    of clocks and temperature follow an AR(1) process.
    """

    log_std: float
    seed: int
    correlation: float = 0.0
    stall_rate: float = 0.0
    """Share of steps that stall besides: a page fault, a collector, a neighbour."""
    stall_s: float = 0.0
    """Mean length of a stall, exponentially distributed."""

    def stream(self, replica: int) -> NoiseStream:
        """The factors of one replica, independent of every other's."""
        return NoiseStream(self, replica)


class NoiseStream:
    """Factors of one replica's steps, drawn in blocks as they are asked for."""

    def __init__(self, noise: StepNoise, replica: int) -> None:
        self._noise = noise
        self._draw = np.random.Generator(np.random.Philox(np.random.SeedSequence((noise.seed, replica))))
        self._factors: list[float] = []
        self._last = 0.0
        self.stalls_any = noise.stall_rate > 0 and noise.stall_s > 0
        # Stalls have a stream of their own: switching them off leaves the factors as they were.
        self._stall_draw = np.random.Generator(
            np.random.Philox(np.random.SeedSequence((noise.seed, replica, 1)))
        )
        self._stalls: list[float] = []

    def at(self, step: int) -> float:
        """The factor of step `step`."""
        while step >= len(self._factors):
            self._extend()
        return self._factors[step]

    def run(self, step: int, count: int) -> Floats:
        """The factors of `count` steps from `step` on, shape (count,)."""
        while step + count > len(self._factors):
            self._extend()
        return np.array(self._factors[step : step + count])

    def stall_at(self, step: int) -> float:
        """Seconds by which step `step` stalls; mostly 0."""
        while step >= len(self._stalls):
            self._extend_stalls()
        return self._stalls[step]

    def stall_run(self, step: int, count: int) -> Floats:
        """Stalls of `count` steps from `step` on, shape (count,)."""
        while step + count > len(self._stalls):
            self._extend_stalls()
        return np.array(self._stalls[step : step + count])

    def _extend_stalls(self) -> None:
        hit = self._stall_draw.random(_BLOCK) < self._noise.stall_rate
        self._stalls.extend(
            np.where(hit, self._stall_draw.exponential(self._noise.stall_s, _BLOCK), 0.0).tolist()
        )

    def _extend(self) -> None:
        noise = self._noise
        normal = self._draw.standard_normal(_BLOCK)
        if noise.correlation:
            # Started in its stationary state, so that the first step is as uncertain as any other.
            keep, fresh = noise.correlation, math.sqrt(1.0 - noise.correlation**2)
            last = self._last if self._factors else float(normal[0])
            for i, shock in enumerate(normal.tolist()):
                last = keep * last + fresh * shock if self._factors or i else last
                normal[i] = last
            self._last = last
        self._factors.extend(np.exp(noise.log_std * normal - noise.log_std**2 / 2).tolist())
