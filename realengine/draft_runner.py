"""A step that verifies drafts and makes the next ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realengine.batch import LayerCache
from realengine.draft import Put, verify
from realengine.draft_model import ModelDrafter
from realengine.inputs import StepInputs
from realengine.models import Model
from realengine.runner import Drawn, StepRunner
from realengine.seats import Draws
from realengine.swap_store import SwapStore


class DraftingStep(StepRunner):
    """`drafter` drafts on the device; without one somebody on the host does."""

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        swap: SwapStore | None,
        num_slots: int,
        device: torch.device,
        drafter: ModelDrafter | None,
    ) -> None:
        super().__init__(model, caches, swap, num_slots, device)
        self.drafter = drafter
        if drafter is not None and drafter.own_cache:
            self.paged = [*caches, *drafter.caches]

    @torch.inference_mode()
    def run(self, inputs: StepInputs, draws: Draws, put: Put) -> Drawn:
        """The whole step; on a device with a queue of its own the host waits for the verdict before it drafts."""
        check = inputs.draft
        assert check is not None
        begun_s = time.perf_counter()
        self.move_pages(inputs.moves)
        logits = self.model.forward(self.batch(inputs, put), self.caches)
        num_sampled = len(check.samples)
        if num_sampled:
            probs = None
            if self.drafter is not None:
                probs = self.drafter.probs(put(inputs.sample_seats), check.drafts.shape[1])
            drawn, held = verify(logits, inputs, draws, probs, self._kernels, put)
            tokens, counts = drawn.cpu().numpy(), held.cpu().numpy()
        else:
            tokens, counts = np.empty((0, 1), np.int64), np.empty(0, np.int64)
        drafts = num_drafts = None
        if self.drafter is not None:
            drafts, num_drafts = self.drafter.draft(check, tokens, counts, draws, put)
        given = Drawn(tokens, 0.0, counts=counts, drafts=drafts, num_drafts=num_drafts)
        if num_sampled and draws.logprobs >= 0:
            said = self._logprobs(logits, drawn, inputs, draws, put)
            given.logprobs, given.top_tokens, given.top_logprobs = (t.cpu().numpy() for t in said)
        given.device_s = time.perf_counter() - begun_s
        return given

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, inputs: StepInputs, draws: Draws, put: Put
    ) -> tuple[Tensor, ...]:
        """Of the tokens [S, K + 1], and the likeliest in their places with theirs [S, K + 1, n]."""
        check = inputs.draft
        assert check is not None
        nth = np.minimum(np.arange(tokens.shape[1]), check.num_drafts[:, None])
        at = put(check.first_row[:, None] + nth)
        logprobs = logits.float().log_softmax(dim=-1)
        top = logprobs.topk(min(draws.logprobs, logprobs.shape[1]), dim=-1)
        own = logprobs[at].gather(2, tokens.clamp(min=0).unsqueeze(2)).squeeze(2)
        return own, top.indices[at], top.values[at]


class CudaDraftingRunner:
    """Drafting steps on one stream of a CUDA device. No graph is recorded: rows and lengths differ from step to step."""

    def __init__(self, step: DraftingStep) -> None:
        self.step = step
        self._stream: Any = torch.cuda.Stream(step.device)  # type: ignore[no-untyped-call]

    def launch(self, inputs: StepInputs, draws: Draws) -> Callable[[], Drawn]:
        def put(array: npt.NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.step.device)

        with torch.cuda.stream(self._stream):
            drawn = self.step.run(inputs, draws, put)
        return lambda: drawn

    def close(self) -> None:
        torch.cuda.synchronize(self.step.device)
