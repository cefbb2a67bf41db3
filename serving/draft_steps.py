"""What drafts make a step compute beside what its row says: the passes of a drafter, and the pairs of a verification.

Kept only where drafts are verified, for FLOPs and bytes; prices do not read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from serving.plan import StepPlan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftSteps:
    """A row per step, in rows of the step table."""

    draft_passes: Ints
    """Passes of the drafter, each of which reads its weights; 0 where no model drafts."""
    draft_tokens: Ints
    """Tokens through the drafter's layers, over all passes."""
    draft_sampled: Ints
    """Rows through its LM head."""
    draft_context_sum: Ints
    """Cached tokens that its passes read, beside prompt chunks; so many query-key pairs at least."""
    draft_pairs: Ints
    """Query-key pairs of its passes beyond these, where a pass has several tokens of a sequence."""
    verified_pairs: Ints
    """Query-key pairs of verifications beyond those of one query a sequence: of d drafts after which c tokens are
    computed, Σ (c - j) for j = 1 … d."""

    def columns(self) -> dict[str, Ints]:
        """Every column by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def where(self, rows: npt.NDArray[np.bool_]) -> DraftSteps:
        """Some of the steps."""
        return DraftSteps(**{name: column[rows] for name, column in self.columns().items()})


DraftRow = tuple[int, int, int, int, int, int]
NAMES = tuple(f.name for f in fields(DraftSteps))
_NOTHING: DraftRow = (0, 0, 0, 0, 0, 0)


def draft_row(plan: StepPlan, own_cache: bool | None) -> DraftRow:
    """The row of a step. `own_cache` is that of `costmodel.speculation.DraftPrices`, None where no model drafts.

    The first pass takes the step's tokens once more and the one just drawn of each sequence that drafts (with a cache of
    its own) or that one alone; pass n + 1 takes a token of each sequence that drafts more than n.
    """
    context = plan.context + plan.num_new
    pairs = 0
    if (verified := plan.drafts) is not None:
        pairs = int((verified * context - verified * (verified + 1) // 2).sum())
    if own_cache is None or (lengths := plan.num_to_draft) is None:
        return (0, 0, 0, 0, 0, pairs)
    drafting = lengths > 0
    count = int(np.count_nonzero(drafting))
    if not count:
        prompts = sum(chunk.num_tokens for chunk in plan.chunks) if own_cache else 0
        return (int(prompts > 0), prompts, 0, 0, 0, pairs)
    t, c = lengths[drafting], context[drafting]
    later = int(t.sum()) - count
    read = int(((t - 1) * c + t * (t + 1) // 2 - 1).sum())
    if not own_cache:
        return (int(t.max()), count + later, count + later, read + int((c + 1).sum()), 0, pairs)
    read += plan.decode_context_sum + count
    return (int(t.max()), plan.num_tokens + count + later, count + later, read, pairs + int(c.sum()), pairs)


class DraftLog:
    """Rows of one replica, by the number of the step; a step that is planned and lost gives its number away."""

    def __init__(self) -> None:
        self._rows: list[DraftRow] = []

    def add(self, step: int, row: DraftRow) -> None:
        """The row of step `step`."""
        del self._rows[step:]
        self._rows += [_NOTHING] * (step - len(self._rows))
        self._rows.append(row)

    def rows(self, count: int) -> list[DraftRow]:
        """Of the first `count` steps."""
        return (self._rows + [_NOTHING] * (count - len(self._rows)))[:count]


def draft_steps(logs: Sequence[DraftLog | None], counts: Sequence[int]) -> DraftSteps | None:
    """The logs of all replicas, with `counts` steps each; None where nobody drafts."""
    if all(log is None for log in logs):
        return None
    rows = [
        row
        for log, count in zip(logs, counts, strict=True)
        for row in (log.rows(count) if log is not None else [_NOTHING] * count)
    ]
    table = np.array(rows, np.int64).reshape(-1, len(NAMES))
    return DraftSteps(*(table[:, i].copy() for i in range(len(NAMES))))
