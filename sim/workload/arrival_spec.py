"""When requests are sent, as configuration: a rate, a ramp, a daily curve, or the trace's own times.

Messages put fields in backquotes; `sim.workload.files.explain` calls them as the user does.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

DAILY_CURVES: dict[str, tuple[float, ...]] = {
    "office": (
        *(0.20, 0.15, 0.12, 0.12, 0.15, 0.25, 0.50, 0.95, 1.60, 2.00, 2.10, 1.95),
        *(1.60, 1.75, 2.00, 2.00, 1.85, 1.50, 1.00, 0.75, 0.55, 0.42, 0.30, 0.24),
    ),
    "consumer": (
        *(0.75, 0.50, 0.35, 0.28, 0.25, 0.30, 0.45, 0.65, 0.85, 1.00, 1.10, 1.18),
        *(1.22, 1.22, 1.20, 1.20, 1.25, 1.32, 1.42, 1.55, 1.68, 1.65, 1.40, 1.05),
    ),
}
"""Invented shapes of a day, hour by hour from midnight, scaled to mean 1 when used. `office`: a working day
with a lunch dip; `consumer`: an evening peak."""


DAY_S = 86400.0


class ArrivalSpec(BaseModel):
    """At most one source of times: `request_rate`, a ramp, `rate_points`, `daily_curve`; none of them means
    the trace's timestamps, or all at once for a dataset without any."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    request_rate: float | None = None
    """Requests (or sessions) a second; inf sends all at once. With `daily_curve`, the mean over the day."""
    burstiness: float = 1.0
    """Shape of the gamma-distributed gaps: 1 is Poisson, below 1 is burstier, inf is constant gaps. The
    coefficient of variation of the gaps is 1/sqrt(burstiness)."""
    rate_scale: float = 1.0
    """Divides the trace's times: 2 is twice the trace's load."""
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    rate_points: tuple[tuple[float, float], ...] | None = None
    """(time in s, requests a second), linear in between; repeated from the start where more requests are
    asked for."""
    daily_curve: str | None = None
    """A named shape of a day (`office`, `consumer`), starting at midnight."""
    period_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = DAY_S
    """Length of the day of `daily_curve`; shorter ones compress it."""
    duration_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Send for this long instead of counting prompts; of a trace, keep what is sent before it."""

    @property
    def from_trace(self) -> bool:
        """Whether times come from the dataset."""
        sources = (self.request_rate, self.ramp_up_strategy, self.rate_points, self.daily_curve)
        return all(source is None for source in sources)

    @property
    def at_once(self) -> bool:
        """Whether an infinite rate sends everything at t = 0."""
        others = (self.ramp_up_strategy, self.rate_points, self.daily_curve)
        return self.request_rate == math.inf and all(other is None for other in others)

    @field_validator("request_rate", "rate_scale", "burstiness", "ramp_up_start_rps", "ramp_up_end_rps")
    @classmethod
    def _positive(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and not value > 0:
            hint = "; inf sends all at once" if info.field_name == "request_rate" else ""
            raise ValueError(f"must be a positive number, got {value:g}{hint}")
        return value

    @field_validator("rate_scale", "ramp_up_start_rps", "ramp_up_end_rps")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"must be finite, got {value:g}")
        return value

    @field_validator("daily_curve")
    @classmethod
    def _known_curve(cls, value: str | None) -> str | None:
        if value is not None and value not in DAILY_CURVES:
            raise ValueError(f"unknown curve {value!r}; known: {', '.join(sorted(DAILY_CURVES))}")
        return value

    @field_validator("rate_points", mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        """`"0:2,600:10"` is two requests a second at first and ten after 600 s."""
        if not isinstance(value, str):
            return value
        points = [point.split(":") for point in value.split(",")]
        if any(len(point) != 2 for point in points):
            raise ValueError(f"must look like 0:2,600:10 (time in s:rate), got {value!r}")
        return points

    @field_validator("rate_points")
    @classmethod
    def _a_curve(
        cls, points: tuple[tuple[float, float], ...] | None
    ) -> tuple[tuple[float, float], ...] | None:
        if points is None:
            return None
        if len(points) < 2:
            raise ValueError("needs at least two (time_s, rate) points")
        if not all(math.isfinite(x) for point in points for x in point):
            raise ValueError("times and rates must be finite")
        times_s, rates = zip(*points, strict=True)
        if times_s[0] != 0:
            raise ValueError(f"the first point must be at time 0, got {times_s[0]:g}")
        if any(b <= a for a, b in itertools.pairwise(times_s)):
            raise ValueError("times must increase from point to point")
        if min(rates) < 0:
            raise ValueError(f"rates must not be negative, got {min(rates):g}")
        if max(rates) <= 0:
            raise ValueError("at least one rate must be positive")
        return points

    @model_validator(mode="after")
    def _every_option_has_an_effect(self) -> ArrivalSpec:
        if self.ramp_up_strategy is not None:
            if self.ramp_up_start_rps is None or self.ramp_up_end_rps is None:
                raise ValueError("a ramp needs both `ramp_up_start_rps` and `ramp_up_end_rps`")
            if self.request_rate is not None and self.request_rate != math.inf:
                raise ValueError(
                    "a ramp replaces `request_rate`; remove `request_rate` or `ramp_up_strategy`"
                )
        elif self.ramp_up_start_rps is not None or self.ramp_up_end_rps is not None:
            raise ValueError(
                "`ramp_up_start_rps` and `ramp_up_end_rps` need `ramp_up_strategy` linear or exponential"
            )
        if (
            self.rate_points is not None
            and (self.request_rate, self.ramp_up_strategy, self.daily_curve) != (None,) * 3
        ):
            raise ValueError(
                "`rate_points` replaces `request_rate`, `ramp_up_strategy` and `daily_curve`; keep one of them"
            )
        if self.daily_curve is not None:
            if self.ramp_up_strategy is not None:
                raise ValueError("`daily_curve` and `ramp_up_strategy` exclude each other; keep one of them")
            if self.request_rate is None or not math.isfinite(self.request_rate):
                raise ValueError("`daily_curve` needs a finite `request_rate`, its mean over the day")
        elif self.period_s != DAY_S:
            raise ValueError("`period_s` has no effect without `daily_curve`")
        if not self.from_trace and self.rate_scale != 1:
            raise ValueError(
                "`rate_scale` scales a trace's own times and has no effect with a rate; remove one of them"
            )
        if self.burstiness != 1 and (self.from_trace or self.at_once):
            raise ValueError("`burstiness` has no effect without a finite `request_rate`; set it")
        if self.duration_s is not None and self.at_once:
            raise ValueError(
                "`duration_s` has no effect when all requests are sent at once; set a finite `request_rate`"
            )
        if self.duration_s is not None and self.ramp_up_strategy is not None:
            raise ValueError(
                "a ramp runs over a number of prompts, as in vLLM; remove `duration_s` and set the number of prompts"
            )
        return self
