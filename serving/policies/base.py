"""What a batch policy is, and how one is found by name."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.config import SchedulerConfig
from serving.errors import TokenTwinError, UsageError, nearest
from serving.queues import Queue, make_queue
from serving.request import Request

if TYPE_CHECKING:
    from serving.scheduler import Scheduler
    from serving.step import Step


CHUNKING = ("chunked", "adaptive")
"""Built-in policies that cut prompts to the token budget, as vLLM V1 does."""


class BatchPolicy:
    """Base of every policy. Override `schedule`; the rest has safe defaults.

    `steady` promises that while every running sequence decodes, nobody can be admitted and nothing else happens, the
    next step is the same again: each running sequence, one token, in the same order. It lets the twin leap over such
    steps. A policy that does not promise it is simply stepped through.
    """

    name = "custom"
    steady = False
    work_conserving = True
    """False for a policy that may leave the device idle with work at hand, such as one that waits for a batch to fill."""

    def schedule(self, step: Step) -> None:
        """Fill `step` with `step.extend(request)`, `step.admit(request)` and `step.preempt(request)`."""
        raise NotImplementedError(f"{type(self).__name__} must define schedule(step)")

    def may_admit(self, scheduler: Scheduler) -> bool:
        """With nothing changed, could the next step admit a waiting request?"""
        return (
            bool(scheduler.waiting)
            and scheduler.num_running < scheduler.config.max_num_seqs
            and not scheduler.head_blocked
        )

    def make_queue(self, order: str) -> Queue:
        """Who waits, in the order named: a policy that does not take the head may want a queue that it can search."""
        return make_queue(order)

    def padding(self, scheduler: Scheduler) -> int:
        """Rows that each step computes for nothing, such as finished members of a padded batch."""
        return 0

    def refuses(self, request: Request, config: SchedulerConfig) -> str | None:
        """Why this policy can never run `request`; None when it can."""
        return None


def _builtin() -> dict[str, type[BatchPolicy]]:
    from serving.policies.adaptive import Adaptive
    from serving.policies.chunked import Chunked
    from serving.policies.continuous import Continuous
    from serving.policies.static import Static

    return {policy.name: policy for policy in (Chunked, Adaptive, Continuous, Static)}


def policy_names() -> tuple[str, ...]:
    """Names of the built-in policies."""
    return tuple(_builtin())


class _Own:
    """Comes before a user's class: what goes wrong in `schedule` is a `UsageError` that names the line."""

    def schedule(self, step: Step) -> None:
        try:
            super().schedule(step)  # type: ignore[misc]
        except TokenTwinError:
            raise
        except Exception as error:
            file = getattr(sys.modules[type(self).__module__], "__file__", None)
            frames = traceback.extract_tb(error.__traceback__)
            at = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
            raise UsageError(
                f"policy {type(self).__name__}: {type(error).__name__} in {at.name} "
                f"({Path(at.filename).name}, line {at.lineno}): {error}"
            ) from error


def load_policy(name: str, **options: Any) -> BatchPolicy:
    """A policy by built-in name or by `module:Class` (looked up in the current folder first).

    Raises `UsageError` when there is no such policy, or the class does not take the options given.
    """
    builtin = _builtin()
    if ":" not in name:
        if name not in builtin:
            raise UsageError(
                f"unknown policy {name!r}; {nearest(name, builtin)} (your own: --policy my_module:MyPolicy)"
            )
        cls: Any = builtin[name]
    else:
        module_name, _, class_name = name.partition(":")
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise UsageError(f"policy {name!r}: cannot import {module_name!r}: {error}") from error
        cls = getattr(module, class_name, None)
        if not (isinstance(cls, type) and callable(getattr(cls, "schedule", None))):
            raise UsageError(
                f"policy {name!r}: {module_name} has no class {class_name!r} with a schedule(step) method"
            )
        bases = (_Own, cls) if issubclass(cls, BatchPolicy) else (_Own, cls, BatchPolicy)
        cls = type(cls.__name__, bases, {"__module__": module_name})
    try:
        policy: BatchPolicy = cls(**options)
    except TypeError as error:
        raise UsageError(f"policy {name!r} does not take these options: {error}") from error
    return policy
