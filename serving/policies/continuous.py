"""Iteration-level batching with whole prompts first (Orca; vLLM before chunked prefill)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.policies.base import BatchPolicy
from serving.request import Request

if TYPE_CHECKING:
    from serving.step import Step


class Continuous(BatchPolicy):
    """A step prefills whole prompts of the queue if one can be admitted; otherwise every running sequence decodes.

    A prompt is never cut: one longer than the token budget has a step to itself. Decodes stall while prompts run,
    which is what chunked prefill was invented against.
    """

    name = "continuous"
    steady = True

    def schedule(self, step: Step) -> None:
        scheduler = step.scheduler
        waiting = scheduler.waiting
        first = True
        while waiting and step.seats > 0:
            request: Request = waiting.peek()
            if first:
                step.set_budget(max(step.token_budget, request.num_tokens))
            elif request.num_tokens > step.token_budget:
                break
            if not step.admit(request):
                break
            first = False
        if first:
            step.set_budget(max(step.token_budget, step.num_running))
            step.continue_running()
