"""One step on a device: inputs over, one forward for prompts and decodes alike, tokens drawn, tokens back."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realengine.batch import Batch, LayerCache
from realengine.inputs import Moves, StepInputs
from realengine.kernels import operators
from realengine.models import Model
from realengine.quant_kv import cache_layout
from realengine.quant_recent import RecentTokens
from realengine.seats import Draws
from realengine.swap_store import SwapStore


@dataclass(slots=True)
class Drawn:
    """Tokens of one step [S], in the order of `StepInputs.plan_rows`, and their log-probabilities if asked for.

    With drafts verified, [S, K + 1] of which the first `counts` hold.
    """

    tokens: npt.NDArray[np.int64]
    device_s: float
    """Time that the device worked on the step."""
    logprobs: npt.NDArray[np.float32] | None = None
    """Of the drawn tokens, under the model's own distribution [S]."""
    top_tokens: npt.NDArray[np.int64] | None = None
    """The likeliest tokens [S, n]."""
    top_logprobs: npt.NDArray[np.float32] | None = None
    counts: npt.NDArray[np.int64] | None = None
    """Tokens that each sequence got [S]: the accepted drafts and one more; None where nobody drafts."""
    drafts: npt.NDArray[np.int64] | None = None
    """Made on the device for the next step [S, k], of which a sequence has the first `num_drafts`."""
    num_drafts: npt.NDArray[np.int64] | None = None


class Runner(Protocol):
    """Runs steps in the order in which they are launched."""

    def launch(self, inputs: StepInputs, draws: Draws) -> Callable[[], Drawn]:
        """Start a step; what is returned waits for its tokens."""

    def close(self) -> None: ...


def allocate_caches(
    model: Model,
    num_pages: int,
    page_tokens: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> list[LayerCache]:
    """A paged cache of `num_pages` pages (page 0 among them) per layer, zeroed, in the model's KV format."""
    cells = (num_pages, page_tokens, model.num_kv_heads)
    layout = cache_layout(model.kv_cache_dtype, model.architecture.shape.head_dim, dtype)
    return [
        LayerCache(*(torch.zeros((*cells, *last), device=device, dtype=kind) for last, kind in layout))
        for _ in model.weights.layers
    ]


class StepRunner:
    """The work of one step, on whatever device the model is. `last_token[slot]` is the latest token of each sequence.

    `swap` holds the host pages of preempted sequences.
    """

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        swap: SwapStore | None,
        num_slots: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.caches = caches
        self.paged = caches
        """Every cache that lives in the scheduler's pages."""
        self.swap = swap
        self.recent: RecentTokens | None = None
        """The last tokens of each sequence in full precision beside quantised pages."""
        self.device = device
        self.last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._kernels = operators(device)

    def move_pages(self, moves: Moves) -> None:
        """Carry out what a step needs of page copies before it computes."""
        if self.swap is not None:
            for move in moves.swap_out:
                self.swap.take(self.paged, move)
            for move in moves.swap_in:
                self.swap.give(self.paged, move)
        if moves.copies:
            sources, targets = torch.tensor(moves.copies, device=self.device).T
            for cache in self.paged:
                self._kernels.copy_pages(cache.tensors, sources, targets)

    def prepare(self, inputs: StepInputs) -> None:
        """What a step needs to know of the steps before it: once a step, in their order."""
        if self.recent is not None:
            inputs.recent = self.recent.rows(inputs)

    def batch(self, inputs: StepInputs, put: Callable[[npt.NDArray[np.generic]], Tensor]) -> Batch:
        """The step's tensors; `put` brings an array to the device."""
        ids = put(inputs.ids)
        if inputs.in_flight is not None:
            ids = torch.where(put(inputs.in_flight), self.last_token[put(inputs.token_seats)], ids)
        every_row = len(inputs.sample_rows) == inputs.num_tokens
        return Batch(
            ids=ids,
            positions=put(inputs.positions),
            slots=put(inputs.kv_slots),
            page_table=put(inputs.page_table),
            context_len=put(inputs.context_len),
            query_start=put(inputs.query_start),
            num_decodes=inputs.num_decodes,
            max_query=inputs.max_query,
            longest=inputs.longest,
            sample_rows=None if every_row else put(inputs.sample_rows),
            recent=None if inputs.recent is None else inputs.recent.window(put),
        )

    def draw(
        self,
        logits: Tensor,
        inputs: StepInputs,
        draws: Draws,
        put: Callable[[npt.NDArray[np.generic]], Tensor],
    ) -> tuple[Tensor, ...]:
        """Tokens [S], and where asked for their log-probabilities and the likeliest tokens with theirs."""
        if draws.greedy:
            tokens = logits.argmax(dim=-1)
        else:
            tokens = self._kernels.sample(
                logits,
                put(draws.temperature),
                put(draws.top_k),
                put(draws.top_p),
                put(draws.min_p),
                put(draws.seed),
                put(inputs.sample_positions),
            )
        self.last_token[put(inputs.sample_seats)] = tokens
        if draws.logprobs < 0:
            return (tokens,)
        logprobs = logits.float().log_softmax(dim=-1)
        top = logprobs.topk(min(draws.logprobs, logprobs.shape[1]), dim=-1)
        return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1), top.indices, top.values

    @torch.inference_mode()
    def run(
        self, inputs: StepInputs, draws: Draws, put: Callable[[npt.NDArray[np.generic]], Tensor]
    ) -> Drawn:
        """The whole step at once, for devices without a queue of their own."""
        begun_s = time.perf_counter()
        self.prepare(inputs)
        self.move_pages(inputs.moves)
        logits = self.model.forward(self.batch(inputs, put), self.caches)
        if not len(inputs.sample_rows):
            return Drawn(np.empty(0, np.int64), time.perf_counter() - begun_s)
        tokens, *rest = (tensor.numpy() for tensor in self.draw(logits, inputs, draws, put))
        return Drawn(tokens, time.perf_counter() - begun_s, *rest)


class CpuRunner:
    """The CPU as the device. With `overlap` steps run in a thread of their own, so that the next can be planned."""

    def __init__(self, step: StepRunner, *, overlap: bool = False) -> None:
        self.step = step
        self._thread = ThreadPoolExecutor(1, "engine-device") if overlap else None

    def launch(self, inputs: StepInputs, draws: Draws) -> Callable[[], Drawn]:
        if self._thread is None:
            drawn = self.step.run(inputs, draws, torch.from_numpy)
            return lambda: drawn
        future: Future[Drawn] = self._thread.submit(self.step.run, inputs, draws, torch.from_numpy)
        return future.result

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
