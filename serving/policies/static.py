"""Static batching: wait for a batch, run it until its last member is done, then take the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.errors import UsageError
from serving.policies.base import BatchPolicy

if TYPE_CHECKING:
    from serving.config import SchedulerConfig
    from serving.request import Request
    from serving.scheduler import Scheduler
    from serving.step import Step


class Static(BatchPolicy):
    """Batches of `batch_size` (max_num_seqs by default), started when full or when the oldest has waited `max_wait_s`.

    Memory is reserved for prompt and longest answer at once, so nothing is ever preempted. Members that finish early
    are computed as padding until the batch ends, as padded batches are.
    """

    name = "static"
    steady = True
    work_conserving = False

    def __init__(self, batch_size: int | None = None, max_wait_s: float = 0.1) -> None:
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"static batch_size is {batch_size}; use at least 1")
        if not max_wait_s >= 0:
            raise UsageError(f"static max_wait_s is {max_wait_s}; use 0 or more seconds")
        self.batch_size = batch_size
        self.max_wait_s = max_wait_s
        self._members = 0

    def schedule(self, step: Step) -> None:
        if not step.num_running:
            self._start(step)
            return
        step.set_budget(max(step.token_budget, sum(map(step.wanted, step.running))))
        step.continue_running()

    def padding(self, scheduler: Scheduler) -> int:
        return self._members - scheduler.num_running if scheduler.num_running else 0

    def _start(self, step: Step) -> None:
        waiting = step.scheduler.waiting
        if not waiting:
            return
        size = min(self.batch_size or step.config.max_num_seqs, step.config.max_num_seqs)
        oldest_s = min(request.arrival_s for request in waiting)
        if len(waiting) < size and step.now_s < oldest_s + self.max_wait_s:
            step.scheduler.wake_s = oldest_s + self.max_wait_s
            return
        self._members = 0
        while waiting and self._members < size:
            request = waiting.peek()
            # The whole batch is one prefill, however long: static servers do not budget tokens.
            step.set_budget(request.num_tokens)
            if not step.admit(request, reserve_tokens=step.scheduler.finish_at(request)):
                break
            self._members += 1

    def may_admit(self, scheduler: Scheduler) -> bool:
        return scheduler.num_running == 0

    def refuses(self, request: Request, config: SchedulerConfig) -> str | None:
        pages = -(
            -min(request.prompt_tokens + request.max_tokens, config.max_model_len) // config.page_tokens
        )
        if pages > config.num_pages:
            return f"static batching reserves {pages} pages for it; the KV cache has {config.num_pages}"
        return None
