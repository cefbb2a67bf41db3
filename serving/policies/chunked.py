"""vLLM V1: one token budget for prompts and decodes alike, running sequences first, then the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.policies.base import BatchPolicy

if TYPE_CHECKING:
    from serving.config import SchedulerConfig
    from serving.request import Request
    from serving.step import Step


class Chunked(BatchPolicy):
    """Running sequences in order of admission, then waiting ones while seats, budget and pages last."""

    name = "chunked"
    steady = True

    def schedule(self, step: Step) -> None:
        step.continue_running()
        if not step.preempted:
            step.admit_waiting()

    def refuses(self, request: Request, config: SchedulerConfig) -> str | None:
        if config.enable_chunked_prefill:
            return None
        # Uncut, whatever it may have to recompute after a preemption must fit one step.
        room = min(config.max_model_len, config.num_pages * config.page_tokens + 1)
        longest = min(request.prompt_tokens + request.max_tokens, room) - 1
        if longest <= config.max_num_batched_tokens - config.draft_slots:
            return None
        return (
            f"up to {longest} tokens in one step, as chunked prefill is off; "
            f"max_num_batched_tokens is {config.max_num_batched_tokens}"
        )
