"""Who is let in: token bucket, queue limit, deadlines that cannot be kept, and shedding of load.

In front of the router. What is refused is refused at once, with a reason, and costs the engines nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from serving.request import Request


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


TOO_MANY = "429:"
"""Begins the reason of every refusal here, as the HTTP status does."""


class TokenBucket(_Spec):
    """At most `burst` at once and `rate` a second in the long run."""

    rate: float = Field(gt=0)
    burst: float = Field(gt=0)
    by: Literal["requests", "tokens"] = "requests"
    """What is counted: requests, or their prompt and answer tokens."""


class Shedding(_Spec):
    """Keeps the TTFT of those who are let in: a limit on requests in the system that falls to `decrease` of itself
    while P95 TTFT of the last `window_s` is over `ttft_ms` and grows by one a window otherwise (AIMD).
    """

    ttft_ms: float = Field(gt=0)
    window_s: float = Field(default=5.0, gt=0)
    decrease: float = Field(default=0.8, gt=0, lt=1)
    min_requests: int = Field(default=1, ge=1)


class Admission(_Spec):
    """Reasons to refuse a request with status 429. Each is off unless it is set."""

    token_bucket: TokenBucket | None = None
    max_waiting: int | None = Field(default=None, ge=1)
    """Queue limit: most requests that wait, in engines and router together."""
    deadline_ms: float | None = Field(default=None, gt=0)
    """Refuse when the predicted TTFT is beyond this, or beyond the tenant's own goodput limit for TTFT if that is less.
    Little's law predicts it: requests without a first token ÷ first tokens per second over `deadline_window_s`. An
    overload settles at the deadline, so that it should lie below the promise."""
    deadline_window_s: float = Field(default=10.0, gt=0)
    shed: Shedding | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Admission:
        if not any(x is not None for x in (self.token_bucket, self.max_waiting, self.deadline_ms, self.shed)):
            raise ValueError("admission sets nothing; give token_bucket, max_waiting, deadline_ms or shed")
        if self.deadline_window_s != 10.0 and self.deadline_ms is None:
            raise ValueError("deadline_window_s has an effect only with deadline_ms")
        return self


class System(Protocol):
    """What the door can see of what is behind it."""

    @property
    def num_outstanding(self) -> int:
        """Requests let in and not ended."""

    @property
    def num_waiting(self) -> int:
        """Requests let in that no engine runs yet."""

    @property
    def num_without_token(self) -> int:
        """Requests let in that have no first token yet."""

    def ttfts(self, from_s: float) -> tuple[list[float], list[float]]:
        """TTFTs of first tokens since `from_s`, and waits so far of those without one."""


class Bucket:
    """A token bucket in continuous time."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self.level = burst
        self._at_s = 0.0

    def take(self, amount: float, now_s: float) -> bool:
        """Take `amount` if it is there. More than a full bucket is taken from a full one, which goes into debt."""
        self.level = min(self.burst, self.level + self.rate * (now_s - self._at_s))
        self._at_s = now_s
        # Rounding of many refills must not make a source wait that keeps exactly to its rate.
        if self.level + 1e-9 * self.burst < min(amount, self.burst):
            return False
        self.level -= amount
        return True


class Door:
    """Decides on each request as it arrives."""

    def __init__(self, spec: Admission, system: System) -> None:
        self._spec, self._system = spec, system
        bucket = spec.token_bucket
        self._bucket = None if bucket is None else Bucket(bucket.rate, bucket.burst)
        self.limit = math.inf
        self._judged_s = 0.0
        self._rate_at_s, self._per_s = -math.inf, math.nan

    def refuses(self, request: Request, sent_s: float, now_s: float) -> str:
        """Why a request is refused; empty when it is let in. `sent_s` is when its client sent it."""
        spec, system = self._spec, self._system
        if spec.max_waiting is not None and system.num_waiting >= spec.max_waiting:
            return f"{TOO_MANY} {system.num_waiting} requests wait, max_waiting is {spec.max_waiting}"
        if spec.deadline_ms is not None:
            due_s = min(spec.deadline_ms / 1000, request.deadline_s - sent_s)
            predicted_s = now_s - sent_s + self._wait_s(now_s)
            if predicted_s > due_s:
                return f"{TOO_MANY} the predicted TTFT is beyond the deadline"
        if spec.shed is not None:
            self._adapt(spec.shed, now_s)
            if system.num_outstanding >= self.limit:
                return f"{TOO_MANY} load is shed to keep the TTFT of requests that are in"
        if self._bucket is not None:
            assert spec.token_bucket is not None
            tokens = spec.token_bucket.by == "tokens"
            amount = request.prompt_tokens + request.max_tokens if tokens else 1
            if not self._bucket.take(amount, now_s):
                return f"{TOO_MANY} the token bucket is empty"
        return ""

    def _wait_s(self, now_s: float) -> float:
        """Predicted time to the first token; the rate is looked up at most ten times a window."""
        waiting = self._system.num_without_token
        if not waiting:
            return 0.0
        window_s = self._spec.deadline_window_s
        if now_s - self._rate_at_s >= window_s / 10:
            self._rate_at_s = now_s
            self._per_s = len(self._system.ttfts(now_s - window_s)[0]) / min(window_s, max(now_s, 1e-9))
        return waiting / self._per_s if self._per_s > 0 else 0.0

    def _adapt(self, shed: Shedding, now_s: float) -> None:
        if now_s - self._judged_s < shed.window_s:
            return
        done, waits = self._system.ttfts(now_s - shed.window_s)
        limit_s = shed.ttft_ms / 1000
        inside = self._system.num_outstanding
        self._judged_s = now_s
        if p95([*done, *(w for w in waits if w > limit_s)]) > limit_s:
            self.limit = max(shed.min_requests, shed.decrease * min(self.limit, inside))
        elif inside >= self.limit - 1:
            self.limit += 1


def p95(values: Iterable[float]) -> float:
    """95th percentile; 0 of nothing."""
    listed = list(values)
    return float(np.percentile(listed, 95)) if listed else 0.0
