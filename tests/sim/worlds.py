"""Small worlds for tests: a price list with known numbers and workloads written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.record import Floats
from sim.workload.types import ClosedLoop, Workload


class LinearPricer:
    """fixed + per token + per context token, with exact agreement between one step and a run of steps."""

    def __init__(
        self, fixed_s: float = 0.01, token_s: float = 1e-5, context_s: float = 1e-7, host_s: float = 0.0
    ) -> None:
        self.fixed_s, self.token_s, self.context_s, self._host_s = fixed_s, token_s, context_s, host_s

    def step_s(
        self,
        num_tokens: int,
        num_sampled: int,
        prefills: Sequence[tuple[int, int]],
        num_decodes: int,
        decode_context_sum: int,
        decode_context_max: int,
    ) -> float:
        prefill_s = sum(self.context_s * 0.01 * chunk * (before + chunk / 2) for chunk, before in prefills)
        return self.fixed_s + self.token_s * num_tokens + prefill_s + self.context_s * decode_context_sum

    def decode_run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> Floats:
        context = context_sum + num_decodes * np.arange(num_steps)
        return self.fixed_s + self.token_s * num_decodes + 0 + self.context_s * context

    def host_s(self, num_seqs: int, num_tokens: int) -> float:
        return self._host_s

    def move_s(self, num_pages: int) -> float:
        return num_pages * (0.05 * self.fixed_s)


def make_workload(
    sent_s: Sequence[float],
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    *,
    segments: Sequence[Sequence[tuple[int, int]]] | None = None,
    after: Sequence[int] | None = None,
    think_s: Sequence[float] | None = None,
    priority: Sequence[int] | None = None,
    max_concurrency: int | None = None,
) -> Workload:
    """A workload from plain lists; `segments[i]` are (end token, stream) of request i's shared prefix."""
    count = len(sent_s)
    parts = segments if segments is not None else [()] * count
    flat = [segment for part in parts for segment in part]
    return Workload(
        name="test",
        sent_s=np.asarray(sent_s, np.float64),
        prompt_tokens=np.asarray(prompt_tokens, np.int64),
        output_tokens=np.asarray(output_tokens, np.int64),
        tenant=np.zeros(count, np.int64),
        priority=np.asarray(priority if priority is not None else [0] * count, np.int64),
        segment_offsets=np.cumsum([0, *(len(part) for part in parts)]).astype(np.int64),
        segment_ends=np.array([end for end, _ in flat], np.int64),
        segment_streams=np.array([stream for _, stream in flat], np.int64),
        after=np.asarray(after if after is not None else [-1] * count, np.int64),
        think_s=np.asarray(think_s if think_s is not None else [0.0] * count, np.float64),
        closed_loop=ClosedLoop(max_concurrency) if max_concurrency is not None else None,
    )


class DrawnPricer:
    """The n-th step of the run takes `times_s[n]`, whatever is in it."""

    def __init__(self, times_s: Floats) -> None:
        self._times_s = times_s.tolist()
        self._next = 0

    def step_s(
        self,
        num_tokens: int,
        num_sampled: int,
        prefills: Sequence[tuple[int, int]],
        num_decodes: int,
        decode_context_sum: int,
        decode_context_max: int,
    ) -> float:
        self._next += 1
        return float(self._times_s[self._next - 1])

    def decode_run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> Floats:
        # A leap may be cut before its end, so that its times are looked up and not used up.
        return np.full(num_steps, self._times_s[self._next])

    def host_s(self, num_seqs: int, num_tokens: int) -> float:
        return 0.0
