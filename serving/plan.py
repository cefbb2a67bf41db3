"""What the scheduler asks of an executor, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from serving.request import Request
from serving.swap import Move

Slots = npt.NDArray[np.intp]
Counts = npt.NDArray[np.int64]


class Admission(NamedTuple):
    """A request that joined the running set in this step."""

    request: Request
    cached_tokens: int
    """Prefix-cache hit, in tokens: not computed again."""
    resumed: bool
    """It ran before and was preempted."""


class Chunk(NamedTuple):
    """A prompt chunk of the step (or the recomputation of a preempted sequence)."""

    request: Request
    num_tokens: int
    context: int
    """Tokens of the sequence already computed before this chunk."""
    last: bool
    """The chunk reaches the end of what is known, so the step samples a token."""


@dataclass(slots=True)
class StepPlan:
    """One step: rows `slots[i]` compute `num_new[i]` tokens after `context[i]` tokens.

    Rows are in scheduling order: sequences that were running, in order of admission, then those admitted now. The
    page tables are `scheduler.tables[slot, :num_pages]`.
    """

    index: int
    slots: Slots
    num_new: Counts
    context: Counts
    chunks: list[Chunk]
    """The rows that are not plain decodes."""
    num_decodes: int
    """Rows that compute one known token (plus drafts) and sample."""
    decode_context_sum: int
    """Sum over those rows of the context attended to, new tokens included."""
    decode_context_max: int
    num_tokens: int
    samples: npt.NDArray[np.bool_] | None = None
    """Which rows sample; None when all do."""
    drafts: Counts | None = None
    """Draft tokens to verify per row; None where no row has any."""
    num_to_draft: Counts | None = None
    """Draft tokens to make per row after the step, for the next one to verify; None without speculation."""
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    truncated: list[Request] = field(default_factory=list)
    """Requests that ended in planning with reason "length": no page pool could hold another token of theirs."""
    starved: list[int] = field(default_factory=list)
    """Slots that were decoding and got nothing in this step, so that their token stream has a gap."""
    num_running: int = 0
    """Sequences that held a seat, scheduled or not."""
    num_waiting: int = 0
    used_pages: int = 0
    num_padding: int = 0
    """Rows computed for nothing: finished members of a static batch."""
    swap_out: list[Move] = field(default_factory=list)
    """Device pages to copy to host pages, before anything else of the step."""
    swap_in: list[Move] = field(default_factory=list)
    """Host pages to copy to device pages, after that."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) device pages to copy last before the step computes: copy on write of forked sequences."""

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_sampled(self) -> int:
        """Rows that go through the LM head."""
        return len(self.slots) if self.samples is None else int(np.count_nonzero(self.samples))


@dataclass(slots=True)
class StepOutcome:
    """What a step produced, per row of its plan.

    `counts[i]` tokens came out of row i: 0 for an unfinished chunk, 1 for a decode, 1 + accepted with speculation. With
    `counts` None every sampling row gave one. `tokens` holds the ids where they are real (they extend the prefix
    identity); `stopped[i]` says that row i met a stop condition of its own, with `reasons[i]`.
    """

    counts: Counts | None = None
    tokens: Sequence[Sequence[int]] | None = None
    stopped: npt.NDArray[np.bool_] | None = None
    reasons: Sequence[str] | None = None
    drafts: Counts | None = None
    """Draft tokens made for each row's next step (synchronous scheduling; otherwise placeholders stand for them)."""


ONE_EACH = StepOutcome()
"""Every sampling row produced one token and none stopped by itself."""
