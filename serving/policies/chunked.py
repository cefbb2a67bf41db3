"""vLLM V1: one token budget for prompts and decodes alike, running sequences first, then the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.policies.base import BatchPolicy

if TYPE_CHECKING:
    from serving.step import Step


class Chunked(BatchPolicy):
    """Running sequences in order of admission, then waiting ones while seats, budget and pages last."""

    name = "chunked"
    steady = True

    def schedule(self, step: Step) -> None:
        step.continue_running()
        if not step.preempted:
            step.admit_waiting()
