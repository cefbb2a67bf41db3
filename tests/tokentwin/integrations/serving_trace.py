"""A load on the scheduler of `serving`, under any policy, in the format of `scripts/record_vllm_schedules.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from serving.config import SchedulerConfig
from serving.plan import StepOutcome
from serving.policies import load_policy
from serving.policies.adaptive import parse_size_classes
from serving.request import Request, TokenKeys
from serving.scheduler import Scheduler

MOST_STEPS = 400


def serve(
    config: dict[str, Any],
    arrivals: Sequence[dict[str, Any]],
    policy: str,
    order: str | None,
    options: dict[str, Any],
    token_hash: Callable[[str, int, int], int],
) -> list[dict[str, Any]]:
    """What each step decides; synchronous, without drafts."""
    limits = SchedulerConfig(
        num_pages=config["num_blocks"] - 1,
        page_tokens=config["block_size"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=config["max_model_len"],
        enable_prefix_caching=config["prefix"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        queue_order=order or "fcfs",
        reserve_full_isl=config["scheduler_reserve_full_isl"],
    )
    if "size_classes" in options:
        options = options | {"size_classes": parse_size_classes(options["size_classes"])}
    scheduler = Scheduler(limits, load_policy(policy, **options))
    waiting = list(arrivals)
    steps = []
    for number in range(MOST_STEPS):
        while waiting and waiting[0]["arrive"] <= number:
            a = waiting.pop(0)
            keys = TokenKeys(limits.page_tokens, a["prompt"])
            arrival_s = float(a["arrive"])
            scheduler.add(
                Request(a["id"], len(a["prompt"]), a["max_tokens"], arrival_s, a["priority"], keys=keys)
            )
        plan = scheduler.plan(float(number))
        decided = {
            "sched": {},
            "resumed": [],
            "preempted": [],
            "running": [r.id for r in scheduler.running()],
            "free": scheduler.pool.num_free,
        }
        if plan is not None:
            owners = [scheduler.seqs.request(slot) for slot in plan.slots.tolist()]
            decided |= {
                "sched": dict(zip([r.id for r in owners], plan.num_new.tolist(), strict=True)),
                "resumed": sorted(a.request.id for a in plan.admitted if a.resumed),
                "preempted": sorted(r.id for r in plan.preempted),
            }
            samples = [True] * len(owners) if plan.samples is None else plan.samples.tolist()
            known = scheduler.seqs.known[plan.slots].tolist()
            tokens = [
                [token_hash(r.id, count - r.prompt_tokens, 7) % 50] if sampled else []
                for r, sampled, count in zip(owners, samples, known, strict=True)
            ]
            scheduler.commit(plan, StepOutcome(tokens=tokens))
        steps.append(decided)
        if not waiting and not scheduler.num_unfinished:
            break
    return steps
