"""vLLM's requests and queues as a batch policy sees them: the names of `serving`, vLLM's state behind them.

Nothing here imports vLLM; every argument named `request` is a `vllm.v1.request.Request`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.queues import by_deadline, by_length, by_priority
from serving.request import State

_STATES = {"WAITING": State.WAITING, "RUNNING": State.RUNNING, "PREEMPTED": State.PREEMPTED}


class RequestView:
    """A request with the fields of `serving.request.Request`. One view per request, so that identity holds.

    `deadline_s` and `predicted_tokens` come from `extra_args` of the request's sampling parameters: `ttft_ms` (a promise
    on the time to its first token) and `predicted_tokens`.
    """

    __slots__ = ("_request", "deadline_s", "predicted_tokens")

    def __init__(self, request: Any) -> None:
        self._request = request
        sampling = request.sampling_params
        extra = (getattr(sampling, "extra_args", None) or {}) if sampling is not None else {}
        ttft_ms, predicted = extra.get("ttft_ms"), extra.get("predicted_tokens")
        self.deadline_s = math.inf if ttft_ms is None else request.arrival_time + float(ttft_ms) / 1000
        self.predicted_tokens: int | None = None if predicted is None else int(predicted)

    @property
    def id(self) -> str:
        return str(self._request.request_id)

    @property
    def prompt_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    @property
    def max_tokens(self) -> int:
        return int(self._request.max_tokens)

    @property
    def arrival_s(self) -> float:
        """Wall-clock time, as `step.now_s` is."""
        return float(self._request.arrival_time)

    @property
    def priority(self) -> int:
        return int(self._request.priority)

    @property
    def num_tokens(self) -> int:
        return int(self._request.num_tokens)

    @property
    def output_tokens(self) -> int:
        return int(self._request.num_output_tokens)

    @property
    def preemptions(self) -> int:
        return int(self._request.num_preemptions)

    @property
    def stale_tokens(self) -> int:
        return int(self._request.num_stale_output_tokens)

    @property
    def state(self) -> State:
        return _STATES.get(self._request.status.name, State.WAITING)

    @property
    def done(self) -> bool:
        return bool(self._request.is_finished())

    def __getattr__(self, name: str) -> Any:
        raise UsageError(f"a policy reads request.{name}, which a request of vLLM does not have")

    def __repr__(self) -> str:
        return f"<request {self.id}: {self.prompt_tokens} prompt tokens>"


class WaitingView:
    """The queue, in its order, of the requests that may be admitted now."""

    def __init__(self, requests: Iterable[RequestView]) -> None:
        self._requests = list(requests)

    def peek(self) -> RequestView:
        if not self._requests:
            raise IndexError("the queue is empty")
        return self._requests[0]

    def take(self, request: RequestView) -> None:
        """The step has admitted it."""
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(list(self._requests))

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"a policy uses waiting.{name}; in vLLM the queue is read only: step.admit takes from it"
        )


class SchedulerView:
    """`step.scheduler` of a policy."""

    def __init__(self, config: SchedulerConfig, running: Callable[[], Sequence[RequestView]]) -> None:
        self.config = config
        self.waiting = WaitingView(())
        self.wake_s = math.inf
        """Set by a policy that waits; vLLM asks again at once, so nothing needs to be remembered."""
        self.used_pages = 0
        self._running = running

    def running(self) -> Iterator[RequestView]:
        return iter(self._running())

    @property
    def num_running(self) -> int:
        return len(self._running())

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_unfinished(self) -> int:
        return self.num_running + self.num_waiting

    def finish_at(self, request: RequestView) -> int:
        """Known tokens at which a request ends with reason "length"."""
        return min(request.prompt_tokens + request.max_tokens, self.config.max_model_len)

    def __getattr__(self, name: str) -> Any:
        raise UsageError(f"a policy uses step.scheduler.{name}, which it does not have in vLLM")


KEYS = {"priority": by_priority, "sjf": by_length, "edf": by_deadline}


def order_key(order: str, view: RequestView) -> tuple[Any, ...]:
    """Smallest first, as `serving.queues` orders; ties by arrival, then id."""
    return (*KEYS[order](view), view.arrival_s, view.id)  # type: ignore[arg-type]
