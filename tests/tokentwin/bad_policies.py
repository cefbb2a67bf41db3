"""Policies that each break one rule, for `tokentwin policy-test`; and one that keeps them all and is not built in."""

from __future__ import annotations

import random
from typing import Any

from serving.policies import BatchPolicy


class Shortest(BatchPolicy):
    """The shortest prompt first: a long one starves while short ones come."""

    def schedule(self, step: Any) -> None:
        step.continue_running()
        if step.preempted:
            return
        for request in sorted(step.scheduler.waiting, key=lambda r: r.prompt_tokens):
            if not step.admit(request):
                break


class Drops(BatchPolicy):
    """Takes a request out of the queue without running it."""

    def schedule(self, step: Any) -> None:
        step.continue_running()
        if not step.preempted:
            step.admit_waiting()
        if len(step.scheduler.waiting) > 3:
            step.scheduler.waiting.pop()


class Never(BatchPolicy):
    """Prompts of 100 tokens and more are never admitted."""

    def schedule(self, step: Any) -> None:
        step.continue_running()
        waiting = step.scheduler.waiting
        while waiting and waiting.peek().prompt_tokens < 100 and step.admit(waiting.peek()):
            pass


class Leaks(BatchPolicy):
    """Takes pages that belong to nobody."""

    def schedule(self, step: Any) -> None:
        step.continue_running()
        if step.preempted:
            return
        step.admit_waiting()
        if step.num_running >= 3 and step.seqs.pool.num_free > 5:
            step.seqs.pool.take(1)


class Dice(BatchPolicy):
    """Admits in an order of its own luck."""

    def schedule(self, step: Any) -> None:
        step.continue_running()
        if step.preempted:
            return
        waiting = list(step.scheduler.waiting)
        random.shuffle(waiting)
        for request in waiting:
            if not step.admit(request):
                break


class Dozes(BatchPolicy):
    """Looks away every other millisecond, with work at hand."""

    def schedule(self, step: Any) -> None:
        if step.now_s * 1000 % 2 < 1 and step.num_running:
            step.scheduler.wake_s = step.now_s + 0.001
            return
        step.continue_running()
        if not step.preempted:
            step.admit_waiting()


class Naps(Dozes):
    """The same on purpose, and says so."""

    work_conserving = False


class Unsteady(BatchPolicy):
    """Promises that nothing changes between steps, and preempts every third."""

    steady = True

    def __init__(self) -> None:
        self.calls = 0

    def schedule(self, step: Any) -> None:
        self.calls += 1
        if self.calls % 3 == 0 and step.num_running > 1:
            step.preempt(step.running[-1])
        step.continue_running()
        if not step.preempted:
            step.admit_waiting()


class Raises(BatchPolicy):
    """Fails when five wait."""

    def schedule(self, step: Any) -> None:
        step.continue_running()
        if len(step.scheduler.waiting) > 4:
            raise ValueError("too many")
        if not step.preempted:
            step.admit_waiting()


class Oldest(BatchPolicy):
    """Running requests in order; then the waiting one that has waited longest, one a step: slower, and no rule broken."""

    def schedule(self, step: Any) -> None:
        step.continue_running()
        if not step.preempted and step.scheduler.waiting:
            step.admit(step.scheduler.waiting.peek())
