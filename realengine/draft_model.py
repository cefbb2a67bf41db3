"""Drafts by a model: a smaller one of the same vocabulary with a cache of its own, or the target's own first layers.

The draft's cache has the target's pages, number for number: what the scheduler shares, copies, swaps or publishes is
shared, copied, swapped and published for both. A draft is made token by token; the first pass brings the draft's cache
up to date (prompts as they are computed, and after a pause in drafting whatever was written meanwhile).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realengine.batch import Batch, LayerCache
from realengine.draft import DraftInputs, Ints, Put
from realengine.kernels import Operators
from realengine.kernels.philox_ref import DRAFT
from realengine.models import Model
from realengine.seats import Draws


def first_layers(model: Model, count: int) -> Model:
    """The model that ends after its first `count` layers, with its own last norm and head."""
    short = copy(model)
    short.weights = replace(model.weights, layers=model.weights.layers[:count])
    return short


@dataclass(slots=True)
class _Passes:
    """Rows of one forward: `start` to `stop` of each sequence's text."""

    rows: npt.NDArray[np.intp]
    start: Ints
    stop: Ints


class ModelDrafter:
    """Drafts with `model` over `caches`; `own_cache` says that nobody else fills them.

    `probabilistic`: requests that are not greedy get drafts drawn from the draft's own distribution, which is kept for
    the verification [slots, k, V].
    """

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCache],
        num_slots: int,
        num_tokens: int,
        page_tokens: int,
        kernels: Operators,
        device: torch.device,
        *,
        own_cache: bool,
        probabilistic: bool = True,
    ) -> None:
        self.model = model
        self.caches = list(caches)
        self.own_cache = own_cache
        self._num_tokens = num_tokens
        self._page_tokens = page_tokens
        self._kernels = kernels
        self._device = device
        self._probabilistic = probabilistic
        self._written: Ints = np.zeros(num_slots, np.int64)
        """Tokens of each sequence whose KV the draft's own cache holds."""
        self._shape = (num_slots, num_tokens, model.architecture.shape.vocab_size)
        self._probs: Tensor | None = None

    def probs(self, seats: Tensor, most: int) -> Tensor | None:
        """What the drafts of these seats were drawn from [S, most, V]; None where no draft was drawn by chance."""
        return None if self._probs is None else self._probs[seats, :most]

    def draft(
        self, inputs: DraftInputs, tokens: Ints, counts: Ints, draws: Draws, put: Put
    ) -> tuple[Ints, Ints]:
        """Drafts [S, k] and how many each sequence got [S], after a step that gave `counts` of `tokens` [S, K + 1].

        `draws` is by row of the LM head; a sequence's first row has its parameters.
        """
        samples, text = inputs.samples, inputs.text
        seats = inputs.seats[samples]
        known = inputs.end.copy()  # tokens whose values are known, by sequence of the step
        known[samples] = inputs.first_position + counts
        for seat, first, row, count in zip(
            seats.tolist(), inputs.first_position.tolist(), tokens, counts.tolist(), strict=True
        ):
            text[seat, first : first + count] = row[:count]
        # The token just drawn is computed first, at the last known position; each draft but the last one after it.
        room = inputs.room[samples] - known[samples] + 1
        made = np.clip(np.minimum(inputs.num_to_draft, room), 0, self._num_tokens)
        drafts = np.zeros((len(samples), self._num_tokens), np.int64)
        passes = self._first_pass(inputs, known, made)
        if passes is None:
            return drafts, made
        making = np.flatnonzero(made)
        wanted = samples[making]
        logits = self._forward(passes, inputs, put, text, wanted)
        drawn: list[Tensor] = []
        columns: list[npt.NDArray[np.intp]] = []
        for nth in range(int(made.max(initial=0))):
            if nth:
                keep = np.flatnonzero(made[making] > nth)
                ids = drawn[-1][put(keep)]
                making = making[keep]
                rows = samples[making]
                at = known[rows] + nth - 1
                step = _Passes(rows, at, at + 1)
                logits = self._forward(step, inputs, put, text, rows, ids)
            drawn.append(self._draw(logits, inputs, making, known[samples[making]] + nth, nth, draws, put))
            columns.append(making)
        if self.own_cache:
            self._written[seats[made > 0]] = (known[samples] + made - 1)[made > 0]
        for nth, (rows, ids) in enumerate(zip(columns, drawn, strict=True)):
            drafts[rows, nth] = ids.cpu().numpy()
        return drafts, made

    def _first_pass(self, inputs: DraftInputs, known: Ints, made: Ints) -> _Passes | None:
        """Whom the first pass serves: prompts that the cache must hold, and everybody who drafts."""
        drafting = np.zeros(len(known), np.bool_)
        drafting[inputs.samples[made > 0]] = True
        stop = np.minimum(known, inputs.room)
        if not self.own_cache:
            rows = np.flatnonzero(drafting)
            return _Passes(rows, stop[rows] - 1, stop[rows]) if len(rows) else None
        rows = np.flatnonzero(drafting | inputs.is_chunk)
        if not len(rows):
            return None
        seats = inputs.seats[rows]
        start = np.where(
            inputs.is_chunk[rows], inputs.context[rows], np.minimum(self._written[seats], known[rows] - 1)
        )
        self._written[seats] = stop[rows]
        return _Passes(rows, start, stop[rows])

    def _forward(
        self,
        passes: _Passes,
        inputs: DraftInputs,
        put: Put,
        text: npt.NDArray[np.int32],
        wanted: npt.NDArray[np.intp],
        ids: Tensor | None = None,
    ) -> Tensor:
        """Logits after the last token of the rows `wanted`, in their order; `ids` replace those of `text`."""
        new = passes.stop - passes.start
        order = np.argsort(new > 1, kind="stable")
        rows, start, new = passes.rows[order], passes.start[order], new[order]
        seats = inputs.seats[rows]
        begins = np.cumsum(new) - new
        row = np.repeat(np.arange(len(rows)), new)
        positions = np.arange(len(row)) + (start - begins)[row]
        size = self._page_tokens
        pages = inputs.page_table[rows[row], positions // size].astype(np.int64)
        num_decodes = int(np.count_nonzero(new == 1))
        place = np.empty(int(inputs.seats.size), np.int64)
        place[rows] = begins + new - 1
        end = start + new
        longest = int(end.max())
        batch = Batch(
            ids=ids if ids is not None else put(text[seats[row], positions].astype(np.int64)),
            positions=put(positions),
            slots=put(pages * size + positions % size),
            page_table=put(np.ascontiguousarray(inputs.page_table[rows, : -(-longest // size)])),
            context_len=put(end.astype(np.int32)),
            query_start=put((np.append(begins, len(row))[num_decodes:] - num_decodes).astype(np.int32)),
            num_decodes=num_decodes,
            max_query=int(new.max()),
            longest=longest,
            sample_rows=put(place[wanted]),
        )
        return self.model.forward(batch, self.caches)

    def _draw(
        self,
        logits: Tensor,
        inputs: DraftInputs,
        making: npt.NDArray[np.intp],
        positions: Ints,
        nth: int,
        draws: Draws,
        put: Put,
    ) -> Tensor:
        if draws.greedy or not self._probabilistic:
            return logits.argmax(dim=-1)
        at = inputs.first_row[making]
        how = [put(each[at]) for each in (draws.temperature, draws.top_k, draws.top_p, draws.min_p)]
        if self._probs is None:
            self._probs = torch.zeros(self._shape, device=self._device)
        seats = put(inputs.seats[inputs.samples[making]])
        self._probs[seats, nth] = self._kernels.sampling_probs(logits, *how)
        tokens: Tensor = self._kernels.sample(logits, *how, put(draws.seed[at]), put(positions), stream=DRAFT)
        return tokens
