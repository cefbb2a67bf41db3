"""The worked example of docs/policies.md, as a user would have it in a module of their own."""

from __future__ import annotations

from itertools import islice
from typing import Any

from serving.policies import BatchPolicy


class SkipAhead(BatchPolicy):
    """vLLM's step; then up to `patience` requests, ever, may pass the same blocked head of the queue."""

    name = "skip_ahead"

    def __init__(self, patience: int = 8, look: int = 32) -> None:
        self.patience = patience
        self.look = look
        self.head: Any = None
        self.passed = 0

    def schedule(self, step: Any) -> None:
        step.continue_running()
        if step.preempted:
            return
        step.admit_waiting()
        waiting = step.scheduler.waiting
        if not waiting:
            return
        if waiting.peek() is not self.head:
            self.head, self.passed = waiting.peek(), 0
        for request in list(islice(waiting, 1, 1 + self.look)):
            if self.passed < self.patience and step.admit(request):
                self.passed += 1
