"""Tensor parallelism across processes: rank 0 schedules, every rank runs the same steps on its share of the weights.

Rank 0 sends each step as plain arrays before it runs it, over a process group of its own: the next step may be on its way
while sums of this one are exchanged. Every rank ends a step with the same logits and draws the same
tokens from them, so that nothing has to come back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from realengine.inputs import StepInputs
from realengine.runner import Drawn, Runner
from realengine.seats import Draws

_Message = tuple[StepInputs, Draws] | None


class LeadingRunner:
    """The runner of rank 0: launches each step on the other ranks as well. `control` comes from `control_group`."""

    def __init__(self, runner: Runner, control: dist.ProcessGroup) -> None:
        self._runner = runner
        self._control = control

    def launch(self, inputs: StepInputs, draws: Draws) -> Callable[[], Drawn]:
        self._send((inputs, draws))
        return self._runner.launch(inputs, draws)

    def close(self) -> None:
        """Let the other ranks go."""
        self._send(None)
        self._runner.close()

    def _send(self, message: _Message) -> None:
        dist.broadcast_object_list([message], src=0, group=self._control)


def control_group() -> dist.ProcessGroup:
    """The group over which steps are sent: every rank calls this once, after the default group was made."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def follow(runner: Runner, control: dist.ProcessGroup) -> None:
    """The whole life of the ranks after 0: run what rank 0 runs until it closes."""
    while True:
        box: list[_Message] = [None]
        dist.broadcast_object_list(box, src=0, group=control)
        if box[0] is None:
            runner.close()
            return
        runner.launch(*box[0])()
