"""How many replicas there should be: the formula of Kubernetes' HorizontalPodAutoscaler and its stabilisation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from sim.fleet.spec import Autoscaler

_ROUNDING = 1e-9


def desired_replicas(current: int, metric: float, target: float, tolerance: float = 0.1) -> int:
    """ceil(current · metric / target); `current` while the ratio is within `tolerance` of 1.

    `metric` is the mean over the current replicas, those that are still starting counted with 0.
    """
    ratio = metric / target
    if abs(ratio - 1.0) <= tolerance + _ROUNDING:
        return current
    return math.ceil(current * ratio - _ROUNDING)


class Scaler:
    """One pool's autoscaler: the largest wish over all targets, cool-downs, steps and range."""

    def __init__(self, spec: Autoscaler) -> None:
        self.spec = spec
        self._wishes: deque[tuple[float, int]] = deque()

    def decide(self, now_s: float, current: int, metrics: Mapping[str, float]) -> int:
        """Replicas to have from now on. `metrics` by the names of the spec's targets."""
        spec = self.spec
        wish = max(
            desired_replicas(current, metrics[name], target, spec.tolerance)
            for name, target in spec.targets().items()
        )
        wish = min(max(wish, spec.min_replicas), spec.max_replicas)
        self._wishes.append((now_s, wish))
        longest_s = max(spec.scale_up_cooldown_s, spec.scale_down_cooldown_s)
        while self._wishes[0][0] < now_s - longest_s:
            self._wishes.popleft()
        if wish > current:
            least = min(w for at_s, w in self._wishes if at_s >= now_s - spec.scale_up_cooldown_s)
            wish = max(current, least)
            if spec.max_step_up is not None:
                wish = min(wish, current + spec.max_step_up)
        elif wish < current:
            most = max(w for at_s, w in self._wishes if at_s >= now_s - spec.scale_down_cooldown_s)
            wish = min(current, most)
            if spec.max_step_down is not None:
                wish = max(wish, current - spec.max_step_down)
        return wish
